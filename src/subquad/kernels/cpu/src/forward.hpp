// One task's sweep along the blocks of a sequence; what is read when, and why, is said in favor/sweep.py.
// Letters as in api.hpp.
#pragma once
#include "centre.hpp"
#include "low.hpp"
#include "neighbours.hpp"

namespace subquad {

constexpr float CERTIFICATE = 1e-8f;  // as in favor/sweep.py
constexpr int SPLIT = 4;

// A row of outputs, packed low part (or null), and normaliser: logarithms (far, exact) of what was seen; -inf: nothing.
struct OutputRow {
  float* out;
  int8_t* low;
  float* norm;
};

// Where a task's rows go: outputs and normalisers of one key head's queries, from token `first` on.
struct Output {
  float *out, *norm;
  int8_t* low;         // or null
  long first, tokens;  // tokens per head
  int norms;           // numbers per normaliser
  bool merge;          // into what another sweep left there
  bool last;           // rows that saw nothing get the normaliser +inf

  static int norms_of(const View& v) { return v.logarithmic() ? 2 : 1; }
  float* out_row(const View& v, long group, long t) const { return out + (group * tokens + t - first) * v.Dv; }
  float* norm_row(long group, long t) const { return norm + (group * tokens + t - first) * norms; }
  OutputRow row(const View& v, long group, long t) const {
    int8_t* low_row = low ? low + (group * tokens + t - first) * v.Dv : nullptr;
    return {out_row(v, group, t), low_row, norm_row(group, t)};
  }
};

// Room for the low parts of two rows.
struct Lows {
  float *one, *other;
  static Lows allocate(const View& v) { return {pool().take(v.height), pool().take(v.height)}; }
};

// Two parts of a row under one normaliser; the smaller one pulls at the larger one.
inline void merge_row(const View& v, const OutputRow& part, const OutputRow& into, const Lows& lows) {
  float* norm = into.norm;
  if (part.norm[0] == -INFINITE) return;
  const float lead = norm[0] - part.norm[0], other = std::exp(-std::fabs(lead)), total = 1 + other;
  const bool keeps = lead > 0;  // what is there weighs more
  const float pull = other / total;
  if (into.low) {
    decode_low(into.out, into.low, v.Dv, keeps ? lows.one : lows.other);
    decode_low(part.out, part.low, v.Dv, keeps ? lows.other : lows.one);
  }
  const float *larger = keeps ? into.out : part.out, *smaller = keeps ? part.out : into.out;
  for (int j = 0; j < v.Dv; ++j) {
    const float origin = larger[j], change = pull * (smaller[j] - origin);
    const float merged = origin + change;
    into.out[j] = merged;
    if (!into.low) continue;
    const float low = lows.one[j] + pull * (lows.other[j] - lows.one[j]) + (change - (merged - origin));
    into.out[j] = merged + low;
    lows.one[j] = low - (into.out[j] - merged);  // again no more than a rounding: there is room for that only
  }
  if (into.low) encode_low(into.out, lows.one, v.Dv, into.low);
  const float* most = keeps ? norm : part.norm;
  const float grown = std::log(total), far = most[0] + grown, exact = most[1] + grown;
  norm[0] = far, norm[1] = exact;
}

// Scores of one key and PANEL rows, of which the first `count` come before it.
inline void hide_rows(float* scores, int count) {
  if (count <= 0) return;
  store(scores, without_first(load(scores), count));
  store(scores + LANES, without_first(load(scores + LANES), count - LANES));
}

// Which keys of a block that is folded its rows read by scores of features: those up to the own position, or, where they
// are near blocks of a section, the blocks before (after) the one that the row's own block is `reach` blocks away from.
struct Triangle {
  enum Kind { TOKENS, BEFORE, AFTER } kind;
  int near, section;

