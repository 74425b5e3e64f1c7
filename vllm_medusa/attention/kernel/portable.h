// The portable way: a chunk of slots is unpacked to float32, and multiplied by vectors.
#pragma once

#include <cmath>

#include "step.h"

namespace medusa {

// T: what queries are made of; C: what the cache holds.
template <class T, class C = T>
struct Portable {
  static constexpr int64_t kChunk = 64;

  struct Session {};

  static int64_t width(int64_t dim) { return round_up(dim, 32); }
  static int64_t scratch_floats(int64_t queries, int64_t dim) {
    return round_up(queries, kRows) * dim + kChunk * dim + kChunk * width(dim) + kRows * kChunk + 64;
  }

  static void run(const Pair& pair, int64_t tile, int64_t first_tile, int64_t last_tile, Sums sums, float* scratch) {
    const MedusaStep& step = *pair.step;
    const int64_t dim = step.dim, wide = width(dim), padded = round_up(pair.queries, kRows);
    float* query = scratch;                    // [padded, dim]
    float* keys = query + padded * dim;        // [dim, kChunk]
    float* values = keys + kChunk * dim;       // [kChunk, wide]
    float* scores = values + kChunk * wide;    // [kRows, kChunk]
    for (int64_t m = 0; m < padded; ++m) {
      float* to = query + m * dim;
      if (m >= pair.queries) {
        std::fill(to, to + dim, 0.0f);
        continue;
      }
      const T* from = static_cast<const T*>(pair.layer->query) + pair.row_of(m) * pair.layer->query_row +
                      pair.head_of(m) * pair.layer->query_head;
      for (int64_t d = 0; d < dim; ++d) to[d] = widen(from[d]);
    }
    for (int64_t m = 0; m < pair.queries; ++m) sums.maximum[m] = -kInfinity, sums.weight[m] = 0.0f;
    std::fill(sums.values, sums.values + padded * wide, 0.0f);
    const int64_t per_chunk = kChunk / tile;
    for (int64_t t = first_tile; t < last_tile; t += per_chunk) {
      const int64_t begin = t * tile, count = (std::min(t + per_chunk, last_tile) - t) * tile;
      unpack(pair, tile, begin, count, keys, values, wide);
      const bool plain = pair.plain(begin, begin + count);
      for (int64_t m = 0; m < pair.queries; m += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, pair.queries - m);
        for (int64_t r = 0; r < rows; r += height(rows - r))
          if (height(rows - r) == kTall)
            score<kTall>(query + (m + r) * dim, keys, scores + r * kChunk, count, dim);
          else
            score<4>(query + (m + r) * dim, keys, scores + r * kChunk, count, dim);
        for (int64_t r = 0; r < rows; ++r)
          soften(pair, m + r, begin, count, plain, scores + r * kChunk, sums, wide);
        for (int64_t r = 0; r < rows; r += height(rows - r))
          if (height(rows - r) == kTall)
            accumulate<kTall>(scores + r * kChunk, values, sums.values + (m + r) * wide, count, wide);
          else
            accumulate<4>(scores + r * kChunk, values, sums.values + (m + r) * wide, count, wide);
      }
    }
  }

 private:
  static void unpack(const Pair& pair, int64_t tile, int64_t begin, int64_t count, float* keys, float* values,
                     int64_t wide) {
    const MedusaStep& step = *pair.step;
    const MedusaLayer& layer = *pair.layer;
    for (int64_t j = 0; j < count; j += tile) {
      const int64_t slot = begin + j, token = slot % step.block_size;
      const int64_t block = step.table[pair.request * step.table_width + slot / step.block_size];
      const C* key = static_cast<const C*>(layer.keys) + block * layer.key_block + pair.kv_head * layer.key_head;
      const C* value =
          static_cast<const C*>(layer.values) + block * layer.value_block + pair.kv_head * layer.value_head;
      for (int64_t d = 0; d < step.dim; ++d) {
        float* to = keys + d * kChunk + j;
        const C* from = key + step.key_dim[d];
        if (step.key_run)
          for (int64_t i = 0; i < tile; ++i) to[i] = widen(from[step.key_token[token] + i]);
        else
          for (int64_t i = 0; i < tile; ++i) to[i] = widen(from[step.key_token[token + i]]);
      }
      for (int64_t i = 0; i < tile; ++i) {
        float* to = values + (j + i) * wide;
        if (slot + i >= pair.slots) {  // never written: weight 0, but it may hold a NaN
          std::fill(to, to + wide, 0.0f);
          continue;
        }
        const C* from = value + step.value_token[token + i];
        if (step.value_run)
          for (int64_t d = 0; d < step.dim; ++d) to[d] = widen(from[step.value_dim[0] + d]);
        else
          for (int64_t d = 0; d < step.dim; ++d) to[d] = widen(from[step.value_dim[d]]);
        std::fill(to + step.dim, to + wide, 0.0f);
      }
    }
  }

