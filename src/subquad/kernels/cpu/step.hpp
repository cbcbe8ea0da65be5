// Decoding: one new token for every sequence, in one call. What it does is `_Step` of favor_state.py.
#pragma once
#include "features.hpp"
#include "passes.hpp"

namespace subquad {

class TokenStep {
 public:
  TokenStep(const View& view, const Step& step) : v(view), s(step) {
    const long place = Field::place(v, 0);
    far_max_ = s.far_max + (v.logarithmic() ? place : 0);
    far_sum_ = s.far_sum + place * (v.V + 1);
    real_ = !s.real || s.real[v.b];
    before_ = s.length[v.b];
    near_ = v.p.near_blocks ? v.p.block : 0;
    x_ = pool().take(v.D);
    y_ = pool().take(v.D);
    values_ = pool().take(v.V + 1);
    logs_ = pool().take(v.M);
    decay_ = pool().take(v.M);
    logits_ = pool().take(v.p.sinks + 2L * near_);
    sums_ = pool().take(v.V + 1);
  }

  void run() {
    if (real_) keep();
    if (!near_ && real_ && before_ >= v.p.sinks) {
      read_token(v.p.k, v.p.dtype, v.b, v.h, 0, v.D, v.p.root, y_);
      read_value(v.p.v.data, v.b * v.p.v.batch + v.h * v.p.v.head);
      fold();
    }
    for (int group = 0; group < v.p.groups; ++group) read(group);
    if (near_ && real_ && (before_ + 1) % near_ == 0) begin_block();
  }

 private:
  // Kept keys and values ------------------------------------------------------------------------------------------------

  long number_size() const { return v.p.dtype == FLOAT32 ? 4 : 2; }
  char* kept(void* base, long per_head, long slot, int width) const {
    return static_cast<char*>(base) + (v.sequence() * per_head + slot) * width * number_size();
  }
  const char* fresh(const Array& a) const {
    return static_cast<const char*>(a.data) + (v.b * a.batch + v.h * a.head) * number_size();
  }
  void keep() {
    const auto copy = [&](void* k, void* values, long per_head, long slot) {
      std::memcpy(kept(k, per_head, slot, v.D), fresh(v.p.k), v.D * number_size());
      std::memcpy(kept(values, per_head, slot, v.V), fresh(v.p.v), v.V * number_size());
    };
    if (before_ < v.p.sinks) copy(s.sink_k, s.sink_v, v.p.sinks, before_);
    if (near_) copy(s.block_k, s.block_v, 2L * near_, near_ + before_ % near_);
  }
  // Keys and values that the new token may see exactly: one run of slots among the sinks, one among the blocks.
  struct Run {
    char *k, *v;
    int count;
  };
  Run sinks() const {
    const long seen = std::min<long>(v.p.sinks, before_ + real_);
    return {kept(s.sink_k, v.p.sinks, 0, v.D), kept(s.sink_v, v.p.sinks, 0, v.V), int(seen)};
  }
  Run blocks() const {
    if (!near_) return {nullptr, nullptr, 0};
    const long origin = before_ - before_ % near_ - near_;  // the token that slot 0 would hold
    const long first = std::max({0L, -origin, v.p.sinks - origin}), end = before_ + real_ - origin;
    const long size = 2L * near_, count = std::max(0L, end - first);
    return {kept(s.block_k, size, first, v.D), kept(s.block_v, size, first, v.V), int(count)};
  }
  // One of them as floats; where it lies if it is float32 already.
  const float* as_float(const char* data, int e, int width, float* into) const {
    const char* at = data + long(e) * width * number_size();
    if (v.p.dtype == FLOAT32) return reinterpret_cast<const float*>(at);
    subquad::read_token(at, 0, v.p.dtype, width, 1, into);
    return into;
  }
  void read_value(const void* data, long offset) {
    subquad::read_token(data, offset, v.p.dtype, v.V, 1, values_);
    values_[v.V] = 1;
  }

  // Features ------------------------------------------------------------------------------------------------------------

  // W x, or x itself, then the rule's or the map's own business.
  void features(const float* weight, const float* x) {
    for (int m = 0; m < v.M; ++m) logs_[m] = weight ? dot(weight + long(m) * v.D, x, v.D) : x[m];
    if (!v.logarithmic())
      return with_kind(v.p.kind, [&](auto kind) {
        constexpr int KIND = decltype(kind)::value;
        each(logs_, v.M, [](Vec y) { return elementwise<KIND>(y); });
      });
    if (v.p.rule != GROUPS) return;
    const int size = v.p.num_features / v.p.rule_groups;
    for (int m = 0; m < v.M; m += size) {
      const float top = *std::max_element(logs_ + m, logs_ + m + size);
      float sum = 0;
      for (int i = m; i < m + size; ++i) sum += std::exp(logs_[i] - top);
      const float grown = std::log(sum);
      for (int i = m; i < m + size; ++i) logs_[i] = logs_[i] - top - grown;
    }
  }
  // x = work(x), a vector at a time.
  template <class Work>
  static void each(float* x, int count, Work work) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(x + i, work(load(x + i)));
    if (i == count) return;
    float rest[LANES] = {};
    std::memcpy(rest, x + i, (count - i) * sizeof(float));
    store(rest, work(load(rest)));
    std::memcpy(x + i, rest, (count - i) * sizeof(float));
  }
  static void exponentials(float* x, int count, float reference) {
    each(x, count, [&](Vec y) { return vexp(y - splat(reference)); });
  }

