// The gradients that one task computes on its way back along the blocks: a state per segment was kept, the rest is
// computed again.
//
// With the normaliser of each row saved, a weight's gradient is weight * (g.v - g.out): no maxima take part in it. Only
// where queries read the far field, which has a centre, both v and out are relative to that. Letters as in api.hpp.
#pragma once
#include "forward.hpp"
#include "passes.hpp"

namespace subquad {

// A fold with memory of its own, for the rare block that is cut into smaller ones.
struct OwnedFold : Fold {
  OwnedFold(const View& v, int tokens) : Fold{} {
    const long n = padded(tokens) * v.M;
    memory = new_buffer(n + 3L * v.M);
    weights = memory.get();
    decay = weights + n, max = decay + v.M, total = max + v.M;
  }
  Buffer memory;
};

class BackwardTask {
 public:
  // grad: gradient of the far field (its maxima are not used), from block to block.
  BackwardTask(const View& view, const Backward& io, Field grad, GradientWindow window)
      : v(view.p.far ? with_maps(view) : view), io_(io), grad_(grad), window_(window), r_(Rows::allocate(view, true)), near_(view, &window_) {
    refolded_ = Keys::allocate(v, v.p.near_blocks ? v.p.block : TILE, true, false, false);
    work_ = Field::over(v, pool().take(Field::size(v)));
    allocate_tiles();
    allocate_map_gradients();
  }

  // A segment in the order of the forward: blocks pass.block(from) to pass.block(to - 1), from the state kept there.
  void segment(const Pass& pass, long from, long to) {
    const long border = pass.first_border + from / v.p.blocks_per_segment;
    work_.read_border(v, io_.borders_max, io_.borders_sum, border);
    reserve_segment(v.p.blocks_per_segment);
    for (long i = from; i < to; ++i) {
      if (v.tiled()) {
        record_tiled(pass.kind == Pass::BACK, pass.block(i), i - from);
        continue;
      }
      states_[i - from].copy_from(v, work_);
      record_folds(pass, pass.block(i), i - from);
    }
    for (long i = to - 1; i >= from; --i) {
      const long b = pass.block(i);
      prefetch(pass.block(i - v.p.blocks_per_segment) * v.p.block, pass.block(i - 1));  // segments begin by folding their keys
      Fold* folds = &folds_[(i - from) * folds_per_block()];
      if (pass.kind == Pass::OWN)
        own(b, states_[i - from], folds);
      else
        near(pass, b, i - from, folds);
    }
  }

  // No far field.
  void exact(long b) {
    prefetch(v.p.near_blocks ? (b - v.around() - 1) * v.p.block : View::NO_TOKEN, b - 1);
    v.p.near_blocks ? near_.attend_around(b) : near_.attend_to_sinks(b);
    if (near_.exact.empty()) return;
    const long begin = b * v.p.block, end = std::min<long>(begin + v.p.block, v.p.length);
    for (int group = 0; group < v.p.groups; ++group)
      for (long t = begin; t < end; t += v.p.tile) {
        r_.load(v, group, t, int(std::min<long>(v.p.tile, end - t)));
        load_normalisers();
        load_gradient(nullptr);
        std::fill(dx_, dx_ + r_.height() * padded(v.D), 0.0f);
        exact_rows();
        give_queries(group);
      }
  }

  // Not causal, near = 0: all queries read one field, then all keys get its gradient.
  void open_summary() {
    work_.read_border(v, io_.borders_max, io_.borders_sum, 0);
    reserve_segment(1);
  }
  void scatter(long b) {
    prefetch(View::NO_TOKEN, b + 1);
    near_.attend_to_sinks(b);
    block_rows(b, work_);
  }
  void gather(long b) {
    prefetch((b + 1) * v.p.block, View::NO_BLOCK);
    Keys& block = near_.block(b);
    make_fold(v, block, 0, block.count, work_.max, true, folds_[0]);
    fold_backward(block, folds_[0]);
  }

  // Only what the queries of a block say to the keys before it (features without maxima).
  void sum_queries(long b) {
    const long begin = b * v.p.block, count = std::min<long>(v.p.block, v.p.length - begin);
    prefetch(View::NO_TOKEN, b + 1);
    for (int group = 0; group < v.p.groups; ++group) {
      open_rows(group, begin, int(count), grad_);  // without maxima no state is needed
      load_gradient(nullptr);
      normalise_weights();
      add_to_field();
    }
  }

