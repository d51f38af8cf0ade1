// Softmax attention of ragged windows over a paged cache.
//
// A page holds 16 entries of one slot: keys [kv_heads][head_dim][16], so that 16 scores are made at
// once, and values [kv_heads][16][head_dim]. Scores of an entry, the softmax over entries and the sum
// of values run in the order of entries, 16 lanes at a time, whatever the window they are asked in.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int PAGE = 16;

struct Window {
  int32_t first, length;   // its tokens in the batch
  int32_t start;           // entries cached before it
  int32_t unused;
  const int32_t* pages;    // of its slot
  const uint8_t* visible;  // [length, length] which tokens of the window one sees; null for a chain
};

template <class Cached>
struct Cache {
  Cached *keys, *values;  // [layers][pages][kv_heads * head_dim * 16]
  int64_t pages;
  int32_t kv_heads, head_dim;

  int64_t at(int layer, int page, int kv_head) const {
    return (((int64_t)layer * pages + page) * kv_heads + kv_head) * head_dim * PAGE;
  }
  static void put(float* to, float x) { *to = x; }
  static void put(uint16_t* to, float x) { *to = to_bf16(x); }

  void write(int layer, const Window& window, int entry, const float* key, const float* value) const {
    const int page = window.pages[entry / PAGE], lane = entry % PAGE;
    for (int h = 0; h < kv_heads; h++) {
      Cached *k = keys + at(layer, page, h) + lane,
             *v = values + at(layer, page, h) + (int64_t)lane * head_dim;
      for (int d = 0; d < head_dim; d++) put(k + d * PAGE, key[h * head_dim + d]);
      for (int d = 0; d < head_dim; d++) put(v + d, value[h * head_dim + d]);
    }
  }
};

struct AttentionItem {
  const Window* window;
  int kv_head, from, to;  // tokens of the window
};

constexpr int ITEM_TOKENS = 16;

inline std::vector<AttentionItem> attention_items(const Window* windows, int num, int kv_heads) {
  std::vector<AttentionItem> items;
  for (int w = 0; w < num; w++)
    for (int from = 0; from < windows[w].length; from += ITEM_TOKENS)
      for (int h = 0; h < kv_heads; h++)
        items.push_back({windows + w, h, from, std::min(from + ITEM_TOKENS, windows[w].length)});
  return items;
}

// Scores of Q queries against the entries of P pages from page `p` on: as many sums side by side as hide
// the latency of one.
template <int Q, int P, class Cached>
inline void score_pages(const Cache<Cached>& cache, int layer, const AttentionItem& item, int p, int pages,
                        const float* const* query, float* scores, int stride) {
  const Cached *keys[P], *next[P];
  repeat<P>([&](auto i) INLINED {  // pages lie anywhere; behind the last keys come the values
    const int32_t* page = item.window->pages;
    keys[i] = cache.keys + cache.at(layer, page[p + i], item.kv_head);
    const int ahead = p + P + i;
    next[i] = ahead < pages ? cache.keys + cache.at(layer, page[ahead], item.kv_head)
                            : cache.values + cache.at(layer, page[std::min<int>(i, pages - 1)], item.kv_head);
  });
  F16 sums[P][Q];
  repeat<P>([&](auto i) INLINED { repeat<Q>([&](auto q) INLINED { sums[i][q] = zero(); }); });
  for (int d = 0; d < cache.head_dim; d++) {
    repeat<P>([&](auto i) INLINED {
      __builtin_prefetch(next[i] + d * PAGE);
      const F16 k = load(keys[i] + d * PAGE);
      repeat<Q>([&](auto q) INLINED { sums[i][q] = fma(k, broadcast(query[q] + d), sums[i][q]); });
    });
  }
  repeat<P>([&](auto i) INLINED {
    repeat<Q>([&](auto q) INLINED { store(scores + q * stride + (p + i) * PAGE, sums[i][q]); });
  });
}

// Scores of Q queries against entries [0, pages * 16).
template <int Q, class Cached>
inline void score(const Cache<Cached>& cache, int layer, const AttentionItem& item, int pages,
                  const float* const* query, float* scores, int stride) {
  constexpr int P = std::clamp(SUMS / Q, 1, 4);
  int p = 0;
  for (; p + P <= pages; p += P)
    score_pages<Q, P>(cache, layer, item, p, pages, query, scores, stride);
  for (; p < pages; p++) score_pages<Q, 1>(cache, layer, item, p, pages, query, scores, stride);
}