  static Triangle of(const View& v, bool back) {
    return {v.tiled() ? back ? AFTER : BEFORE : TOKENS, v.p.near, v.section};
  }
  bool empty() const { return kind != TOKENS && section == near; }
  // Keys that some row of panel j reads; the first is the first of a panel.
  Seen keys(int j, int count) const {
    const int row = j * PANEL, last = row + PANEL - 1;
    if (kind == TOKENS) return {0, std::min(count, last + 1)};
    if (kind == AFTER)
      return {std::min(count, (row / near + 1) * near) / PANEL * PANEL, std::min(count, (last / section + 1) * section)};
    return {row / section * section / PANEL * PANEL, std::min(count, last / near * near)};
  }
  // Zeros for the rows of panel j that do not read key s.
  void hide(float* scores, int s, int j) const {
    if (kind == TOKENS) return hide_rows(scores, s - j * PANEL);
    const int first = s / section * section - j * PANEL, end = first + section, own = s / near * near - j * PANEL;
    const Seen reading = kind == BEFORE ? Seen{own + near, end} : Seen{first, own};
    for (int i = 0; i < PANEL; ++i)
      if (i < reading.from || i >= reading.to) scores[i] = 0;
  }
};

// Within a block that has several near blocks, rows are read at the maxima of all its folded keys, some of which they do
// not see. That costs a row no more than this factor of its sum, as a logarithm; else near blocks are done one by one.
constexpr float MOST_GROWTH = 10;
inline bool grows_much(const float* before, const float* after, int count) {
  for (int m = 0; m < count; ++m)
    if (!(after[m] - before[m] <= MOST_GROWTH)) return true;
  return false;
}

// Leaves only near block i of keys that are folded.
inline void fold_only(const View& v, Keys& keys, const std::vector<float>& fold, int i) {
  for (int t = 0; t < keys.height; ++t) keys.fold[t] = t / v.p.near == i ? fold[t] : 0;
}

class ForwardTask {
 public:
  ForwardTask(const View& view, Field field, Output output)
      : v(view.p.far ? with_maps(view) : view), field_(field), to_(output), r_(Rows::allocate(view, false)),
        near_(view, nullptr) {
    fold_ = Fold::allocate(v, TILE);
    lows_ = Lows::allocate(v);
    part_ = {pool().take(v.height), reinterpret_cast<int8_t*>(pool().take(v.height)), nullptr};
    if (v.tiled()) allocate_sections();
    if (v.p.near_blocks || !v.p.causal) return;
    scores_ = pool().take(TILE * TILE);
    before_ = Field::running(v, pool().take(Field::running_size(v)));
    first_seen_ = 0;
    while (first_seen_ < v.p.key_length && !v.counts(v.p.alive, first_seen_)) ++first_seen_;
    for (int m = 0; m < v.M && v.p.far_max && v.logarithmic(); ++m)
      if (v.p.far_max[Field::place(v, 0) + m] > FLOOR / 2) first_seen_ = 0;
  }

