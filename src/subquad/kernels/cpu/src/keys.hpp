// A block of keys and values, ready for products, and the sums of what flows back to them. Letters as in api.hpp.
#pragma once
#include "view.hpp"

namespace subquad {

struct Keys {
  long token = 0;      // of the first one
  int count = 0;       // tokens, dead ones included
  long height = 0;     // tokens with padding
  float *lanes, *columns;              // [D][tokens] for features, [tokens][D] for logits and gradients, or null
  float *value_lanes, *value_columns;  // [Dv][tokens] (backward only), [tokens][Dv]
  float *half_square;                  // [tokens] (only if features or logits use it)
  float *alive, *fold;                 // [tokens] 1 or 0: counts at all, enters the far field
  float *grad, *value_grad;            // [tokens][D], [tokens][Dv] in padded rows (backward only)

  static Keys allocate(const View& v, int capacity, bool lanes, bool columns, bool backward) {
    Keys keys;
    keys.key_stage = Stage::allocate(v.D), keys.value_stage = Stage::allocate(v.Dv);
    const long n = padded(capacity), depth = padded(v.D);
    keys.lanes = lanes ? pool().take(n * v.D) : nullptr;
    keys.columns = columns ? pool().take(n * depth) : nullptr;
    keys.value_columns = pool().take(n * v.height);
    keys.half_square = pool().take(n);
    keys.alive = pool().take(n);
    keys.fold = pool().take(n);
    keys.value_lanes = backward ? pool().take(n * v.Dv) : nullptr;
    keys.grad = backward ? pool().zeros(n * depth) : nullptr;
    keys.value_grad = backward ? pool().zeros(n * v.height) : nullptr;
    return keys;
  }

  // Tokens from `begin` on; what a dead one holds, NaN included, becomes zero. Values less a centre, if there is one.
  SUBQUAD_STAGE void load(const View& v, long begin, int tokens, const float* centre = nullptr) {
    token = begin, count = tokens, height = padded(tokens);
    for (int i = 0; i < height; ++i) {
      alive[i] = i < count && v.counts(v.p.alive, begin + i);
      fold[i] = i < count && begin + i < v.fold_end && v.counts(v.fold_mask(), begin + i);
    }
    fill(v, v.p.k, v.p.v, centre);
  }
  void load_sinks(const View& v) {
    token = 0, count = v.p.sinks, height = padded(count);
    for (int i = 0; i < height; ++i) alive[i] = i < count, fold[i] = 0;
    fill(v, v.p.sink_k, v.p.sink_v, nullptr);
  }
  // The values less a centre.
  SUBQUAD_STAGE void copy_values(const View& v, const float* centre, float* to) const {
    for (long d = 0; d < v.height; d += LANES) {
      const Vec less = subquad::load(centre + d);
      const long column = d / PANEL * height * PANEL + d % PANEL;
      for (int i = 0; i < height; ++i)
        store(to + column + i * PANEL, subquad::load(value_columns + column + i * PANEL) - less);
    }
  }
  // The values, when nothing but a far field needs them any more.
  SUBQUAD_STAGE void subtract(const View& v, const float* centre) {
    for (long d = 0; d < v.height; d += LANES) {
      const Vec less = subquad::load(centre + d);
      float* column = value_columns + d / PANEL * height * PANEL + d % PANEL;
      for (int i = 0; i < count; ++i) store(column + i * PANEL, subquad::load(column + i * PANEL) - less);
    }
  }

 private:
  void fill(const View& v, const Array& k, const Array& values, const float* centre) {
    for (int i = 0; i < height; i += LANES) {
      const auto lives = [&](int j) { return alive[i + j] != 0; };
      if (lanes || columns) {
        key_stage.read(k, v.p.dtype, v.b, v.h, token + i, v.p.root, lives);
        key_stage.write(i, height, lanes, columns);
      }
      if (v.key_norms && lanes) store(half_square + i, squares(lanes, v.D, i) * splat(0.5f));
      value_stage.read(values, v.p.dtype, v.b, v.h, token + i, 1, lives);
      value_stage.write(i, height, value_lanes, value_columns, centre);
    }
  }
  Stage key_stage, value_stage;
};

}  // namespace subquad
