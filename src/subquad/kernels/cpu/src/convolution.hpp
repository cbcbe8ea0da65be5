// A convolution over neighbouring tokens, one filter per channel, and its gradients. E channels.
#pragma once
#include <algorithm>

#include "api.hpp"
#include "simd.hpp"
#include "workers.hpp"

namespace subquad {

// How far tap i looks: 0, -1, -2, ... if causal, else 0, -1, 1, -2, ...
inline long tap_offset(const Convolution& c, int i) { return c.causal ? -i : i % 2 ? -(i + 1) / 2 : i / 2; }

inline long convolution_parts(const Convolution& c) {
  return (c.length + c.part - 1) / c.part;
}

// out_t = sum_i taps_i x_{t + sign offset_i} for tokens [from, to) of one sequence.
SUBQUAD_STAGE inline void correlate(const Convolution& c, const float* x, float* out, long from, long to, int sign) {
  const long E = c.channels;
  for (long t = from; t < to; ++t)
    for (long e = 0; e < E; e += LANES) {
      const int some = int(std::min<long>(LANES, E - e));
      Vec sum{};
      for (int i = 0; i < c.width; ++i) {
        const long there = t + sign * tap_offset(c, i);
        if (there < 0 || there >= c.length) continue;
        sum += load_some(c.taps + i * E + e, some) * load_some(x + there * E + e, some);
      }
      store_some(out + t * E + e, sum, some);
    }
}

// dtaps_i = sum_t grad_t x_{t + offset_i} over tokens [from, to) of one sequence.
SUBQUAD_STAGE inline void tap_gradients(const Convolution& c, const float* x, const float* grad, float* dtaps, long from,
                                        long to) {
  const long E = c.channels;
  std::fill(dtaps, dtaps + c.width * E, 0.0f);
  for (long t = from; t < to; ++t)
    for (int i = 0; i < c.width; ++i) {
      const long there = t + tap_offset(c, i);
      if (there < 0 || there >= c.length) continue;
      for (long e = 0; e < E; e += LANES) {
        const int some = int(std::min<long>(LANES, E - e));
        float* sum = dtaps + i * E + e;
        const Vec product = load_some(grad + t * E + e, some) * load_some(x + there * E + e, some);
        store_some(sum, load_some(sum, some) + product, some);
      }
    }
}

// The output, or, where there is a gradient of it, those of x and of the taps that are asked for.
inline void convolve(const Convolution& c) {
  const long parts = convolution_parts(c), sequence = c.length * c.channels;
  each_task(c.threads, c.batch * parts, [&](long task) {
    const long from = task % parts * c.part, to = std::min<long>(from + c.part, c.length);
    const long start = task / parts * sequence;
    if (c.out) correlate(c, (c.grad ? c.grad : c.x) + start, c.out + start, from, to, c.grad ? -1 : 1);
    if (c.dtaps) tap_gradients(c, c.x + start, c.grad + start, c.dtaps + task * c.width * c.channels, from, to);
  });
}

}  // namespace subquad
