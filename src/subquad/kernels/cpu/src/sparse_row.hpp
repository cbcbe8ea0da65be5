// A tile of one query: products with the rows of its keys where they lie. Packing them for one query would cost more.
// Letters as in api.hpp.
#pragma once
#include "sparse_tile.hpp"

namespace subquad {

class SparseRow {
 public:
  // Where the gradients of a block are summed up.
  struct Sums {
    float *dk, *dv;
  };

  SparseRow(const Sparse& sparse, const SharedMasks& masks)
      : s(sparse), masks_(masks), D(int(s.head_dim)), Dv(int(s.value_dim)), limit_(logit_limit(D)) {
    keys_.reserve(s.met * s.keys);
    x_ = pool().take(padded(D));
    weights_ = pool().take(padded(s.met * s.keys));
    dlogits_ = s.grad_out ? pool().take(padded(s.met * s.keys)) : nullptr;
    sums_ = pool().take(padded(std::max(D, Dv)));
  }

  SUBQUAD_STAGE void forward(long tile) {
    load(tile);
    multiply(x_, s.k, D, limit_, weights_);
    const Vec top = splat(largest());
    Vec sum{};
    for (long i = 0; i < padded_count(); i += LANES) {
      const Vec weight = vexp(subquad::load(weights_ + i) - top);  // 0 behind the last key
      store(weights_ + i, weight);
      sum += weight;
    }
    const float total = keys_.empty() ? 0 : hsum(sum);
    add_rows(weights_, s.v, Dv, INFINITE, sums_);
    for (int d = 0; d < Dv; ++d) s.out[tile * Dv + d] = keys_.empty() ? 0 : sums_[d] / total;
    s.log_normaliser[tile] = keys_.empty() ? -double(INFINITE) : double(top[0]) + std::log(double(total));
  }

  // `sums_of` tells where those of a block are.
  template <class SumsOf>
  SUBQUAD_STAGE void backward(long tile, SumsOf sums_of) {
    load(tile);
    const float* grad = s.grad_out + tile * Dv;
    multiply(x_, s.k, D, limit_, weights_);
    multiply(grad, s.v, Dv, INFINITE, dlogits_);
    differentiate(tile);
    add_rows(dlogits_, s.k, D, limit_, sums_);
    for (int d = 0; d < D; ++d) s.dq[tile * D + d] = sums_[d] * s.scale;
    for (size_t i = 0; i < keys_.size();) {
      const long block = keys_[i] / s.keys;
      const Sums sums = sums_of(block);
      for (; i < keys_.size() && keys_[i] / s.keys == block; ++i) {
        const long inside = keys_[i] % s.keys;
        add(x_, dlogits_[i], D, sums.dk + inside * D);
        add(grad, weights_[i], Dv, sums.dv + inside * Dv);
      }
    }
  }

 private:
  long padded_count() const { return (long(keys_.size()) + LANES - 1) / LANES * LANES; }

  // The query, and the keys that it sees.
  void load(long tile) {
    for (int d = 0; d < D; d += LANES) {
      const Vec x = load_some(s.q + tile * D + d, std::min(LANES, D - d)) * splat(s.scale);
      store(x_ + d, within(x, limit_));
    }
    keys_.clear();
    const RowLabels labels(s, tile, 0);
    for (long w = 0; w < s.met; ++w) {
      const int64_t block = s.meets[tile * s.met + w];
      if (!exists(s, block)) continue;
      for (long key = block * s.keys, met = w * s.keys; key < (block + 1) * s.keys; ++key, ++met)
        if (sees(labels, key, met)) keys_.push_back(key);
    }
  }
  bool sees(const RowLabels& labels, long key, long met) const {
    alignas(64) float mask[PANEL];
    if (s.alike) return (!s.alive || s.alive[key]) && masks_.first_row_sees(met);
    return labels.mask_key(s.k_place[key], s.k_code ? s.k_code + key * s.rounds : nullptr, mask);
  }

  static Vec within(Vec x, float limit) { return vmin(splat(limit), vmax(splat(-limit), x)); }

  // Products of a vector with the rows of the keys, -inf behind the last; these numbers within +-limit, NaN stays NaN.
  void multiply(const float* x, const float* rows, int width, float limit, float* to) const {
    const long count = long(keys_.size());
    for (long i = 0; i < count; i += LANES) {
      Vec products[LANES] = {};
      for (int r = 0; r < LANES && i + r < count; ++r) {
        const float* row = rows + keys_[i + r] * width;
        int d = 0;
        for (; d + LANES <= width; d += LANES) products[r] += subquad::load(x + d) * within(subquad::load(row + d), limit);
        if (d < width) products[r] += load_some(x + d, width - d) * within(load_some(row + d, width - d), limit);
      }
      store(to + i, sums_across(products));
    }
    std::fill(to + count, to + padded_count(), -INFINITE);
  }

  float largest() const {
    Vec top = splat(-INFINITE);
    for (long i = 0; i < padded_count(); i += LANES) top = vmax(top, subquad::load(weights_ + i));
    return hmax(top);
  }

  // Weights from logits, and from gradients of weights those of logits.
  void differentiate(long tile) {
    const double normaliser = s.log_normaliser[tile];
    const bool sees = !(std::fabs(normaliser) > double(std::numeric_limits<float>::max()));  // as in SparseTile
    const float high = sees ? float(normaliser) : INFINITE, low = sees ? float(normaliser - double(high)) : 0;
    float shift = float(s.shift[tile]);
    if (s.out) shift -= dot(s.grad_out + tile * Dv, s.out + tile * Dv, Dv);
    for (long i = 0; i < padded_count(); i += LANES) {
      const Vec weight = vexp(subquad::load(weights_ + i) - splat(high) - splat(low));
      store(weights_ + i, weight);
      store(dlogits_ + i, weight == Vec{} ? Vec{} : weight * (subquad::load(dlogits_ + i) + splat(shift)));
    }
  }

  // The sum of the keys' rows, each times its factor.
  void add_rows(const float* factors, const float* rows, int width, float limit, float* sums) const {
    int d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES) add_columns<4>(factors, rows + d, width, limit, sums + d);
    for (; d + LANES <= width; d += LANES) add_columns<1>(factors, rows + d, width, limit, sums + d);
    if (d == width) return;
    Vec sum{};
    for (size_t i = 0; i < keys_.size(); ++i)
      sum += splat(factors[i]) * within(load_some(rows + keys_[i] * width + d, width - d), limit);
    store(sums + d, sum);
  }
  template <int VECTORS>
  void add_columns(const float* factors, const float* rows, int width, float limit, float* sums) const {
    Vec sum[VECTORS] = {};
    for (size_t i = 0; i < keys_.size(); ++i)
      for (int j = 0; j < VECTORS; ++j)
        sum[j] += splat(factors[i]) * within(subquad::load(rows + keys_[i] * width + j * LANES), limit);
    for (int j = 0; j < VECTORS; ++j) store(sums + j * LANES, sum[j]);
  }
  static void add(const float* __restrict__ from, float factor, int count, float* __restrict__ to) {
    for (int d = 0; d < count; ++d) to[d] += factor * from[d];
  }

  const Sparse& s;
  const SharedMasks& masks_;
  const int D, Dv;
  const float limit_;
  std::vector<long> keys_;      // that the query sees
  float* x_ = nullptr;          // [D] the query
  float* weights_ = nullptr;    // [keys] logits, then weights
  float* dlogits_ = nullptr;    // [keys]
  float* sums_ = nullptr;       // [D or Dv]
};

}  // namespace subquad
