// y = x W^T + b over weights packed in panels of 16 rows, so that 16 outputs are made at once and one
// activation is broadcast to all of them.
//
// Packed layout, K columns: [rows / 16][K / inner][16][inner], rows and K padded with zeros. As many
// weights of a row stand side by side as one instruction multiplies: one in float32 and bf16, several in
// int8, whose activations are made whole numbers, of 16 bits or of 8.
//
// A float sum runs over k = 0, 1, ... whatever the number of tokens and the tile it falls in, sums of
// whole numbers are exact. So a token's result does not depend on what else is in the batch: the
// batch-invariance of the engine starts here.
#pragma once
#include <algorithm>
#include <cfloat>
#include <climits>

#include "vec.h"

// Of the weights; INT8 for activations of 16 bits, INT8_INT8 for those of 8.
enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT8_INT8 = 3 };
constexpr int LIMIT = 127;  // of a whole number of 8 bits; quant.int8.LIMIT

struct Linear {
  const void* weight;
  const float* scale;      // [rows], INT8 and INT8_INT8
  const int32_t* row_sum;  // [rows], INT8_INT8: sums of a row's weights times 128
  const float* bias;       // [rows] or null
  int32_t rows, cols;      // before padding
  int32_t kind;
};

// What a linear map reads: tokens as float32 or, for INT8 and INT8_INT8, as whole numbers with a step each.
struct Input {
  const float* x;     // [tokens, stride]
  const void* q;      // [tokens, q_stride]
  const float* step;  // [tokens]
  int stride, q_stride;
};

enum Into { SET, ADD };

template <class W>
struct Panels {  // float32 activations, W the stored weight
  static constexpr int inner = 1, most_streamed = sizeof(W) == 4 ? MOST_STREAMED : MOST_TOKENS;
  using Sum = F16;
  static Sum none() { return zero(); }
  static auto weights(const W* p) { return load(p); }
  static const float* activations(const Input& in, int token) {
    return in.x + (int64_t)token * in.stride;
  }
  static F16 spread(const float* x) { return broadcast(x); }
  static Sum accumulate(Sum s, F16 x, F16 w) { return fma(x, w, s); }
  static F16 finish(Sum s, const Linear&, const Input&, int, int) { return s; }
};

template <class Pack>
struct IntPanels {
  static constexpr int inner = Pack::inner, most_streamed = MOST_TOKENS;
  using Sum = I16;
  using Activation = typename Pack::Activation;
  static Sum none() { return zero_int(); }
  static Packed16 weights(const int8_t* p) { return Pack::weights(p); }
  static const Activation* activations(const Input& in, int token) {
    return (const Activation*)in.q + (int64_t)token * in.q_stride;
  }
  static Packed16 spread(const Activation* x) { return broadcast_packed(x); }
  static Sum accumulate(Sum s, Packed16 x, Packed16 w) { return Pack::dot(s, x, w); }
  static F16 finish(Sum s, const Linear& m, const Input& in, int token, int row) {
    if (Pack::offset) s = s - load_int(m.row_sum + row);  // sum (x + 128) w - 128 sum w
    return to_float(s) * all(in.step[token]) * load(m.scale + row);
  }
};

