// Which task takes which blocks in the backward, and how their sums are merged; what a task computes is in backward.hpp.
// Letters as in api.hpp.
#pragma once
#include "backward.hpp"
#include "run_forward.hpp"

namespace subquad {

// Blocks [from, to) of a pass, in the order of the backward.
inline void visit_back(BackwardTask& task, const View& v, const Pass& pass, long from, long to) {
  if (pass.kind == Pass::GATHER || pass.kind == Pass::SCATTER) {
    task.open_summary();
    for (long i = from; i < to; ++i) pass.kind == Pass::GATHER ? task.gather(i) : task.scatter(i);
  } else if (pass.kind == Pass::EXACT) {
    for (long i = to - 1; i >= from; --i) task.exact(i);
  } else {
    const long step = v.p.blocks_per_segment;
    for (long i = (to - 1) / step * step; i >= from; i -= step) task.segment(pass, i, std::min(i + step, to));
  }
}

// The gradient that the last state brings; a second sweep begins with none.
inline void start_gradient(const View& v, const Pass& pass, const Backward& io, Field grad) {
  if (pass.kind == Pass::GATHER || pass.kind == Pass::EXACT) return;
  if (v.p.causal && io.grad_last_far_sum)
    grad.read_state(v, nullptr, io.grad_last_far_sum);
  else
    grad.clear(v);
}

// Whether the gradient of one token is a sum, over slices or over two sweeps, or nothing at all, of keys that no query sees.
inline bool accumulates(const Problem& p) {
  return p.slices > 1 || (p.near_blocks && !p.causal) || !p.far;
}

inline GradientWindow whole_window(const View& v, const Backward& io) {
  const long heads = v.b * v.p.key_heads * v.p.groups + v.query_head(0), sequence = v.sequence();
  return {io.dq + heads * v.p.length * v.D, io.dk + sequence * v.p.key_length * v.D,
          io.dv + sequence * v.p.key_length * v.Dv, 0, v.p.length, 0, v.p.key_length, accumulates(v.p)};
}

// Where the portion after this one, which comes before it on the way back, has left gradients of keys already.
inline long met_before(const View& v, const Pass& pass, const Portion& portion) {
  return pass.kind == Pass::ALONG && portion.to < pass.blocks ? v.folded_token(false, portion.to) : GradientWindow::NEVER;
}

inline void backward_alone(const View& v, const Passes& passes, const Backward& io) {
  pool().reset();
  Field grad = Field::running(v, pool().take(Field::running_size(v)));
  for (int i = passes.count - 1; i >= 0; --i) {
    start_gradient(v, passes.pass[i], io, grad);
    BackwardTask task(v, io, grad, whole_window(v, io));
    visit_back(task, v, passes.pass[i], 0, passes.pass[i].blocks);
    task.finish();
  }
  if (v.p.causal && io.dfar_sum) grad.write_state(v, nullptr, io.dfar_sum);
}

// Heads in portions: any thread may go on where another stopped.
inline void backward_in_portions(const Problem& p, const Passes& passes, const Backward& io) {
  const std::vector<Portion> portions = portions_of(p, passes);
  const SharedFields grads(p);
  const long steps = long(portions.size());
  each_step(p.threads, task_count(p), steps, [&](long task, long i) {
    const Portion& portion = portions[steps - 1 - i];
    const Pass& pass = passes.pass[portion.pass];
    const View v(p, task);
    pool().reset();
    Field grad = grads.of(v, task);
    if (portion.to == pass.blocks) start_gradient(v, pass, io, grad);
    GradientWindow window = whole_window(v, io);
    window.keys_met = met_before(v, pass, portion);
    BackwardTask part(v, io, grad, window);
    visit_back(part, v, pass, portion.from, portion.to);
    part.finish();
    if (i + 1 == steps && p.causal && io.dfar_sum) grad.write_state(v, nullptr, io.dfar_sum);
  });
}

// Sums of every slice but the first, which adds to the gradients themselves: for the tokens of a chunk, and for keys up
// to some blocks away from it.
struct Windows {
  Buffer memory;
  long first, tokens, key_first, key_tokens, size;