  // Hands everything over that was summed up on the way.
  void finish() {
    near_.give_back_all();
    const long place = long(v.slice) * v.sequences() + v.sequence();
    if (v.p.sinks) {
      copy_rows<true>(near_.sinks.grad, padded(v.D), v.p.sinks, v.D, v.p.root, 0, v.p.sinks,
                      io_.dsink_k + place * v.p.sinks * v.D, 0);
      copy_rows<true>(near_.sinks.value_grad, v.height, v.p.sinks, v.Dv, 1, 0, v.p.sinks,
                      io_.dsink_v + place * v.p.sinks * v.Dv, 0);
    }
    const long row = v.sequence() * v.p.num_features + v.first;
    add_map(map_.query, io_.dquery, row);
    add_map(map_.key, io_.dkey, row);
    for (int m = 0; m < v.M && io_.dkey_bias; ++m) io_.dkey_bias[row + m] += map_.key_bias[m];
    for (int d = 0; d < v.D && io_.doffset_weight; ++d) io_.doffset_weight[place * v.D + d] += map_.offset_weight[d];
    if (io_.doffset_bias) io_.doffset_bias[place] += *map_.offset_bias;
  }

 private:
  // Memory ------------------------------------------------------------------------------------------------------------

  void allocate_tiles() {
    const long n = padded(TILE);
    grad_stage_ = Stage::allocate(v.Dv), out_stage_ = Stage::allocate(v.Dv);
    grad_lanes_ = pool().take(n * v.Dv);
    grad_columns_ = pool().take(n * v.height);
    minus_dot_ = pool().take(n);
    centred_dot_ = pool().take(n);
    lows_ = pool().zeros(LANES * v.height);
    dlogs_ = pool().take(n * v.M);
    key_dlogs_ = pool().take(n * v.M);
    scratch_ = v.p.rule == GROUPS ? pool().take(n * v.M) : nullptr;
    fold_total_ = pool().take(v.M);
    if (v.tiled()) allocate_sections();
    dx_ = pool().take(n * padded(v.D));
    if (!v.tiled() && (v.p.near_blocks || !v.p.causal)) return;
    scores_ = pool().take(n * n);
    dscores_ = pool().take(n * n);
    dscores_transposed_ = pool().take(n * n);
    read_ = Field::over(v, pool().take(Field::size(v)));
  }

  void allocate_sections() {
    section_values_ = pool().take(padded(v.p.block) * v.height);
    row_totals_ = pool().take(TILE / LANES * v.M);
    key_totals_ = pool().take(TILE / LANES * v.M);
    section_state_ = Field::over(v, pool().take(Field::size(v)));
  }

  void allocate_map_gradients() {
    const auto wanted = [&](const float* into, long count) { return into ? pool().zeros(count) : nullptr; };
    map_ = {wanted(io_.dquery, padded(v.D) * v.M), wanted(io_.dkey, padded(v.D) * v.M),
            wanted(io_.dkey_bias, v.M), wanted(io_.doffset_weight, v.D), wanted(io_.doffset_bias, 1)};
  }
  void add_map(const float* from, float* to, long row) const {
    for (int m = 0; m < v.M && to; ++m)
      for (int d = 0; d < v.D; ++d) to[(row + m) * v.D + d] += from[(d / PANEL * v.M + m) * PANEL + d % PANEL];
  }

  long folds_per_block() const { return (v.p.block + TILE - 1) / TILE; }
  void reserve_segment(long blocks) {
    in_parts_.resize(blocks);
    while (long(states_.size()) < blocks) states_.push_back(Field::over(v, pool().take(Field::size(v))));
    while (long(folds_.size()) < blocks * folds_per_block())
      folds_.push_back(Fold::allocate(v, std::min(TILE, v.p.block)));
  }

