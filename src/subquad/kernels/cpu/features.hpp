// Features of tokens in lanes [M][tokens], and their vector-Jacobian product.
#pragma once
#include "field.hpp"
#include "keys.hpp"

namespace subquad {

// Calls `work(x)` for each vector of a matrix in lanes: x points at feature m of LANES tokens, of which the first is t.
template <class Work>
inline void each_vector(int features, int panel_count, float* lanes, Work work) {
  for (int j = 0; j < panel_count; ++j)
    for (int m = 0; m < features; ++m) {
      float* x = lanes + (long(j) * features + m) * PANEL;
      work(x, m, j * PANEL);
      work(x + LANES, m, j * PANEL + LANES);
    }
}

// `W x` for tokens in lanes [D][tokens]; without W the numbers themselves.
SUBQUAD_STAGE inline void project(const View& v, const float* weight, const float* lanes, int panel_count, float* out) {
  if (weight) {
    multiply(v.M, panel_count * PANEL, v.D, rows(weight, v.D), {lanes, long(v.D) * PANEL}, in_panels(out, v.M));
    return;
  }
  for (int j = 0; j < panel_count; ++j)
    std::memcpy(out + long(j) * v.M * PANEL, lanes + (long(j) * v.D + v.first) * PANEL, v.M * PANEL * sizeof(float));
}

// Subtracts the log-sum-exp of each group of features (rule GROUPS).
inline void normalise_groups(const View& v, int panel_count, float* logs) {
  if (v.p.rule != GROUPS) return;
  const int size = v.p.num_features / v.p.rule_groups;
  for (int j = 0; j < panel_count; ++j)
    for (int m = 0; m < v.M; m += size)
      for (int lane = 0; lane < PANEL; lane += LANES) {
        float* group = logs + (long(j) * v.M + m) * PANEL + lane;
        Vec top = load(group), sum{};
        for (int i = 1; i < size; ++i) top = vmax(top, load(group + i * PANEL));
        for (int i = 0; i < size; ++i) sum += vexp(load(group + i * PANEL) - top);
        for (int i = 0; i < LANES; ++i) top[i] += std::log(sum[i]);
        for (int i = 0; i < size; ++i) store(group + i * PANEL, load(group + i * PANEL) - top);
      }
}

// Gradient through `normalise_groups`, in place: minus each feature's share of what its group got.
inline void normalise_groups_backward(const View& v, const float* weight, const float* lanes, int panel_count,
                                      float* grad, float* scratch) {
  if (v.p.rule != GROUPS) return;
  project(v, weight, lanes, panel_count, scratch);
  normalise_groups(v, panel_count, scratch);
  const int size = v.p.num_features / v.p.rule_groups;
  for (int j = 0; j < panel_count; ++j)
    for (int m = 0; m < v.M; m += size)
      for (int lane = 0; lane < PANEL; lane += LANES) {
        const long at = (long(j) * v.M + m) * PANEL + lane;
        Vec sum{};
        for (int i = 0; i < size; ++i) sum += load(grad + at + i * PANEL);
        for (int i = 0; i < size; ++i) {
          float* x = grad + at + i * PANEL;
          store(x, load(x) - vexp(load(scratch + at + i * PANEL)) * sum);
        }
      }
}

inline Vec elementwise(int kind, Vec x) {
  switch (kind) {
    case ELU1: return x < Vec{} ? vexp(x) : x + 1.0f;
    case RELU: return x < Vec{} ? Vec{} : x;
    case RELU2: return x < Vec{} ? Vec{} : x * x;
    case SOFTPLUS:
      for (int i = 0; i < LANES; ++i) x[i] = x[i] > 20 ? x[i] : std::log1p(std::exp(x[i]));
      return x;
    default: return x;
  }
}
inline Vec slope(int kind, Vec x) {
  const Vec one = splat(1);
  switch (kind) {
    case ELU1: return x < Vec{} ? vexp(x) : one;
    case RELU: return x > Vec{} ? one : Vec{};
    case RELU2: return x > Vec{} ? x + x : Vec{};
    case SOFTPLUS: return one / (one + vexp(-x));
    default: return one;
  }
}

// Keys ----------------------------------------------------------------------------------------------------------------

// A tile of keys on its way into the far field.
struct Fold {
  int begin, panel_count;  // tokens of the block from `begin` on
  bool decays;             // whether any maximum moves
  float *weights;          // [M][tokens] in lanes, relative to the new maxima
  float *slopes;           // the same shape: derivative of the weights (backward; EXP: the weights themselves)
  float *decay, *max;      // [M] what the field shrinks by; the maxima after
  float *total;            // [M] sums of the weights

