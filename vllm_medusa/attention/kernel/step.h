// What a step's layers share, one layer, and the rows that one KV head serves for one request.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

extern "C" {

// What the layers of one step share. Mirrored field by field in native.py; all pointers stay the caller's.
struct MedusaStep {
  int64_t requests;
  int64_t words;  // of ancestor bits per row
  int64_t block_size;
  int64_t table_width;
  int64_t window;       // a row sees logical positions > its own - window; <= 0: all
  const int32_t* table;       // [requests, table_width]
  const int64_t* contexts;    // [requests], tokens in the cache before this step
  const int64_t* starts;      // [requests + 1], first row of each request
  const int64_t* depths;      // [rows]
  const uint64_t* ancestors;  // [rows, words]
  uint64_t* visible;          // [rows, words + 1], filled by medusa_prepare: bit j = slot context + j is seen
  const int32_t* key_token;   // place of (token, dim) in a block = token part + dim part
  const int32_t* key_dim;
  const int32_t* value_token;
  const int32_t* value_dim;
  int64_t key_run;    // tokens of a tile stand next to each other (keys transposed)
  int64_t value_run;  // dims stand next to each other (values row-major)
  int64_t dtype;      // of queries, results and cache: 0 float32, 1 bfloat16, 2 float16
  int64_t cache;      // 0 the cache holds that too, 1 float8 (e4m3), 2 float8 (e5m2)
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t amx;
  float scale;
  float softcap;
};

// One layer. Strides are in elements.
struct MedusaLayer {
  const void* query;  // [rows, heads, dim]
  int64_t query_row, query_head;
  const void* keys;  // [blocks, kv_heads, block_size * dim]
  int64_t key_block, key_head;
  const void* values;
  int64_t value_block, value_head;
  void* out;  // [rows, heads, dim]
  int64_t out_row, out_head;
  const float* sinks;            // [heads], a score for each that no key has and that draws no value; or null
  float key_scale, value_scale;  // what cached elements are multiplied by
};

// Tokens that change places, in every layer of a cache. Strides are in elements of `item` bytes.
struct MedusaMove {
  int64_t layers, kv_heads, block_size, dim, item;
  int64_t key_block, key_head, value_block, value_head;
  void* const* keys;  // [layers]
  void* const* values;
  const int32_t* key_token;
  const int32_t* key_dim;
  const int32_t* value_token;
  const int32_t* value_dim;
  int64_t moves;
  const int64_t* from;  // [moves], slots; moved one after the other
  const int64_t* to;
};

}  // extern "C"

namespace medusa {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kRows = 16;  // query rows that go over a chunk together

struct Pair {
  const MedusaStep* step;
  const MedusaLayer* layer;
  int64_t request, kv_head;
  int64_t first_row, rows;  // of the request
  int64_t context, slots;   // slots = context + rows
  int64_t group, queries;   // query heads per KV head; queries = rows * group, query m = row m / group, head m % group
  int64_t deepest;

  int64_t row_of(int64_t m) const { return first_row + m / group; }
  int64_t head_of(int64_t m) const { return kv_head * group + m % group; }

  // What the sink of query m adds to its sum of weights, at the scale of a running maximum.
  float sink(int64_t m, float maximum) const {
    return layer->sinks ? std::exp(layer->sinks[head_of(m)] - maximum) : 0.0f;
  }

  // Whether slots [begin, end) are seen by every row.
  bool plain(int64_t begin, int64_t end) const {
    return end <= context && (step->window <= 0 || begin > context + deepest - step->window);
  }

  // Bit j = `row` sees slot + j, j < 16.
  uint32_t visible16(int64_t row, int64_t slot) const {
    uint32_t seen = 0;
    const int64_t place = slot - context;
    if (place < 0) {
      const int64_t prefix = std::min<int64_t>(-place, 16);
      seen = (1u << prefix) - 1;
      if (step->window > 0) {
        const int64_t gone = context + step->depths[row] - step->window - slot + 1;  // so many slots are too old
        if (gone > 0) seen &= gone >= 16 ? 0u : ~0u << gone;
      }
      if (prefix < 16) seen |= uint32_t(bits(row, 0) << prefix) & 0xffffu;
      return seen;
    }
    return bits(row, place);
  }

 private:
  // 16 bits of the row's visible slots from context + place on; 0 beyond the last.
  uint32_t bits(int64_t row, int64_t place) const {
    const int64_t words = step->words + 1;
    const uint64_t* visible = step->visible + row * words;
    const int64_t word = place / 64, shift = place % 64;
    if (word >= words) return 0;
    uint64_t seen = visible[word] >> shift;
    if (shift > 48 && word + 1 < words) seen |= visible[word + 1] << (64 - shift);
    return uint32_t(seen & 0xffff);
  }
};

// Running softmax of `queries` rows: the largest score (natural units), the sum of weights, the weighted values.
struct Sums {
  float* maximum;  // [queries]
  float* weight;   // [queries]
  float* values;   // [queries rounded up to 16, width]
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Hide what a row may not see among `count` (a multiple of 16) slots from `slot` on.
inline void hide(const Pair& pair, int64_t row, int64_t slot, int64_t count, float* scores) {
  for (int64_t j = 0; j < count; j += 16) {
    const uint32_t seen = pair.visible16(row, slot + j);
    if (seen == 0xffffu) continue;
#ifdef MEDUSA_AMX
    _mm512_mask_storeu_ps(scores + j, __mmask16(~seen), _mm512_set1_ps(-kInfinity));
#else
    for (int i = 0; i < 16; ++i)
      if (!(seen >> i & 1)) scores[j + i] = -kInfinity;
#endif
  }
}

}  // namespace medusa
