// One head of linear attention on all threads: its features have no maxima, so sums over stretches of the sequence can
// be taken apart and put together again.
#pragma once
#include "run_backward.hpp"
#include "run_forward.hpp"

namespace subquad {

constexpr long STRETCHES_PER_THREAD = 4;  // so that a thread that was held up leaves the rest to others
constexpr long BLOCKS_PER_THREAD = 8;    // of a causal forward, prepared before they are read

struct Range {
  long begin, end;
};
// Part i of `count` things, in multiples of `unit`.
inline Range part_of(long count, long unit, long i, long parts) {
  const long units = (count + unit - 1) / unit;
  return {std::min(count, units * i / parts * unit), std::min(count, units * (i + 1) / parts * unit)};
}

// Fields side by side, to be summed up.
class FieldRow {
 public:
  FieldRow(const View& view, long count) : v(view), size_(Field::running_size(v)), memory_(new_buffer(count * size_)) {}
  Field operator[](long i) const { return Field::running(v, memory_.get() + i * size_); }
  float* numbers(long i) const { return memory_.get() + i * size_; }
  long size() const { return size_; }

 private:
  const View& v;
  long size_;
  Buffer memory_;
};

inline void add_numbers(const float* __restrict__ from, float* __restrict__ to, long count) {
  for (long i = 0; i < count; ++i) to[i] += from[i];
}

// Rows of PANEL sums `at` of every field become what `running` held before it, which goes on to hold them all. The fields'
// values are as they are, those of `running` relative to its centre.
inline void sums_before(const View& v, const FieldRow& fields, Range at, long count, const Field& running) {
  for (long i = 0; i < count; ++i) {
    const Field own = fields[i];
    for (long panel = at.begin / v.M; panel * v.M < at.end; ++panel) {
      const Vec low = load(running.centre + panel * PANEL), high = load(running.centre + panel * PANEL + LANES);
      const long first = std::max(at.begin, panel * v.M), end = std::min(at.end, (panel + 1) * v.M);
      for (long row = first; row < end; ++row) {
        const Vec weight = splat(own.total[row - panel * v.M]);
        float *sum = running.sum + row * PANEL, *more = own.sum + row * PANEL;
        const Vec a = load(sum), b = load(sum + LANES);
        running.add(row * PANEL, load(more) - weight * low);
        running.add(row * PANEL + LANES, load(more + LANES) - weight * high);
        store(more, a), store(more + LANES, b);
      }
    }
  }
}
inline void totals_before(const View& v, const FieldRow& fields, long count, Field& running) {
  for (long i = 0; i < count; ++i)
    for (int m = 0; m < v.M; m += LANES) {
      const int some = std::min(LANES, v.M - m);
      const Vec before = load_some(running.total + m, some);
      running.add_to_totals(m, load_some(fields[i].total + m, some), some);
      store_some(fields[i].total + m, before, some);
    }
}

// Not causal ----------------------------------------------------------------------------------------------------------

inline void forward_summary(const View& v, const Passes& passes, const Forward& f) {
  const Pass &gather = passes.pass[0], &scatter = passes.pass[1];
  const long parts = v.p.stretches * STRETCHES_PER_THREAD;
  FieldRow fields(v, parts);
  const Forward nothing_kept{};
  each_task(v.p.threads, parts, [&](long i) {
    pool().reset();
    Field own = fields[i];
    i == 0 ? own.begin(v) : own.clear(v);
    const Range blocks = part_of(gather.blocks, 1, i, parts);
    visit(v, gather, blocks.begin, blocks.end, own, Output{}, nothing_kept, blocks.begin);
  });
  for (long i = 1; i < parts; ++i) {
    Field own = fields[i];
    own.move_centre(v, fields[0].centre);
    add_numbers(fields.numbers(i), fields.numbers(0), Field::sums(v));
  }
  if (f.borders_sum) fields[0].write_border(v, f.borders_max, f.borders_sum, 0);
  each_task(v.p.threads, parts, [&](long i) {
    pool().reset();
    const Range blocks = part_of(scatter.blocks, 1, i, parts);
    visit(v, scatter, blocks.begin, blocks.end, fields[0], whole_output(v, f, false, true), f);
  });
}

// Calls `work(task, i)` for every stretch with a task of its own. What tasks add to the same sums, they add in order, so
// that results do not depend on which thread was first.
template <class Work>
inline void each_stretch_back(const View& v, const Backward& io, const FieldRow& grads, long parts, Work work) {
  Turns turns;
  each_task(v.p.threads, parts, [&](long i) {
    Turns::Turn turn(turns, i);
    pool().reset();
    BackwardTask task(v, io, grads[i], whole_window(v, io));
    work(task, i);
    turn.wait();
    task.finish();
  });
}

inline void backward_summary(const View& v, const Passes& passes, const Backward& io) {
  const long parts = v.p.stretches * STRETCHES_PER_THREAD;
  FieldRow grads(v, parts);
  for (long i = 0; i < parts; ++i) grads[i].clear(v);
  const auto visit_part = [&](const Pass& pass) {
    each_stretch_back(v, io, grads, parts, [&](BackwardTask& task, long i) {
      const Range blocks = part_of(pass.blocks, 1, i, parts);
      visit_back(task, v, pass, blocks.begin, blocks.end);
    });
  };
  visit_part(passes.pass[1]);
  for (long i = 1; i < parts; ++i) add_numbers(grads.numbers(i), grads.numbers(0), Field::sums(v));
  for (long i = 1; i < parts; ++i) grads[i].copy_from(v, grads[0]);
  visit_part(passes.pass[0]);
}

// Causal --------------------------------------------------------------------------------------------------------------

struct ReadyBlock {
  Keys keys;
  Fold fold;
};

// Many blocks at a time: their keys first, then what lies before each of them, then their queries. Every worker keeps its
// scratch from one step to the next.
inline void forward_causal(const View& v, const Pass& pass, const Forward& f) {
  const long workers = v.p.threads, most = std::min(pass.blocks, workers * BLOCKS_PER_THREAD);
  pool().reset();
  std::vector<ReadyBlock> ready;
  for (long i = 0; i < most; ++i) ready.push_back({Keys::allocate(v, TILE, true, false, false), Fold::allocate(v, TILE)});
  FieldRow fields(v, most + 1);
  Field running = fields[most];
  running.begin(v);
  std::vector<ForwardTask> tasks;
  tasks.reserve(workers);
  for (long i = 0; i < workers; ++i) tasks.emplace_back(v, running, whole_output(v, f, false, true));
  for (long from = 0; from < pass.blocks; from += most) {
    const long count = std::min(most, pass.blocks - from);
    if (centre_is_due((from - most) * v.p.block, from * v.p.block)) recentre(&v, &running, 1);
    const auto each_block = [&](auto work) {
      each_task(workers, workers, [&](long worker) {
        const Range own = part_of(count, 1, worker, workers);
        for (long i = own.begin; i < own.end; ++i) work(tasks[worker], i);
      });
    };
    each_block([&](ForwardTask& task, long i) { task.prepare(from + i, ready[i].keys, ready[i].fold, fields[i]); });
    each_task(workers, workers, [&](long worker) {
      sums_before(v, fields, part_of(v.height / PANEL * v.M, 1, worker, workers), count, running);
    });
    totals_before(v, fields, count, running);
    each_block([&](ForwardTask& task, long i) {
      const long segment = (from + i) / v.p.blocks_per_segment;
      Field before = fields[i];
      before.centre = running.centre;
      if (f.borders_sum && (from + i) % v.p.blocks_per_segment == 0)
        before.write_border(v, f.borders_max, f.borders_sum, pass.first_border + segment);
      task.read_prepared(ready[i].keys, ready[i].fold, before);
    });
  }
  if (f.far_sum) running.write_state(v, f.far_max, f.far_sum);
}

// First what the queries of all stretches but the first say to the keys before them, in smaller pieces; then every
// stretch by itself.
inline void backward_causal(const View& v, const Pass& pass, const Backward& io) {
  const long parts = v.p.stretches, pieces = (parts - 1) * v.p.threads;
  const auto blocks_of = [&](long i) { return part_of(pass.blocks, v.p.blocks_per_segment, i, parts); };
  FieldRow sums(v, pieces), grads(v, parts);
  each_task(v.p.threads, pieces, [&](long i) {
    pool().reset();
    sums[i].clear(v);
    BackwardTask task(v, io, sums[i], whole_window(v, io));
    const Range stretch = blocks_of(1 + i / v.p.threads);
    const Range piece = part_of(stretch.end - stretch.begin, 1, i % v.p.threads, v.p.threads);
    for (long b = piece.begin; b < piece.end; ++b) task.sum_queries(stretch.begin + b);
  });
  start_gradient(v, pass, io, grads[parts - 1]);
  for (long i = parts - 2; i >= 0; --i) {
    grads[i].copy_from(v, grads[i + 1]);
    for (long j = i * v.p.threads; j < (i + 1) * v.p.threads; ++j)
      add_numbers(sums.numbers(j), grads.numbers(i), Field::sums(v));
  }
  each_stretch_back(v, io, grads, parts, [&](BackwardTask& task, long i) {
    visit_back(task, v, pass, blocks_of(i).begin, blocks_of(i).end);
  });
  if (io.dfar_sum) grads[0].write_state(v, nullptr, io.dfar_sum);
}

// All sequences, one after the other ----------------------------------------------------------------------------------

inline void forward_in_stretches(const Problem& p, const Passes& passes, const Forward& f) {
  const long numbers = task_count(p) * p.groups * p.length * p.value_dim;
  each_task(p.threads, p.threads, [&](long i) {
    const Range own = part_of(numbers, 1, i, p.threads);
    touch_pages(f.out + own.begin, own.end - own.begin);
  });
  for (long sequence = 0; sequence < task_count(p); ++sequence) {
    const View v(p, sequence);
    p.causal ? forward_causal(v, passes.pass[0], f) : forward_summary(v, passes, f);
  }
}

inline void backward_in_stretches(const Problem& p, const Passes& passes, const Backward& io) {
  for (long sequence = 0; sequence < task_count(p); ++sequence) {
    const View v(p, sequence);
    p.causal ? backward_causal(v, passes.pass[0], io) : backward_summary(v, passes, io);
  }
}

}  // namespace subquad
