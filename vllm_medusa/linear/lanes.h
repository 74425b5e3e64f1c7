// Vectors of the width that this processor has, and the number formats of weights as pairs of such vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "../attention/kernel/vectors.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace medusa {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr int kStep = 2 * kLanes;  // numbers of a row that are multiplied together

typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

inline Lanes lanes(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

// A step of `kStep` weights as two vectors. Which weight lies in which lane is the format's own; rows of the input are laid
// out by the same two functions.
template <class T>
struct Format;

template <>
struct Format<float> {
  static Lanes first(const float* from) { return lanes(from); }
  static Lanes second(const float* from) { return lanes(from + kLanes); }
};

template <>
struct Format<BFloat16> {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Zeros beneath the lower and the upper four of each half. A shuffle runs beside the multiplications, where a shift would
  // take the place of one; and written like this, no register holds the zeros or a mask: there are none to spare.
  struct Sixteen {
    BFloat16 numbers[16];
  };
  static Lanes first(const BFloat16* from) {
    Lanes wide;
    asm("vpxor %0, %0, %0\n\tvpunpcklwd %1, %0, %0" : "=&x"(wide) : "m"(*reinterpret_cast<const Sixteen*>(from)));
    return wide;
  }
  static Lanes second(const BFloat16* from) {
    Lanes wide;
    asm("vpxor %0, %0, %0\n\tvpunpckhwd %1, %0, %0" : "=&x"(wide) : "m"(*reinterpret_cast<const Sixteen*>(from)));
    return wide;
  }
#else  // two in a word: the even ones by a shift, the odd ones by a mask
  static Lanes first(const BFloat16* from) { return (Lanes)(*reinterpret_cast<const Bits*>(from) << 16); }
  static Lanes second(const BFloat16* from) { return (Lanes)(*reinterpret_cast<const Bits*>(from) & (Bits{} + 0xffff0000u)); }
#endif
};

template <>
struct Format<int8_t> {
  static Lanes whole(const int8_t* from) {  // GCC 12 takes conversions of byte vectors apart, one number at a time
    Lanes wide;
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m512 y = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    std::memcpy(&wide, &y, sizeof wide);
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m256 y = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    std::memcpy(&wide, &y, sizeof wide);
#else
    for (int i = 0; i < kLanes; ++i) wide[i] = from[i];
#endif
    return wide;
  }
  static Lanes first(const int8_t* from) { return whole(from); }
  static Lanes second(const int8_t* from) { return whole(from + kLanes); }
};

#ifdef __FLT16_MAX__
template <>
struct Format<_Float16> {
  static Lanes half(const _Float16* from) {
    Lanes wide;
#if defined(__AVX512F__)
    const __m512 y = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    std::memcpy(&wide, &y, sizeof wide);
#elif defined(__F16C__) && defined(__AVX__)
    const __m256 y = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    std::memcpy(&wide, &y, sizeof wide);
#else
    for (int i = 0; i < kLanes; ++i) wide[i] = float(from[i]);
#endif
    return wide;
  }
  static Lanes first(const _Float16* from) { return half(from); }
  static Lanes second(const _Float16* from) { return half(from + kLanes); }
};
#endif

// The sum of all lanes of four vectors, always in the same order.
#ifdef __AVX__
inline __m256 halved(Lanes x) {
#if defined(__AVX512F__)
  __m512 y;
  std::memcpy(&y, &x, sizeof y);
  return _mm256_add_ps(_mm512_castps512_ps256(y), _mm512_extractf32x8_ps(y, 1));
#else
  __m256 y;
  std::memcpy(&y, &x, sizeof y);
  return y;
#endif
}
inline void totals(Lanes a, Lanes b, Lanes c, Lanes d, float (&to)[4]) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halved(a), halved(b)), _mm256_hadd_ps(halved(c), halved(d)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
#else
inline void totals(Lanes a, Lanes b, Lanes c, Lanes d, float (&to)[4]) {
  int i = 0;
  for (const Lanes& x : {a, b, c, d}) to[i++] = (x[0] + x[1]) + (x[2] + x[3]);
}
#endif
inline float total(Lanes x) {
  float all[4];
  totals(x, x, x, x, all);
  return all[0];
}

}  // namespace medusa