  // near > 0, towards the end: exact on blocks b - reach to b (to b + reach), far on those before.
  void along(long b) {
    prefetch(near_.token(near_.last_around(b + 1)), b + 1);
    near_.attend_around(b);
    if (v.tiled()) return read_and_fold(b, false);
    read_block(b);
    if (near_.there(b - v.p.reach)) fold_block(near_.block(b - v.p.reach));
  }
  // near > 0, towards the beginning: far on blocks after b + reach.
  void back(long b) {
    prefetch(v.folded_token(true, b - 1), b - 1);
    near_.attend_to_nothing();
    if (v.tiled()) return read_and_fold(b, true);
    read_block(b);
    if (near_.there(b + v.p.reach)) fold_block(near_.block(b + v.p.reach));
  }
  // No far field.
  void exact(long b) {
    prefetch(v.p.near_blocks ? near_.token(near_.last_around(b + 1)) : View::NO_TOKEN, b + 1);
    v.p.near_blocks ? near_.attend_around(b) : near_.attend_to_sinks(b);
    const long begin = b * v.p.block, end = std::min<long>(begin + v.p.block, v.p.length);
    for (int group = 0; group < v.p.groups; ++group)
      for (long t = begin; t < end; t += v.p.tile) read_exact(group, t, int(std::min<long>(v.p.tile, end - t)));
  }
  // near = 0, not causal: first all keys, then all queries.
  void gather(long b) {
    prefetch((b + 1) * v.p.block, View::NO_BLOCK);
    fold_block(near_.block(b));
  }
  void scatter(long b) {
    prefetch(View::NO_TOKEN, b + 1);
    near_.attend_to_sinks(b);
    read_block(b);
  }
  // near = 0, causal.
  void own(long b) {
    prefetch((b + 1) * v.p.block, b + 1);
    near_.attend_to_sinks(b);
    const long begin = b * v.p.block;
    own_tokens(begin, int(std::min<long>(v.p.block, v.p.length - begin)));
  }
  // The same in two steps, for features without maxima: the sum over a block's keys, then its queries with the sum over
  // all keys before it.
  void prepare(long b, Keys& keys, Fold& fold, Field sum) const {
    const long begin = b * v.p.block;
    prefetch((b + 1) * v.p.block, View::NO_BLOCK);
    keys.load(v, begin, int(std::min<long>(v.p.block, v.p.length - begin)));
    std::fill(sum.max, sum.max + v.M, 0.0f);
    make_fold(v, keys, 0, keys.count, sum.max, true, fold);
    set_fold(v, keys, fold, sum);
  }
  void read_prepared(const Keys& keys, const Fold& fold, Field before) {
    field_ = before, fold_ = fold;
    prefetch(View::NO_TOKEN, keys.token / v.p.block + 1);
    for (int group = 0; group < v.p.groups; ++group) read_rows(group, keys.token, keys.count, &keys);
  }

 private:
  // The first of the keys, and the block of queries, that come next.
  void prefetch(long keys, long queries) const {
    prefetcher().clear();
    v.prefetch_keys(keys);
    v.prefetch_rows(v.p.q, queries, v.D);
  }

  void fold_block(Keys& block) {
    if (field_.is_centred(v)) block.subtract(v, field_.centre);
    for (int begin = 0; begin < block.count; begin += TILE) {
      make_fold(v, block, begin, std::min(TILE, block.count - begin), field_.max, false, fold_, &field_);
    }
  }

  void read_block(long b) {
    const long begin = b * v.p.block, end = std::min<long>(begin + v.p.block, v.p.length);
    for (int group = 0; group < v.p.groups; ++group)
      for (long t = begin; t < end; t += v.p.tile)
        read_rows(group, t, int(std::min<long>(v.p.tile, end - t)), nullptr);
  }

  void allocate_sections() {
    scores_ = pool().take(TILE * TILE);
    section_values_ = pool().take(padded(v.p.block) * v.height);
    if (v.p.groups > 1) before_ = Field::over(v, pool().take(Field::size(v)));
  }

  // A block of several near blocks, whose keys enter the field section by section.
  void read_and_fold(long b, bool back) {
    const long begin = b * v.p.block;
    const int count = int(std::min<long>(v.p.block, v.p.length - begin));
    Keys* const folded = near_.folded(back, b);
    if (!folded) return read_block(b);
    triangle_ = Triangle::of(v, back);
    before_max_.assign(field_.max, field_.max + v.M);
    make_fold(v, *folded, 0, folded->count, field_.max, false, fold_);
    if (grows_much(before_max_.data(), field_.max, v.M)) {
      std::copy(before_max_.begin(), before_max_.end(), field_.max);
      return read_and_fold_parts(begin, count, back, *folded);
    }
    const bool centred = field_.is_centred(v);
    if (centred) folded->copy_values(v, field_.centre, section_values_);  // exact parts still need the values themselves
    values_ = centred ? section_values_ : folded->value_columns;
    for (int group = 0; group < v.p.groups; ++group) read_rows(group, begin, count, folded);
  }
  void read_and_fold_parts(long begin, int count, bool back, Keys& folded) {
    const std::vector<float> fold(folded.fold, folded.fold + folded.height);
    const int parts = v.p.block / v.p.near;
    float* const values = folded.value_columns;
    const bool centred = field_.is_centred(v);
    if (centred) folded.copy_values(v, field_.centre, section_values_);
    for (int step = 0; step < parts; ++step) {
      const int part = back ? parts - 1 - step : step, first = part * v.p.near, some = std::min(v.p.near, count - first);
      for (int group = 0; group < v.p.groups && some > 0; ++group) read_rows(group, begin + first, some, nullptr);
      fold_only(v, folded, fold, part);
      if (centred) folded.value_columns = section_values_;  // but not for exact parts
      make_fold(v, folded, 0, folded.count, field_.max, false, fold_, &field_);
      folded.value_columns = values;
    }
  }