  static Fold allocate(const View& v, int tokens, bool backward) {
    const long n = padded(tokens) * v.M;
    Fold fold{};
    fold.weights = pool().take(n);
    fold.slopes = v.logarithmic() ? fold.weights : backward ? pool().take(n) : nullptr;
    fold.decay = pool().take(v.M);
    fold.max = pool().take(v.M);
    fold.total = pool().take(v.M);
    return fold;
  }
};

// Log-features m of a tile, relative to `max[m]`, which they raise first (unless `fixed`). Returns whether they did.
inline bool fold_feature(const View& v, int m, const float* scalar, float* max, bool fixed, Fold& fold) {
  float* row = fold.weights + m * PANEL;
  const long step = long(v.M) * PANEL;
  const Vec bias = splat(v.bias[m]);
  Vec top = splat(DEAD), sum{};
  for (int j = 0; j < fold.panel_count; ++j)
    for (int i = 0; i < PANEL; i += LANES) {
      const Vec x = load(row + j * step + i) + bias + load(scalar + j * PANEL + i);
      store(row + j * step + i, x);
      top = vmax(top, x);
    }
  const float before = max[m], grown = fixed ? before : std::max(before, hmax(top));
  for (int j = 0; j < fold.panel_count; ++j)
    for (int i = 0; i < PANEL; i += LANES) {
      const Vec weight = vexp(load(row + j * step + i) - splat(grown));
      store(row + j * step + i, weight);
      sum += weight;
    }
  max[m] = grown;
  fold.decay[m] = before - grown;
  fold.total[m] = hsum(sum);
  return grown != before;
}

SUBQUAD_STAGE inline void fold_exponential(const View& v, const Keys& keys, float* max, bool fixed, Fold& fold) {
  const float* lanes = keys.lanes + long(fold.begin) * v.D;
  float scalar[TILE];
  for (int t = 0; t < fold.panel_count * PANEL; ++t)
    scalar[t] = keys.fold[fold.begin + t] ? -v.key_norms * keys.half_square[fold.begin + t] : DEAD;
  fold.decays = false;
  const int step = v.p.rule == GROUPS ? v.M : 64;  // features: few enough to find them in the first cache again
  for (int begin = 0; begin < v.M; begin += step) {
    const int end = std::min(begin + step, v.M);
    multiply(end - begin, fold.panel_count * PANEL, v.D, rows(v.key + long(begin) * v.D, v.D),
             {lanes, long(v.D) * PANEL}, in_panels(fold.weights + begin * PANEL, v.M));
    normalise_groups(v, fold.panel_count, fold.weights);
    for (int m = begin; m < end; ++m) fold.decays |= fold_feature(v, m, scalar, max, fixed, fold);
  }
  if (fold.decays)
    for (int m = 0; m < v.M; ++m) fold.decay[m] = std::exp(fold.decay[m]);
}

SUBQUAD_STAGE inline void fold_elementwise(const View& v, const Keys& keys, Fold& fold) {
  project(v, v.key, keys.lanes + long(fold.begin) * v.D, fold.panel_count, fold.weights);
  fold.decays = false;
  std::fill(fold.total, fold.total + v.M, 0.0f);
  each_vector(v.M, fold.panel_count, fold.weights, [&](float* x, int m, int t) {
    const Vec alive = load(keys.fold + fold.begin + t), argument = load(x);
    if (fold.slopes) store(fold.slopes + (x - fold.weights), slope(v.p.kind, argument) * alive);
    const Vec weight = elementwise(v.p.kind, argument) * alive;
    store(x, weight);
    fold.total[m] += hsum(weight);
  });
}

inline void make_fold(const View& v, const Keys& keys, int begin, int tokens, float* max, bool fixed, Fold& fold) {
  fold.begin = begin, fold.panel_count = int(padded(tokens) / PANEL);
  if (v.logarithmic())
    fold_exponential(v, keys, max, fixed, fold);
  else
    fold_elementwise(v, keys, fold);
  std::copy(max, max + v.M, fold.max);
}

// The tile's own part of the far field; the rest was scaled before.
SUBQUAD_STAGE inline void add_fold(const View& v, const Keys& keys, const Fold& fold, Field& field) {
  const float* values = keys.value_columns + long(fold.begin) * PANEL;
  const int tokens = fold.panel_count * PANEL;
  add_product(v.M, v.V, tokens, panels(fold.weights, v.M), {values, keys.height * PANEL}, in_panels(field.sum, v.M));
  for (int m = 0; m < v.M; ++m) field.total[m] += fold.total[m];
}

// Queries -------------------------------------------------------------------------------------------------------------

// Up to TILE queries of one head.
struct Rows {
  long token = 0;  // of the first one
  long head = 0;
  int count = 0, panel_count = 0;
  float *lanes, *columns;   // [D][tokens], [tokens][D]
  float *scalar;            // [tokens] common log-factor of a row's features
  float *weights;           // [M][tokens]
  float *far, *exact;       // [tokens] what exponents are relative to, on two scales (see problem.py); or 1 / size
  float *sum;               // [tokens] normaliser
  float *out;               // [tokens][V] in padded rows

