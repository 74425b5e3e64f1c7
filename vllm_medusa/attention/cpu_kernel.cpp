// Tree-masked attention over a host's paged and packed KV cache. A plain C interface, see native.py beside this file.
//
// One unit of work is a "tile", 16 or 32 slots of one (request, KV head) pair. All tiles of all pairs form one line,
// which is cut into equal parts, one per thread; a pair that is cut is merged at the end by log-sum-exp. All query rows
// that share a KV head (rows of the tree times the heads of the group) go over a chunk of tiles together, with an
// online softmax per chunk (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).
//
// Two ways to do the products, chosen by the caller:
// - portable: a chunk, also one of float8, is unpacked to float32; GCC's vector types do the rest on any CPU;
// - AMX: bfloat16 caches that are packed for AMX are multiplied where they stand. Weights are rounded to bfloat16.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "kernel/amx.h"
#include "kernel/portable.h"

#ifdef MEDUSA_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace medusa {
namespace {

template <class T>
void finish(const Pair& pair, int64_t m, const float* values, float weight) {
  T* to = static_cast<T*>(pair.layer->out) + pair.row_of(m) * pair.layer->out_row +
          pair.head_of(m) * pair.layer->out_head;
  const float scale = pair.layer->value_scale;
  for (int64_t d = 0; d < pair.step->dim; ++d) narrow(values[d] * scale / weight, to[d]);
}

float* aligned(std::vector<float>& buffer, int64_t floats) {
  if (int64_t(buffer.size()) < floats + 16) buffer.resize(floats + 16);
  auto address = reinterpret_cast<uintptr_t>(buffer.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

// Brings the parts of query m to one scale and adds them up; returns the sum of weights, its sink's included.
float merge(const Pair& pair, const std::vector<Sums>& parts, int64_t m, int64_t wide, float* values) {
  float maximum = -kInfinity, weight = 0.0f;
  for (const Sums& sums : parts) maximum = std::max(maximum, sums.maximum[m]);
  std::fill(values, values + wide, 0.0f);
  for (const Sums& sums : parts) {
    const float factor = std::exp(sums.maximum[m] - maximum);  // 0 for a part that the query does not see
    weight += sums.weight[m] * factor;
    for (int64_t d = 0; d < wide; ++d) values[d] += sums.values[m * wide + d] * factor;
  }
  return weight + pair.sink(m, maximum);
}

// Where one pair's tiles lie on the line.
struct Place {
  int64_t first_tile, tiles;  // the tiles that any row sees
  int64_t cost;               // of one tile
  int64_t begin;              // sum of costs before
};

template <class T, class Way>
void attend(const MedusaStep& step, const MedusaLayer& layer) {
  const int64_t tile = step.block_size % 32 == 0 ? 32 : 16;
  const int64_t count = step.requests * step.kv_heads, group = step.heads / step.kv_heads;
  const int64_t wide = Way::width(step.dim);
  std::vector<Pair> pairs(count);
  std::vector<Place> places(count);
  int64_t line = 0, most = 0;
  for (int64_t request = 0; request < step.requests; ++request) {
    const int64_t first = step.starts[request], rows = step.starts[request + 1] - first;
    const int64_t context = step.contexts[request], slots = context + rows;
    int64_t deepest = 0;
    for (int64_t row = first; row < first + rows; ++row) deepest = std::max(deepest, step.depths[row]);
    const int64_t seen_from = step.window > 0 ? std::max<int64_t>(0, context - step.window + 1) : 0;
    const int64_t first_tile = seen_from / tile, tiles = rows ? (slots + tile - 1) / tile - first_tile : 0;
    for (int64_t head = 0; head < step.kv_heads; ++head) {
      const int64_t at = request * step.kv_heads + head;
      pairs[at] = {&step, &layer, request, head, first, rows, context, slots, group, rows * group, deepest};
      places[at] = {first_tile, tiles, round_up(rows * group, kRows) / kRows, line};
      line += tiles * places[at].cost;
      most = std::max(most, rows * group);
    }
  }
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), line / 8));
  const int64_t padded = round_up(most, kRows), one = padded * (wide + 2);
  // Two unfinished pairs per thread: number 0 came from the thread before, number 1 goes on in the next.
  thread_local std::vector<float> parts_buffer;
  float* parts = threads > 1 ? aligned(parts_buffer, threads * 2 * one) : nullptr;
  // Tiles of a pair that lie before the cut between thread - 1 and thread.
  const auto before = [&](int64_t at, int64_t thread) {
    const Place& place = places[at];
    const int64_t cut = line * thread / threads - place.begin;
    const int64_t tiles = cut <= 0 ? 0 : (cut + place.cost - 1) / place.cost;
    return std::min(place.tiles, tiles);
  };
  const auto part = [&](int64_t thread, int64_t number) {
    float* base = parts + (thread * 2 + number) * one;
    return Sums{base, base + padded, base + 2 * padded};
  };