// P panels times T tokens: as many independent sums as hide the latency of one. All of it has to be
// inlined: sums that any call sees by reference are stored in every turn of the loop (2.5 times slower).
template <class M, class W, int P, int T>
inline void tile(const Linear& m, const Input& in, const W* panels, int panel, int token, float* y,
                 int64_t y_stride, Into into) {
  const int groups = (m.cols + M::inner - 1) / M::inner;
  const int64_t panel_size = (int64_t)groups * M::inner * LANES;
  typename M::Sum sums[P][T];
  repeat<P>([&](auto p) INLINED {
    repeat<T>([&](auto t) INLINED { sums[p][t] = M::none(); });
  });
  const W* w = panels + panel * panel_size;
  const auto* x = M::activations(in, token);
  const int64_t stride = M::activations(in, 1) - M::activations(in, 0);
  const auto turn = [&]() INLINED {
    if constexpr (ROOM_FOR_WEIGHTS) {  // an activation is loaded once for all panels
      decltype(M::weights(w)) weights[P];
      repeat<P>([&](auto p) INLINED { weights[p] = M::weights(w + p * panel_size); });
      repeat<T>([&](auto t) INLINED {
        const auto spread = M::spread(x + t * stride);
        repeat<P>([&](auto p) INLINED {
          sums[p][t] = M::accumulate(sums[p][t], spread, weights[p]);
        });
      });
    } else {
      repeat<P>([&](auto p) INLINED {
        const auto weights = M::weights(w + p * panel_size);
        repeat<T>([&](auto t) INLINED {
          sums[p][t] = M::accumulate(sums[p][t], M::spread(x + t * stride), weights);
        });
      });
    }
    w += M::inner * LANES;
    x += M::inner;
  };
  // Memory is read ahead by as much as is computed on, else the two take turns.
  const auto read_ahead = [&]() INLINED {
    repeat<P>([&](auto p) INLINED { __builtin_prefetch(w + (P + p) * panel_size, 0, 2); });
  };
  constexpr int a_line = std::max(1, CACHE_LINE / (int)(M::inner * LANES * sizeof(W)));
  int g = 0;
  for (; g + a_line <= groups; g += a_line) {
    read_ahead();
    repeat<a_line>([&](auto) INLINED { turn(); });
  }
  for (; g < groups; g++) turn();
  repeat<P>([&](auto p) INLINED {
    repeat<T>([&](auto t) INLINED {
      const int row = (panel + p) * LANES;
      F16 out = M::finish(sums[p][t], m, in, token + t, row);
      if (m.bias) out = out + load(m.bias + row);
      float* to = y + (token + t) * y_stride + row;
      if (row + LANES <= m.rows) {
        store(to, into == ADD ? load(to) + out : out);
      } else {  // the last panel of a height that is no multiple of 16
        float lanes[LANES];
        store(lanes, out);
        for (int i = 0; row + i < m.rows; i++) to[i] = into == ADD ? to[i] + lanes[i] : lanes[i];
      }
    });
  });
}

// Of tiles of so many tokens, where there is room for so many sums.
constexpr int panels_beside(int sums, int tokens) { return std::clamp(sums / tokens, 1, 4); }

template <class M, class W, int T, int S>
inline void panel_range(const Linear& m, const Input& in, int first, int last, int token, float* y,
                        int64_t y_stride, Into into) {
  constexpr int P = panels_beside(S, T);
  const W* panels = (const W*)m.weight;
  int panel = first;
  for (; panel + P <= last; panel += P) tile<M, W, P, T>(m, in, panels, panel, token, y, y_stride, into);
  for (; panel < last; panel++) tile<M, W, 1, T>(m, in, panels, panel, token, y, y_stride, into);
}

template <class M, class W, int S, int MOST>
void run_tile(const Linear& m, const Input& in, int first, int last, int token, int tokens, float* y,
              int64_t y_stride, Into into) {
  switch (tokens) {
#define CASE(T)                                                                              \
  case T:                                                                                    \
    if constexpr (T <= MOST) panel_range<M, W, T, S>(m, in, first, last, token, y, y_stride, into); \
    return;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
    CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18)
#undef CASE
  }
}

