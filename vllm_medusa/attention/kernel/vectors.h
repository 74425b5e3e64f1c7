// Elements of a cache as floats, and vectors of 16 floats by GCC's vector types: any CPU, at the width it has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && \
    defined(__AVX512BF16__)
#define MEDUSA_AMX 1
#include <immintrin.h>
#endif

namespace medusa {

struct BFloat16 {
  uint16_t bits;
};

// A byte of a quantized cache, with so many bits of mantissa. e4m3 has no infinity: all ones are its NaN.
template <int kMantissa>
struct Float8 {
  uint8_t bits;
};
using E4M3 = Float8<3>;
using E5M2 = Float8<2>;

template <int kMantissa>
struct Float8Values {
  float of[256];
  Float8Values() {
    constexpr int exponents = 7 - kMantissa, bias = (1 << (exponents - 1)) - 1, last = (1 << exponents) - 1;
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> kMantissa & last, mantissa = bits & ((1 << kMantissa) - 1);
      float value = std::ldexp(float(mantissa + (exponent ? 1 << kMantissa : 0)),
                               std::max(exponent, 1) - bias - kMantissa);
      if (kMantissa == 3 ? (bits & 127) == 127 : exponent == last && mantissa)
        value = std::numeric_limits<float>::quiet_NaN();
      else if (kMantissa == 2 && exponent == last)
        value = std::numeric_limits<float>::infinity();
      of[bits] = bits & 128 ? -value : value;
    }
  }
};

template <int kMantissa>
inline float widen(Float8<kMantissa> x) {
  static const Float8Values<kMantissa> values;
  return values.of[x.bits];
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, BFloat16& y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) {
    y.bits = 0x7fc0;
  } else {
    y.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
}
#ifdef __FLT16_MAX__
inline float widen(_Float16 x) { return float(x); }
inline void narrow(float x, _Float16& y) { y = _Float16(x); }
#endif

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64)));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
inline Vec broadcast(float x) { return Vec{} + x; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

inline float sum(Vec x) {
  Half h[2];
  std::memcpy(h, &x, 64);
  const Half all = h[0] + h[1];
  Quarter q[2];
  std::memcpy(q, &all, 32);
  const Quarter y = q[0] + q[1];
  return (y[0] + y[1]) + (y[2] + y[3]);
}
inline float largest(Vec x) {
  Half h[2];
  std::memcpy(h, &x, 64);
  const Half all = h[0] > h[1] ? h[0] : h[1];
  Quarter q[2];
  std::memcpy(q, &all, 32);
  const Quarter y = q[0] > q[1] ? q[0] : q[1];
  return std::max(std::max(y[0], y[1]), std::max(y[2], y[3]));
}

// e^x for x <= 88, 0 below -87: range reduction by ln 2 in two parts, then a polynomial (Cephes expf).
inline Vec exponential(Vec x) {
  const Vec low = broadcast(-87.0f);
  const Vec clamped = x > low ? x : low;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  Vec n = clamped * 1.44269504088896341f + magic;
  n = n - magic;
  Vec f = clamped - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  const Vec y = p * (Vec)power;
  return x > low ? y : Vec{};
}

// tanh, to full float32 precision near zero too (Cephes tanhf).
inline Vec hyperbolic_tangent(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec square = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec near = p * square * x + x;
  const Vec bounded = size > 20.0f ? broadcast(20.0f) : size;
  const Vec far = 1.0f - 2.0f / (exponential(bounded * 2.0f) + 1.0f);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace medusa
