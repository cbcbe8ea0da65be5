// The forward of whole heads, and of slices of their features, whose partial results are merged. Letters as in api.hpp.
#pragma once
#include "forward.hpp"
#include "passes.hpp"

namespace subquad {

// Tokens [first, first + count) of every slice, until they are merged; there is room for `tokens`.
struct Parts {
  Buffer out, norm, low;
  long first = 0, count = 0, tokens = 0;
};

// Before block i of a pass whose field began at block `begun`; slices choose together, when they meet.
inline void recentre_before(const View& v, const Pass& pass, long i, long begun, Field field) {
  const long step = v.p.blocks_per_segment, passed = i - begun;
  if (v.p.slices > 1 || pass.kind == Pass::SCATTER || pass.kind == Pass::EXACT || passed % step) return;
  if (centre_is_due((passed - step) * v.p.block, passed * v.p.block)) recentre(&v, &field, 1);
}

inline void visit(const View& v, const Pass& pass, long from, long to, Field field, const Output& output,
                  const Forward& f, long begun = 0) {
  ForwardTask task(v, field, output);
  for (long i = from; i < to; ++i) {
    recentre_before(v, pass, i, begun, field);
    const bool keeps_border = f.borders_sum && pass.kind != Pass::GATHER && pass.kind != Pass::SCATTER;
    if (keeps_border && i % v.p.blocks_per_segment == 0)
      field.write_border(v, f.borders_max, f.borders_sum, pass.first_border + i / v.p.blocks_per_segment);
    switch (pass.kind) {
      case Pass::ALONG: task.along(pass.block(i)); break;
      case Pass::BACK: task.back(pass.block(i)); break;
      case Pass::OWN: task.own(pass.block(i)); break;
      case Pass::GATHER: task.gather(pass.block(i)); break;
      case Pass::SCATTER: task.scatter(pass.block(i)); break;
      case Pass::EXACT: task.exact(pass.block(i)); break;
    }
  }
  if (to < pass.blocks) return;
  if (pass.kind == Pass::GATHER && f.borders_sum) field.write_border(v, f.borders_max, f.borders_sum, 0);
  if (f.far_sum && v.p.causal) field.write_state(v, f.far_max, f.far_sum);
}

inline Output whole_output(const View& v, const Forward& f, bool merge, bool last) {
  const long heads = v.b * v.p.key_heads * v.p.groups + v.query_head(0);
  const int norms = Output::norms_of(v);
  const long rows = heads * v.p.length;
  int8_t* low = f.low ? f.low + rows * v.Dv : nullptr;
  return {f.out + rows * v.Dv, f.normaliser + rows * norms, low, 0, v.p.length, norms, merge, last};
}

// Asks for the pages of some tokens' rows, just before they are written: what the system clears stays in the cache.
inline void touch_rows(const View& v, const Output& output, long begin, long end) {
  for (int group = 0; group < v.p.groups; ++group) touch_pages(output.out_row(v, group, begin), (end - begin) * v.Dv);
}

inline void start_field(const View& v, const Pass& pass, Field& field) {
  if (pass.kind == Pass::BACK)
    field.clear(v);
  else if (pass.kind != Pass::SCATTER && pass.kind != Pass::EXACT)
    field.begin(v);
}

// One slice: nothing to merge.
inline void forward_alone(const View& v, const Passes& passes, const Forward& f) {
  pool().reset();
  Field field = Field::running(v, pool().take(Field::running_size(v)));
  touch_rows(v, whole_output(v, f, false, false), 0, v.p.length);
  for (int i = 0; i < passes.count; ++i) {
    const Pass& pass = passes.pass[i];
    start_field(v, pass, field);
    visit(v, pass, 0, pass.blocks, field, whole_output(v, f, pass.kind == Pass::BACK, i + 1 == passes.count), f);
  }
}

// Fields of all tasks, which outlive the portions that read and write them; one of them at a time in a thread.
class SharedFields {
 public:
  explicit SharedFields(const Problem& p) : size_(lines(Field::running_size(p, padded(p.value_dim), p.num_features))) {
    call_pool().reset();
    memory_ = call_pool().take(task_count(p) * size_);
  }
  Field of(const View& v, long task) const { return Field::running(v, memory_ + task * size_); }

 private:
  static long lines(long count) { return (count + 15) / 16 * 16; }  // no two fields share a line of a cache

