// The weights of a law from its logits, in one pass that stays in the cache: rollout/law_pass.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "vec.h"

constexpr int LAW_BLOCK = 256;  // rollout.law_pass.BLOCK

struct Laws {
  const float* logits;        // [positions, stride]
  const float* temperatures;  // [positions]
  float* weights;             // [positions, vocab]: exp((logit - maximum) / temperature)
  float* maxima;              // [positions]
  double* cumulative;         // [positions, blocks]: sums of weights up to the end of each block
  int64_t positions, vocab, stride;
  int32_t threads;
};

// NaN and +inf among the logits show as a sum that is NaN.
inline void law(const Laws& laws, int64_t position) {
  const float* logits = laws.logits + position * laws.stride;
  float* weights = laws.weights + position * laws.vocab;
  const int64_t blocks = (laws.vocab + LAW_BLOCK - 1) / LAW_BLOCK;
  const int64_t whole = laws.vocab / LANES * LANES;

  constexpr float NOTHING = -std::numeric_limits<float>::infinity();
  float last[LANES];  // the lanes behind the last whole ones
  for (int i = 0; i < LANES; i++) last[i] = whole + i < laws.vocab ? logits[whole + i] : NOTHING;
  F16 top = load(last);
  for (int64_t i = 0; i < whole; i += LANES) top = max(top, load(logits + i));
  const float maximum = laws.maxima[position] = largest(top);

  const F16 shift = all(maximum), temperature = all(laws.temperatures[position]);
  const bool scaled = laws.temperatures[position] != 1.0f;
  double total = 0.0;
  for (int64_t block = 0; block < blocks; block++) {
    F16 sums = zero();
    const int64_t end = std::min<int64_t>(laws.vocab, (block + 1) * LAW_BLOCK);
    for (int64_t i = block * LAW_BLOCK; i < end; i += LANES) {
      const bool part = i + LANES > laws.vocab;
      F16 distance = load(part ? last : logits + i) - shift;
      if (scaled) distance = distance / temperature;
      const F16 w = exp(distance);
      sums = sums + w;
      if (part) {
        float lanes[LANES];
        store(lanes, w);
        for (int64_t j = i; j < laws.vocab; j++) weights[j] = lanes[j - i];
      } else {
        store(weights + i, w);
      }
    }
    laws.cumulative[position * blocks + block] = total += sum(sums);
  }
}
