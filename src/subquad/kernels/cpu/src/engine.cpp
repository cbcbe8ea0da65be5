// The whole engine for one kind of machine: compiled once for each, into a library of its own, so that not even the
// standard library's templates are shared between code for different machines.
#include "choice.hpp"
#include "convolution.hpp"
#include "sparse.hpp"
#include "step.hpp"
#include "stretches.hpp"

namespace subquad {

// Heads in parallel, few of them in portions; fewer than threads: slices of their features or stretches of their tokens.
static void forward(const Problem& p, const Forward& f) {
  const Passes passes = passes_of(p);
  ask_for_large_pages(f.out, long(p.batch) * p.key_heads * p.groups * p.length * p.value_dim);
  if (p.slices > 1) return forward_in_slices(p, passes, f);
  if (p.stretches > 1) return forward_in_stretches(p, passes, f);
  if (!heads_are_many(p)) return forward_in_portions(p, passes, f);
  each_task(p.threads, task_count(p), [&](long task) { forward_alone(View(p, task), passes, f); });
}

static void backward(const Problem& p, const Backward& io) {
  const Passes passes = passes_of(p);
  open_gradients(p, io);
  if (p.slices > 1) return backward_in_slices(p, passes, io);
  if (p.stretches > 1) return backward_in_stretches(p, passes, io);
  if (!heads_are_many(p)) return backward_in_portions(p, passes, io);
  each_task(p.threads, task_count(p), [&](long task) { backward_alone(View(p, task), passes, io); });
}

}  // namespace subquad

#define SUBQUAD_EXPORT extern "C" __attribute__((visibility("default")))

// What it was made from: Python does not use a library whose sources have changed since.
SUBQUAD_EXPORT const char* subquad_sources() { return SUBQUAD_SOURCES; }
// Sizes of the structures, so that Python can refuse a library that is not its own.
SUBQUAD_EXPORT int64_t subquad_sizes(int which) {
  const int64_t sizes[] = {sizeof(Problem), sizeof(Forward), sizeof(Backward), sizeof(Step),
                           sizeof(Convolution), sizeof(ConvolutionStep), sizeof(Sparse), sizeof(Choice)};
  return sizes[which];
}

// Whether results are to have large pages, from now on.
SUBQUAD_EXPORT void subquad_use_large_pages(int32_t wanted) { subquad::large_pages() = wanted != 0; }

// 0, or what went wrong: an exception must not reach Python's C code.
enum Status : int32_t { DONE = 0, NO_MEMORY = 1, FAILED = 2 };
template <class Work>
static int32_t guarded(Work work) noexcept {
  try {
    work();
    return DONE;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  } catch (...) {
    return FAILED;
  }
}
SUBQUAD_EXPORT int32_t subquad_forward(const Problem* p, const Forward* f) {
  return guarded([&] { subquad::forward(*p, *f); });
}
SUBQUAD_EXPORT int32_t subquad_backward(const Problem* p, const Backward* b) {
  return guarded([&] { subquad::backward(*p, *b); });
}
SUBQUAD_EXPORT int32_t subquad_step(const Problem* p, const Step* s) {
  return guarded([&] { subquad::step(*p, *s); });
}
SUBQUAD_EXPORT int32_t subquad_convolve(const Convolution* c) {
  return guarded([&] { subquad::convolve(*c); });
}
SUBQUAD_EXPORT int32_t subquad_convolve_step(const ConvolutionStep* c) {
  return guarded([&] { subquad::convolve_step(*c); });
}
// Forward, or, where there is a gradient of the output, gradients.
SUBQUAD_EXPORT int32_t subquad_sparse(const Sparse* s) {
  return guarded([&] { s->grad_out ? subquad::sparse_backward(*s) : subquad::sparse_forward(*s); });
}
SUBQUAD_EXPORT int32_t subquad_choose(const Choice* c) {
  return guarded([&] { subquad::choose(*c); });
}
