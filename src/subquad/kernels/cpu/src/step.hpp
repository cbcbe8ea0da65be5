// Decoding: one new token for every sequence, in one call. What it does is `_Step` of favor_state.py.
// Letters as in api.hpp.
#pragma once
#include "features.hpp"
#include "passes.hpp"

namespace subquad {

class TokenStep {
 public:
  TokenStep(const View& view, const Step& step) : v(view), s(step), now_(step.before) {
    real_ = !s.real || s.real[v.b];
    before_ = s.length ? s.length[v.b] : 0;
    near_ = v.p.near_blocks ? v.p.near : 0;
    previous_ = long(v.p.reach) * near_, slots_ = previous_ + near_;
    x_ = pool().take(v.D);
    y_ = pool().take(v.D);
    values_ = pool().take(std::max(1, near_) * (v.Dv + 1L));
    logs_ = pool().take(std::max(1, near_) * long(v.M));
    logits_ = pool().take(v.p.sinks + slots_);
    sums_ = pool().take(v.Dv + 1);
  }

  void run() {
    carry_over();
    if (real_) keep();
    if (!near_ && v.p.far) fold_token();
    for (int group = 0; group < v.p.groups; ++group) read(group);
    if (near_) end_block();
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
  // This head's part of what is to change, into its new place.
  void carry_over() {
    const auto carry = [&](void* from, void* to, void*& now, long per_head, int width) {
      if (!to) return;
      std::memcpy(kept(to, per_head, 0, width), kept(from, per_head, 0, width), per_head * width * number_size());
      now = to;
    };
    carry(s.before.sink_k, s.after.sink_k, now_.sink_k, v.p.sinks, v.D);
    carry(s.before.sink_v, s.after.sink_v, now_.sink_v, v.p.sinks, v.Dv);
    carry(s.before.block_k, s.after.block_k, now_.block_k, slots_, v.D);
    carry(s.before.block_v, s.after.block_v, now_.block_v, slots_, v.Dv);
  }
  void keep() {
    const auto copy = [&](void* k, void* values, long per_head, long slot) {
      std::memcpy(kept(k, per_head, slot, v.D), fresh(v.p.k), v.D * number_size());
      std::memcpy(kept(values, per_head, slot, v.Dv), fresh(v.p.v), v.Dv * number_size());
    };
    if (before_ < v.p.sinks) copy(now_.sink_k, now_.sink_v, v.p.sinks, before_);
    if (near_) copy(now_.block_k, now_.block_v, slots_, previous_ + before_ % near_);
  }
  // Keys and values that the new token may see exactly: one run of slots among the sinks, one among the blocks.
  struct Run {
    char *k, *v;
    int count;
  };
  Run sinks() const {
    const long seen = std::min<long>(v.p.sinks, before_ + real_);
    return {kept(now_.sink_k, v.p.sinks, 0, v.D), kept(now_.sink_v, v.p.sinks, 0, v.Dv), int(seen)};
  }
  Run blocks() const {
    if (!near_) return {nullptr, nullptr, 0};
    const long origin = before_ - before_ % near_ - previous_;  // the token that slot 0 would hold
    const long first = std::max({0L, -origin, v.p.sinks - origin}), end = before_ + real_ - origin;
    const long count = std::max(0L, end - first);
    return {kept(now_.block_k, slots_, first, v.D), kept(now_.block_v, slots_, first, v.Dv), int(count)};
  }
  // One of them as floats; where it lies if it is float32 already.
  const float* as_float(const char* data, int e, int width, float* into) const {
    const char* at = data + long(e) * width * number_size();
    if (v.p.dtype == FLOAT32) return reinterpret_cast<const float*>(at);
    subquad::read_token(at, 0, v.p.dtype, width, 1, into);
    return into;
  }

  // Features ------------------------------------------------------------------------------------------------------------

  // W x, or x itself, then what the rule or the elementwise map makes of it.
  void features(const float* weight, const float* x, float* logs) {
    weight ? products(weight, x, logs) : void(std::copy_n(x, v.M, logs));
    if (!v.logarithmic())
      return with_kind(v.p.kind, [&](auto kind) {
        constexpr int KIND = decltype(kind)::value;
        each(logs, v.M, [](Vec y) { return elementwise<KIND>(y, splat(TINY)); });
      });
    if (v.p.rule != GROUPS) return;
    const int size = v.p.num_features / v.p.rule_groups;
    for (int m = 0; m < v.M; m += size) {
      const float top = *std::max_element(logs + m, logs + m + size);
      float sum = 0;
      for (int i = m; i < m + size; ++i) sum += std::exp(logs[i] - top);
      const float grown = std::log(sum);
      for (int i = m; i < m + size; ++i) logs[i] = logs[i] - top - grown;
    }
  }
  // W x, LANES rows at a time: their sums across vectors then cost as much as one.
  void products(const float* weight, const float* x, float* into) const {
    int m = 0;
    for (; m + LANES <= v.M; m += LANES, weight += long(LANES) * v.D) {
      Vec sums[LANES] = {};
      int d = 0;
      for (; d + LANES <= v.D; d += LANES)
        for (int i = 0; i < LANES; ++i) sums[i] += load(weight + long(i) * v.D + d) * load(x + d);
      store(into + m, sums_across(sums));
      for (; d < v.D; ++d)
        for (int i = 0; i < LANES; ++i) into[m + i] += weight[long(i) * v.D + d] * x[d];
    }
    for (; m < v.M; ++m, weight += v.D) into[m] = dot(weight, x, v.D);
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

  // Key and value number i of those that are folded together.
  void take_key(int i, const void* k, const void* values) {
    float* logs = logs_ + long(i) * v.M;
    subquad::read_token(k, 0, v.p.dtype, v.D, v.p.root, y_);
    features(v.key, y_, logs);
    const float scalar = -v.key_norms * dot(y_, y_, v.D) / 2;
    for (int m = 0; m < v.M && v.logarithmic(); ++m) logs[m] += v.bias[m] + scalar;
    float* row = values_ + i * (v.Dv + 1L);
    subquad::read_token(values, 0, v.p.dtype, v.Dv, 1, row);
    row[v.Dv] = 1;
  }

  // `count` keys, taken before, into the far field: summed up by themselves first, then added once.
  void fold(int count) {
    const long place = Field::place(v, 0), row = v.Dv + 1;
    const float* max = s.before.far_max + (v.logarithmic() ? place : 0);
    float *new_max = s.after.far_max + (v.logarithmic() ? place : 0), *decay = pool().take(v.M);
    for (int m = 0; m < v.M; ++m) {
      float grown = v.logarithmic() ? max[m] : 0;
      for (int i = 0; i < count && v.logarithmic(); ++i) grown = std::max(grown, logs_[long(i) * v.M + m]);
      decay[m] = v.logarithmic() ? max[m] - grown : 0;
      if (v.logarithmic()) new_max[m] = grown;
    }
    exponentials(decay, v.M, 0);
    for (int i = 0; i < count && v.logarithmic(); ++i) {
      for (int m = 0; m < v.M; ++m) logs_[long(i) * v.M + m] -= new_max[m];
      exponentials(logs_ + long(i) * v.M, v.M, 0);
    }
    for (int m = 0; m < v.M; ++m) {
      const float* more = values_;
      float weight = logs_[m];
      if (count > 1) {
        std::fill(sums_, sums_ + row, 0.0f);
        for (int i = 0; i < count; ++i) add_multiple(logs_[long(i) * v.M + m], values_ + i * row, sums_);
        more = sums_, weight = 1;
      }
      const long at = (place + m) * row;
      add_exactly(s.before.far_sum + at, s.before.far_low + at, decay[m], weight, more, s.after.far_sum + at,
                  s.after.far_low + at);
    }
  }
  void add_multiple(float weight, const float* __restrict__ from, float* __restrict__ to) const {
    for (int j = 0; j <= v.Dv; ++j) to[j] += weight * from[j];
  }
  // (high, low) decay + weight more, where high is the sum as a float and low what that leaves out.
  void add_exactly(const float* __restrict__ high, const float* __restrict__ low, float decay, float weight,
                   const float* __restrict__ more, float* __restrict__ new_high, float* __restrict__ new_low) const {
    for (int j = 0; j <= v.Dv; ++j) {
      const float large = high[j] * decay, small = weight * more[j], sum = large + small, part = sum - large;
      const float rest = low[j] * decay + ((large - (sum - part)) + (small - part));
      new_high[j] = sum + rest;
      new_low[j] = rest - (new_high[j] - sum);
    }
  }
  // The far field where nothing is folded, but other sequences fold.
  void keep_far() {
    if (!s.after.far_sum) return;
    const long place = Field::place(v, 0), numbers = v.M * (v.Dv + 1L);
    if (v.logarithmic()) std::copy_n(s.before.far_max + place, v.M, s.after.far_max + place);
    std::copy_n(s.before.far_sum + place * (v.Dv + 1), numbers, s.after.far_sum + place * (v.Dv + 1));
    std::copy_n(s.before.far_low + place * (v.Dv + 1), numbers, s.after.far_low + place * (v.Dv + 1));
  }

  // near = 0: the new token enters the far field, which then is what it reads.
  void fold_token() {
    if (real_ && before_ >= v.p.sinks) {
      take_key(0, fresh(v.p.k), fresh(v.p.v));
      fold(1);
    } else {
      keep_far();
    }
    now_.far_max = s.after.far_max, now_.far_sum = s.after.far_sum;
  }

  // near > 0: if the block is full, the first one goes into the far field, and the others move up.
  void end_block() {
    if (!real_ || (before_ + 1) % near_) return keep_far();
    int count = 0;
    for (int i = 0; i < near_ && v.p.far; ++i) {
      const long index = before_ + 1 - slots_ + i;
      if (index < 0 || index < v.p.sinks) continue;
      take_key(count++, kept(now_.block_k, slots_, i, v.D), kept(now_.block_v, slots_, i, v.Dv));
    }
    count ? fold(count) : keep_far();
    const auto move = [&](void* base, int width) {
      const long number = width * number_size();
      std::memmove(kept(base, slots_, 0, width), kept(base, slots_, near_, width), previous_ * number);
      std::memset(kept(base, slots_, previous_, width), 0, near_ * number);
    };
    move(now_.block_k, v.D), move(now_.block_v, v.Dv);
  }

  // Reading -------------------------------------------------------------------------------------------------------------

  void read(int group) {
    const long head = v.query_head(group);
    float* out = s.out + (v.b * v.p.key_heads * v.p.groups + head) * v.Dv;
    if (near_ && !real_) return std::fill(out, out + v.Dv, 0.0f), void();
    subquad::read_token(v.p.q, v.p.dtype, v.b, head, 0, v.D, v.p.root, x_);
    if (v.p.far) features(v.query, x_, logs_);
    std::fill(sums_, sums_ + v.Dv + 1, 0.0f);
    if (v.logarithmic())
      read_logarithmic();
    else
      read_elementwise();
    const float total = sums_[v.Dv], divisor = std::fabs(total) < TINY ? INFINITE : total;
    for (int j = 0; j < v.Dv; ++j) out[j] = sums_[j] / divisor;
  }

  // Four vectors of sums in registers, then single numbers.
  void add_far() {
    constexpr int WIDE = 4 * LANES;
    const long row = v.Dv + 1;
    const float* far = now_.far_sum + Field::place(v, 0) * row;
    int j = 0;
    for (; j + WIDE <= row; j += WIDE) {
      Vec sums[4];
      for (int i = 0; i < 4; ++i) sums[i] = load(sums_ + j + i * LANES);
      for (int m = 0; m < v.M; ++m)
        for (int i = 0; i < 4; ++i) sums[i] += splat(logs_[m]) * load(far + m * row + j + i * LANES);
      for (int i = 0; i < 4; ++i) store(sums_ + j + i * LANES, sums[i]);
    }
    if (j == row) return;
    for (int m = 0; m < v.M; ++m)
      for (int i = j; i < row; ++i) sums_[i] += logs_[m] * far[m * row + i];
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
    for (int e = 0; e < count; ++e) exact = std::max(exact, logits_[e]);
    if (v.p.far) {
      const float* max = now_.far_max + Field::place(v, 0);
      for (int m = 0; m < v.M; ++m) far = std::max(far, logs_[m] += max[m]);
      exponentials(logs_, v.M, std::max(far, exact - scalar));
      add_far();
    }
    exponentials(logits_, count, std::max(exact, far + scalar));
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
      const float* value = as_float(run.v, e, v.Dv, values_);
      for (int j = 0; j < v.Dv; ++j) sums_[j] += weights[e] * value[j];
      sums_[v.Dv] += weights[e];
    }
  }

  const View& v;
  const Step& s;
  Kept now_;  // the state to read from: before or after
  bool real_;
  long before_;
  int near_;
  long previous_, slots_;  // tokens of whole blocks that are kept, and of all
  float *x_, *y_, *values_, *logs_, *logits_, *sums_;
};

inline void step(const Problem& p, const Step& s) {
  const long heads = task_count(p), keys = p.sinks + (p.near_blocks ? (p.reach + 1L) * p.near : 0);
  const bool worth_waking = heads * (p.num_features * p.far + keys) * (p.head_dim + p.value_dim) > 1500000;
  each_task(worth_waking ? p.threads : 1, heads, [&](long task) {
    pool().reset();
    TokenStep(View(p, task), s).run();
  });
}

}  // namespace subquad