  static Rows allocate(const View& v, bool backward) {
    const long n = padded(TILE);
    Rows r;
    r.lanes = pool().take(n * v.D);
    r.columns = backward ? pool().take(n * padded(v.D)) : nullptr;
    r.weights = pool().take(n * v.M);
    for (float** x : {&r.scalar, &r.far, &r.exact, &r.sum}) *x = pool().take(n);
    r.out = pool().take(n * v.height);
    return r;
  }
  long height() const { return long(panel_count) * PANEL; }

  SUBQUAD_STAGE void load(const View& v, int group, long first, int tokens) {
    token = first, head = v.query_head(group), count = tokens, panel_count = int(padded(tokens) / PANEL);
    row.resize(v.D);
    for (int i = 0; i < height(); ++i) {
      if (i < count)
        read_token(v.p.q, v.p.dtype, v.b, head, first + i, v.D, v.p.root, row.data());
      else
        std::fill(row.begin(), row.end(), 0.0f);
      put_lane(row.data(), v.D, i, lanes);
      if (columns) put_column(row.data(), v.D, i, height(), columns);
      scalar[i] = -v.query_norms * dot(row.data(), row.data(), v.D) / 2;
      if (v.offset_weight) scalar[i] += dot(row.data(), v.offset_weight, v.D) + v.offset_bias;
    }
  }

