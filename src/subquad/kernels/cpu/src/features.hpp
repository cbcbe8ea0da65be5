// Features of tokens in lanes [M][tokens], and their vector-Jacobian product. Letters as in api.hpp.
#pragma once
#include "field.hpp"
#include "keys.hpp"

namespace subquad {

// Calls `work(t, some)` for those of each panel.
template <class Work>
inline void each_panel_of(Seen tokens, Work work) {
  for (int t = tokens.from; t < tokens.to;) {
    const int some = std::min(tokens.to - t, PANEL - t % PANEL);
    work(t, some);
    t += some;
  }
}

// Calls `work(x, m, t)` for each vector of a matrix in lanes: x points at feature m of LANES tokens, of which the first is t.
template <class Work>
inline void each_vector(int features, int panel_count, float* lanes, Work work) {
  for (int j = 0; j < panel_count; ++j)
    for (int m = 0; m < features; ++m) {
      float* x = lanes + (long(j) * features + m) * PANEL;
      work(x, m, j * PANEL);
      work(x + LANES, m, j * PANEL + LANES);
    }
}

// `W x` for tokens in lanes [D][tokens], W [M][D] in panels; without W the numbers themselves, which are there already.
// Some features or all.
SUBQUAD_STAGE inline void project(const View& v, const float* weight, const float* lanes, int panel_count, float* out,
                                  int begin, int count) {
  if (!weight) return;
  multiply(count, panel_count * PANEL, v.D, panels(weight + begin * PANEL, v.M), {lanes, long(v.D) * PANEL},
           in_panels(out + begin * PANEL, v.M));
}
inline void project(const View& v, const float* weight, const float* lanes, int panel_count, float* out) {
  project(v, weight, lanes, panel_count, out, 0, v.M);
}

// Calls `work` with the kind as a constant: a switch for every vector would cost as much as what it chooses.
template <class Work>
inline void with_kind(int kind, Work work) {
  switch (kind) {
    case ELU1: return work(std::integral_constant<int, ELU1>());
    case RELU: return work(std::integral_constant<int, RELU>());
    case RELU2: return work(std::integral_constant<int, RELU2>());
    case SOFTPLUS: return work(std::integral_constant<int, SOFTPLUS>());
    case IDENTITY: return work(std::integral_constant<int, IDENTITY>());
    default: return work(std::integral_constant<int, EXP>());
  }
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
        Vec grown{};
        for (int i = 0; i < LANES; ++i) grown[i] = std::log(sum[i]);
        // In two steps: top + grown would round the small one to the precision of the large one.
        for (int i = 0; i < size; ++i) store(group + i * PANEL, load(group + i * PANEL) - top - grown);
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

constexpr float TINY = 0x1p-100f;  // features and sums below it count as zero: as in features/elementwise.py

// Features, but for those below `least`, which are zero.
template <int KIND>
inline __attribute__((always_inline)) Vec elementwise(Vec x, Vec least) {
  if constexpr (KIND == ELU1) x = x < Vec{} ? vexp(x) : x + 1.0f;
  if constexpr (KIND == RELU2) x = x < Vec{} ? Vec{} : x * x;
  if constexpr (KIND == SOFTPLUS)
    for (int i = 0; i < LANES; ++i) x[i] = x[i] > 20 ? x[i] : std::log1p(std::exp(x[i]));
  if constexpr (KIND == IDENTITY) return vabs(x) < least ? Vec{} : x;
  return x < least ? Vec{} : x;  // NaN stays NaN
}

// 1 - exp(-x) for x >= 0.
inline __attribute__((always_inline)) Vec one_minus_exp(Vec x) {
  Vec series = splat(1 / 5040.0f);
  for (const float term : {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 1 / 2.0f, 1.0f}) series = term - x * series;
  return x < splat(0.5f) ? x * series : 1 - vexp(-x);
}

// The derivative of unit * phi(x) by x, from what it is: no argument has to be kept, and no exponential done again.
template <int KIND>
inline __attribute__((always_inline)) Vec slope(Vec weight, Vec unit) {
  if constexpr (KIND == EXP) return weight;
  if constexpr (KIND == ELU1) return vmin(unit, weight);
  if constexpr (KIND == RELU) return weight > Vec{} ? unit : Vec{};
  if constexpr (KIND == RELU2) return 2 * vsqrt(weight) * vsqrt(unit);
  if constexpr (KIND == SOFTPLUS) return unit * one_minus_exp(weight / (unit > Vec{} ? unit : splat(1)));
  return unit;
}

// Keys ----------------------------------------------------------------------------------------------------------------

// A tile of keys on its way into the far field.
struct Fold {
  int begin, panel_count;  // tokens of the block from `begin` on
  bool decays;             // whether any maximum moves
  float *weights;          // [M][tokens] in lanes, relative to the new maxima
  float *decay, *max;      // [M] what the field shrinks by; the maxima after
  float *total;            // [M] sums of the weights
  float *section_totals;   // [sections][M] the same for each section of a block that has several near blocks

  static Fold allocate(const View& v, int tokens) {
    Fold fold{};
    fold.weights = pool().take(padded(tokens) * v.M);
    fold.decay = pool().take(v.M);
    fold.max = pool().take(v.M);
    fold.total = pool().take(v.M);
    if (v.tiled()) fold.section_totals = pool().take(long(v.sections()) * v.M);
    return fold;
  }
};

// Log-features m to m + count of a tile, relative to their maxima, which they raise first (unless `fixed`). At most LANES
// of them, so that what is found over all tokens is one vector. Returns whether a maximum moved.
inline bool fold_features(const View& v, int m, int count, const float* scalar, float* max, bool fixed, Fold& fold) {
  Vec tops[LANES], sums[LANES] = {};
  for (Vec& top : tops) top = splat(DEAD);
  for (int j = 0; j < fold.panel_count && !fixed; ++j) {
    const float* x = fold.weights + (long(j) * v.M + m) * PANEL;
    const Vec low = load(scalar + j * PANEL), high = load(scalar + j * PANEL + LANES);
    for (int i = 0; i < count; ++i, x += PANEL) tops[i] = vmax(load(x) + low, vmax(load(x + LANES) + high, tops[i]));
  }
  const Vec bias = load_some(v.bias + m, count), before = load_some(max + m, count);
  const Vec grown = fixed ? before : vmax(maxima_across(tops) + bias, before), shift = bias - grown;
  for (int j = 0; j < fold.panel_count; ++j) {
    float* x = fold.weights + (long(j) * v.M + m) * PANEL;
    const Vec low = load(scalar + j * PANEL), high = load(scalar + j * PANEL + LANES);
    for (int i = 0; i < count; ++i, x += PANEL) {
      const Vec own = splat(shift[i]), a = vexp(load(x) + low + own), b = vexp(load(x + LANES) + high + own);
      store(x, a), store(x + LANES, b);
      sums[i] += a + b;
    }
  }
  store_some(max + m, grown, count);
  store_some(fold.decay + m, vexp(before - grown), count);
  store_some(fold.total + m, sums_across(sums), count);
  return hmax(grown - before) > 0;
}

SUBQUAD_STAGE inline void fold_exponential(const View& v, const float* scalar, float* max, bool fixed, int begin,
                                           int count, Fold& fold) {
  for (int m = begin; m < begin + count; m += LANES)
    fold.decays |= fold_features(v, m, std::min(LANES, begin + count - m), scalar, max, fixed, fold);
}

SUBQUAD_STAGE inline void fold_elementwise(const View& v, const float* alive, int begin, int count, Fold& fold) {
  float least[TILE];  // no feature of a dead key reaches it
  for (int t = 0; t < fold.panel_count * PANEL; ++t) least[t] = alive[t] != 0 ? TINY : INFINITE;
  with_kind(v.p.kind, [&](auto kind) {
    constexpr int KIND = decltype(kind)::value;
    for (int m = begin; m < begin + count; m += LANES) {
      const int some = std::min(LANES, begin + count - m);
      Vec sums[LANES] = {};
      for (int i = 0; i < some; ++i)
        for (int t = 0; t < fold.panel_count * PANEL; t += LANES) {
          float* x = fold.weights + (long(t / PANEL) * v.M + m + i) * PANEL + t % PANEL;
          const Vec weight = elementwise<KIND>(load(x), load(least + t));
          store(x, weight);
          sums[i] += weight;
        }
      store_some(fold.total + m, sums_across(sums), some);
      store_some(fold.decay + m, splat(1), some);
    }
  });
}

// The tile's own part of the far field; the rest was scaled before. Some features or all.
SUBQUAD_STAGE inline void add_fold(const View& v, const Keys& keys, const Fold& fold, Field& field, int begin,
                                   int count) {
  const Right values{keys.value_columns + long(fold.begin) * PANEL, keys.height * PANEL};
  add_product(count, v.Dv, fold.panel_count * PANEL, panels(fold.weights + begin * PANEL, v.M), values,
              field.sums_from(v, begin));
  for (int m = begin; m < begin + count; m += LANES) {
    const int some = std::min(LANES, begin + count - m);
    field.add_to_totals(m, load_some(fold.total + m, some), some);
  }
}
// The tile alone as a field.
SUBQUAD_STAGE inline void set_fold(const View& v, const Keys& keys, const Fold& fold, Field& field) {
  multiply(v.M, v.Dv, fold.panel_count * PANEL, panels(fold.weights, v.M), {keys.value_columns, keys.height * PANEL},
           in_panels(field.sum, v.M));
  std::copy(fold.total, fold.total + v.M, field.total);
}

// Sums over some tokens, whole vectors, of up to LANES features from m on in lanes [M][tokens], times `factor` [tokens] if
// there is one.
template <bool WEIGHTED>
inline Vec sum_tokens(const View& v, const float* lanes, Seen tokens, int m, int count, const float* factor) {
  Vec sums[LANES] = {};
  for (int t = tokens.from; t < tokens.to; t += LANES) {
    const float* x = lanes + (long(t / PANEL) * v.M + m) * PANEL + t % PANEL;
    const Vec by = WEIGHTED ? load(factor + t) : Vec{};
    if (count == LANES) {  // sums stay in registers
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) sums[i] += WEIGHTED ? load(x + i * PANEL) * by : load(x + i * PANEL);
    } else {
      for (int i = 0; i < count; ++i) sums[i] += WEIGHTED ? load(x + i * PANEL) * by : load(x + i * PANEL);
    }
  }
  return across(sums, [](Vec a, Vec b) { return a + b; });
}

// Totals of some features for each section of the tile.
SUBQUAD_STAGE inline void sum_sections(const View& v, int begin, int count, Fold& fold) {
  for (int s = 0; s < v.sections(); ++s)
    for (int m = begin; m < begin + count; m += LANES) {
      const int some = std::min(LANES, begin + count - m);
      const Vec sums = sum_tokens<false>(v, fold.weights, v.section_at(s, false, fold.panel_count * PANEL), m, some, nullptr);
      store_some(fold.section_totals + long(s) * v.M + m, sums, some);
    }
}

// Sums of a field += weights in lanes [M][tokens] times values [tokens][Dv] of `height` tokens: some tokens, the first of
// which begins a vector, and some features.
inline void add_weighted(const View& v, const float* weights, const float* columns, long height, const Field& field,
                         Seen tokens, int begin, int count) {
  each_panel_of(tokens, [&](int t, int some) {
    const float* from = weights + (long(t / PANEL) * v.M + begin) * PANEL + t % PANEL;
    add_product(count, v.Dv, some, panels(from, v.M), {columns + long(t) * PANEL, height * PANEL}, field.sums_from(v, begin));
  });
}

// A section of a fold, with values that are relative to the field's centre.
SUBQUAD_STAGE inline void add_section(const View& v, const Fold& fold, const float* values, long height, Seen tokens,
                                      Field& field, int begin, int count) {
  add_weighted(v, fold.weights, values, height, field, tokens, begin, count);
  const float* totals = fold.section_totals + long(tokens.from / v.section) * v.M;
  for (int m = begin; m < begin + count; m += LANES) {
    const int some = std::min(LANES, begin + count - m);
    field.add_to_totals(m, load_some(totals + m, some), some);
  }
}

// Weights of the keys from `begin` on, relative to `max`, which they raise first (unless `fixed`). They enter `field`,
// if there is one.
inline void make_fold(const View& v, const Keys& keys, int begin, int tokens, float* max, bool fixed, Fold& fold,
                      Field* field = nullptr) {
  if (v.in_place()) fold.weights = keys.lanes + long(begin) * v.D;
  fold.begin = begin, fold.panel_count = int(padded(tokens) / PANEL), fold.decays = false;
  float scalar[TILE];
  for (int t = 0; t < fold.panel_count * PANEL; ++t) {
    const bool counts = keys.fold[begin + t] != 0;
    scalar[t] = counts ? (v.key_norms ? -v.key_norms * keys.half_square[begin + t] : 0) : DEAD;
  }
  each_chunk(v, [&](int first, int count) {
    project(v, v.key_panels, keys.lanes + long(begin) * v.D, fold.panel_count, fold.weights, first, count);
    normalise_groups(v, fold.panel_count, fold.weights);
    if (v.logarithmic())
      fold_exponential(v, scalar, max, fixed, first, count, fold);
    else
      fold_elementwise(v, keys.fold + begin, first, count, fold);
    if (fold.section_totals) sum_sections(v, first, count, fold);
    if (!field) return;
    if (fold.decays) field->scale(v, fold.decay, first, count);
    add_fold(v, keys, fold, *field, first, count);
  });
  std::copy(max, max + v.M, fold.max);
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
  float *far, *exact;       // [tokens] what exponents are relative to, on two scales (see favor/problem.py)
  float *unit;              // [tokens] what phi is multiplied by (not EXP)
  bool scaled = false;      // whether any of them is not 1
  float *sum;               // [tokens] normaliser
  float *least;             // [tokens] sums below it count as zero (not EXP)
  float *out;               // [tokens][Dv] in padded rows

  static Rows allocate(const View& v, bool backward) {
    const long n = padded(TILE);
    Rows r;
    r.stage = Stage::allocate(v.D);
    r.lanes = pool().take(n * v.D);
    r.columns = backward && !v.in_place() ? pool().take(n * padded(v.D)) : nullptr;
    r.weights = v.in_place() ? r.lanes : pool().take(n * v.M);
    for (float** x : {&r.scalar, &r.far, &r.exact, &r.unit, &r.sum, &r.least}) *x = pool().take(n);
    r.out = pool().take(n * v.height);
    return r;
  }
  long height() const { return long(panel_count) * PANEL; }

  SUBQUAD_STAGE void load(const View& v, int group, long first, int tokens) {
    token = first, head = v.query_head(group), count = tokens, panel_count = int(padded(tokens) / PANEL);
    for (int i = 0; i < height(); i += LANES) {
      stage.read(v.p.q, v.p.dtype, v.b, head, first + i, v.p.root, [&](int j) { return i + j < count; });
      stage.write(i, height(), lanes, columns);
      Vec factor{};
      if (v.query_norms) factor = squares(lanes, v.D, i) * splat(-v.query_norms / 2);
      if (v.offset_weight) factor += products(lanes, v.offset_weight, v.D, i) + splat(v.offset_bias);
      store(scalar + i, factor);
    }
  }

 private:
  Stage stage;
};

// Log-features plus the field's maxima, and their largest in `far`.
SUBQUAD_STAGE inline void query_logs(const View& v, const float* max, Rows& r) {
  project(v, v.query_panels, r.lanes, r.panel_count, r.weights);
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

// exp(logs - far). Some features or all.
SUBQUAD_STAGE inline void query_exponentials(const View& v, Rows& r, int begin, int count) {
  for (int j = 0; j < r.panel_count; ++j) {
    const Vec far_low = load(r.far + j * PANEL), far_high = load(r.far + j * PANEL + LANES);
    float* x = r.weights + (long(j) * v.M + begin) * PANEL;
    for (int m = begin; m < begin + count; ++m, x += PANEL)
      store(x, vexp(load(x) - far_low)), store(x + LANES, vexp(load(x + LANES) - far_high));
  }
}
// What the weights of some rows, whole vectors, weigh against totals, added to `sum`.
inline void add_weighted_totals(const View& v, const float* total, Rows& r, Seen rows, int begin, int count) {
  for (int t = rows.from; t < rows.to; t += LANES) {
    const float* x = r.weights + (long(t / PANEL) * v.M + begin) * PANEL + t % PANEL;
    Vec sums[4] = {load(r.sum + t)};  // several, as each waits for the one before
    int m = 0;
    for (; m + 4 <= count; m += 4)
      for (int i = 0; i < 4; ++i) sums[i] += load(x + (m + i) * PANEL) * splat(total[begin + m + i]);
    for (; m < count; ++m) sums[0] += load(x + m * PANEL) * splat(total[begin + m]);
    store(r.sum + t, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}
// Both, where all rows read one field.
SUBQUAD_STAGE inline void query_weights(const View& v, const float* total, Rows& r, int begin, int count) {
  for (int j = 0; j < r.panel_count; ++j) {
    Vec low = load(r.sum + j * PANEL), high = load(r.sum + j * PANEL + LANES);
    const Vec far_low = load(r.far + j * PANEL), far_high = load(r.far + j * PANEL + LANES);
    float* x = r.weights + (long(j) * v.M + begin) * PANEL;
    for (int m = begin; m < begin + count; ++m, x += PANEL) {
      const Vec a = vexp(load(x) - far_low), b = vexp(load(x + LANES) - far_high), z = splat(total[m]);
      store(x, a), store(x + LANES, b);
      low += a * z, high += b * z;
    }
    store(r.sum + j * PANEL, low), store(r.sum + j * PANEL + LANES, high);
  }
}

// Largest features of a row that need no factor. What meets keys loses four bits of float32's range then, no more.
constexpr float SMALL = 0x1p-4f, LARGE = 0x1p4f;

// phi(q), and what it weighs against `total` (if there is one). A row's own factor cancels: where the largest feature is not
// between SMALL and LARGE, it is made 1 by `unit`, so that tiny features of queries and keys do not underflow together.
// Weights and sums do not have it yet; `scaled` says whether any row needs it.
SUBQUAD_STAGE inline void query_elementwise(const View& v, const float* total, Rows& r) {
  project(v, v.query_panels, r.lanes, r.panel_count, r.weights);
  r.scaled = false;
  with_kind(v.p.kind, [&](auto kind) {
    constexpr int KIND = decltype(kind)::value;
    for (int t = 0; t < r.height(); t += LANES) {
      float* x = r.weights + long(t / PANEL) * v.M * PANEL + t % PANEL;
      Vec size{}, sum{};
      for (int m = 0; m < v.M; ++m, x += PANEL) {
        const Vec phi = elementwise<KIND>(load(x), splat(TINY));
        store(x, phi);
        size = vmax(size, KIND == IDENTITY ? vabs(phi) : phi);
        if (total) sum += phi * splat(total[m]);
      }
      size = size > Vec{} ? size : splat(1);
      const Vec unit = size < splat(SMALL) ? 1 / size : size > splat(LARGE) ? 1 / size : splat(1);
      store(r.unit + t, unit), store(r.sum + t, sum), store(r.least + t, size * unit * TINY);
      r.scaled |= hmax(vabs(unit - splat(1))) > 0;
    }
  });
}

// unit phi, and what it weighs against the field's totals.
SUBQUAD_STAGE inline void query_sums(const View& v, const float* total, Rows& r) {
  query_elementwise(v, total, r);
  if (!r.scaled) return;
  for (int t = 0; t < r.height(); t += LANES) {
    float* x = r.weights + long(t / PANEL) * v.M * PANEL + t % PANEL;
    const Vec unit = load(r.unit + t);
    Vec sum{};
    for (int m = 0; m < v.M; ++m, x += PANEL) {
      const Vec weight = load(x) * unit;
      store(x, weight);
      sum += weight * splat(total[m]);
    }
    store(r.sum + t, sum);
  }
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

// dx [tokens][D] in padded rows (+)= W^T grad, for grad [M][tokens] in lanes and W [M][D] in panels.
template <bool ADD>
SUBQUAD_STAGE inline void unproject(const View& v, const float* weight, int tokens, const float* grad, float* dx) {
  const long stride = padded(v.D);
  if (weight)
    return product<ADD>(tokens, v.D, v.M, transposed(grad, v.M), {weight, long(v.M) * PANEL}, in_rows(dx, stride));
  for (int t = 0; t < tokens; t += LANES)
    for (int m = 0; m < v.M; m += LANES) {
      const int some = std::min(LANES, v.M - m);
      Vec square[LANES] = {};
      for (int i = 0; i < some; ++i) square[i] = load(grad + (long(t / PANEL) * v.M + m + i) * PANEL + t % PANEL);
      transpose(square);
      for (int i = 0; i < std::min(LANES, tokens - t); ++i) {
        float* to = dx + (t + i) * stride + m;
        store_some(to, ADD ? load_some(to, some) + square[i] : square[i], some);
      }
    }
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

// From the gradient of the logs (consumed) that of the tile's queries, dx [tokens][D] in padded rows, which is overwritten.
inline void queries_backward(const View& v, const Rows& r, float* grad, float* scratch, const MapGradients& into,
                             float* dx) {
  float row[TILE];
  if (v.query_norms || v.offset_weight) sum_features(v, r.panel_count, grad, row);
  normalise_groups_backward(v, v.query_panels, r.lanes, r.panel_count, grad, scratch);
  unproject<false>(v, v.query_panels, int(r.height()), grad, dx);
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
inline void keys_backward(const View& v, Keys& keys, const Fold& fold, float* grad, float* scratch,
                          const MapGradients& into) {
  const int tokens = fold.panel_count * PANEL;
  const float* columns = keys.columns + long(fold.begin) * PANEL;
  float* dy = keys.grad + fold.begin * padded(v.D);
  float row[TILE];
  if (v.key_norms) sum_features(v, fold.panel_count, grad, row);
  if (into.key_bias)
    each_vector(v.M, fold.panel_count, grad, [&](float* x, int m, int) { into.key_bias[m] += hsum(load(x)); });
  const float* lanes = keys.lanes ? keys.lanes + long(fold.begin) * v.D : nullptr;
  normalise_groups_backward(v, v.key_panels, lanes, fold.panel_count, grad, scratch);
  unproject<true>(v, v.key_panels, tokens, grad, dy);
  if (v.key_norms) add_multiples(v, tokens, columns, keys.height, row, -v.key_norms, dy);
  if (into.key)
    add_product(v.M, v.D, tokens, panels(grad, v.M), {columns, keys.height * PANEL}, in_panels(into.key, v.M));
}

}  // namespace subquad
