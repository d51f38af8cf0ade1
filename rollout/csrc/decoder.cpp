// One forward of a dense decoder on a CPU: all layers in one parallel region.
//
// Threads meet at barriers that spin, since a layer is a dozen steps of some ten microseconds and a
// sleeping thread takes as long to wake. Between forwards nobody spins.
//
// Nothing here depends on what else is in the batch: a token's activations are sums in an order that
// its own position decides (see linear.h and attention.h).
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "attention.h"
#include "law.h"
#include "linear.h"

struct Block {
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *q_norm, *k_norm;            // [head_dim] or null
  Linear qkv, out, gate_up, down;
};

struct Model {
  const Block* blocks;
  Linear head, embedding;  // the same storage where they are tied
  const float* norm;
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
  float eps;
};

struct Batch {
  int32_t tokens, windows, scored, threads;
  const int32_t *ids, *positions;  // [tokens]
  const Window* window;            // [windows]
  const int32_t* wanted;           // [scored] token indices
  const float *cos, *sin;          // [context, head_dim / 2]
  const float* inputs;             // [tokens, hidden] in place of the ids' embeddings, or null
  float* logits;                   // [scored, head.rows]
  float* hidden;                   // [scored, hidden] what the head reads, or null
  double* seconds;                 // [PHASES] added to
};

enum Phase { EMBED, NORM, QKV, ROPE, ATTENTION, OUT, GATE_UP, SILU, DOWN, HEAD, PHASES };

namespace {

class Barrier {
 public:
  void expect(int threads) { threads_ = threads; }
  void wait() {
    if (threads_ == 1) return;
    const int turn = turn_.load(std::memory_order_relaxed);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      here_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++) {
      if (spins < 4096) {
        _mm_pause();
      } else {
        sched_yield();  // somebody else has our core
      }
    }
  }

 private:
  int threads_ = 1;
  alignas(64) std::atomic<int> here_{0};
  alignas(64) std::atomic<int> turn_{0};
};

