// The AMX way: bfloat16 caches that are packed for AMX are multiplied where they stand.
#pragma once

#include <cmath>

#include "step.h"

#ifdef MEDUSA_AMX

namespace medusa {

struct Amx {
  static constexpr int64_t kChunk = 256;
  static constexpr int64_t kTile = 32;
  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kSlack = 6.0f;  // weights may grow to 2^6 before the sums are rescaled; floats do not mind

  // What a thread needs around its work: eight tiles of 16 rows of 64 bytes, and vanishing weights that are zero
  // instead of slow.
  class Session {
   public:
    Session() : state_(_mm_getcsr()) {
      const Config config;
      _tile_loadconfig(&config);
      _mm_setcsr(state_ | 0x8040);
    }
    ~Session() {
      _tile_release();
      _mm_setcsr(state_);
    }

   private:
    struct Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    unsigned int state_;
  };

  static int64_t width(int64_t dim) { return dim; }
  static int64_t scratch_floats(int64_t queries, int64_t dim) {
    const int64_t padded = round_up(queries, kRows);
    return padded * dim / 2 + kRows * kChunk + kRows * kChunk / 2 + kTile * dim / 2 + padded * 16 + 128;
  }

  // 2^x for x <= kSlack; to about 1e-4, eighty times finer than the bfloat16 it ends in.
  static inline __m512 power_of_two(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(0.0555041086648216f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402265069591007f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931471805599453f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
  }

  static void run(const Pair& pair, int64_t, int64_t first_tile, int64_t last_tile, Sums sums, float* scratch) {
    const MedusaStep& step = *pair.step;
    const MedusaLayer& layer = *pair.layer;
    const int64_t dim = step.dim, padded = round_up(pair.queries, kRows), steps = dim / 32;
    uint16_t* query = reinterpret_cast<uint16_t*>(scratch);           // [padded / 16, dim / 32, 16, 32]
    float* scores = scratch + padded * dim / 2;                       // [16, kChunk]
    uint16_t* weights = reinterpret_cast<uint16_t*>(scores + kRows * kChunk);  // [16, kChunk]
    uint16_t* tail = weights + kRows * kChunk;                        // [dim / 16, 16, 32], the values of a last tile
    float* totals = reinterpret_cast<float*>(tail + kTile * dim);     // [padded, 16], sums of weights, lane by lane
    for (int64_t m = 0; m < padded; ++m)
      for (int64_t k = 0; k < steps; ++k) {
        uint16_t* to = query + ((m / 16 * steps + k) * 16 + m % 16) * 32;
        if (m < pair.queries)
          std::memcpy(to, static_cast<const uint16_t*>(layer.query) + pair.row_of(m) * layer.query_row +
                              pair.head_of(m) * layer.query_head + k * 32, 64);
        else
          std::memset(to, 0, 64);
      }
    std::fill(sums.maximum, sums.maximum + pair.queries, -kInfinity);
    std::fill(sums.values, sums.values + padded * dim, 0.0f);
    std::fill(totals, totals + padded * 16, 0.0f);
    std::memset(weights, 0, kRows * kChunk * 2);
    const int64_t value_stride = 16 * step.block_size;  // from one group of 16 dims to the next
    constexpr int64_t per_chunk = kChunk / kTile;
    for (int64_t t = first_tile; t < last_tile; t += per_chunk) {
      const int64_t tiles = std::min(per_chunk, last_tile - t), begin = t * kTile, count = tiles * kTile;
      const uint16_t* keys[per_chunk];
      const uint16_t* values[per_chunk];
      int64_t strides[per_chunk];
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t slot = begin + i * kTile, token = slot % step.block_size;
        const int64_t block = step.table[pair.request * step.table_width + slot / step.block_size];
        keys[i] = static_cast<const uint16_t*>(layer.keys) + block * layer.key_block + pair.kv_head * layer.key_head +
                  token * dim;
        values[i] = static_cast<const uint16_t*>(layer.values) + block * layer.value_block +
                    pair.kv_head * layer.value_head + token * 16;
        strides[i] = value_stride;
        if (slot + kTile > pair.slots) values[i] = without_garbage(values[i], tail, pair.slots - slot, dim, strides[i]);
      }
      const bool plain = pair.plain(begin, begin + count);
      for (int64_t m = 0; m < pair.queries; m += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, pair.queries - m);
        score(query + m / 16 * steps * 512, keys, tiles, steps, scores);
        for (int64_t r = 0; r < rows; ++r) {
          float* row = scores + r * kChunk;
          const float scale = scaled(step, row, count);
          if (!plain) hide(pair, pair.row_of(m + r), begin, count, row);
          soften(row, weights + r * kChunk, count, scale, plain, sums.maximum[m + r], totals + (m + r) * 16,
                 sums.values + (m + r) * dim, dim);
        }
        for (int64_t d = 0; d < dim; d += 64)
          accumulate(weights, values, strides, tiles, d, std::min<int64_t>(4, (dim - d) / 16), sums.values + m * dim,
                     dim);
      }
    }
    for (int64_t m = 0; m < pair.queries; ++m) {
      sums.weight[m] = _mm512_reduce_add_ps(_mm512_loadu_ps(totals + m * 16));
      sums.maximum[m] /= kLog2e;
    }
  }