// Panels [first, last) for all tokens; of several tiles few panels at a time, so that they are read
// once from memory and then from the cache.
template <class M, class W>
void run_panels(const Linear& m, const Input& in, int first, int last, int tokens, float* y,
                int64_t y_stride, Into into) {
  if (tokens <= M::most_streamed) {
    return run_tile<M, W, STREAMED_SUMS, M::most_streamed>(m, in, first, last, 0, tokens, y, y_stride, into);
  }
  const int tiles = (tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  const int step = panels_beside(SUMS, (tokens + tiles - 1) / tiles);
  for (int panel = first; panel < last; panel += step) {
    const int end = std::min(panel + step, last);
    for (int i = 0; i < tiles; i++) {
      const int token = (int64_t)tokens * i / tiles, next = (int64_t)tokens * (i + 1) / tiles;
      run_tile<M, W, SUMS, MOST_TOKENS>(m, in, panel, end, token, next - token, y, y_stride, into);
    }
  }
}

inline int num_panels(const Linear& m) { return (m.rows + LANES - 1) / LANES; }

// One thread's share of y (+)= x W^T + b; y [tokens, y_stride].
inline void linear(const Linear& m, const Input& in, int tokens, float* y, int64_t y_stride, Into into,
                   int thread, int threads) {
  const int n = num_panels(m);
  const int first = (int64_t)n * thread / threads, last = (int64_t)n * (thread + 1) / threads;
  switch (m.kind) {
    case FLOAT32:
      return run_panels<Panels<float>, float>(m, in, first, last, tokens, y, y_stride, into);
    case BFLOAT16:
      return run_panels<Panels<uint16_t>, uint16_t>(m, in, first, last, tokens, y, y_stride, into);
    case INT8:
      return run_panels<IntPanels<Pairs>, int8_t>(m, in, first, last, tokens, y, y_stride, into);
    case INT8_INT8:
      return run_panels<IntPanels<ForInt8>, int8_t>(m, in, first, last, tokens, y, y_stride, into);
  }
}

// Row `row` of a packed weight as float32: how an embedding is read, which is never INT8_INT8.
inline void unpack_row(const Linear& m, int row, float* out) {
  const int panel = row / LANES, lane = row % LANES;
  if (m.kind == INT8) {
    constexpr int inner = Pairs::inner;
    const int64_t groups = (m.cols + inner - 1) / inner;
    const int8_t* from = (const int8_t*)m.weight + (panel * groups * LANES + lane) * inner;
    for (int k = 0; k < m.cols; k++)
      out[k] = (float)from[k / inner * LANES * inner + k % inner] * m.scale[row];
    return;
  }
  const int64_t at = (int64_t)panel * m.cols * LANES + lane;
  for (int k = 0; k < m.cols; k++) {
    const int64_t i = at + (int64_t)k * LANES;
    if (m.kind == FLOAT32) {
      out[k] = ((const float*)m.weight)[i];
    } else {
      uint32_t bits = (uint32_t)((const uint16_t*)m.weight)[i] << 16;
      __builtin_memcpy(&out[k], &bits, 4);
    }
  }
}

// Whole numbers in [-most, most] and their step, per token (as `quant.int8.quantise_tokens`). A token that
// is not finite gets the step NaN, which shows in all it touches; one whose step would have lost its
// digits counts as zeros.
template <class Pack>
inline float quantise(const float* x, int cols, int most, typename Pack::Activation* q, int padded) {
  F16 top = zero(), check = zero();
  int k = 0;
  for (; k + LANES <= cols; k += LANES) {
    F16 v = load(x + k);
    top = max(top, abs(v));
    check = fma(v, zero(), check);
  }
  float absmax = largest(top), bad = sum(check);
  for (; k < cols; k++) {
    absmax = std::fabs(x[k]) > absmax ? std::fabs(x[k]) : absmax;
    bad += x[k] * 0.0f;
  }
  float step = absmax / most;
  if (step < FLT_MIN) step = 1.0f;
  for (k = 0; k + LANES <= cols; k += LANES) store_whole(q + k, load(x + k) / all(step));
  for (; k < cols; k++) q[k] = (int)std::nearbyintf(x[k] / step) + Pack::offset;
  for (; k < padded; k++) q[k] = 0;
  return bad == 0.0f ? step : NAN;
}

// The most that 16 bits hold and that leaves a sum of `cols` products within 32 bits.
inline int most_of_16_bits(int cols) { return std::min(INT16_MAX, INT32_MAX / (LIMIT * cols)); }

inline bool reads_whole(const Linear& m) { return m.kind == INT8 || m.kind == INT8_INT8; }

// Token `token` for the map, where that reads whole numbers.
inline void quantise_for(const Linear& m, const float* x, int token, void* q, int q_stride, float* step) {
  if (!reads_whole(m)) return;
  const int64_t at = (int64_t)token * q_stride;
  step[token] = m.kind == INT8
      ? quantise<Pairs>(x, m.cols, most_of_16_bits(m.cols), (int16_t*)q + at, q_stride)
      : quantise<ForInt8>(x, m.cols, LIMIT, (ForInt8::Activation*)q + at, q_stride);
}
