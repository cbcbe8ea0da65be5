// Which pages of keys queries choose, by bounds of their products; what that means is said in kernels/sparse/choice.py.
// Letters as in api.hpp, and N lines of P pages, G query heads per line, W pages that a query chooses.
#pragma once
#include "tokens.hpp"
#include "workers.hpp"

namespace subquad {

typedef double DVec __attribute__((vector_size(SUBQUAD_VECTOR_BYTES), aligned(8), may_alias));
typedef int64_t LVec __attribute__((vector_size(SUBQUAD_VECTOR_BYTES), aligned(8), may_alias));
constexpr int DLANES = SUBQUAD_VECTOR_BYTES / 8;
constexpr int BOUNDS = 4 * DLANES;  // pages whose bounds are summed side by side

inline DVec load(const double* p) { return *reinterpret_cast<const DVec*>(p); }
inline void store(double* p, DVec v) { *reinterpret_cast<DVec*>(p) = v; }
inline double* as_doubles(float* p) { return reinterpret_cast<double*>(p); }

// The extremes of one line, in panels of BOUNDS pages: [panels][D][largest, smallest][BOUNDS].
class PageExtremes {
 public:
  explicit PageExtremes(const Choice& c)
      : c(c), count_((c.pages + BOUNDS - 1) / BOUNDS), size_(2 * c.head_dim * BOUNDS),
        numbers_(new_buffer(2 * c.lines * count_ * size_)) {
    each_task(c.threads, c.lines * count_, [&](long task) { fill(task / count_, task % count_); });
  }
  const double* at(long line, long panel) const { return as_doubles(numbers_.get()) + (line * count_ + panel) * size_; }

 private:
  void fill(long line, long panel) {
    double* to = as_doubles(numbers_.get()) + (line * count_ + panel) * size_;
    for (long i = 0; i < BOUNDS; ++i) {
      const long page = std::min<long>(panel * BOUNDS + i, c.pages - 1);  // bounds behind the last are not looked at
      const long from = (line * c.pages + page) * c.head_dim;
      for (long d = 0; d < c.head_dim; ++d) {
        to[2 * d * BOUNDS + i] = c.high[from + d];
        to[(2 * d + 1) * BOUNDS + i] = c.low[from + d];
      }
    }
  }
  const Choice& c;
  const long count_, size_;
  Buffer numbers_;
};

// Some queries of one head, next to each other.
class Choosers {
 public:
  static constexpr long QUERIES = 16;

  // Without panels, which are not worth making for few queries, extremes are read where they lie.
  Choosers(const Choice& c, const PageExtremes* panels) : c(c), panels_(panels), room_((c.pages + BOUNDS - 1) / BOUNDS * BOUNDS) {
    x_ = as_doubles(pool().take(2 * QUERIES * c.head_dim));
    bounds_ = as_doubles(pool().take(2 * QUERIES * room_));
    best_ = as_doubles(pool().take(2 * c.width));
    halves_.resize(QUERIES * c.head_dim);
  }

  // Queries first .. first + count - 1 of a head of a line.
  void choose(long line, long group, long first, long count) {
    const long token = (line * c.groups + group) * c.length + first;
    long wanted[QUERIES], most = 0;
    for (long i = 0; i < count; ++i) {
      const int64_t candidates = c.candidates[line / (c.lines / c.rows) * c.length + first + i];
      wanted[i] = long(std::min<int64_t>(candidates, c.pages));  // below 0: as 0
      if (wanted[i] <= c.width) continue;
      read(i, c.q + (token + i) * c.head_dim);
      most = std::max(most, wanted[i]);
    }
    for (long panel = 0; panel * BOUNDS < most; ++panel)
      for (long i = 0; i < count; ++i)
        if (wanted[i] > c.width && wanted[i] > panel * BOUNDS) bound(i, line, panel, c.q + (token + i) * c.head_dim);
    for (long i = 0; i < count; ++i) {
      int64_t* chosen = c.chosen + (token + i) * c.width;
      if (wanted[i] > c.width)
        take_best(bounds_ + i * room_, wanted[i], chosen);
      else
        for (long w = 0; w < c.width; ++w) chosen[w] = w < wanted[i] ? w : c.pages;
    }
  }

 private:
  // A query, and where in a panel the extremes are that its numbers want: the smallest if they are negative.
  void read(long i, const float* q) {
    for (long d = 0; d < c.head_dim; ++d) {
      x_[i * c.head_dim + d] = q[d];
      halves_[i * c.head_dim + d] = (2 * d + (q[d] < 0)) * BOUNDS;
    }
  }
  void bound(long i, long line, long panel, const float* q) const {
    double* to = bounds_ + i * room_ + panel * BOUNDS;
    if (panels_) return sum_panel(i, panels_->at(line, panel), to);
    for (long page = panel * BOUNDS; page < std::min<long>((panel + 1) * BOUNDS, c.pages); ++page) *to++ = sum(i, line, page, q);
  }
  static DVec largest_if_nan(DVec x) { return x == x ? x : std::numeric_limits<double>::infinity() - DVec{}; }