  // The rows' exact part, and nothing else.
  void read_exact(int group, long token, int count) {
    r_.load(v, group, token, count);
    std::fill(r_.out, r_.out + r_.height() * v.height, 0.0f);
    std::fill(r_.sum, r_.sum + r_.height(), 0.0f);
    std::fill(r_.exact, r_.exact + r_.height(), FLOOR);
    if (!near_.exact.empty()) {
      near_.exact.logits(v, r_);
      for (int t = 0; t < r_.height(); ++t) r_.exact[t] = std::max(r_.exact[t], FLOOR);  // rows that see nothing
      near_.exact.weights(v, r_);
      near_.exact.add_values(v, r_);
    }
    std::copy(r_.exact, r_.exact + r_.height(), r_.far);
    for (int i = 0; i < count; ++i) write_logarithmic(group, i);
  }

  // Returns the smallest normaliser, at the row's reference, of a row that sees anything.
  float read_rows(int group, long token, int count, const Keys* own) {
    r_.load(v, group, token, count);
    if (v.logarithmic()) {
      query_logs(v, field_.max, r_);
      references();
      std::fill(r_.sum, r_.sum + r_.height(), 0.0f);
    } else {
      query_sums(v, field_.total, r_);
    }
    each_chunk(v, [&](int begin, int features) {
      if (own && v.tiled()) return read_sections(*own, group, begin, features);
      if (v.logarithmic()) query_weights(v, field_.total, r_, begin, features);
      read_field(begin, features);
    });
    centred_ = field_.is_centred(v);
    std::copy(r_.sum, r_.sum + r_.height(), far_sum_);
    std::fill(r_.sum, r_.sum + r_.height(), 0.0f);
    if (own && !triangle_.empty()) add_own(*own);
    if (!near_.exact.empty()) {
      near_.exact.weights(v, r_);
      near_.exact.add_values(v, r_);
    }
    std::copy(r_.sum, r_.sum + r_.height(), near_sum_);
    for (int t = 0; t < r_.height(); ++t) r_.sum[t] += far_sum_[t];
    for (int i = 0; i < count; ++i) v.logarithmic() ? write_logarithmic(group, i) : write_linear(group, i);
    return smallest_sum();
  }

  SUBQUAD_STAGE void read_field(int begin, int count) {
    const Transposed weights = transposed(r_.weights + begin * PANEL, v.M);
    const Right sums{field_.sum + begin * PANEL, long(v.M) * PANEL};
    if (begin == 0)
      multiply(int(r_.height()), v.Dv, count, weights, sums, in_rows(r_.out, v.height));
    else
      add_product(int(r_.height()), v.Dv, count, weights, sums, in_rows(r_.out, v.height));
  }