 private:
  std::vector<float> row;
};

// Log-features plus the field's maxima, and their largest in `far`.
SUBQUAD_STAGE inline void query_logs(const View& v, const float* max, Rows& r) {
  project(v, v.query, r.lanes, r.panel_count, r.weights);
  normalise_groups(v, r.panel_count, r.weights);
  for (int j = 0; j < r.panel_count; ++j) {
    Vec low = splat(-INFINITE), high = low;
    float* x = r.weights + long(j) * v.M * PANEL;
    for (int m = 0; m < v.M; ++m, x += PANEL) {
      const Vec shift = splat(max[m]), a = load(x) + shift, b = load(x + LANES) + shift;
      store(x, a), store(x + LANES, b);
      low = vmax(low, a), high = vmax(high, b);
    }
    store(r.far + j * PANEL, low), store(r.far + j * PANEL + LANES, high);
  }
}

// exp(logs - far), and what they weigh against the field's totals.
SUBQUAD_STAGE inline void query_weights(const View& v, const float* total, Rows& r) {
  for (int j = 0; j < r.panel_count; ++j) {
    Vec low{}, high{};
    const Vec far_low = load(r.far + j * PANEL), far_high = load(r.far + j * PANEL + LANES);
    float* x = r.weights + long(j) * v.M * PANEL;
    for (int m = 0; m < v.M; ++m, x += PANEL) {
      const Vec a = vexp(load(x) - far_low), b = vexp(load(x + LANES) - far_high), z = splat(total[m]);
      store(x, a), store(x + LANES, b);
      low += a * z, high += b * z;
    }
    store(r.sum + j * PANEL, low), store(r.sum + j * PANEL + LANES, high);
  }
}

// The largest feature of each row, over all slices: without a projection they are all at hand.
inline void query_sizes(const View& v, Rows& r) {
  for (int t = 0; t < r.height(); t += LANES) {
    const float* x = r.lanes + long(t / PANEL) * v.D * PANEL + t % PANEL;
    const float* w = r.weights + long(t / PANEL) * v.M * PANEL + t % PANEL;
    Vec size{};
    for (int i = 0; i < (v.query ? v.M : v.D); ++i)
      size = vmax(size, vabs(elementwise(v.p.kind, load(v.query ? w + i * PANEL : x + i * PANEL))));
    store(r.far + t, size > Vec{} ? size : splat(1));
  }
}

// phi / size: a row's own factor cancels, and without it tiny features of queries and keys do not underflow together.
// The size is left in `far`; `slopes`, where wanted, become dphi / size.
SUBQUAD_STAGE inline void query_elementwise(const View& v, const float* total, Rows& r, float* slopes) {
  project(v, v.query, r.lanes, r.panel_count, r.weights);
  query_sizes(v, r);
  std::fill(r.sum, r.sum + r.height(), 0.0f);
  each_vector(v.M, r.panel_count, r.weights, [&](float* x, int m, int t) {
    const Vec argument = load(x), size = load(r.far + t), weight = elementwise(v.p.kind, argument) / size;
    if (slopes) store(slopes + (x - r.weights), slope(v.p.kind, argument) / size);
    store(x, weight);
    store(r.sum + t, load(r.sum + t) + weight * splat(total[m]));
  });
}

// Gradients -----------------------------------------------------------------------------------------------------------

// Sums over features of a matrix in lanes, [tokens].
SUBQUAD_STAGE inline void sum_features(const View& v, int panel_count, const float* lanes, float* sums) {
  for (int t = 0; t < panel_count * PANEL; t += LANES) {
    const float* x = lanes + long(t / PANEL) * v.M * PANEL + t % PANEL;
    Vec sum{};
    for (int m = 0; m < v.M; ++m) sum += load(x + m * PANEL);
    store(sums + t, sum);
  }
}

// dx [tokens][D] in padded rows += W^T grad, for grad [M][tokens] in lanes. `weight_columns`: W [M][D] in panels.
SUBQUAD_STAGE inline void unproject(const View& v, const float* weight_columns, int tokens, const float* grad, float* dx) {
  const long stride = padded(v.D);
  if (weight_columns) {
    add_product(tokens, v.D, v.M, transposed(grad, v.M), {weight_columns, long(v.M) * PANEL}, in_rows(dx, stride));
    return;
  }
  for (int t = 0; t < tokens; ++t)
    for (int m = 0; m < v.M; ++m)
      dx[t * stride + v.first + m] += grad[(long(t / PANEL) * v.M + m) * PANEL + t % PANEL];
}

// dx[t] += factor[t] * x[t] for x in columns
SUBQUAD_STAGE inline void add_multiples(const View& v, int tokens, const float* columns, long height, const float* factor, float sign,
                          float* dx) {
  const long stride = padded(v.D);
  for (long d = 0; d < stride; d += LANES)
    for (int t = 0; t < tokens; ++t) {
      const float* x = columns + d / PANEL * height * PANEL + long(t) * PANEL + d % PANEL;
      float* to = dx + t * stride + d;
      store(to, load(to) + load(x) * splat(sign * factor[t]));
    }
}

// Accumulators of one slice; null where not wanted. Weights [M][D] in panels.
struct MapGradients {
  float *query, *key, *key_bias, *offset_weight, *offset_bias;
};

// From the gradient of the logs (consumed) that of the tile's queries, dx [tokens][D] in padded rows.
inline void queries_backward(const View& v, const Rows& r, const float* weight_columns, float* grad, float* scratch,
                             const MapGradients& into, float* dx) {
  float row[TILE];
  sum_features(v, r.panel_count, grad, row);
  normalise_groups_backward(v, v.query, r.lanes, r.panel_count, grad, scratch);
  unproject(v, weight_columns, r.count, grad, dx);
  if (v.query_norms) add_multiples(v, r.count, r.columns, r.height(), row, -v.query_norms, dx);
  if (into.query)
    add_product(v.M, v.D, int(r.height()), panels(grad, v.M), {r.columns, r.height() * PANEL},
                in_panels(into.query, v.M));
  if (!v.offset_weight) return;
  for (int t = 0; t < r.count; ++t) {
    for (int d = 0; d < v.D; ++d) {
      dx[t * padded(v.D) + d] += row[t] * v.offset_weight[d];
      if (into.offset_weight)
        into.offset_weight[d] += row[t] * r.columns[(d / PANEL * r.height() + t) * PANEL + d % PANEL];
    }
    if (into.offset_bias) *into.offset_bias += row[t];
  }
}

// The same for the keys of a fold, added to their block.
inline void keys_backward(const View& v, Keys& keys, const Fold& fold, const float* weight_columns, float* grad,
                          float* scratch, const MapGradients& into) {
  const int tokens = fold.panel_count * PANEL;
  const float* columns = keys.columns + long(fold.begin) * PANEL;
  float* dy = keys.grad + fold.begin * padded(v.D);
  float row[TILE];
  sum_features(v, fold.panel_count, grad, row);
  if (into.key_bias)
    each_vector(v.M, fold.panel_count, grad, [&](float* x, int m, int) { into.key_bias[m] += hsum(load(x)); });
  normalise_groups_backward(v, v.key, keys.lanes + long(fold.begin) * v.D, fold.panel_count, grad, scratch);
  unproject(v, weight_columns, tokens, grad, dy);
  if (v.key_norms) add_multiples(v, tokens, columns, keys.height, row, -v.key_norms, dy);
  if (into.key)
    add_product(v.M, v.D, tokens, panels(grad, v.M), {columns, keys.height * PANEL}, in_panels(into.key, v.M));
}

}  // namespace subquad