  // The first of the keys, and the block of rows, that come next.
  void prefetch(long keys, long rows) const {
    prefetcher().clear();
    v.prefetch_rows(v.p.q, rows, v.D);
    v.prefetch_rows(io_.grad_out, rows, v.Dv);
    v.prefetch_rows(io_.out, rows, v.Dv);
    v.prefetch_keys(keys);
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  // The block that enters the far field after block b was read, or -1.
  long folded_block(const Pass& pass, long b) const {
    if (pass.kind == Pass::OWN) return b;
    const long other = pass.kind == Pass::ALONG ? b - v.p.reach : b + v.p.reach;
    return near_.there(other) ? other : -1;
  }

  SUBQUAD_STAGE void record_folds(const Pass& pass, long b, long place) {
    const long other = folded_block(pass, b);
    if (other < 0) return;
    const long begin = other * v.p.block;
    const bool cut = pass.kind == Pass::OWN;  // as the forward cut it
    Fold* folds = &folds_[place * folds_per_block()];
    if (v.in_place()) refolded_.lanes = folds->weights;  // where they are to stay
    const int count = cut ? int(std::min<long>(v.p.block, v.p.length - begin)) : v.p.block;
    refolded_.load(v, begin, count, work_.centre);
    for (int i = 0; i < refolded_.count; i += TILE, ++folds) {
      make_fold(v, refolded_, i, std::min(TILE, refolded_.count - i), work_.max, false, *folds, &work_);
    }
  }

  // A block of several near blocks, as `read_and_fold` of the forward: the state that its first rows read is kept.
  SUBQUAD_STAGE void record_tiled(bool back, long b, long place) {
    Field& state = states_[place];
    Fold& fold = folds_[place];
    in_parts_[place] = false;
    const long token = v.folded_token(back, b);
    if (token + v.p.block <= 0 || token >= v.p.key_length) return state.copy_from(v, work_);
    refolded_.load(v, token, v.p.block, work_.centre);
    std::copy(work_.max, work_.max + v.M, state.max);
    make_fold(v, refolded_, 0, refolded_.count, work_.max, false, fold);
    in_parts_[place] = grows_much(state.max, work_.max, v.M);
    if (fold.decays && !in_parts_[place]) work_.scale(v, fold.decay);
    state.copy_sums_from(v, work_);
    std::copy(work_.centre, work_.centre + v.height, state.centre);
    if (in_parts_[place])
      work_.scale(v, fold.decay);
    else
      std::copy(work_.max, work_.max + v.M, state.max);
    add_fold(v, refolded_, fold, work_, 0, v.M);
  }

  // key_dlogs = gradient of the weights of a fold, less the totals', which are added at last; values get theirs.
  SUBQUAD_STAGE void fold_gradient(Keys& block, const Fold& fold) {
    const int tokens = fold.panel_count * PANEL;
    const float* values = block.value_lanes + long(fold.begin) * v.Dv;
    multiply(v.M, tokens, v.Dv, panels(grad_.sum, v.M), {values, long(v.Dv) * PANEL}, in_panels(key_dlogs_, v.M));
    std::copy(grad_.total, grad_.total + v.M, fold_total_);
    add_product(tokens, v.Dv, v.M, transposed(fold.weights, v.M), {grad_.sum, long(v.M) * PANEL},
                in_rows(block.value_grad + fold.begin * v.height, v.height));
  }
  // total(m, t): of feature m, for the vector of tokens from t on.
  template <class Total>
  SUBQUAD_STAGE void finish_fold(Keys& block, const Fold& fold, Total total) {
    with_kind(v.p.kind, [&](auto kind) {
      constexpr int KIND = decltype(kind)::value;
      each_vector(v.M, fold.panel_count, key_dlogs_, [&](float* x, int m, int t) {
        const Vec gain = slope<KIND>(load(fold.weights + (x - key_dlogs_)), load(block.fold + fold.begin + t));
        store(x, (load(x) + splat(total(m, t))) * gain);
      });
    });
    keys_backward(v, block, fold, key_dlogs_, scratch_, map_);
  }
  void finish_fold(Keys& block, const Fold& fold) {
    finish_fold(block, fold, [&](int m, int) { return fold_total_[m]; });
  }
  void fold_backward(Keys& block, const Fold& fold) {
    fold_gradient(block, fold);
    finish_fold(block, fold);
    if (fold.decays) grad_.scale(v, fold.decay);
  }

  // Blocks ------------------------------------------------------------------------------------------------------------

  void near(const Pass& pass, long b, long place, const Fold* folds) {
    const long other = v.tiled() ? -1 : folded_block(pass, b);
    for (long i = folds_per_block() - 1; i >= 0 && other >= 0; --i) fold_backward(near_.block(other), folds[i]);
    if (pass.kind == Pass::ALONG)
      near_.attend_around(b);
    else
      near_.attend_to_nothing();
    if (v.tiled()) return near_tiled(pass.kind == Pass::BACK, b, place, *folds);
    block_rows(b, states_[place]);
  }

  // Several near blocks, as `read_and_fold` of the forward.
  void near_tiled(bool back, long b, long place, const Fold& fold) {
    const long begin = b * v.p.block;
    const int count = int(std::min<long>(v.p.block, v.p.length - begin));
    const Field& state = states_[place];
    Keys* const folded = near_.folded(back, b);
    if (!folded) return block_rows(b, state);
    if (in_parts_[place]) {
      near_parts(begin, count, back, *folded, state);
    } else {
      triangle_ = Triangle::of(v, back);
      const bool centred = state.is_centred(v);
      if (centred) folded->copy_values(v, state.centre, section_values_);
      values_ = centred ? section_values_ : folded->value_columns;
      for (int group = 0; group < v.p.groups; ++group) {
        open_rows(group, begin, count, state);
        rows_backward(group, state, folded, &fold);
      }
      finish_fold(*folded, fold, [&](int m, int t) { return key_totals_[t / LANES * v.M + m]; });
      if (fold.decays) grad_.scale(v, fold.decay);
    }
  }
  // Its near blocks one by one.
  void near_parts(long begin, int count, bool back, Keys& folded, const Field& before) {
    const std::vector<float> fold(folded.fold, folded.fold + folded.height);
    const int parts = v.p.block / v.p.near;
    const auto part_at = [&](int step) { return back ? parts - 1 - step : step; };
    std::vector<Buffer> memory;
    std::vector<Field> states;
    for (int step = 0; step < parts; ++step) {  // what each of them finds
      memory.push_back(new_buffer(Field::size(v)));
      states.push_back(Field::over(v, memory.back().get()));
      states.back().copy_from(v, step ? states[step - 1] : before);
      if (step) fold_near(folded, fold, part_at(step - 1), states.back());
    }
    for (int step = parts - 1; step >= 0; --step) {
      const int part = part_at(step), first = part * v.p.near, some = std::min(v.p.near, count - first);
      OwnedFold own(v, v.p.block);
      std::copy(states[step].max, states[step].max + v.M, work_.max);
      refolded_.load(v, folded.token, folded.count);
      fold_only(v, refolded_, fold, part);
      make_fold(v, refolded_, 0, refolded_.count, work_.max, false, own);
      fold_backward(folded, own);
      for (int group = 0; group < v.p.groups && some > 0; ++group) {
        open_rows(group, begin + first, some, states[step]);
        rows_backward(group, states[step], nullptr, nullptr);
      }
    }
  }
  // One near block of those that are folded, into a field, about its centre.
  void fold_near(const Keys& folded, const std::vector<float>& fold, int part, Field& field) {
    OwnedFold own(v, v.p.block);
    refolded_.load(v, folded.token, folded.count, field.centre);
    fold_only(v, refolded_, fold, part);
    make_fold(v, refolded_, 0, refolded_.count, field.max, false, own, &field);
  }
  // The field relative to the maxima after a fold.
  const Field* decayed(const Field& before, const Fold& fold) {
    if (!fold.decays) return &before;
    read_.copy_from(v, before);
    read_.scale(v, fold.decay);
    std::copy(fold.max, fold.max + v.M, read_.max);
    return &read_;
  }

  void block_rows(long b, const Field& state) {
    const long begin = b * v.p.block, end = std::min<long>(begin + v.p.block, v.p.length);
    for (int group = 0; group < v.p.groups; ++group)
      for (long t = begin; t < end; t += v.p.tile) {
        open_rows(group, t, int(std::min<long>(v.p.tile, end - t)), state);
        rows_backward(group, state, nullptr, nullptr);
      }
  }

  void own(long b, const Field& state, const Fold* fold) {
    near_.attend_to_sinks(b);
    const long begin = b * v.p.block;
    own_tokens(begin, int(std::min<long>(v.p.block, v.p.length - begin)), state, *fold);
  }

  void own_tokens(long begin, int count, const Field& before, const Fold& fold) {
    const Field* state = decayed(before, fold);  // the own keys are relative to the later maxima
    for (int group = 0; group < v.p.groups; ++group) {
      open_rows(group, begin, count, *state);
      if (v.logarithmic() && count > 1 && too_large()) return own_parts(begin, count, before);
    }
    Keys& block = near_.tokens(begin, count);
    fold_gradient(block, fold);
    for (int group = 0; group < v.p.groups; ++group) {
      if (v.p.groups > 1) open_rows(group, begin, count, *state);
      rows_backward(group, *state, &block, &fold);
    }
    finish_fold(block, fold);
    if (fold.decays) grad_.scale(v, fold.decay);
    near_.give_back(block);
  }

  // Rows that the certificate of the forward refused: the same with smaller blocks.
  void own_parts(long begin, int count, const Field& before) {
    const int part = std::max(1, count / SPLIT);
    std::vector<Buffer> memory;
    std::vector<Field> states;
    for (int i = 0; i < count; i += part) {  // what each part finds
      memory.push_back(new_buffer(Field::size(v)));
      states.push_back(Field::over(v, memory.back().get()));
      states.back().copy_from(v, i ? states[states.size() - 2] : before);
      if (i) fold_part(begin + i - part, part, states.back());
    }
    for (int i = int(states.size()) - 1; i >= 0; --i) {
      OwnedFold fold(v, part);
      const int size = std::min(part, count - i * part);
      refolded_.load(v, begin + i * part, size);
      std::copy(states[i].max, states[i].max + v.M, work_.max);
      make_fold(v, refolded_, 0, size, work_.max, false, fold);
      own_tokens(begin + i * part, size, states[i], fold);
    }
  }
  void fold_part(long begin, int count, Field& field) {
    OwnedFold fold(v, count);
    refolded_.load(v, begin, count, field.centre);
    make_fold(v, refolded_, 0, count, field.max, false, fold, &field);
  }

  // Rows --------------------------------------------------------------------------------------------------------------

  // Queries, normalisers and log-features (or features) of a tile.
  void open_rows(int group, long token, int count, const Field& state) {
    r_.load(v, group, token, count);
    if (v.logarithmic())
      query_logs(v, state.max, r_);
    else
      query_elementwise(v, nullptr, r_);
    std::copy(r_.far, r_.far + r_.height(), largest_);
    load_normalisers();
  }
  void load_normalisers() {
    const int norms = Output::norms_of(v);
    const long row = (v.b * v.p.key_heads * v.p.groups + r_.head) * v.p.length + r_.token;
    const float* norm = io_.normaliser + row * norms;
    for (int t = 0; t < r_.height(); ++t) {
      const bool there = t < r_.count;
      if (v.logarithmic()) {
        r_.far[t] = there ? norm[2 * t] : INFINITE;
        r_.exact[t] = there ? norm[2 * t + 1] : INFINITE;
      } else {
        r_.sum[t] = there ? norm[t] : INFINITE;
      }
    }
  }

  // The certificate again, from the normaliser that the forward found.
  bool too_large() const {
    for (int t = 0; t < r_.count; ++t)
      if (largest_[t] - r_.far[t] > -std::log(CERTIFICATE)) return true;
    return false;
  }

  // Gradients of outputs, and their products with these: as they are, and, for a state that is read, about its centre.
  SUBQUAD_STAGE void load_gradient(const Field* state) {
    const bool centred = state && state->is_centred(v);
    for (int i = 0; i < r_.height(); i += LANES) {
      const auto there = [&](int j) { return i + j < r_.count; };
      grad_stage_.read(io_.grad_out, v.p.dtype, v.b, r_.head, r_.token + i, 1, there);
      out_stage_.read(io_.out, v.p.dtype, v.b, r_.head, r_.token + i, 1, there);
      // g / sum instead of phi / sum: where features are tiny, so is the sum, and only together they are of common size
      for (int j = 0; j < LANES && !v.logarithmic(); ++j) grad_stage_.scale_row(j, 1 / r_.sum[i + j]);
      Vec sums[LANES] = {};
      for (int j = 0; j < LANES; ++j)
        for (int d = 0; d < v.Dv; d += LANES) sums[j] -= grad_stage_.at(j, d) * out_stage_.at(j, d);
      const Vec dot = sums_across(sums);
      store(minus_dot_ + i, dot);
      store(centred_dot_ + i, centred ? centred_dot(i, state->centre) : dot);
      grad_stage_.write(i, r_.height(), grad_lanes_, grad_columns_);
    }
  }
  // The same for LANES rows from i on, which are staged, with all digits that the forward knew of outputs.
  Vec centred_dot(int i, const float* centre) {
    for (int j = 0; j < LANES && io_.low && i + j < r_.count; ++j) {
      const long row = (v.b * v.p.key_heads * v.p.groups + r_.head) * v.p.length + r_.token + i + j;
      decode_low(out_stage_.row(j), io_.low + row * v.Dv, v.Dv, lows_ + j * v.height);
    }
    Vec sums[LANES] = {};
    for (int j = 0; j < LANES; ++j)
      for (int d = 0; d < v.Dv; d += LANES) {
        const Vec less = out_stage_.at(j, d) - load(centre + d);
        sums[j] -= grad_stage_.at(j, d) * (less + load(lows_ + j * v.height + d));
      }
    return sums_across(sums);
  }

  // Weights under the saved normaliser, or, where the gradient is divided by that, of common size.
  SUBQUAD_STAGE void normalise_weights() {
    const auto each = [&](auto work) { each_vector(v.M, r_.panel_count, r_.weights, work); };
    if (v.logarithmic()) return each([&](float* x, int, int t) { store(x, vexp(load(x) - load(r_.far + t))); });
    if (r_.scaled) each([&](float* x, int, int t) { store(x, load(x) * load(r_.unit + t)); });
  }
  // From the gradient of the weights, less the totals' part, that of the logs (or arguments).
  // total(m, t): of feature m of the state that the vector of rows from t on reads.
  template <class Total>
  SUBQUAD_STAGE void finish_rows(Total total) {
    with_kind(v.p.kind, [&](auto kind) {
      constexpr int KIND = decltype(kind)::value;
      each_vector(v.M, r_.panel_count, dlogs_, [&](float* x, int m, int t) {
        const Vec gain = slope<KIND>(load(r_.weights + (x - dlogs_)), load(r_.unit + t));
        store(x, (load(x) + splat(total(m, t)) * load(centred_dot_ + t)) * gain);
      });
    });
  }

  void rows_backward(int group, const Field& state, Keys* own, const Fold* fold) {
    load_gradient(&state);
    normalise_weights();
    const int tall = int(r_.height());
    if (own && v.tiled()) {
      read_and_fold_backward(group == 0, state, *own, *fold);
      finish_rows([&](int m, int t) { return row_totals_[t / LANES * v.M + m]; });
    } else {
      const Right g_lanes{grad_lanes_, long(v.Dv) * PANEL};
      multiply(v.M, tall, v.Dv, panels(state.sum, v.M), g_lanes, in_panels(dlogs_, v.M));
      add_to_field();
      if (own) own_backward(*own, *fold);
      finish_rows([&](int m, int) { return state.total[m]; });
    }
    queries_backward(v, r_, dlogs_, scratch_, map_, dx_);
    if (!near_.exact.empty()) {
      std::fill(r_.sum, r_.sum + tall, 0.0f);
      exact_rows();
    }
    give_queries(group);
  }

  // Sections of a block that read the field and whose keys enter it: what rows and keys get from the field, and give it.
  void read_and_fold_backward(bool first, const Field& state, Keys& own, const Fold& fold) {
    each_chunk(v, [&](int begin, int count) {
      state_to_rows(state, own, fold, begin, count);
      gradient_to_keys(first, own, fold, begin, count);
    });
    if (!triangle_.empty()) own_backward(own, fold);
  }
  // dlogs of some features from the states of the field that each section reads, which are made again.
  SUBQUAD_STAGE void state_to_rows(const Field& state, const Keys& own, const Fold& fold, int begin, int count) {
    Field field = section_state_;
    field.copy_features_from(v, state, begin, count);
    const bool back = triangle_.kind == Triangle::AFTER;
    for (int i = 0; i < v.sections(); ++i) {
      const Seen rows = v.section_at(i, back, r_.height());
      multiply_lanes<false>(field, grad_lanes_, rows, begin, count, dlogs_);
      copy_totals(field, rows, begin, count, row_totals_);
      if (i + 1 < v.sections())
        add_section(v, fold, values_, own.height, v.section_at(i, back, own.height), field, begin, count);
    }
  }
  // Keys get the field's gradient at their section, to which rows of their own and earlier sections have not added yet.
  // That of a second group is collected by itself, and added at last.
  SUBQUAD_STAGE void gradient_to_keys(bool first, Keys& own, const Fold& fold, int begin, int count) {
    Field field = first ? grad_ : section_state_;
    if (!first) field.clear_features(v, begin, count);
    const bool back = triangle_.kind == Triangle::AFTER;
    for (int i = v.sections() - 1; i >= 0; --i) {
      const Seen keys = v.section_at(i, back, own.height), rows = v.section_at(i, back, r_.height());
      if (first) {
        multiply_lanes<false>(field, own.value_lanes, keys, begin, count, key_dlogs_);
        copy_totals(field, keys, begin, count, key_totals_);
      } else {
        multiply_lanes<true>(field, own.value_lanes, keys, begin, count, key_dlogs_);
        add_totals(field, keys, begin, count, key_totals_);
      }
      each_panel_of(keys, [&](int t, int some) {
        const float* weights = fold.weights + (long(t / PANEL) * v.M + begin) * PANEL + t % PANEL;
        add_product(some, v.Dv, count, transposed(weights, v.M), {field.sum + begin * PANEL, long(v.M) * PANEL},
                    in_rows(own.value_grad + t * v.height, v.height));
      });
      add_rows(rows, field, begin, count);
    }
    if (!first) grad_.add_features_of(v, field, begin, count);
  }
  SUBQUAD_STAGE void add_rows(Seen rows, Field& field, int begin, int count) {
    add_weighted(v, r_.weights, grad_columns_, r_.height(), field, rows, begin, count);
    for (int m = begin; m < begin + count; m += LANES) {
      const int some = std::min(LANES, begin + count - m);
      field.add_to_totals(m, sum_tokens<true>(v, r_.weights, rows, m, some, minus_dot_), some);
    }
  }
  // Some features of lanes [M][tokens] (+)= field.sum times lanes [Dv][tokens], for a section of the tokens.
  template <bool ADD>
  void multiply_lanes(const Field& field, const float* lanes, Seen tokens, int begin, int count, float* to) const {
    const Panels sums = panels(field.sum + begin * PANEL, v.M);
    each_panel_of(tokens, [&](int t, int some) {
      const float* right = lanes + long(t / PANEL) * v.Dv * PANEL + t % PANEL;
      float* result = to + (long(t / PANEL) * v.M + begin) * PANEL + t % PANEL;
      if (some > LANES)
        multiply_panel<ADD>(count, v.Dv, sums, right, result, PANEL);
      else
        multiply_half_panel<ADD>(count, v.Dv, sums, right, result, PANEL);
    });
  }
  void copy_totals(const Field& field, Seen tokens, int begin, int count, float* to) const {
    for (int t = tokens.from; t < tokens.to; t += LANES)
      std::copy(field.total + begin, field.total + begin + count, to + t / LANES * v.M + begin);
  }
  void add_totals(const Field& field, Seen tokens, int begin, int count, float* to) const {
    for (int t = tokens.from; t < tokens.to; t += LANES)
      for (int m = begin; m < begin + count; ++m) to[t / LANES * v.M + m] += field.total[m];
  }

  void give_queries(int group) {
    float* to = window_.q + group * window_.tokens * v.D;
    give_rows(window_.add, dx_, padded(v.D), r_.count, v.D, v.p.root, r_.token, v.p.length, to, window_.first);
  }

  // What the rows say to the field.
  SUBQUAD_STAGE void add_to_field() {
    const Right g_columns{grad_columns_, r_.height() * PANEL};
    add_product(v.M, v.Dv, int(r_.height()), panels(r_.weights, v.M), g_columns, grad_.sums_from(v, 0));
    for (int m = 0; m < v.M; m += LANES) {
      const int some = std::min(LANES, v.M - m);
      Vec sums[LANES] = {};
      for (int i = 0; i < some; ++i)
        for (int t = 0; t < r_.height(); t += LANES)
          sums[i] += load(r_.weights + (long(t / PANEL) * v.M + m + i) * PANEL + t % PANEL) * load(minus_dot_ + t);
      grad_.add_to_totals(m, sums_across(sums), some);
    }
  }

  void exact_rows() {
    float kept[TILE];
    std::copy(r_.exact, r_.exact + r_.height(), kept);  // the logits' maxima are written there
    near_.exact.logits(v, r_);
    std::copy(kept, kept + r_.height(), r_.exact);
    near_.exact.weights(v, r_);
    near_.exact.backward(v, r_, grad_lanes_, grad_columns_, minus_dot_, dx_);
  }

  // The gradient of the scores of rows in panel j, as [rows][keys].
  void transpose_scores(const float* dscores, Seen keys, int j) {
    const int seen = keys.to - keys.from;
    for (int s = 0; s < padded(seen); s += LANES)
      for (int i = 0; i < PANEL; i += LANES) {
        Vec square[LANES] = {};
        for (int e = 0; e < LANES && s + e < seen; ++e) square[e] = load(dscores + (s + e) * PANEL + i);
        transpose(square);
        const int first = keys.from + s;
        float* to = dscores_transposed_ + (first / PANEL * padded(TILE) + j * PANEL + i) * PANEL + first % PANEL;
        for (int e = 0; e < LANES; ++e) store(to + e * PANEL, square[e]);
      }
  }

  // What rows and keys of the same block give each other through their features.
  SUBQUAD_STAGE void own_backward(Keys& own, const Fold& fold) {
    const long n = padded(TILE);
    for (int j = 0; j < r_.panel_count; ++j) {
      const Seen keys = triangle_.keys(j, own.count);
      const int seen = keys.to - keys.from;
      const float *weights = r_.weights + long(j) * v.M * PANEL, *features = fold.weights + long(keys.from) * v.M;
      float *scores = scores_ + (j * n + keys.from) * PANEL, *dscores = dscores_ + (j * n + keys.from) * PANEL;
      if (v.tiled())
        each_chunk(v, [&](int begin, int count) {  // both sides stay in the first cache
          const auto multiply = begin ? multiply_panel<true, Transposed> : multiply_panel<false, Transposed>;
          multiply(seen, count, transposed(features + begin * PANEL, v.M), weights + begin * PANEL, scores, PANEL);
        });
      else
        multiply_panel<false>(seen, v.M, transposed(features, v.M), weights, scores, PANEL);
      multiply_panel<false>(seen, v.Dv, panels(own.value_columns + keys.from * PANEL, own.height),
                            grad_lanes_ + long(j) * v.Dv * PANEL, dscores, PANEL);
      for (int s = 0; s < seen; ++s) {
        float *score = scores + s * PANEL, *grad = dscores + s * PANEL;
        for (int i = 0; i < PANEL; i += LANES) store(grad + i, load(grad + i) + load(minus_dot_ + j * PANEL + i));
        triangle_.hide(score, keys.from + s, j), triangle_.hide(grad, keys.from + s, j);
      }
      std::fill(scores + seen * PANEL, scores + (padded(keys.to) - keys.from) * PANEL, 0.0f);  // keys of the last panel
      transpose_scores(dscores, keys, j);
      multiply_panel<true>(v.M, seen, panels(features, v.M), dscores, dlogs_ + long(j) * v.M * PANEL, PANEL);
    }
    for (int s = 0; s < own.count; s += PANEL) {
      const auto sees = [&](int j) {
        const Seen keys = triangle_.keys(j, own.count);
        return keys.from <= s && keys.to > s;
      };
      int j = 0, end = r_.panel_count;  // panels of rows before `j` and from `end` on do not see these keys
      while (j < end && !sees(j)) ++j;
      while (end > j && !sees(end - 1)) --end;
      const int rest = (end - j) * PANEL;
      if (!rest) continue;
      add_product(v.M, PANEL, rest, panels(r_.weights + long(j) * v.M * PANEL, v.M),
                  {dscores_transposed_ + (s / PANEL * n + j * PANEL) * PANEL, 0},
                  in_panels(key_dlogs_ + long(s / PANEL) * v.M * PANEL, v.M));
      add_product(std::min(PANEL, own.count - s), v.Dv, rest, panels(scores_ + (j * n + s) * PANEL, n),
                  {grad_columns_ + j * PANEL * PANEL, r_.height() * PANEL}, in_rows(own.value_grad + s * v.height, v.height));
    }
  }

  View v;
  const Backward& io_;
  Field grad_, work_{}, read_{};
  GradientWindow window_;
  Rows r_;
  Neighbours near_;  // collects gradients
  Keys refolded_;       // does not: runs ahead when a segment is folded once more
  Triangle triangle_ = Triangle::of(v, false);
  std::vector<Field> states_;
  std::vector<Fold> folds_;
  std::vector<char> in_parts_;  // whether a block of several near blocks is done one near block after the other
  MapGradients map_{};
  float *grad_lanes_, *grad_columns_, *minus_dot_, *centred_dot_, *lows_, *dlogs_, *key_dlogs_, *fold_total_, *scratch_, *dx_;
  float *scores_ = nullptr, *dscores_ = nullptr, *dscores_transposed_ = nullptr;
  float *section_values_ = nullptr, *row_totals_ = nullptr, *key_totals_ = nullptr;  // the totals for each vector of tokens
  const float* values_ = nullptr;  // of keys that are folded, less the centre
  Field section_state_{};          // some features of the field, or of its gradient, between sections
  float largest_[TILE];
  Stage grad_stage_, out_stage_;
};

}  // namespace subquad