class Stopwatch {  // of one thread: time from barrier to barrier
 public:
  Stopwatch(double* seconds, bool on) : seconds_(seconds), on_(on) {
    if (on_) last_ = now();
  }
  void lap(Phase phase) {
    if (!on_) return;
    const double at = now();
    seconds_[phase] += at - last_;
    last_ = at;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  double* seconds_;
  bool on_;
  double last_ = 0;
};

struct Scratch {  // grows to the largest batch seen and stays
  std::vector<float> hidden, normed, qkv, gate_up, step;
  std::vector<int16_t> q;  // whole numbers of 16 bits, or of 8 in half of it
  std::vector<std::vector<float>> scores;  // per thread
};

void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  F16 squares = zero();
  for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const float mean = sum(squares) / n;  // beyond float32 it would make all of x a finite 0
  const F16 factor = all(std::isfinite(mean) ? 1.0f / std::sqrt(mean + eps) : NAN);
  for (int i = 0; i < n; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
}

void silu_times(const float* gate, const float* up, int n, float* y) {
  const F16 one = all(1.0f);
  for (int i = 0; i < n; i += LANES) {
    F16 g = load(gate + i), floor = max(g, all(-88.0f));
    store(y + i, g / (one + exp(zero() - floor)) * load(up + i));
  }
}

void rotate(float* x, const float* cos, const float* sin, int head_dim) {  // halves, as Hugging Face
  const int half = head_dim / 2;
  for (int i = 0; i < half; i++) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

int padded(int cols) { return (cols + 3) / 4 * 4; }

template <class Cached>
void forward(const Model& m, const Cache<Cached>& cache, const Batch& b, Scratch& s) {
  const int n = b.tokens, hidden = m.hidden, inner = m.intermediate, head = m.head_dim;
  const int q_size = m.heads * head, kv_size = m.kv_heads * head, qkv_size = q_size + 2 * kv_size;
  const int widest = std::max(std::max(hidden, inner), q_size), most = std::max(n, b.scored);
  auto at_least = [](auto& v, size_t size) {
    if (v.size() < size) v.resize(size);
  };
  at_least(s.hidden, (size_t)n * hidden);
  at_least(s.normed, (size_t)most * widest);
  at_least(s.qkv, (size_t)n * qkv_size);
  at_least(s.gate_up, (size_t)n * 2 * inner);
  at_least(s.step, most);
  at_least(s.q, (size_t)most * padded(widest));
  at_least(s.scores, b.threads);
  const std::vector<AttentionItem> items = attention_items(b.window, b.windows, m.kv_heads);

  Barrier barrier;
  std::atomic<int> next_item{0};

#pragma omp parallel num_threads(b.threads)
  {
    // OpenMP may give fewer threads than it was asked for.
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
#pragma omp single
    barrier.expect(threads);
    Stopwatch watch(b.seconds, thread == 0);
    auto meet = [&](Phase phase) {
      barrier.wait();
      watch.lap(phase);
    };
    auto each_token = [&](int tokens, auto&& work) {
      for (int t = thread; t < tokens; t += threads) work(t);
    };
    // What the next linear map reads, from `normed` [n, cols].
    auto input = [&](int cols) {
      return Input{s.normed.data(), s.q.data(), s.step.data(), cols, padded(cols)};
    };
    auto whole_for = [&](const Linear& next, int t, int cols) {
      quantise_for(next, &s.normed[(size_t)t * cols], t, s.q.data(), padded(cols), s.step.data());
    };
    auto norm_for = [&](const Linear& next, const float* weight, int t) {
      rms_norm(&s.hidden[(size_t)t * hidden], weight, hidden, m.eps, &s.normed[(size_t)t * hidden]);
      whole_for(next, t, hidden);
    };

    each_token(n, [&](int t) {
      float* x = &s.hidden[(size_t)t * hidden];
      if (b.inputs) {
        std::memcpy(x, b.inputs + (size_t)t * hidden, hidden * sizeof(float));
      } else {
        unpack_row(m.embedding, b.ids[t], x);
      }
    });
    meet(EMBED);
    for (int layer = 0; layer < m.layers; layer++) {
      const Block& block = m.blocks[layer];
      each_token(n, [&](int t) { norm_for(block.qkv, block.attention_norm, t); });
      meet(NORM);
      linear(block.qkv, input(hidden), n, s.qkv.data(), qkv_size, SET, thread, threads);
      meet(QKV);

      if (thread == 0) next_item.store(0, std::memory_order_relaxed);
      for (int w = 0; w < b.windows; w++) {
        const Window& window = b.window[w];
        for (int i = 0; i < window.length; i++) {
          const int t = window.first + i;
          if (t % threads != thread) continue;
          float* row = &s.qkv[(size_t)t * qkv_size];
          const float *cos = b.cos + (int64_t)b.positions[t] * (head / 2),
                      *sin = b.sin + (int64_t)b.positions[t] * (head / 2);
          for (int h = 0; h < m.heads + m.kv_heads; h++) {
            float* x = row + (int64_t)h * head;
            const float* weight = h < m.heads ? block.q_norm : block.k_norm;
            if (weight) rms_norm(x, weight, head, m.eps, x);
            rotate(x, cos, sin, head);
          }
          cache.write(layer, window, window.start + i, row + q_size, row + q_size + kv_size);
        }
      }
      meet(ROPE);
      for (int i; (i = next_item.fetch_add(1, std::memory_order_relaxed)) < (int)items.size();)
        attend(items[i], layer, cache, m.heads / m.kv_heads, s.qkv.data(), qkv_size, s.normed.data(),
               q_size, s.scores[thread]);
      meet(ATTENTION);
      if (reads_whole(block.out)) {
        each_token(n, [&](int t) { whole_for(block.out, t, q_size); });
        meet(NORM);
      }
      linear(block.out, input(q_size), n, s.hidden.data(), hidden, ADD, thread, threads);
      meet(OUT);
      each_token(n, [&](int t) { norm_for(block.gate_up, block.mlp_norm, t); });
      meet(NORM);
      linear(block.gate_up, input(hidden), n, s.gate_up.data(), 2 * inner, SET, thread, threads);
      meet(GATE_UP);
      each_token(n, [&](int t) {
        const float* gate = &s.gate_up[(size_t)t * 2 * inner];
        silu_times(gate, gate + inner, inner, &s.normed[(size_t)t * inner]);
        whole_for(block.down, t, inner);
      });
      meet(SILU);
      linear(block.down, input(inner), n, s.hidden.data(), hidden, ADD, thread, threads);
      meet(DOWN);
    }
    each_token(b.scored, [&](int i) {
      rms_norm(&s.hidden[(size_t)b.wanted[i] * hidden], m.norm, hidden, m.eps, &s.normed[(size_t)i * hidden]);
      if (b.hidden) std::memcpy(b.hidden + (size_t)i * hidden, &s.normed[(size_t)i * hidden], hidden * sizeof(float));
      whole_for(m.head, i, hidden);
    });
    meet(NORM);
    linear(m.head, input(hidden), b.scored, b.logits, m.head.rows, SET, thread, threads);
    meet(HEAD);
  }
}

}  // namespace

extern "C" {

// Weights of a row that stand side by side in the packing for activations of 16 bits, and of 8.
int er_inner16() { return Pairs::inner; }
int er_inner8() { return ForInt8::inner; }
int er_phases() { return PHASES; }
const char* er_instructions() {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return "AVX-512 VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#else
  return "AVX2";
#endif
}
void* er_scratch() { return new Scratch; }
void er_free(void* scratch) { delete (Scratch*)scratch; }

// y [tokens, rows] = x W^T + b for x [tokens, cols]: one map alone, for tests and benchmarks.
void er_linear(const Linear* m, const float* x, int tokens, float* y, int threads) {
  const int q_cols = padded(m->cols);
  std::vector<int16_t> q((size_t)tokens * q_cols);
  std::vector<float> step(tokens);
  for (int t = 0; t < tokens; t++)
    quantise_for(*m, x + (size_t)t * m->cols, t, q.data(), q_cols, step.data());
  const Input in{x, q.data(), step.data(), m->cols, q_cols};
#pragma omp parallel num_threads(threads)
  linear(*m, in, tokens, y, m->rows, SET, omp_get_thread_num(), omp_get_num_threads());
}

// The weights of all positions.
void er_laws(const Laws* laws) {
#pragma omp parallel for schedule(static) num_threads(laws->threads) if (laws->threads > 1)
  for (int64_t position = 0; position < laws->positions; position++) law(*laws, position);
}

// Embeddings [tokens, hidden] of ids.
void er_embed(const Model* m, const int32_t* ids, int tokens, float* y) {
  for (int t = 0; t < tokens; t++) unpack_row(m->embedding, ids[t], y + (size_t)t * m->hidden);
}

// Runs the batch and fills its logits.
void er_forward_float(const Model* m, const Cache<float>* cache, const Batch* b, void* scratch) {
  forward(*m, *cache, *b, *(Scratch*)scratch);
}
void er_forward_bf16(const Model* m, const Cache<uint16_t>* cache, const Batch* b, void* scratch) {
  forward(*m, *cache, *b, *(Scratch*)scratch);
}
}
