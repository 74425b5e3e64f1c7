// out = rows . weights^T + bias for any number of rows, each weight read once for as many of them as fit a cache.
//
// Each number of the result is one sum, taken in the same order whatever the other rows and columns are: to the bit, a
// row's result does not depend on what else is in the step.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "lanes.h"

namespace medusa {

template <class T>
struct Product {
  const T* rows;     // [count, size], `stride` numbers from row to row
  const T* weights;  // [outputs, size], dense
  const T* bias;     // [outputs], or none
  T* out;            // [count, outputs], dense
  int64_t count, size, outputs, stride;
};

constexpr int64_t kRowBytes = 192 << 10;    // of widened rows that stay in a core's own cache
constexpr int64_t kWeightBytes = 48 << 10;  // of weights that stay there while all those rows pass
constexpr int64_t kChunkBytes = 20 << 10;   // of a group's rows that stay in the innermost cache
constexpr int64_t kFewestRows = 16;         // rows that share a read of the weights, however long they are
constexpr int kMostRows = kRegisters == 32 ? 8 : 4;

// Columns multiplied at once with a group of `rows`: sums, one vector of each column and one of a row fit the registers.
constexpr int columns_of(int rows) {
  if (kRegisters == 16) return rows == 1 ? 8 : rows == 2 ? 4 : 3;
  return rows <= 2 ? 8 : rows <= 4 ? 6 : rows <= 6 ? 4 : 3;
}

constexpr int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Numbers that a thread keeps room for, from product to product.
class Room {
 public:
  ~Room() { std::free(at_); }
  float* of(int64_t wanted) {
    if (room_ < wanted) {
      std::free(at_);
      at_ = static_cast<float*>(std::aligned_alloc(64, (wanted * 4 + 63) / 64 * 64));
      room_ = wanted;
    }
    return at_;
  }

 private:
  float* at_ = nullptr;
  int64_t room_ = 0;
};

template <int R, int C, class Run>
inline __attribute__((always_inline)) void each(Run run) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) run(r, c);
}

// sums += a step of R widened rows, `width` numbers apart, times a step of C columns, `size` numbers apart.
template <int R, int C, class T>
inline __attribute__((always_inline)) void add(Lanes (&sums)[R][C], const float* rows, int64_t width,
                                               const T* columns, int64_t size) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    Lanes w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) w[c] = half ? Format<T>::second(columns + c * size) : Format<T>::first(columns + c * size);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Lanes x = lanes(rows + r * width + half * kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] += x * w[c];
    }
    asm volatile("" ::: "memory");  // GCC would keep what it read for the other half, and push sums out of registers
  }
}