  // Some features: each section of the rows reads the field, and its folded keys enter it, while this part of the field
  // is in the first cache. The last group leaves the field as it is after the block, the others as it was before.
  void read_sections(const Keys& own, int group, int begin, int features) {
    const bool last = group + 1 == v.p.groups, back = triangle_.kind == Triangle::AFTER;
    query_exponentials(v, r_, begin, features);
    if (group == 0 && fold_.decays) field_.scale(v, fold_.decay, begin, features);
    if (!last) before_.copy_features_from(v, field_, begin, features);
    Field field = last ? field_ : before_;
    for (int i = 0; i < v.sections(); ++i) {
      read_section(field, v.section_at(i, back, r_.height()), begin, features);
      if (last || i + 1 < v.sections())
        add_section(v, fold_, values_, own.height, v.section_at(i, back, own.height), field, begin, features);
    }
    if (!triangle_.empty()) add_scores(own, begin, features);
  }
  SUBQUAD_STAGE void read_section(const Field& field, Seen rows, int begin, int count) {
    add_weighted_totals(v, field.total, r_, rows, begin, count);
    const Right sums{field.sum + begin * PANEL, long(v.M) * PANEL};
    each_panel_of(rows, [&](int t, int some) {
      const Transposed weights = transposed(r_.weights + (long(t / PANEL) * v.M + begin) * PANEL + t % PANEL, v.M);
      const Result out = in_rows(r_.out + t * v.height, v.height);
      begin == 0 ? multiply(some, v.Dv, count, weights, sums, out) : add_product(some, v.Dv, count, weights, sums, out);
    });
  }

  // The largest exponent of each row, as one point on two scales: far + scalar = exact.
  void references() {
    if (near_.exact.empty()) {
      for (int t = 0; t < r_.height(); ++t) r_.exact[t] = r_.far[t] + r_.scalar[t];
      return;
    }
    near_.exact.logits(v, r_);
    for (int t = 0; t < r_.height(); ++t) {
      const float far = r_.far[t], exact = r_.exact[t];
      r_.far[t] = std::max(far, exact - r_.scalar[t]);
      r_.exact[t] = std::max(exact, far + r_.scalar[t]);
    }
  }

  // Some features' part of the scores of keys that are folded with the rows' own section.
  SUBQUAD_STAGE void add_scores(const Keys& own, int begin, int count) {
    for (int j = 0; j < r_.panel_count; ++j) {
      const Seen keys = triangle_.keys(j, own.count);
      const auto multiply = begin ? multiply_panel<true, Transposed> : multiply_panel<false, Transposed>;
      multiply(keys.to - keys.from, count, transposed(fold_.weights + long(keys.from) * v.M + begin * PANEL, v.M),
               r_.weights + (long(j) * v.M + begin) * PANEL, scores_ + long(j) * TILE * PANEL, PANEL);
    }
  }

  // Scores of the keys that are folded with the block, where a row reads them.
  SUBQUAD_STAGE void add_own(const Keys& own) {
    for (int j = 0; j < r_.panel_count; ++j) {
      const Seen keys = triangle_.keys(j, own.count);
      const int seen = keys.to - keys.from;
      float* scores = scores_ + long(j) * TILE * PANEL;
      if (!v.tiled())
        multiply_panel<false>(seen, v.M, transposed(fold_.weights, v.M), r_.weights + long(j) * v.M * PANEL, scores, PANEL);
      Vec low = load(r_.sum + j * PANEL), high = load(r_.sum + j * PANEL + LANES);
      for (int s = 0; s < seen; ++s) {
        float* x = scores + s * PANEL;
        triangle_.hide(x, keys.from + s, j);
        low += load(x), high += load(x + LANES);
      }
      store(r_.sum + j * PANEL, low), store(r_.sum + j * PANEL + LANES, high);
      add_product(PANEL, v.Dv, seen, transposed(scores, 0), {own.value_columns + keys.from * PANEL, own.height * PANEL},
                  in_rows(r_.out + j * PANEL * v.height, v.height));
    }
  }

