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

// Some channels of one token, those from `begin` on of all E: added up in the order of `correlate`, to the same bits.
inline void convolve_channels(const ConvolutionStep& c, long b, long begin, long count, const float* x, float* out) {
  const long E = c.first + c.second, past = c.width - 1;
  const float* recent = c.recent + b * past * E + begin;
  float* kept = c.new_recent + b * past * E + begin;
  for (long e = 0; e < count; ++e) {
    const float* weight = c.weight + (begin + e) * c.width;
    float sum = 0;
    for (long i = 0; i < c.width; ++i) sum += c.rate * weight[i] * (i ? recent[(past - i) * E + e] : x[e]);
    out[e] = sum;
  }
  for (long i = 0; i + 1 < past; ++i) std::copy_n(recent + (i + 1) * E, count, kept + i * E);
  if (past) std::copy_n(x, count, kept + (past - 1) * E);
}

inline void convolve_step(const ConvolutionStep& c) {
  for (long b = 0; b < c.batch; ++b) {
    convolve_channels(c, b, 0, c.first, c.x + b * c.first, c.out_x + b * c.first);
    if (c.second) convolve_channels(c, b, c.first, c.second, c.y + b * c.second, c.out_y + b * c.second);
  }
}

}  // namespace subquad