  // The far field with the key `y_` and `values_` in it.
  void fold() {
    features(v.key, y_);
    const float scalar = -v.key_norms * dot(y_, y_, v.D) / 2;
    for (int m = 0; m < v.M && v.logarithmic(); ++m) {
      const float log = logs_[m] + v.bias[m] + scalar, grown = std::max(far_max_[m], log);
      decay_[m] = far_max_[m] - grown;
      logs_[m] = log - grown;
      far_max_[m] = grown;
    }
    if (v.logarithmic()) exponentials(logs_, v.M, 0), exponentials(decay_, v.M, 0);
    for (int m = 0; m < v.M; ++m) {
      float* row = far_sum_ + long(m) * (v.V + 1);
      const float decay = v.logarithmic() ? decay_[m] : 1, weight = logs_[m];
      for (int j = 0; j <= v.V; ++j) row[j] = row[j] * decay + weight * values_[j];
    }
  }

  // The previous block into the far field, the full one in its place.
  void begin_block() {
    for (int i = 0; i < near_; ++i) {
      const long index = before_ + 1 - 2L * near_ + i;
      if (index < 0 || index < v.p.sinks) continue;
      subquad::read_token(kept(s.block_k, 2L * near_, i, v.D), 0, v.p.dtype, v.D, v.p.root, y_);
      read_value(kept(s.block_v, 2L * near_, i, v.V), 0);
      fold();
    }
    const auto move = [&](void* base, int width) {
      const long size = near_ * width * number_size();
      std::memcpy(kept(base, 2L * near_, 0, width), kept(base, 2L * near_, near_, width), size);
      std::memset(kept(base, 2L * near_, near_, width), 0, size);
    };
    move(s.block_k, v.D), move(s.block_v, v.V);
  }

  // Reading -------------------------------------------------------------------------------------------------------------

  void read(int group) {
    const long head = v.query_head(group);
    float* out = s.out + (v.b * v.p.key_heads * v.p.groups + head) * v.V;
    if (near_ && !real_) return std::fill(out, out + v.V, 0.0f), void();
    subquad::read_token(v.p.q, v.p.dtype, v.b, head, 0, v.D, v.p.root, x_);
    features(v.query, x_);
    std::fill(sums_, sums_ + v.V + 1, 0.0f);
    if (v.logarithmic())
      read_logarithmic();
    else
      read_elementwise();
    const float total = sums_[v.V], divisor = total != 0 ? total : 1;
    for (int j = 0; j < v.V; ++j) out[j] = sums_[j] / divisor;
  }

  void add_far() {
    for (int m = 0; m < v.M; ++m) {
      const float* row = far_sum_ + long(m) * (v.V + 1);
      for (int j = 0; j <= v.V; ++j) sums_[j] += logs_[m] * row[j];
    }
  }

  void read_elementwise() {
    float size = 0;
    for (int m = 0; m < v.M; ++m) size = std::max(size, std::fabs(logs_[m]));
    if (size > 0)
      for (int m = 0; m < v.M; ++m) logs_[m] /= size;
    add_far();
  }

  void read_logarithmic() {
    float scalar = -v.query_norms * dot(x_, x_, v.D) / 2;
    if (v.offset_weight) scalar += dot(x_, v.offset_weight, v.D) + v.offset_bias;
    const Run first = sinks(), second = blocks();
    logits(first, logits_), logits(second, logits_ + first.count);
    const int count = first.count + second.count;
    float far = -INFINITE, exact = -INFINITE;
    for (int m = 0; m < v.M; ++m) far = std::max(far, logs_[m] += far_max_[m]);
    for (int e = 0; e < count; ++e) exact = std::max(exact, logits_[e]);
    exponentials(logs_, v.M, std::max(far, exact - scalar));
    exponentials(logits_, count, std::max(exact, far + scalar));
    add_far();
    add_values(first, logits_), add_values(second, logits_ + first.count);
  }
  void logits(const Run& run, float* into) {
    for (int e = 0; e < run.count; ++e) {
      const float* y = as_float(run.k, e, v.D, y_);
      into[e] = dot(x_, y, v.D) * v.p.root;
      if (v.p.gaussian) into[e] -= dot(y, y, v.D) * v.p.root * v.p.root / 2;
    }
  }
  void add_values(const Run& run, const float* weights) {
    for (int e = 0; e < run.count; ++e) {
      const float* value = as_float(run.v, e, v.V, values_);
      for (int j = 0; j < v.V; ++j) sums_[j] += weights[e] * value[j];
      sums_[v.V] += weights[e];
    }
  }

  const View& v;
  const Step& s;
  float *far_max_, *far_sum_;
  bool real_;
  long before_;
  int near_;
  float *x_, *y_, *values_, *logs_, *decay_, *logits_, *sums_;
};

inline void step(const Problem& p, const Step& s) {
  const long heads = task_count(p), keys = p.sinks + (p.near_blocks ? 2L * p.block : 0);
  [[maybe_unused]] const bool worth_waking = heads * (p.num_features + keys) * (p.head_dim + p.value_dim) > 200000;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (worth_waking)
  for (long task = 0; task < heads; ++task) {
    pool().reset();
    TokenStep(View(p, task), s).run();
  }
}

}  // namespace subquad
