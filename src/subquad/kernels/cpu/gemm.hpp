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

// ROWS x PANEL numbers of C, held in registers. Four rows hide the latency of a multiply-add and leave registers over.
template <int ROWS, bool ADD>
inline __attribute__((always_inline)) void multiply_tile(int depth, const float* left, const Left& A, const float* b,
                                                         float* c, long stride) {
  Vec sum[ROWS][2];
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; ++i) {
    sum[i][0] = ADD ? load(c + i * stride) : Vec{};
    sum[i][1] = ADD ? load(c + i * stride + LANES) : Vec{};
  }
  for (int begin = 0; begin < depth; begin += PANEL, left += A.panel) {
    const float* a = left;
    const float* end = b + (depth - begin < PANEL ? depth - begin : PANEL) * PANEL;
    for (; b != end; b += PANEL, a += A.step) {
      const Vec low = load(b), high = load(b + LANES);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        const Vec x = splat(a[i * A.row]);
        sum[i][0] += x * low;
        sum[i][1] += x * high;
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; ++i) {
    store(c + i * stride, sum[i][0]);
    store(c + i * stride + LANES, sum[i][1]);
  }
}

template <bool ADD>
inline void multiply_panel(int height, int depth, const Left& A, const float* b, float* c, long stride) {
  int i = 0;
  for (; i + 4 <= height; i += 4) multiply_tile<4, ADD>(depth, A.at(i), A, b, c + i * stride, stride);
  for (; i < height; ++i) multiply_tile<1, ADD>(depth, A.at(i), A, b, c + i * stride, stride);
}

// C [height][width] = A [height][depth] B [depth][width]; widths are rounded up to whole panels.
inline void multiply(int height, int width, int depth, Left A, Right B, Result C) {
  for (int j = 0; j * PANEL < width; ++j)
    multiply_panel<false>(height, depth, A, B.b + j * B.panel, C.c + j * C.panel, C.row);
}
inline void add_product(int height, int width, int depth, Left A, Right B, Result C) {
  for (int j = 0; j * PANEL < width; ++j)
    multiply_panel<true>(height, depth, A, B.b + j * B.panel, C.c + j * C.panel, C.row);
}

}  // namespace subquad