// Weights asked for ahead of their use: in each step, a line of the cache for each column.
struct Ahead {
  const char* at;
  int64_t apart, stride;  // bytes from line to line, and from step to step
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// `count` steps of four rows and three columns of bfloat16. All sixteen registers are in use, and GCC 12 keeps two of the sums
// in memory instead.
inline void steps_of_4x3(Lanes (&sums)[4][3], const float* rows, int64_t width, const BFloat16* columns, int64_t size,
                         int64_t count, Ahead ahead) {
#define MEDUSA_WIDEN(half, from, to) "vpxor " to "," to "," to "\n\tvpunpck" half "wd " from "," to "," to "\n\t"
#define MEDUSA_ROW(from, a, b, c)             \
  "vmovups " from ",%%ymm15\n\t"              \
  "vfmadd231ps %%ymm15,%%ymm12,%%ymm" a "\n\t" \
  "vfmadd231ps %%ymm15,%%ymm13,%%ymm" b "\n\t" \
  "vfmadd231ps %%ymm15,%%ymm14,%%ymm" c "\n\t"
#define MEDUSA_HALF(half, offset)                                                                                    \
  MEDUSA_WIDEN(half, "(%[columns])", "%%ymm12")                                                                      \
  MEDUSA_WIDEN(half, "(%[columns],%[size])", "%%ymm13")                                                              \
  MEDUSA_WIDEN(half, "(%[columns],%[size],2)", "%%ymm14")                                                            \
  MEDUSA_ROW(offset "(%[rows])", "0", "1", "2") MEDUSA_ROW(offset "(%[rows],%[width])", "3", "4", "5")               \
  MEDUSA_ROW(offset "(%[rows],%[width],2)", "6", "7", "8") MEDUSA_ROW(offset "(%[rows],%[thrice])", "9", "10", "11")
#define MEDUSA_SUMS(move)                                                                                            \
  move("0", "0") move("1", "32") move("2", "64") move("3", "96") move("4", "128") move("5", "160") move("6", "192") \
  move("7", "224") move("8", "256") move("9", "288") move("10", "320") move("11", "352")
#define MEDUSA_LOAD(sum, offset) "vmovups " offset "(%[sums]),%%ymm" sum "\n\t"
#define MEDUSA_STORE(sum, offset) "vmovups %%ymm" sum "," offset "(%[sums])\n\t"
  if (count <= 0) return;
  asm volatile(
      MEDUSA_SUMS(MEDUSA_LOAD)
      ".p2align 4\n"
      "1:\n\t"
      MEDUSA_HALF("l", "0")
      MEDUSA_HALF("h", "32")
      "prefetcht0 (%[ahead])\n\t"
      "prefetcht0 (%[ahead],%[apart])\n\t"
      "prefetcht0 (%[ahead],%[apart],2)\n\t"
      "add %[stride],%[ahead]\n\t"
      "add $32,%[columns]\n\t"
      "add $64,%[rows]\n\t"
      "dec %[count]\n\t"
      "jnz 1b\n\t"
      MEDUSA_SUMS(MEDUSA_STORE)
      : [rows] "+r"(rows), [columns] "+r"(columns), [count] "+r"(count), [ahead] "+r"(ahead.at)
      : [width] "r"(4 * width), [thrice] "r"(12 * width), [size] "r"(2 * size), [sums] "r"(&sums),
        [apart] "r"(ahead.apart), [stride] "r"(ahead.stride)
      : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15");
#undef MEDUSA_WIDEN
#undef MEDUSA_ROW
#undef MEDUSA_HALF
#undef MEDUSA_SUMS
#undef MEDUSA_LOAD
#undef MEDUSA_STORE
}
#endif

// `size` numbers as floats, in the order in which the inner loop meets them, filled up to a whole step.
template <class T>
inline void widen_row(const T* from, int64_t size, float* to) {
  for (int64_t k = 0; k < size; k += kStep, to += kStep) {
    T rest[kStep];
    const T* here = from + k;
    if (k + kStep > size) {
      std::memset(rest, 0, sizeof rest);
      std::memcpy(rest, here, (size - k) * sizeof(T));
      here = rest;
    }
    const Lanes first = Format<T>::first(here), second = Format<T>::second(here);
    std::memcpy(to, &first, sizeof first);
    std::memcpy(to + kLanes, &second, sizeof second);
  }
}

// Widened rows times the columns of a matrix [outputs, size], in one thread. give(row, column, sum) takes each number.
template <class T, class Give>
class Columns {
 public:
  Columns(const T* weights, int64_t size, Give give)
      : weights_(weights), size_(size), width_(up(size, kStep)), whole_(size / kStep * kStep), give_(give) {}

  // `count` rows, the first one number `done`, with the columns from `first` to `last`.
  void run(const float* rows, int64_t done, int64_t count, int64_t first, int64_t last) const {
    if (count > kMostRows)
      together<columns_of(kMostRows)>(rows, done, count, first, last);
    else
      group_of(count, [&](auto r) { together<columns_of(decltype(r)::value)>(rows, done, count, first, last); });
  }

 private:
  const T* const weights_;
  const int64_t size_, width_, whole_;
  const Give give_;

  // run(integral constant) for 1 to kMostRows rows.
  template <class Run>
  static void group_of(int64_t rows, Run run) {
    switch (rows) {
      case 1: return run(std::integral_constant<int, 1>{});
      case 2: return run(std::integral_constant<int, 2>{});
      case 3: return run(std::integral_constant<int, 3>{});
      case 4: return run(std::integral_constant<int, 4>{});
    }
    if constexpr (kMostRows == 8) switch (rows) {
        case 5: return run(std::integral_constant<int, 5>{});
        case 6: return run(std::integral_constant<int, 6>{});
        case 7: return run(std::integral_constant<int, 7>{});
        case 8: return run(std::integral_constant<int, 8>{});
      }
  }

  // What a group of rows asks for while it multiplies: nothing; the columns that it meets next; or, where more groups share
  // what is in the cache, its part of the columns that all of them meet next.
  struct Fetch {
    enum { nothing, next, part } what = nothing;
    const T* from = nullptr;        // `part`: the first number that lies ahead
    int64_t parts = 1, number = 0;  // `part`: of how many, and which one
  };

  // C columns at a time: as many as stay in the cache, and in turns all groups of rows over them.
  template <int C>
  void together(const float* rows, int64_t done, int64_t count, int64_t first, int64_t last) const {
    const int64_t fitting = std::max<int64_t>(C, kWeightBytes / int64_t(sizeof(T)) / size_ / C * C);
    const int64_t groups = (count + kMostRows - 1) / kMostRows;
    for (int64_t from = first; from < last; from += fitting) {
      const int64_t to = std::min(from + fitting, last);
      const int64_t cold = groups == 1 || from == first ? 1 : 0;  // groups that come before anything was asked for
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t r = count * group / groups;
        Fetch fetch;
        if (group < cold)
          fetch.what = Fetch::next;
        else if (to < last)
          fetch = {Fetch::part, weights_ + to * size_, groups - cold, group - cold};
        group_of(count * (group + 1) / groups - r, [&](auto size) {
          constexpr int R = decltype(size)::value;
          if constexpr (C <= columns_of(R))  // a lone group has columns_of(R), groups of many the fewest
            some<R, C>(rows + r * width_, done + r, from, to, fetch);
        });
      }
    }
  }

  // One group of R rows with the columns from `from` to `to`.
  template <int R, int C>
  void some(const float* rows, int64_t row, int64_t from, int64_t to, Fetch fetch) const {
    const int64_t chunks = (R * width_ * 4 + kChunkBytes - 1) / kChunkBytes;
    const int64_t chunk = up((width_ + chunks - 1) / chunks, kStep);
    static thread_local Room room;
    Lanes* const kept = chunk < width_ ? reinterpret_cast<Lanes*>(room.of((to - from + C) * R * kLanes)) : nullptr;
    for (int64_t k = 0; k < width_; k += chunk) {
      const int64_t end = std::min(k + chunk, width_);
      int64_t column = from;
      Lanes* sums = kept;
      Ahead there = ahead<C>(fetch, from, k);
      for (; column + C <= to; column += C, sums += R * C, there.at += C * size_ * int64_t(sizeof(T)))
        tile<R, C>(rows, row, column, k, end, sums, there);
      for (; column < to; ++column, sums += R) tile<R, 1>(rows, row, column, k, end, sums, ahead<1>({}, column, k));
    }
  }

  // What the first C of the columns from `from` on ask for; the next C ask for what lies behind it.
  template <int C>
  Ahead ahead(const Fetch& fetch, int64_t from, int64_t k) const {
    constexpr int64_t step = kStep * sizeof(T);
    const auto place = [](const T* at) { return reinterpret_cast<const char*>(at); };
    if (fetch.what == Fetch::part)
      return {place(fetch.from + C * (fetch.number * size_ + k) / fetch.parts), step / fetch.parts, C * step / fetch.parts};
    const T* const at = weights_ + from * size_ + k;
    if (fetch.what == Fetch::next) return {place(at + C * size_), size_ * int64_t(sizeof(T)), step};
    return {place(at), 0, 0};
  }

  // R rows and C columns, numbers `k` to `end` of each; what they add up to is kept in between.
  template <int R, int C>
  void tile(const float* rows, int64_t row, int64_t column, int64_t k, int64_t end, Lanes* kept, Ahead ahead) const {
    Lanes sums[R][C];
    each<R, C>([&](int r, int c) __attribute__((always_inline)) { sums[r][c] = k > 0 ? kept[r * C + c] : Lanes{}; });
    const int64_t width = width_, size = size_, stop = std::min(end, whole_);
    const T* const at = weights_ + column * size;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (R == 4 && C == 3 && std::is_same_v<T, BFloat16>)
      steps_of_4x3(sums, rows + k, width, at + k, size, (stop - k) / kStep, ahead);
    else
#endif
      for (int64_t i = k; i < stop; i += kStep, ahead.at += ahead.stride) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          __builtin_prefetch(ahead.at + c * ahead.apart, 0, 3);
          if (kStep * sizeof(T) > 64) __builtin_prefetch(ahead.at + c * ahead.apart + 64, 0, 3);
        }
        add<R, C, T>(sums, rows + i, width, at + i, size);
      }
    if (stop < end) {
      T rests[C * kStep] = {};
      for (int c = 0; c < C; ++c) std::memcpy(rests + c * kStep, at + c * size + whole_, (size - whole_) * sizeof(T));
      add<R, C, T>(sums, rows + whole_, width, rests, kStep);
    }
    if (end < width_)
      each<R, C>([&](int r, int c) __attribute__((always_inline)) { kept[r * C + c] = sums[r][c]; });
    else
      finish(row, column, sums);
  }

  template <int R, int C>
  inline __attribute__((always_inline)) void finish(int64_t row, int64_t column, const Lanes (&sums)[R][C]) const {
    if constexpr (R % 4 == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r += 4)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          float x[4];
          totals(sums[r][c], sums[r + 1][c], sums[r + 2][c], sums[r + 3][c], x);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) give_(row + r + i, column + c, x[i]);
        }
    } else {
      each<R, C>([&](int r, int c) __attribute__((always_inline)) { give_(row + r, column + c, total(sums[r][c])); });
    }
  }
};

