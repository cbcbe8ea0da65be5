// A block of keys and values, ready for products, and the sums of what flows back to them.
#pragma once
#include "view.hpp"

namespace subquad {

struct Keys {
  long token = 0;      // of the first one
  int count = 0;       // tokens, dead ones included
  long height = 0;     // tokens with padding
  float *lanes, *columns;              // [D][tokens], [tokens][D] (null unless wanted)
  float *value_lanes, *value_columns;  // [V][tokens] (backward only), [tokens][V]
  float *half_square;                  // [tokens] (only if features or logits use it)
  float *alive, *fold;                 // [tokens] 1 or 0: counts at all, enters the far field
  float *grad, *value_grad;            // [tokens][D], [tokens][V] in padded rows (backward only)

  static Keys allocate(const View& v, int capacity, bool exact, bool backward) {
    Keys keys;
    const long n = padded(capacity), depth = padded(v.D);
    keys.lanes = pool().take(n * v.D);
    keys.columns = exact || backward ? pool().take(n * depth) : nullptr;
    keys.value_columns = pool().take(n * v.height);
    keys.half_square = pool().take(n);
    keys.alive = pool().take(n);
    keys.fold = pool().take(n);
    keys.value_lanes = backward ? pool().take(n * v.V) : nullptr;
    keys.grad = backward ? pool().zeros(n * depth) : nullptr;
    keys.value_grad = backward ? pool().zeros(n * v.height) : nullptr;
    return keys;
  }

  // Tokens from `begin` on; whatever stands in a dead one, NaN included, becomes zero.
  SUBQUAD_STAGE void load(const View& v, long begin, int tokens) {
    token = begin, count = tokens, height = padded(tokens);
    for (int i = 0; i < height; ++i) {
      const bool lives = i < count && v.counts(v.p.alive, begin + i);
      put(v, v.p.k, v.p.v, v.h, lives ? begin + i : -1, i);
      fold[i] = i < count && v.counts(v.fold_mask(), begin + i);
    }
  }
  void load_sinks(const View& v) {
    token = 0, count = v.p.sinks, height = padded(count);
    for (int i = 0; i < height; ++i) {
      put(v, v.p.sink_k, v.p.sink_v, v.h, i < count ? i : -1, i);
      fold[i] = 0;
    }
  }

 private:
  void put(const View& v, const Array& k, const Array& values, long h, long t, int i) {
    row.resize(std::max(v.D, v.V));
    const auto fill = [&](const Array& a, int n, float factor) {
      if (t >= 0)
        read_token(a, v.p.dtype, v.b, h, t, n, factor, row.data());
      else
        std::fill(row.begin(), row.begin() + n, 0.0f);
    };
    fill(k, v.D, v.p.root);
    put_lane(row.data(), v.D, i, lanes);
    if (columns) put_column(row.data(), v.D, i, height, columns);
    if (v.key_norms) half_square[i] = dot(row.data(), row.data(), v.D) / 2;
    fill(values, v.V, 1);
    if (value_lanes) put_lane(row.data(), v.V, i, value_lanes);
    put_column(row.data(), v.V, i, height, value_columns);
    alive[i] = t >= 0;
  }
  std::vector<float> row;
};

}  // namespace subquad
