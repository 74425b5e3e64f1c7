// What drafting asks of a CPU and no library does well: products of one or two rows with a matrix, and the best tokens
// of rows of logits with their probabilities in one pass. A plain C interface, see native.py beside this file.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "../attention/kernel/vectors.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace medusa {
namespace {

// R dot products with one row of a matrix, out[r * step] each; `size` is a multiple of 32.
template <int R>
inline void dots(const BFloat16* weight, const BFloat16* rows, int64_t size, float* out, int64_t step) {
#ifdef __AVX512BF16__
  __m512 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t d = 0; d < size; d += 32) {
    const __m512bh w = (__m512bh)_mm512_loadu_si512(weight + d);
    for (int r = 0; r < R; ++r)
      sums[r] = _mm512_dpbf16_ps(sums[r], w, (__m512bh)_mm512_loadu_si512(rows + r * size + d));
  }
  for (int r = 0; r < R; ++r) {
    Vec values;
    std::memcpy(&values, &sums[r], 64);
    out[r * step] = sum(values);
  }
#else
  Vec sums[R] = {};
  for (int64_t d = 0; d < size; d += 16) {
    Vec w, x;
    for (int i = 0; i < 16; ++i) w[i] = widen(weight[d + i]);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 16; ++i) x[i] = widen(rows[r * size + d + i]);
      sums[r] += w * x;
    }
  }
  for (int r = 0; r < R; ++r) out[r * step] = sum(sums[r]);
#endif
}

template <int R>
void product(const BFloat16* rows, const BFloat16* weight, float* out, int64_t outputs, int64_t size) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < outputs; ++m) dots<R>(weight + m * size, rows, size, out + m, outputs);
}

constexpr int64_t kChunk = 64;  // logits of a row that are looked at together
constexpr int64_t kRows = 16;   // rows that are read together

// What is known of a row so far: its largest logit, its sum of exponentials below that (online softmax, Milakov and
// Gimelshein, arXiv:1805.02867), its best tokens.
struct Best {
  float maximum = -__builtin_inff(), weight = 0.0f;
  std::vector<std::pair<float, int64_t>> tokens;  // best first, of equals the earlier

  void take(const float* logits, int64_t first, size_t most) {
    Vec tops = load(logits);
    for (int64_t i = 16; i < kChunk; i += 16) tops = larger(load(logits + i), tops);
    const float top = largest(tops);
    if (top > maximum) {
      weight *= exponential(broadcast(maximum - top))[0];
      maximum = top;
    }
    if (maximum == -__builtin_inff()) return;
    Vec sums = {};
    for (int64_t i = 0; i < kChunk; i += 16) sums += exponential(load(logits + i) - maximum);
    weight += sum(sums);
    if (tokens.size() == most && !(top > tokens.back().first)) return;
    for (int64_t i = 0; i < kChunk; ++i)
      if (tokens.size() < most ? logits[i] > -__builtin_inff() : logits[i] > tokens.back().first) {
        const std::pair<float, int64_t> token{logits[i], first + i};
        if (tokens.size() == most) tokens.pop_back();
        tokens.insert(std::upper_bound(tokens.begin(), tokens.end(), token,
                                       [](const auto& a, const auto& b) { return a.first > b.first; }),
                      token);
      }
  }
};

template <class T>
void best(const T* logits, const float* scales, int64_t* places, float* probabilities, int64_t count, int64_t outputs,
          int64_t row, int64_t column, int64_t most) {
#pragma omp parallel for if (count >= 2 * kRows)
  for (int64_t block = 0; block < count; block += kRows) {
    const int64_t rows = std::min(kRows, count - block);
    std::vector<Best> found(rows);
    float chunk[kRows][kChunk];
    for (int64_t first = 0; first < outputs; first += kChunk) {
      const int64_t here = std::min(kChunk, outputs - first);
      for (int64_t m = 0; m < here; ++m)  // rows of a product with the matrix on its left stand side by side
        for (int64_t r = 0; r < rows; ++r) {
          const float logit = scales[block + r] * widen(logits[(block + r) * row + (first + m) * column]);
          chunk[r][m] = logit == logit ? logit : -__builtin_inff();  // a NaN is no candidate
        }
      for (int64_t r = 0; r < rows; ++r) {
        std::fill(chunk[r] + here, chunk[r] + kChunk, -__builtin_inff());
        found[r].take(chunk[r], first, size_t(most));
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < most; ++k) {
        const bool there = k < int64_t(found[r].tokens.size());
        const int64_t at = (block + r) * most + k;
        places[at] = there ? found[r].tokens[k].second : 0;
        probabilities[at] =
            there ? exponential(broadcast(found[r].tokens[k].first - found[r].maximum))[0] / found[r].weight : 0.0f;
      }
  }
}

}  // namespace
}  // namespace medusa

// The `most` largest of scales[r] * logits[r * row + m * column] over m < outputs for each r < count, best first:
// places int64 [count, most] and probabilities float32 [count, most], both 0 where a row has fewer that are numbers.
// dtype: 0 float32, 1 bfloat16.
extern "C" void medusa_best(const void* logits, int64_t dtype, const float* scales, int64_t* places,
                            float* probabilities, int64_t count, int64_t outputs, int64_t row, int64_t column,
                            int64_t most) {
  if (dtype == 0)
    medusa::best(static_cast<const float*>(logits), scales, places, probabilities, count, outputs, row, column, most);
  else
    medusa::best(static_cast<const medusa::BFloat16*>(logits), scales, places, probabilities, count, outputs, row,
                 column, most);
}

// out[r, m] = rows[r, :] . weight[m, :], float32 [count, outputs] from dense bfloat16 [count, size] and [outputs, size];
// count 1 or 2, `size` a multiple of 32.
extern "C" void medusa_product(const medusa::BFloat16* rows, const medusa::BFloat16* weight, float* out, int64_t count,
                               int64_t outputs, int64_t size) {
  if (count == 1)
    medusa::product<1>(rows, weight, out, outputs, size);
  else
    medusa::product<2>(rows, weight, out, outputs, size);
}