  // All pages of a panel at once.
  SUBQUAD_STAGE void sum_panel(long i, const double* panel, double* to) const {
    const double* x = x_ + i * c.head_dim;
    const long* halves = halves_.data() + i * c.head_dim;
    DVec sums[4] = {};
    for (long d = 0; d < c.head_dim; ++d) {
      const double* extremes = panel + halves[d];
      const DVec factor = x[d] - DVec{};
      for (int j = 0; j < 4; ++j) sums[j] += factor * load(extremes + j * DLANES);
    }
    for (int j = 0; j < 4; ++j) store(to + j * DLANES, largest_if_nan(sums[j]));
  }
  // One page.
  double sum(long i, long line, long page, const float* q) const {
    const double* x = x_ + i * c.head_dim;
    const float* high = c.high + (line * c.pages + page) * c.head_dim;
    const float* low = c.low + (line * c.pages + page) * c.head_dim;
    DVec sums{};
    long d = 0;
    for (; d + DLANES <= c.head_dim; d += DLANES) {
      const DVec factor = load(x + d), largest = doubles(high + d), smallest = doubles(low + d);
      sums += factor * (factor < DVec{} ? smallest : largest);
    }
    double all = 0;
    for (int j = 0; j < DLANES; ++j) all += sums[j];
    for (; d < c.head_dim; ++d) all += x[d] * double(q[d] < 0 ? low[d] : high[d]);
    return all == all ? all : std::numeric_limits<double>::infinity();
  }
  static DVec doubles(const float* from) {
    typedef float Half __attribute__((vector_size(SUBQUAD_VECTOR_BYTES / 2), aligned(4), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Half*>(from), DVec);
  }

  // The best so far are sorted; of equal ones the earlier stays in front.
  SUBQUAD_STAGE void take_best(const double* bounds, long count, int64_t* chosen) const {
    long kept = 0, page = 0;
    const auto insert = [&](long p) {
      long at = kept < c.width ? kept++ : kept - 1;
      for (; at > 0 && best_[at - 1] < bounds[p]; --at) best_[at] = best_[at - 1], chosen[at] = chosen[at - 1];
      best_[at] = bounds[p], chosen[at] = p;
    };
    for (; page < c.width; ++page) insert(page);
    for (; page + BOUNDS <= count; page += BOUNDS)
      if (any_above(bounds + page, best_[c.width - 1]))
        for (long p = page; p < page + BOUNDS; ++p)
          if (bounds[p] > best_[c.width - 1]) insert(p);
    for (; page < count; ++page)
      if (bounds[page] > best_[c.width - 1]) insert(page);
  }
  static bool any_above(const double* bounds, double limit) {
    const DVec limits = limit - DVec{};
    LVec above{};
    for (int j = 0; j < 4; ++j) above |= load(bounds + j * DLANES) > limits;
    int64_t found = 0;
    for (int i = 0; i < DLANES; ++i) found |= above[i];
    return found != 0;
  }

  const Choice& c;
  const PageExtremes* panels_;
  const long room_;             // bounds of a query, whole panels
  double* x_ = nullptr;         // [QUERIES][D]
  double* bounds_ = nullptr;    // [QUERIES][P]
  double* best_ = nullptr;      // [W] largest first
  std::vector<long> halves_;    // [QUERIES][D]
};

inline void choose(const Choice& c) {
  constexpr long FEW = 16;  // queries of a line for which panels are not worth making
  const std::unique_ptr<PageExtremes> panels(c.groups * c.length > FEW ? new PageExtremes(c) : nullptr);
  const long tiles = (c.length + Choosers::QUERIES - 1) / Choosers::QUERIES, heads = c.lines * c.groups;
  const long step = std::max(1L, long((1 << 21) / (double(c.pages) * double(c.head_dim) * Choosers::QUERIES)));
  const long tasks = (tiles + step - 1) / step;
  each_task(c.threads, heads * tasks, [&](long task) {
    pool().reset();
    Choosers queries(c, panels.get());
    const long head = task / tasks, end = std::min(tiles, (task % tasks + 1) * step);
    for (long tile = task % tasks * step; tile < end; ++tile) {
      const long first = tile * Choosers::QUERIES;
      queries.choose(head / c.groups, head % c.groups, first, std::min<long>(Choosers::QUERIES, c.length - first));
    }
  });
}

}  // namespace subquad
