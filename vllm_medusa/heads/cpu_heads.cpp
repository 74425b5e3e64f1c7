// What drafting asks of a CPU and no library does well: all heads for a few rows at once, and the best tokens of rows of
// logits with their probabilities in one pass. A plain C interface, see native.py beside this file.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../attention/kernel/vectors.h"
#include "../linear/rows.h"

namespace medusa {
namespace {

// A matrix [outputs, size] in bytes, scales[m] to each row.
struct Matrix {
  const int8_t* bytes;
  const float* scales;
  int64_t outputs, size;
};

// give(r, m, rows[r, :] . matrix[m, :]), each thread of a team for its part of the matrix, which is read once. Rows are
// `up(size, kStep)` numbers apart, zeros behind their own. Returns when all threads are done.
template <class Give>
inline void product(int64_t count, const float* rows, const Matrix& matrix, Give give) {
  const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
  const auto scaled = [&](int64_t r, int64_t m, float x) { give(r, m, x * matrix.scales[m]); };
  Columns<int8_t, decltype(scaled)>(matrix.bytes, matrix.size, scaled)
      .run(rows, 0, count, matrix.outputs * thread / team, matrix.outputs * (thread + 1) / team);
#pragma omp barrier
}

constexpr int64_t kChunk = 64;  // logits of a row that are looked at together
constexpr int64_t kRows = 16;   // rows that are read together

inline float number(float logit) { return logit == logit ? logit : -__builtin_inff(); }  // a NaN is no candidate

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

  // Write the `most` best places and their probabilities; zeros where there are fewer.
  void tell(int64_t* places, float* probabilities, int64_t most) const {
    for (int64_t k = 0; k < most; ++k) {
      const bool there = k < int64_t(tokens.size());
      places[k] = there ? tokens[k].second : 0;
      probabilities[k] = there ? exponential(broadcast(tokens[k].first - maximum))[0] / weight : 0.0f;
    }
  }
};

// Heads whose matrices all serve every head: h_k = h + SiLU(first h + root e + bias) taken by head, or, with a layer
// that they share, h_k = h + back_k SiLU(...) + back_bias_k; then logits_k = scale_k unembedding h_k.
struct Heads {
  Matrix first, root, back, unembedding;  // no bytes: there is none
  const float *bias, *back_bias, *scales;
  const BFloat16* embedding;  // [tokens, hidden]
  int64_t heads, hidden;
};

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

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
          chunk[r][m] = number(scales[block + r] * widen(logits[(block + r) * row + (first + m) * column]));
        }
      for (int64_t r = 0; r < rows; ++r) {
        std::fill(chunk[r] + here, chunk[r] + kChunk, -__builtin_inff());
        found[r].take(chunk[r], first, size_t(most));
      }
    }
    for (int64_t r = 0; r < rows; ++r) found[r].tell(places + (block + r) * most, probabilities + (block + r) * most, most);
  }
}

void best_of_row(const float* logits, int64_t outputs, int64_t* places, float* probabilities, int64_t most) {
  Best found;
  float chunk[kChunk];
  for (int64_t first = 0; first < outputs; first += kChunk) {
    const int64_t here = std::min(kChunk, outputs - first);
    for (int64_t m = 0; m < here; ++m) chunk[m] = number(logits[first + m]);
    std::fill(chunk + here, chunk + kChunk, -__builtin_inff());
    found.take(chunk, first, size_t(most));
  }
  found.tell(places, probabilities, most);
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

// The `most` likeliest tokens of each of `count` * heads rows, as medusa_best gives them, from hidden rows
// bfloat16 [count, hidden] and root tokens int64 [count]. One team of threads for all of it: between small products,
// waking one takes as long as the product.
extern "C" void medusa_guess(const medusa::Heads* given, const medusa::BFloat16* hidden, const int64_t* roots,
                             int64_t* places, float* probabilities, int64_t count, int64_t most) {
  const medusa::Heads h = *given;
  const int64_t inner_size = h.first.outputs, rows = count * h.heads, outputs = h.unembedding.outputs;
  const int64_t width = medusa::up(h.hidden, medusa::kStep), inner_width = medusa::up(inner_size, medusa::kStep);
  std::vector<float> wide(count * width), root(h.root.bytes ? count * width : 0), inner(count * inner_width);
  std::vector<float> states(rows * width), logits(rows * outputs);
  for (int64_t b = 0; b < count; ++b)
    for (int64_t d = 0; d < h.hidden; ++d) {
      wide[b * width + d] = medusa::widen(hidden[b * h.hidden + d]);
      if (h.root.bytes) root[b * width + d] = medusa::widen(h.embedding[roots[b] * h.hidden + d]);
    }
#pragma omp parallel
  {
    float* const in = inner.data();
    medusa::product(count, wide.data(), h.first, [&](int64_t b, int64_t m, float x) {
      in[b * inner_width + m] = x + (h.bias ? h.bias[m] : 0.0f);
    });
    if (h.root.bytes)  // the same thread has the same rows of both
      medusa::product(count, root.data(), h.root, [&](int64_t b, int64_t m, float x) { in[b * inner_width + m] += x; });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * inner_width; ++i) in[i] = medusa::silu(in[i]);
    const auto set_state = [&](int64_t b, int64_t m, float x) {
      const int64_t head = m / h.hidden, d = m % h.hidden;
      states[(b * h.heads + head) * width + d] = wide[b * width + d] + x;
    };
    if (h.back.bytes) {
      medusa::product(count, in, h.back, [&](int64_t b, int64_t m, float x) { set_state(b, m, x + h.back_bias[m]); });
    } else {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count * inner_size; ++i)
        set_state(i / inner_size, i % inner_size, in[i / inner_size * inner_width + i % inner_size]);
    }
    medusa::product(rows, states.data(), h.unembedding, [&](int64_t r, int64_t m, float x) {
      logits[r * outputs + m] = x * h.scales[r % h.heads];
    });
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
      medusa::best_of_row(logits.data() + r * outputs, outputs, places + r * most, probabilities + r * most, most);
  }
}
