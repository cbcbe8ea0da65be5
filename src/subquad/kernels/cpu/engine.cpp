// The whole engine for one kind of machine: compiled once for each, into a library of its own, so that not even the
// standard library's templates are shared between code for different machines.
#include "step.hpp"
#include "stretches.hpp"

namespace subquad {

// Heads in parallel; where they are too few, slices of their features or stretches of their tokens.
static void forward(const Problem& p, const Forward& f) {
  const Passes passes = passes_of(p);
  if (p.slices > 1) return forward_in_slices(p, passes, f);
  if (p.stretches > 1) return forward_in_stretches(p, passes, f);
#pragma omp parallel for schedule(dynamic) num_threads(p.threads)
  for (long task = 0; task < task_count(p); ++task) forward_alone(View(p, task), passes, f);
}

static void backward(const Problem& p, const Backward& saved) {
  const Passes passes = passes_of(p);
  open_gradients(p, saved);
  if (p.slices > 1) return backward_in_slices(p, passes, saved);
  if (p.stretches > 1) return backward_in_stretches(p, passes, saved);
#pragma omp parallel for schedule(dynamic) num_threads(p.threads)
  for (long task = 0; task < task_count(p); ++task) backward_alone(View(p, task), passes, saved);
}

}  // namespace subquad

#define SUBQUAD_EXPORT extern "C" __attribute__((visibility("default")))

// What it was made from: Python does not use a library whose sources have changed since.
SUBQUAD_EXPORT const char* subquad_sources() { return SUBQUAD_SOURCES; }
// Sizes of the structures, so that Python can refuse a library that is not its own.
SUBQUAD_EXPORT int64_t subquad_sizes(int which) {
  const int64_t sizes[] = {sizeof(Problem), sizeof(Forward), sizeof(Backward), sizeof(Step)};
  return sizes[which];
}
SUBQUAD_EXPORT int subquad_has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}
SUBQUAD_EXPORT void subquad_forward(const Problem* p, const Forward* f) { subquad::forward(*p, *f); }
SUBQUAD_EXPORT void subquad_backward(const Problem* p, const Backward* b) { subquad::backward(*p, *b); }
SUBQUAD_EXPORT void subquad_step(const Problem* p, const Step* s) { subquad::step(*p, *s); }