  Windows(const Problem& p, long chunk_blocks) {
    const long beyond = 2 * View::around(p) + (View::key_offset(p) ? 1 : 0);
    tokens = chunk_blocks * p.block, key_tokens = tokens + beyond * p.block;
    size = tokens * p.groups * p.head_dim + key_tokens * (p.head_dim + p.value_dim);
    memory = new_buffer(task_count(p) / p.slices * (p.slices - 1) * size);
  }
  GradientWindow of(const View& v, int slice) const {
    float* q = memory.get() + (v.sequence() * (v.p.slices - 1) + slice - 1) * size;
    float* k = q + tokens * v.p.groups * v.D;
    return {q, k, k + key_tokens * v.D, first, tokens, key_first, key_tokens, true};
  }
  GradientWindow open(const View& v, const Backward& io) const {
    if (v.slice == 0) return whole_window(v, io);
    const GradientWindow window = of(v, v.slice);
    std::fill(window.q, window.q + size, 0.0f);
    return window;
  }
};

// Adds a task's share of `count` numbers.
inline void add_share(const View& v, float* to, const float* from, long count) {
  const long begin = count * v.slice / v.p.slices, end = count * (v.slice + 1) / v.p.slices;
  for (long i = begin; i < end; ++i) to[i] += from[i];
}

inline void add_windows(const Problem& p, const Windows& windows, const Backward& io, long task) {
  const View v(p, task);
  const GradientWindow to = whole_window(v, io);
  for (int slice = 1; slice < p.slices; ++slice) {
    const GradientWindow from = windows.of(v, slice);
    const long count = std::min(from.tokens, long(p.length) - from.first);
    for (int group = 0; group < p.groups && count > 0; ++group)
      add_share(v, to.q + (group * p.length + from.first) * v.D, from.q + group * from.tokens * v.D, count * v.D);
    const long begin = std::max(0L, from.key_first);
    const long keys = std::min(from.key_first + from.key_tokens, long(p.key_length)) - begin;
    if (keys <= 0) continue;
    add_share(v, to.k + begin * v.D, from.k + (begin - from.key_first) * v.D, keys * v.D);
    add_share(v, to.v + begin * v.Dv, from.v + (begin - from.key_first) * v.Dv, keys * v.Dv);
  }
}

inline void backward_in_slices(const Problem& p, const Passes& passes, const Backward& io) {
  const long tasks = task_count(p);
  const SharedFields grads(p);
  Windows windows(p, blocks_per_chunk(p, passes.pass[0]));
  for (int i = passes.count - 1; i >= 0; --i) {
    const Pass& pass = passes.pass[i];
    const long step = blocks_per_chunk(p, pass), last = (pass.blocks - 1) / step * step;
    for (long from = last; from >= 0; from -= step) {
      const long to = std::min(from + step, pass.blocks);
      windows.first = std::min(pass.block(from), pass.block(to - 1)) * p.block;
      windows.key_first = windows.first - View::around(p) * p.block;
      each_task(p.threads, tasks, [&](long task) {
        const View v(p, task);
        pool().reset();
        Field grad = grads.of(v, task);
        if (from == last) start_gradient(v, pass, io, grad);
        BackwardTask part(v, io, grad, windows.open(v, io));
        visit_back(part, v, pass, from, to);
        part.finish();
        if (from == 0 && p.causal && io.dfar_sum) grad.write_state(v, nullptr, io.dfar_sum);
      });
      each_task(p.threads, tasks, [&](long task) { add_windows(p, windows, io, task); });
    }
  }
}

// Zeros for what tasks add to. Not by torch, whose threads would go on spinning beside ours.
inline void clear_sums(const Problem& p, const Backward& io) {
  const long heads = long(p.batch) * p.key_heads, slices = p.slices * heads;
  const auto clear = [](float* sums, long count) {
    if (sums) std::fill(sums, sums + count, 0.0f);
  };
  clear(io.dsink_k, slices * p.sinks * p.head_dim);
  clear(io.dsink_v, slices * p.sinks * p.value_dim);
  clear(io.dquery, heads * p.num_features * p.head_dim);
  clear(io.dkey, heads * p.num_features * p.head_dim);
  clear(io.dkey_bias, heads * p.num_features);
  clear(io.doffset_weight, slices * p.head_dim);
  clear(io.doffset_bias, slices);
}

// Pages for the gradients of tokens, each thread a part of them; zeros where they are sums.
inline void open_gradients(const Problem& p, const Backward& io) {
  clear_sums(p, io);
  const long heads = long(p.batch) * p.key_heads;
  const long counts[] = {heads * p.groups * p.length * p.head_dim, heads * p.key_length * p.head_dim,
                         heads * p.key_length * p.value_dim};
  float* const all[] = {io.dq, io.dk, io.dv};
  for (int i = 0; i < 3; ++i) ask_for_large_pages(all[i], counts[i]);
  each_task(p.threads, 3 * p.threads, [&](long part) {
    const long count = counts[part % 3], begin = count * (part / 3) / p.threads, end = count * (part / 3 + 1) / p.threads;
    touch_pages(all[part % 3] + begin, end - begin);
    if (accumulates(p)) std::fill(all[part % 3] + begin, all[part % 3] + end, 0.0f);
  });
}

}  // namespace subquad