  long size_;
  float* memory_;
};

// Heads in portions: any thread may go on where another stopped.
inline void forward_in_portions(const Problem& p, const Passes& passes, const Forward& f) {
  const std::vector<Portion> portions = portions_of(p, passes);
  const SharedFields fields(p);
  each_step(p.threads, task_count(p), long(portions.size()), [&](long task, long i) {
    const Portion& portion = portions[i];
    const Pass& pass = passes.pass[portion.pass];
    const View v(p, task);
    pool().reset();
    Field field = fields.of(v, task);
    if (portion.from == 0) start_field(v, pass, field);
    const Output output = whole_output(v, f, pass.kind == Pass::BACK, portion.pass + 1 == passes.count);
    if (pass.kind != Pass::GATHER && pass.kind != Pass::BACK)
      touch_rows(v, output, portion.from * p.block, std::min(portion.to * p.block, p.length));
    visit(v, pass, portion.from, portion.to, field, output, f);
  });
}

// The first slice writes to the output, where the others are added.
inline Output part_output(const View& v, const Forward& f, const Parts& parts, bool merge) {
  if (v.slice == 0) return whole_output(v, f, merge, false);
  const int norms = Output::norms_of(v);
  const long rows = (v.sequence() * (v.p.slices - 1) + v.slice - 1) * v.p.groups * parts.tokens;
  int8_t* low = f.low ? reinterpret_cast<int8_t*>(parts.low.get()) + rows * v.Dv : nullptr;
  return {parts.out.get() + rows * v.Dv, parts.norm.get() + rows * norms, low, parts.first, parts.tokens, norms, false,
          false};
}

// All slices' parts of some rows of one key head into the output; each task does its share of the rows.
inline void merge_parts(const Problem& p, const Forward& f, const Parts& parts, long task, bool last) {
  const View v(p, task);
  const Output to = whole_output(v, f, false, last);
  const long count = std::min(parts.count, long(p.length) - parts.first);
  const long begin = parts.first + count * v.slice / p.slices, end = parts.first + count * (v.slice + 1) / p.slices;
  pool().reset();
  const Lows lows = Lows::allocate(v);
  for (int slice = 1; slice < p.slices; ++slice) {
    const Output part = part_output(View(p, task - v.slice + slice), f, parts, false);
    for (int group = 0; group < p.groups; ++group)
      for (long t = begin; t < end; ++t) {
        float* norm = to.norm_row(group, t);
        merge_row(v, part.row(v, group, t), to.row(v, group, t), lows);
        if (last && slice + 1 == p.slices && norm[0] == -INFINITE) norm[0] = norm[1] = INFINITE;
      }
  }
}

// What the slices of a head agree on, where they meet.
inline void recentre_slices(const Problem& p, const SharedFields& fields, long sequence) {
  std::vector<View> views;
  std::vector<Field> own;
  for (long task = sequence * p.slices; task < (sequence + 1) * p.slices; ++task) {
    views.emplace_back(p, task);
    own.push_back(fields.of(views.back(), task));
  }
  recentre(views.data(), own.data(), p.slices);
}

inline void forward_in_slices(const Problem& p, const Passes& passes, const Forward& f) {
  const long tasks = task_count(p);
  const SharedFields fields(p);
  Parts parts;
  for (int i = 0; i < passes.count; ++i) {
    const Pass& pass = passes.pass[i];
    const long step = blocks_per_chunk(p, pass);
    const bool reads = pass.kind != Pass::GATHER, merge = pass.kind == Pass::BACK, last = i + 1 == passes.count;
    parts.tokens = step * p.block;
    if (reads && !parts.out) {
      const long rows = tasks / p.slices * (p.slices - 1) * p.groups * parts.tokens;
      parts.out = new_buffer(rows * p.value_dim);
      parts.norm = new_buffer(rows * 2);
      if (f.low) parts.low = new_buffer(rows * p.value_dim / 4 + 1);
    }
    for (long from = 0; from < pass.blocks; from += step) {
      const long to = std::min(from + step, pass.blocks);
      parts.first = std::min(pass.block(from), pass.block(to - 1)) * p.block, parts.count = (to - from) * p.block;
      each_task(p.threads, tasks, [&](long task) {
        const View v(p, task);
        pool().reset();
        Field field = fields.of(v, task);
        if (from == 0) start_field(v, pass, field);
        visit(v, pass, from, to, field, reads ? part_output(v, f, parts, merge) : Output{}, f);
      });
      if (reads) each_task(p.threads, tasks, [&](long task) { merge_parts(p, f, parts, task, last); });
      if (pass.kind != Pass::SCATTER && pass.kind != Pass::EXACT && centre_is_due(from * p.block, to * p.block))
        each_task(p.threads, tasks / p.slices, [&](long sequence) { recentre_slices(p, fields, sequence); });
    }
  }
}

}  // namespace subquad