  void own_tokens(long begin, int count) {
    Keys& block = near_.tokens(begin, count);
    std::copy(field_.max, field_.max + v.M, before_.max);
    make_fold(v, block, 0, count, field_.max, false, fold_);
    if (fold_.decays) {  // the own keys are relative to the later maxima, so the field must be too
      before_.copy_sums_from(v, field_);
      field_.scale(v, fold_.decay);
    }
    float smallest = INFINITE;
    for (int group = 0; group < v.p.groups; ++group)
      smallest = std::min(smallest, read_rows(group, begin, count, &block));
    if (smallest >= CERTIFICATE || count == 1 || !v.logarithmic()) {
      if (field_.is_centred(v)) block.subtract(v, field_.centre);
      return add_fold(v, block, fold_, field_, 0, v.M);
    }
    if (fold_.decays) {
      field_.copy_sums_from(v, before_);
      std::copy(before_.max, before_.max + v.M, field_.max);
    }
    const int part = std::max(1, count / SPLIT);
    for (int i = 0; i < count; i += part) own_tokens(begin + i, std::min(part, count - i));
  }

  float smallest_sum() const {
    float smallest = INFINITE;
    for (int i = 0; i < r_.count; ++i) {
      const long t = r_.token + i;
      const bool sees = t >= first_seen_ || (v.p.sink_seen && v.p.sink_seen[v.mask_row() * v.p.length + t] > 0);
      if (sees) smallest = std::min(smallest, r_.sum[i]);
    }
    return smallest;
  }

  // The row's sums over their normaliser into outputs, with the centre in them.
  void write_row(int i, float divisor, const OutputRow& to) {
    float* sums = r_.out + i * v.height;
    float inverse = 1 / divisor;
    if (std::isinf(inverse)) {  // of a number that is not
      for (int j = 0; j < v.Dv; ++j) sums[j] /= divisor;
      inverse = 1;
    }
    if (!centred_) {
      for (int j = 0; j < v.Dv; ++j) to.out[j] = sums[j] * inverse;
      if (to.low) std::fill(to.low, to.low + v.Dv, int8_t(0));
      return;
    }
    const CentredRow row{far_sum_[i] / divisor, near_sum_[i] / divisor};
    if (!to.low) return row.finish<false>(field_.centre, v.Dv, inverse, sums, to.out);
    row.finish<true>(field_.centre, v.Dv, inverse, sums, to.out);
    encode_low(to.out, sums, v.Dv, to.low);
  }

  void write_logarithmic(int group, int i) {
    const float sum = r_.sum[i], log_sum = sum > 0 ? std::log(sum) : -INFINITE;
    float found[2] = {r_.far[i] + log_sum, r_.exact[i] + log_sum};
    const OutputRow to = to_.row(v, group, r_.token + i);
    if (to_.merge) {
      const OutputRow part{part_.out, to.low ? part_.low : nullptr, found};
      write_row(i, sum > 0 ? sum : 1, part);
      merge_row(v, part, to, lows_);
    } else {
      write_row(i, sum > 0 ? sum : 1, to);
      to.norm[0] = found[0], to.norm[1] = found[1];
    }
    if (to_.last && to.norm[0] == -INFINITE) to.norm[0] = to.norm[1] = INFINITE;
  }

  void write_linear(int group, int i) {
    const float sum = r_.sum[i], divisor = std::fabs(sum) < r_.least[i] ? INFINITE : sum;
    const OutputRow to = to_.row(v, group, r_.token + i);
    write_row(i, divisor, to);
    *to.norm = divisor;
  }

  View v;
  Field field_, before_{};
  Output to_;
  Rows r_;
  Neighbours near_;
  Fold fold_;
  std::vector<float> before_max_;  // [M] maxima before a block of several near blocks
  Triangle triangle_ = Triangle::of(v, false);
  Lows lows_;
  OutputRow part_;  // of a row that is to be merged
  float far_sum_[TILE], near_sum_[TILE];  // what a row weighs in the far field, and elsewhere
  bool centred_ = false;
  float* scores_ = nullptr;
  float* section_values_ = nullptr;  // of a block that is folded, less the centre
  const float* values_ = nullptr;    // these, or the block's own
  long first_seen_ = 0;
};

}  // namespace subquad