// A whole product, by a team of threads.
template <class T>
void multiply(const Product<T>& p) {
  const int64_t width = up(p.size, kStep);
  const auto give = [&p](int64_t row, int64_t column, float x) {
    if (p.bias) x += widen(p.bias[column]);
    narrow(x, p.out[row * p.outputs + column]);
  };
  const Columns<T, decltype(give)> columns(p.weights, p.size, give);
  const int64_t fitting = std::max(kFewestRows, kRowBytes / 4 / width / kMostRows * kMostRows);
  const int64_t blocks = (p.count + fitting - 1) / fitting;
  static thread_local Room room;
  float* const rows = room.of((p.count / std::max<int64_t>(blocks, 1) + 1) * width);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t done = p.count * block / blocks, count = p.count * (block + 1) / blocks - done;
    const auto widen_one = [&](int64_t r) { widen_row(p.rows + (done + r) * p.stride, p.size, rows + r * width); };
#pragma omp parallel
    {
      if (count >= kMostRows) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; ++r) widen_one(r);
      } else {
#pragma omp single
        for (int64_t r = 0; r < count; ++r) widen_one(r);
      }
      const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
      columns.run(rows, done, count, p.outputs * thread / team, p.outputs * (thread + 1) / team);
    }
  }
}

}  // namespace medusa