// C chunks of 16 dimensions of the values' sums under the weights of Q queries, from `dim` on.
template <int Q, int C, class Cached>
inline void mix(const Cache<Cached>& cache, int layer, const AttentionItem& item, int entries,
                const float* weights, int stride, const float* factors, int dim, float* const* out) {
  F16 sums[Q][C];
  repeat<Q>([&](auto q) { repeat<C>([&](auto c) { sums[q][c] = zero(); }); });
  for (int p = 0; p * PAGE < entries; p++) {
    const Cached* values =
        cache.values + cache.at(layer, item.window->pages[p], item.kv_head) + dim;
    const int num = std::min(PAGE, entries - p * PAGE);
    const int ahead = item.window->pages[(p + 1) * PAGE < entries ? p + 1 : p];
    const Cached* next = cache.values + cache.at(layer, ahead, item.kv_head) + dim;
    for (int e = 0; e < num; e++) {
      __builtin_prefetch(next + e * cache.head_dim);
      const float* weight = weights + p * PAGE + e;
      F16 value[C];
      repeat<C>([&](auto c) { value[c] = load(values + e * cache.head_dim + c * LANES); });
      repeat<Q>([&](auto q) {
        const F16 w = broadcast(weight + q * stride);
        repeat<C>([&](auto c) { sums[q][c] = fma(value[c], w, sums[q][c]); });
      });
    }
  }
  repeat<Q>([&](auto q) {
    const F16 factor = all(factors[q]);
    repeat<C>([&](auto c) { store(out[q] + dim + c * LANES, sums[q][c] * factor); });
  });
}

// Softmax over the entries a token sees, in place and not normalised; returns the sum. Weights up to
// `longest` are 0 where the token sees nothing.
inline float soften(float* scores, const Window& window, int token, float scale, int longest) {
  const int entries = window.start + (window.visible ? window.length : token + 1);
  const int end = (entries + PAGE - 1) / PAGE * PAGE;
  auto hide = [&](float value) {
    for (int e = entries; e < end; e++) scores[e] = value;
    if (window.visible)
      for (int i = 0; i < window.length; i++)
        if (!window.visible[token * window.length + i]) scores[window.start + i] = value;
  };
  hide(-INFINITY);
  F16 top = all(-INFINITY);
  for (int e = 0; e < end; e += PAGE) top = max(top, load(scores + e));
  const F16 most = all(largest(top)), by = all(scale);
  for (int e = 0; e < end; e += PAGE) store(scores + e, exp((load(scores + e) - most) * by));
  hide(0.0f);
  std::fill(scores + end, scores + longest, 0.0f);
  F16 total = zero();
  for (int e = 0; e < end; e += PAGE) total = total + load(scores + e);
  return sum(total);
}

template <class Cached>
void attend(const AttentionItem& item, int layer, const Cache<Cached>& cache, int group,
            const float* qkv, int qkv_stride, float* mixed, int mixed_stride,
            std::vector<float>& scores) {
  constexpr int MANY = 6;
  const Window& window = *item.window;
  const int head_dim = cache.head_dim;
  const int num = (item.to - item.from) * group;  // queries: of one token one after the other
  const int longest = (window.start + (window.visible ? window.length : item.to) + PAGE - 1) / PAGE * PAGE;
  if (scores.size() < (size_t)MANY * longest) scores.resize((size_t)MANY * longest);
  const float scale = 1.0f / std::sqrt((float)head_dim);
  for (int first = 0; first < num; first += MANY) {
    const int many = std::min(MANY, num - first);
    const float* query[MANY];
    for (int q = 0; q < many; q++) {
      const int token = item.from + (first + q) / group, head = item.kv_head * group + (first + q) % group;
      query[q] = qkv + (int64_t)(window.first + token) * qkv_stride + (int64_t)head * head_dim;
    }
    const int last = item.from + (first + many - 1) / group;
    const int pages = (window.start + (window.visible ? window.length : last + 1) + PAGE - 1) / PAGE;
    switch (many) {
#define CASE(Q) \
  case Q: score<Q>(cache, layer, item, pages, query, scores.data(), longest); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
    const int entries = window.start + (window.visible ? window.length : last + 1);
    float factors[MANY];
    float* out[MANY];
    for (int q = 0; q < many; q++) {
      const int token = item.from + (first + q) / group, head = item.kv_head * group + (first + q) % group;
      float* weights = &scores[(size_t)q * longest];
      factors[q] = 1.0f / soften(weights, window, token, scale, pages * PAGE);
      out[q] = mixed + (int64_t)(window.first + token) * mixed_stride + (int64_t)head * head_dim;
    }
    for (int q = 0; q < many; q += 3) {  // 3 queries of 32 dimensions fit the registers
      auto dims = [&]<int Q>() {
        const float* weights = &scores[(size_t)q * longest];
        int dim = 0;
        for (; dim + 2 * LANES <= head_dim; dim += 2 * LANES)
          mix<Q, 2>(cache, layer, item, entries, weights, longest, factors + q, dim, out + q);
        for (; dim < head_dim; dim += LANES)
          mix<Q, 1>(cache, layer, item, entries, weights, longest, factors + q, dim, out + q);
      };
      switch (std::min(3, many - q)) {
        case 1: dims.template operator()<1>(); break;
        case 2: dims.template operator()<2>(); break;
        case 3: dims.template operator()<3>(); break;
      }
    }
  }
}
