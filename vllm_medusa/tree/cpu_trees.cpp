// Following a request's text and growing trees from two sources, as lookup.py and mixture.py say it in Python: the same
// steps in the same order, in float32 where they are; and the greedy walk of walk.py, which looks for the best token of
// the rows that it reaches only. A plain C interface, see native.py beside this file.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../attention/kernel/vectors.h"

namespace medusa {
namespace {

struct Match {
  int64_t source, length, known;
};

struct Odds {
  double hits, tries;
};

// Where the longest earlier copy of the text's end goes on (of equals the latest), and its length in tokens.
void find_longest(const int32_t* text, int64_t length, int64_t longest, int64_t reach, Match& match) {
  match.source = -1;
  match.length = 0;
  const int64_t last = length - 1;
  for (int64_t place = last - 1; place >= std::max<int64_t>(last - reach, 0); --place) {
    if (text[place] != text[last]) continue;
    int64_t same = 1;
    while (same < longest && same <= place && text[place - same] == text[last - same]) ++same;
    if (same > match.length) {
      match.length = same;
      match.source = place + 1;
      if (same == longest) return;
    }
  }
}

// A node that could come next.
struct Waiting {
  float worth, share;  // its reach, and by what its head's probabilities are multiplied
  int64_t parent, depth, rank, twin;
};

// The first of a row's largest elements; -1 if there is a NaN.
template <class T>
int64_t first_largest(const T* row, int64_t size) {
  constexpr int64_t kLanes = 64;
  float tops[kLanes];
  int32_t numbers = 1;
  std::fill(tops, tops + kLanes, -__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    int32_t here = 1;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float x = widen(row[i + lane]);
      tops[lane] = x > tops[lane] ? x : tops[lane];
      here &= x == x;
    }
    numbers &= here;
  }
  float top = *std::max_element(tops, tops + kLanes);
  for (; i < size; ++i) {
    const float x = widen(row[i]);
    top = x > top ? x : top;
    numbers &= x == x;
  }
  if (!numbers) return -1;
  for (i = 0; i < size; ++i)
    if (widen(row[i]) == top) return i;
  return -1;
}

template <class T>
bool greedy_walk(const T* logits, int64_t stride, int64_t vocab, const int64_t* first, const uint8_t* walks,
                 const int64_t* tokens, const int64_t* parents, const int64_t* sizes, int64_t requests, int64_t width,
                 int64_t* rows, int64_t* emitted, int64_t* lengths) {
  bool numbers = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : numbers) if (requests > 1)
  for (int64_t request = 0; request < requests; ++request) {
    int64_t row = 0, length = 0;
    while (row >= 0) {
      const int64_t best = first_largest(logits + (first[request] + row) * stride, vocab);
      numbers = numbers && best >= 0;
      rows[request * (width + 1) + length] = row;
      emitted[request * (width + 1) + length] = best;
      ++length;
      const int64_t standing = row;
      row = -1;
      for (int64_t node = 0; walks[request] && node < sizes[request] && row < 0; ++node)
        if (parents[request * width + node] == standing && tokens[request * width + node] == best) row = node + 1;
    }
    lengths[request] = length;
  }
  return numbers;
}

inline float known(float probability) { return probability > 0.0f ? probability : 0.0f; }

}  // namespace
}  // namespace medusa