  // Parts of each pair that are still missing: whoever brings the last one merges them, and nobody waits.
  std::vector<std::atomic<int64_t>> missing(count);
  for (int64_t at = 0; at < count; ++at)
    for (int64_t thread = 0; thread < threads; ++thread) missing[at] += before(at, thread) < before(at, thread + 1);

#pragma omp parallel num_threads(int(threads))
  {
    const int64_t team = omp_get_num_threads();  // may be smaller than asked for
    thread_local std::vector<float> buffer;
    float* own = aligned(buffer, one + Way::scratch_floats(most, step.dim));
    [[maybe_unused]] typename Way::Session session;
    for (int64_t thread = omp_get_thread_num(); thread < threads; thread += team)
      for (int64_t at = 0; at < count; ++at) {
        const int64_t from = before(at, thread), to = before(at, thread + 1);
        if (from >= to) continue;
        const Pair& pair = pairs[at];
        const bool whole = from == 0 && to == places[at].tiles;
        const Sums sums = whole ? Sums{own, own + padded, own + 2 * padded} : part(thread, from == 0);
        Way::run(pair, tile, places[at].first_tile + from, places[at].first_tile + to, sums, own + one);
        if (whole) {
          for (int64_t m = 0; m < pair.queries; ++m)
            finish<T>(pair, m, sums.values + m * wide, sums.weight[m] + pair.sink(m, sums.maximum[m]));
          continue;
        }
        if (missing[at].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        std::vector<Sums> parts_of_pair;
        for (int64_t other = 0; other < threads; ++other)
          if (before(at, other) < before(at, other + 1)) parts_of_pair.push_back(part(other, before(at, other) == 0));
        for (int64_t m = 0; m < pair.queries; ++m) {
          const float weight = merge(pair, parts_of_pair, m, wide, own);
          finish<T>(pair, m, own, weight);
        }
      }
  }
}

template <class T>
void attend_portably(const MedusaStep& step, const MedusaLayer& layer) {
  if (step.cache == 0) attend<T, Portable<T>>(step, layer);
  if (step.cache == 1) attend<T, Portable<T, E4M3>>(step, layer);
  if (step.cache == 2) attend<T, Portable<T, E5M2>>(step, layer);
}

// One token's elements of one head, from one place in a block to another.
template <class T>
void move_one(T* from, T* to, const int32_t* token, const int32_t* dims, int64_t dim, int64_t here, int64_t there) {
  from += token[here];
  to += token[there];
  for (int64_t d = 0; d < dim; ++d) to[dims[d]] = from[dims[d]];
}

template <class T>
void move_all(const MedusaMove& move) {
  for (int64_t layer = 0; layer < move.layers; ++layer) {
    T* keys = static_cast<T*>(move.keys[layer]);
    T* values = static_cast<T*>(move.values[layer]);
    for (int64_t m = 0; m < move.moves; ++m) {
      const int64_t here = move.from[m] % move.block_size, there = move.to[m] % move.block_size;
      const int64_t source = move.from[m] / move.block_size, target = move.to[m] / move.block_size;
      for (int64_t head = 0; head < move.kv_heads; ++head) {
        T* k = keys + head * move.key_head;
        T* v = values + head * move.value_head;
        move_one(k + source * move.key_block, k + target * move.key_block, move.key_token, move.key_dim, move.dim, here,
                 there);
        move_one(v + source * move.value_block, v + target * move.value_block, move.value_token, move.value_dim,
                 move.dim, here, there);
      }
    }
  }
}

}  // namespace
}  // namespace medusa

extern "C" {

// Whether this process may use AMX; asks the operating system for it.
int64_t medusa_has_amx() {
#ifdef MEDUSA_AMX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 0;
#endif
}

// Whether the compiler knows float16.
int64_t medusa_has_float16() {
#ifdef __FLT16_MAX__
  return 1;
#else
  return 0;
#endif
}

// Fills `visible` from `ancestors`, `depths` and the window.
void medusa_prepare(const MedusaStep* step) {
  const int64_t words = step->words + 1;
  for (int64_t request = 0; request < step->requests; ++request) {
    const int64_t first = step->starts[request];
    for (int64_t row = first; row < step->starts[request + 1]; ++row) {
      uint64_t* visible = step->visible + row * words;
      const uint64_t* ancestors = step->ancestors + row * step->words;
      uint64_t carry = 1;  // the root, in the place before node 0
      for (int64_t w = 0; w < step->words; ++w) {
        visible[w] = ancestors[w] << 1 | carry;
        carry = ancestors[w] >> 63;
      }
      visible[step->words] = carry;
      if (step->window <= 0 || step->depths[row] < step->window) continue;
      for (int64_t place = 0; place < step->starts[request + 1] - first; ++place)
        if (step->depths[first + place] <= step->depths[row] - step->window)
          visible[place / 64] &= ~(uint64_t(1) << place % 64);
    }
  }
}

// Moves tokens to other slots, all layers.
void medusa_move(const MedusaMove* move) {
  if (move->item == 4) medusa::move_all<uint32_t>(*move);
  if (move->item == 2) medusa::move_all<uint16_t>(*move);
  if (move->item == 1) medusa::move_all<uint8_t>(*move);
}

// Fills `out` of one layer.
void medusa_attend(const MedusaStep* step, const MedusaLayer* layer) {
  using namespace medusa;
#ifdef MEDUSA_AMX
  if (step->amx) return attend<BFloat16, Amx>(*step, *layer);
#endif
  if (step->dtype == 0) attend_portably<float>(*step, *layer);
  if (step->dtype == 1) attend_portably<BFloat16>(*step, *layer);
#ifdef __FLT16_MAX__
  if (step->dtype == 2) attend_portably<_Float16>(*step, *layer);
#endif
}

}  // extern "C"
