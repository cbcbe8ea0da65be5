// Small matrix products that never repack: C (+)= A B.
//
// "Panels" are the one layout of all matrices [N][n]: columns in groups of PANEL, each group [N][PANEL]. B and C are in
// panels, or C has rows of any stride. A is read one number at a time, so it can be panels or transposed panels.
#pragma once
#include "prefetch.hpp"
#include "simd.hpp"

namespace subquad {

inline constexpr long padded(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

// The left side, A(i, k), as panels [height][..]. Distances known to the compiler become part of the instructions.
struct Panels {
  const float* a;
  long height;
  static constexpr long ROW = PANEL, STEP = 1;  // from A(i, k) to A(i + 1, k) and to A(i, k + 1)
  const float* at(long i) const { return a + i * PANEL; }
  long next() const { return height * PANEL; }  // from one panel of columns to the next
};
// The same for the matrix whose transpose is panels [height][..].
struct Transposed {
  const float* a;
  long height;
  static constexpr long ROW = 1, STEP = PANEL;
  const float* at(long i) const { return a + i / PANEL * height * PANEL + i % PANEL; }
  long next() const { return PANEL * PANEL; }
};
inline Panels panels(const float* a, long height) { return {a, height}; }
inline Transposed transposed(const float* a, long height) { return {a, height}; }

// B: panel j begins at b + j * panel.
struct Right {
  const float* b;
  long panel;
};

// C: rows `row` apart inside a panel, panels `panel` apart. `low` numbers further lies what rounding leaves out of C, if
// that is kept (0: it is not).
struct Result {
  float* c;
  long row, panel, low = 0;
};
inline Result in_panels(float* c, long height) { return {c, PANEL, height * PANEL}; }
inline Result in_rows(float* c, long stride) { return {c, stride, PANEL}; }

// sum += A B for some columns of A and as many rows of a panel of B.
template <int ROWS, class Left>
inline __attribute__((always_inline)) void accumulate(Vec (&sum)[ROWS][2], int count, const float* a, const float* b) {
#pragma GCC unroll 4
  for (int k = 0; k < count; ++k, a += Left::STEP, b += PANEL) {
    const Vec low = load(b), high = load(b + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Vec x = splat(a[i * Left::ROW]);
      sum[i][0] += x * low;
      sum[i][1] += x * high;
    }
  }
}

// high + low + more, where high becomes the sum as a float and low what that leaves out.
inline void add_exactly(Vec& high, Vec& low, Vec more) {
  const Vec large = high, small = low + more, part = (high = large + small) - large;
  low = (large - (high - part)) + (small - part);
}
inline void add_exactly(float* high, float* low, Vec more) {
  Vec sum = load(high), rest = load(low);
  add_exactly(sum, rest, more);
  store(high, sum), store(low, rest);
}

// ROWS x PANEL numbers of C, held in registers. What is there already is added last: a sum over many calls, which grows
// large, then takes one rounding per call, not one per number, and numbers too small for it are summed up first.
template <int ROWS, bool ADD, class Left>
inline __attribute__((always_inline)) void multiply_tile(int depth, const float* a, const Left& A, const float* b,
                                                         float* c, long stride, long low) {
  Vec sum[ROWS][2];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) sum[i][0] = sum[i][1] = Vec{};
  for (; depth >= PANEL; depth -= PANEL, a += A.next(), b += PANEL * PANEL)
    accumulate<ROWS, Left>(sum, PANEL, a, b);
  accumulate<ROWS, Left>(sum, depth, a, b);
  if (ADD && low) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      add_exactly(c + i * stride, c + i * stride + low, sum[i][0]);
      add_exactly(c + i * stride + LANES, c + i * stride + LANES + low, sum[i][1]);
    }
    return;
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    store(c + i * stride, ADD ? load(c + i * stride) + sum[i][0] : sum[i][0]);
    store(c + i * stride + LANES, ADD ? load(c + i * stride + LANES) + sum[i][1] : sum[i][1]);
  }
}

constexpr int TALL = SUBQUAD_VECTOR_BYTES == 64 ? 8 : SUBQUAD_VECTOR_BYTES == 32 ? 6 : 4;  // as registers allow

// Rows [begin, begin + count) of A and C, within one group of PANEL rows, against all panels of B.
template <int ROWS, bool ADD, class Left>
inline void multiply_rows(Prefetcher& next, int i, int panel_count, int depth, const Left& A, const Right& B,
                          const Result& C) {
  next.some();
  for (int j = 0; j < panel_count; ++j)
    multiply_tile<ROWS, ADD>(depth, A.at(i), A, B.b + j * B.panel, C.c + j * C.panel + i * C.row, C.row, C.low);
}

// Rows outside, panels inside: A is read once, and a B of some 16 kB stays in the first cache.
template <bool ADD, class Left>
inline void product(int height, int width, int depth, const Left& A, const Right& B, const Result& C) {
  const int panel_count = (width + PANEL - 1) / PANEL;
  Prefetcher& next = prefetcher();  // a thread's own: to find it takes as long as a small product
  for (int begin = 0; begin < height; begin += PANEL) {
    const int end = begin + PANEL < height ? begin + PANEL : height;
    int i = begin;
    for (; i + TALL <= end; i += TALL) multiply_rows<TALL, ADD>(next, i, panel_count, depth, A, B, C);
    for (; i + 4 <= end; i += 4) multiply_rows<4, ADD>(next, i, panel_count, depth, A, B, C);
    for (; i < end; ++i) multiply_rows<1, ADD>(next, i, panel_count, depth, A, B, C);
  }
}

// One panel of B and C.
template <bool ADD, class Left>
inline void multiply_panel(int height, int depth, const Left& A, const float* b, float* c, long stride) {
  product<ADD>(height, PANEL, depth, A, {b, 0}, {c, stride, 0});
}

// ROWS x LANES numbers of C: half of a panel of B and C.
template <int ROWS, bool ADD>
inline __attribute__((always_inline)) void multiply_half_tile(int depth, const float* a, const Panels& A, const float* b,
                                                              float* c, long stride) {
  Vec sum[ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) sum[i] = Vec{};
  for (; depth > 0; depth -= PANEL, a += A.next()) {
    const int some = depth < PANEL ? depth : PANEL;
#pragma GCC unroll 4
    for (int k = 0; k < some; ++k, b += PANEL) {
      const Vec right = load(b);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) sum[i] += splat(a[i * Panels::ROW + k]) * right;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) store(c + i * stride, ADD ? load(c + i * stride) + sum[i] : sum[i]);
}

// One vector of columns of B and C.
template <bool ADD>
inline void multiply_half_panel(int height, int depth, const Panels& A, const float* b, float* c, long stride) {
  int i = 0;
  Prefetcher& next = prefetcher();
  for (; i + 2 * TALL <= height; i += 2 * TALL) {
    next.some();
    multiply_half_tile<2 * TALL, ADD>(depth, A.at(i), A, b, c + i * stride, stride);
  }
  for (; i + 4 <= height; i += 4) multiply_half_tile<4, ADD>(depth, A.at(i), A, b, c + i * stride, stride);
  for (; i < height; ++i) multiply_half_tile<1, ADD>(depth, A.at(i), A, b, c + i * stride, stride);
}

// C [height][width] = A [height][depth] B [depth][width]; widths are rounded up to whole panels.
template <class Left>
inline void multiply(int height, int width, int depth, Left A, Right B, Result C) {
  product<false>(height, width, depth, A, B, C);
}
template <class Left>
inline void add_product(int height, int width, int depth, Left A, Right B, Result C) {
  product<true>(height, width, depth, A, B, C);
}

}  // namespace subquad