  // As many rows as the registers hold next to two vectors of keys or values.
#ifdef __AVX512F__
  static constexpr int kTall = 8;
#else
  static constexpr int kTall = 4;
#endif
  static int height(int64_t rows) { return rows > 4 ? kTall : 4; }

  // H rows of queries times all slots of the chunk.
  template <int H>
  static void score(const float* query, const float* keys, float* scores, int64_t count, int64_t dim) {
    int64_t j = 0;
    for (; j + 32 <= count; j += 32) score<H, 2>(query, keys + j, scores + j, dim);
    if (j < count) score<H, 1>(query, keys + j, scores + j, dim);
  }

  template <int H, int N>
  static void score(const float* query, const float* keys, float* scores, int64_t dim) {
    Vec s[H][N] = {};
    for (int64_t d = 0; d < dim; ++d) {
      Vec k[N];
      for (int n = 0; n < N; ++n) k[n] = load(keys + d * kChunk + n * 16);
      for (int r = 0; r < H; ++r)
        for (int n = 0; n < N; ++n) s[r][n] += k[n] * query[r * dim + d];
    }
    for (int r = 0; r < H; ++r)
      for (int n = 0; n < N; ++n) store(scores + r * kChunk + n * 16, s[r][n]);
  }

  // Scores of one row become weights; what was summed up before is brought to the same scale.
  static void soften(const Pair& pair, int64_t m, int64_t begin, int64_t count, bool plain, float* scores, Sums sums,
                     int64_t wide) {
    const MedusaStep& step = *pair.step;
    const float scale = step.scale * pair.layer->key_scale;
    Vec most = broadcast(-kInfinity);
    for (int64_t j = 0; j < count; j += 16) {
      Vec s = load(scores + j) * scale;
      if (step.softcap > 0) s = hyperbolic_tangent(s / step.softcap) * step.softcap;
      store(scores + j, s);
      most = larger(s, most);
    }
    if (!plain) {
      hide(pair, pair.row_of(m), begin, count, scores);
      most = load(scores);
      for (int64_t j = 16; j < count; j += 16) most = larger(load(scores + j), most);
    }
    const float maximum = std::max(sums.maximum[m], largest(most));
    const float base = maximum == -kInfinity ? 0.0f : maximum;
    Vec total = {};
    for (int64_t j = 0; j < count; j += 16) {
      const Vec weight = exponential(load(scores + j) - base);
      total += weight;
      store(scores + j, weight);
    }
    const float factor = sums.maximum[m] == maximum ? 1.0f : std::exp(sums.maximum[m] - base);
    sums.maximum[m] = maximum;
    sums.weight[m] = sums.weight[m] * factor + sum(total);
    if (factor != 1.0f) {
      float* row = sums.values + m * wide;
      for (int64_t d = 0; d < wide; d += 16) store(row + d, load(row + d) * factor);
    }
  }

  // H rows of weights times all dims.
  template <int H>
  static void accumulate(const float* weights, const float* values, float* out, int64_t count, int64_t wide) {
    for (int64_t d = 0; d < wide; d += 32) {
      Vec a[H][2];
      for (int r = 0; r < H; ++r)
        for (int n = 0; n < 2; ++n) a[r][n] = load(out + r * wide + d + n * 16);
      for (int64_t t = 0; t < count; ++t) {
        const Vec v[2] = {load(values + t * wide + d), load(values + t * wide + d + 16)};
        for (int r = 0; r < H; ++r)
          for (int n = 0; n < 2; ++n) a[r][n] += v[n] * weights[r * kChunk + t];
      }
      for (int r = 0; r < H; ++r)
        for (int n = 0; n < 2; ++n) store(out + r * wide + d + n * 16, a[r][n]);
    }
  }
};

}  // namespace medusa
