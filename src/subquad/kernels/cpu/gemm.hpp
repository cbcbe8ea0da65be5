// Small matrix products that never repack: C (+)= A B.
//
// "Panels" are the one layout of all matrices [N][n]: columns in groups of PANEL, each group [N][PANEL]. B and C are in
// panels, or C has rows of any stride. A is read one number at a time, so it can be panels, transposed panels or rows.
#pragma once
#include "simd.hpp"

namespace subquad {

inline constexpr long padded(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

// A(i, k) = a[(i / PANEL) * group + (i % PANEL) * row + (k / PANEL) * panel + (k % PANEL) * step]
struct Left {
  const float* a;
  long row, group, step, panel;
  const float* at(long i) const { return a + i / PANEL * group + i % PANEL * row; }
};
inline Left rows(const float* a, long stride) { return {a, stride, PANEL * stride, 1, PANEL}; }
inline Left panels(const float* a, long height) { return {a, PANEL, PANEL * PANEL, 1, height * PANEL}; }
inline Left transposed(const float* a, long height) { return {a, 1, height * PANEL, PANEL, PANEL * PANEL}; }

// B: panel j begins at b + j * panel.
struct Right {
  const float* b;
  long panel;
};

// C: rows `row` apart inside a panel, panels `panel` apart.
struct Result {
  float* c;
  long row, panel;
};
inline Result in_panels(float* c, long height) { return {c, PANEL, height * PANEL}; }
inline Result in_rows(float* c, long stride) { return {c, stride, PANEL}; }

// sum += A B for some columns of A and as many rows of a panel of B.
template <int ROWS>
inline __attribute__((always_inline)) void accumulate(Vec (&sum)[ROWS][2], int count, const float* a, const Left& A,
                                                      const float* b) {
#pragma GCC unroll 4
  for (int k = 0; k < count; ++k, a += A.step, b += PANEL) {
    const Vec low = load(b), high = load(b + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Vec x = splat(a[i * A.row]);
      sum[i][0] += x * low;
      sum[i][1] += x * high;
    }
  }
}

// ROWS x PANEL numbers of C, held in registers.
template <int ROWS, bool ADD>
inline __attribute__((always_inline)) void multiply_tile(int depth, const float* a, const Left& A, const float* b,
                                                         float* c, long stride) {
  Vec sum[ROWS][2];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    sum[i][0] = ADD ? load(c + i * stride) : Vec{};
    sum[i][1] = ADD ? load(c + i * stride + LANES) : Vec{};
  }
  for (; depth >= PANEL; depth -= PANEL, a += A.panel, b += PANEL * PANEL) accumulate<ROWS>(sum, PANEL, a, A, b);
  accumulate<ROWS>(sum, depth, a, A, b);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    store(c + i * stride, sum[i][0]);
    store(c + i * stride + LANES, sum[i][1]);
  }
}

constexpr int TALL = SUBQUAD_VECTOR_BYTES == 64 ? 8 : SUBQUAD_VECTOR_BYTES == 32 ? 6 : 4;  // as registers allow

// Rows [begin, begin + count) of A and C, within one group of PANEL rows, against all panels of B.
template <int ROWS, bool ADD>
inline void multiply_rows(int i, int panel_count, int depth, const Left& A, const Right& B, const Result& C) {
  for (int j = 0; j < panel_count; ++j)
    multiply_tile<ROWS, ADD>(depth, A.at(i), A, B.b + j * B.panel, C.c + j * C.panel + i * C.row, C.row);
}

// Rows outside, panels inside: A is read once, and a B of some 16 kB stays in the first cache.
template <bool ADD>
inline void product(int height, int width, int depth, const Left& A, const Right& B, const Result& C) {
  const int panel_count = (width + PANEL - 1) / PANEL;
  for (int begin = 0; begin < height; begin += PANEL) {
    const int end = begin + PANEL < height ? begin + PANEL : height;
    int i = begin;
    for (; i + TALL <= end; i += TALL) multiply_rows<TALL, ADD>(i, panel_count, depth, A, B, C);
    for (; i + 4 <= end; i += 4) multiply_rows<4, ADD>(i, panel_count, depth, A, B, C);
    for (; i < end; ++i) multiply_rows<1, ADD>(i, panel_count, depth, A, B, C);
  }
}

// One panel of B and C.
template <bool ADD>
inline void multiply_panel(int height, int depth, const Left& A, const float* b, float* c, long stride) {
  product<ADD>(height, PANEL, depth, A, {b, 0}, {c, stride, 0});
}

// C [height][width] = A [height][depth] B [depth][width]; widths are rounded up to whole panels.
inline void multiply(int height, int width, int depth, Left A, Right B, Result C) {
  product<false>(height, width, depth, A, B, C);
}
inline void add_product(int height, int width, int depth, Left A, Right B, Result C) {
  product<true>(height, width, depth, A, B, C);
}

}  // namespace subquad