extern "C" {

// See Lookups.follow. match: source, length, known; tally: hits and tries by length 0 to longest.
void medusa_follow(const int32_t* text, int64_t length, medusa::Match* match, medusa::Odds* tally, int64_t longest,
                   int64_t reach, int64_t catch_up, double memory, int64_t most, int64_t* tokens, float* odds) {
  if (match->known == 0 || match->known > length || length - match->known > catch_up) {
    medusa::find_longest(text, length, longest, reach, *match);
    match->known = length;
  }
  for (int64_t place = match->known; place < length; ++place) {
    const bool right = match->source >= 0 && text[match->source] == text[place];
    if (match->source >= 0) {
      medusa::Odds& cell = tally[match->length];
      if (cell.tries >= memory) cell.hits *= 0.5, cell.tries *= 0.5;
      cell.hits += right;
      cell.tries += 1.0;
    }
    if (right) {
      ++match->source;
      match->length = std::min(match->length + 1, longest);
    } else {
      medusa::find_longest(text, place + 1, longest, reach, *match);
    }
  }
  match->known = length;
  if (match->source < 0) return;
  for (int64_t step = 0; step < most; ++step) {
    const int64_t place = match->source + step;
    tokens[step] = place < length ? text[place] : tokens[place - length];
    const medusa::Odds& cell = tally[std::min(match->length + step, longest)];
    odds[step] = float(cell.hits / cell.tries);
  }
}

// See grow_mixture: tokens and probabilities [batch, heads, top_k], expected and odds [batch, most], the rest
// [batch, nodes] and [batch].
void medusa_grow(const int64_t* tokens, const float* probabilities, const int64_t* expected, const float* odds,
                 int64_t batch, int64_t heads, int64_t top_k, int64_t most, int64_t nodes, int64_t* out_tokens,
                 int64_t* parents, int64_t* ranks, float* reach, int64_t* sizes) {
  std::vector<medusa::Waiting> waiting;
  waiting.reserve(2 * nodes + 2);
  for (int64_t request = 0; request < batch; ++request) {
    waiting.clear();
    int64_t size = 0, row = 0, depth = 0;
    float above = 1.0f;
    bool on_path = true;
    while (true) {
      const int64_t* guesses = tokens + depth * top_k;
      const float* shares = probabilities + depth * top_k;
      int64_t twin = -1;
      float left = above;
      if (on_path && depth < most && expected[depth] >= 0) {
        left = above * (1.0f - odds[depth]);
        float value = above * odds[depth];
        twin = top_k;
        for (int64_t rank = 0; depth < heads && rank < top_k; ++rank)
          if (guesses[rank] == expected[depth]) {
            twin = rank;
            value += left * medusa::known(shares[rank]);
            break;
          }
        waiting.push_back({std::min(value, above), left, row, depth, twin, twin});
      }
      const int64_t first = twin == 0 ? 1 : 0;
      if (depth < heads && first < top_k)
        waiting.push_back({left * medusa::known(shares[first]), left, row, depth, first, twin});

      size_t best = 0;
      for (size_t place = 1; place < waiting.size(); ++place)
        if (waiting[place].worth > waiting[best].worth) best = place;
      if (size == nodes || waiting.empty() || !(waiting[best].worth > 0.0f)) break;
      medusa::Waiting& taken = waiting[best];
      depth = taken.depth;
      on_path = taken.rank == taken.twin;
      out_tokens[size] = on_path ? expected[depth] : tokens[depth * top_k + taken.rank];
      parents[size] = taken.parent;
      ranks[size] = taken.rank;
      reach[size] = above = taken.worth;
      ++size;

      const int64_t following = taken.rank + (taken.rank + 1 == taken.twin ? 2 : 1);
      if (!on_path && following < top_k) {  // its next sibling takes its place
        taken.worth = taken.share * medusa::known(probabilities[depth * top_k + following]);
        taken.rank = following;
      } else {
        taken = waiting.back();
        waiting.pop_back();
      }
      row = size;
      ++depth;
    }
    sizes[request] = size;
    tokens += heads * top_k;
    probabilities += heads * top_k;
    expected += most;
    odds += most;
    out_tokens += nodes;
    parents += nodes;
    ranks += nodes;
    reach += nodes;
  }
}

// See native.greedy_walk: tokens and parents [requests, width]; rows and emitted [requests, width + 1], filled up to
// lengths. dtype: 0 float32, 1 bfloat16. 0 if there was a NaN on the way, else 1.
int64_t medusa_greedy_walk(const void* logits, int64_t dtype, int64_t stride, int64_t vocab, const int64_t* first,
                           const uint8_t* walks, const int64_t* tokens, const int64_t* parents, const int64_t* sizes,
                           int64_t requests, int64_t width, int64_t* rows, int64_t* emitted, int64_t* lengths) {
  if (dtype == 0)
    return medusa::greedy_walk(static_cast<const float*>(logits), stride, vocab, first, walks, tokens, parents, sizes,
                               requests, width, rows, emitted, lengths);
  return medusa::greedy_walk(static_cast<const medusa::BFloat16*>(logits), stride, vocab, first, walks, tokens, parents,
                             sizes, requests, width, rows, emitted, lengths);
}
}