 private:
  // The values of a tile of which only `used` slots were ever written: weight 0 times NaN must not happen.
  static const uint16_t* without_garbage(const uint16_t* values, uint16_t* tail, int64_t used, int64_t dim,
                                         int64_t& stride) {
    for (int64_t g = 0; g < dim / 16; ++g)
      for (int64_t t = 0; t < kTile; ++t)
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t at = t / 2 * 32 + i * 2 + t % 2;
          tail[g * 512 + at] = t < used ? values[g * stride + at] : 0;
        }
    stride = 512;
    return tail;
  }

  // 16 queries times all slots of the chunk. Tiles 0-3 sum, 4 holds queries, 5-7 keys.
  static void score(const uint16_t* query, const uint16_t* const* keys, int64_t tiles, int64_t steps, float* scores) {
    settle();
    int64_t i = 0;
    for (; i + 2 <= tiles; i += 2) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < steps; ++k) {
        const int64_t half = steps * 512;  // from one group of 16 tokens to the next
        _tile_loadd(4, query + k * 512, 64);
        _tile_loadd(5, keys[i] + k * 512, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys[i] + half + k * 512, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, keys[i + 1] + k * 512, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, keys[i + 1] + half + k * 512, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
      float* to = scores + i * kTile;
      _tile_stored(0, to, kChunk * 4);
      _tile_stored(1, to + 16, kChunk * 4);
      _tile_stored(2, to + 32, kChunk * 4);
      _tile_stored(3, to + 48, kChunk * 4);
    }
    for (; i < tiles; ++i) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t k = 0; k < steps; ++k) {
        _tile_loadd(4, query + k * 512, 64);
        _tile_loadd(5, keys[i] + k * 512, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys[i] + steps * 512 + k * 512, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, scores + i * kTile, kChunk * 4);
      _tile_stored(1, scores + i * kTile + 16, kChunk * 4);
    }
  }

  // Applies a soft cap if there is one; returns what is still to be multiplied in to get powers of two.
  static float scaled(const MedusaStep& step, float* scores, int64_t count) {
    if (step.softcap <= 0) return step.scale * kLog2e;
    for (int64_t j = 0; j < count; j += 16)
      store(scores + j, hyperbolic_tangent(load(scores + j) * step.scale / step.softcap) * step.softcap);
    return kLog2e;
  }

  // One row's scores become weights; `maximum` (powers of two) may lag behind the true one by kSlack.
  static void soften(const float* scores, uint16_t* weights, int64_t count, float scale, bool plain, float& maximum,
                     float* totals, float* values, int64_t dim) {
    __m512 most = _mm512_loadu_ps(scores);
    __m512 most2 = _mm512_loadu_ps(scores + 16);
    for (int64_t j = 32; j < count; j += 32) {
      most = _mm512_max_ps(most, _mm512_loadu_ps(scores + j));
      most2 = _mm512_max_ps(most2, _mm512_loadu_ps(scores + j + 16));
    }
    most = _mm512_mul_ps(_mm512_max_ps(most, most2), _mm512_set1_ps(scale));
    __m512 total = _mm512_loadu_ps(totals);
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(maximum + kSlack), _CMP_GT_OQ)) {
      const float next = _mm512_reduce_max_ps(most);
      if (maximum != -kInfinity) {
        const __m512 factor = _mm512_set1_ps(std::exp2(maximum - next));
        total = _mm512_mul_ps(total, factor);
        for (int64_t d = 0; d < dim; d += 16)
          _mm512_storeu_ps(values + d, _mm512_mul_ps(_mm512_loadu_ps(values + d), factor));
      }
      maximum = next;
    }
    const __m512 base = _mm512_set1_ps(maximum == -kInfinity ? 0.0f : -maximum);
    const __m512 by = _mm512_set1_ps(scale);
    const __m512 low = _mm512_set1_ps(-140.0f);  // 2^-140 is flushed to zero; keeps -inf out of the polynomial
    for (int64_t j = 0; j < count; j += 32) {
      __m512 a = _mm512_fmadd_ps(_mm512_loadu_ps(scores + j), by, base);
      __m512 b = _mm512_fmadd_ps(_mm512_loadu_ps(scores + j + 16), by, base);
      if (!plain) a = _mm512_max_ps(a, low), b = _mm512_max_ps(b, low);
      a = power_of_two(a);
      b = power_of_two(b);
      total = _mm512_add_ps(total, _mm512_add_ps(a, b));
      _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    _mm512_storeu_ps(totals, total);
  }

  // 16 rows of weights times 16 * `groups` dims from `d` on. Tiles 0-3 sum, 4 holds weights, 5-7 values.
  static void accumulate(const uint16_t* weights, const uint16_t* const* values, const int64_t* strides, int64_t tiles,
                         int64_t d, int64_t groups, float* out, int64_t dim) {
    settle();
    if (groups == 4) return accumulate4(weights, values, strides, tiles, d, out, dim);
    for (int64_t g = d / 16; g < d / 16 + groups; ++g) {
      _tile_loadd(0, out + g * 16, dim * 4);
      for (int64_t i = 0; i < tiles; ++i) {
        _tile_loadd(4, weights + i * kTile, kChunk * 2);
        _tile_loadd(5, values[i] + g * strides[i], 64);
        _tile_dpbf16ps(0, 4, 5);
      }
      _tile_stored(0, out + g * 16, dim * 4);
    }
  }

  static void accumulate4(const uint16_t* weights, const uint16_t* const* values, const int64_t* strides,
                          int64_t tiles, int64_t d, float* out, int64_t dim) {
    float* to = out + d;
    _tile_loadd(0, to, dim * 4);
    _tile_loadd(1, to + 16, dim * 4);
    _tile_loadd(2, to + 32, dim * 4);
    _tile_loadd(3, to + 48, dim * 4);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t stride = strides[i];
      const uint16_t* value = values[i] + d / 16 * stride;
      _tile_loadd(4, weights + i * kTile, kChunk * 2);
      _tile_loadd(5, value, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, value + stride, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, value + 2 * stride, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, value + 3 * stride, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, to, dim * 4);
    _tile_stored(1, to + 16, dim * 4);
    _tile_stored(2, to + 32, dim * 4);
    _tile_stored(3, to + 48, dim * 4);
  }

  // GCC does not know that a tile load reads memory: what was written must be there first.
  static void settle() { asm volatile("" ::: "memory"); }
};

}  // namespace medusa

#endif  // MEDUSA_AMX
