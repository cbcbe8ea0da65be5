// The far field: for every feature the sum of its keys' weights times values, the sum of the weights, and the maximum
// that the weights are relative to.
#pragma once
#include "view.hpp"

namespace subquad {

struct Field {
  float *sum, *total, *max;  // [M][V] in panels, [M], [M]; one piece of memory

  static size_t size(const View& v) { return size_t(v.height + 2) * v.M; }
  static Field over(const View& v, float* memory) {
    return {memory, memory + v.height * v.M, memory + (v.height + 1) * v.M};
  }
  void copy_from(const View& v, const Field& other) { std::memcpy(sum, other.sum, size(v) * sizeof(float)); }

  void clear(const View& v) {
    std::fill(sum, max, 0.0f);
    std::fill(max, max + v.M, v.logarithmic() ? FLOOR : 0.0f);
  }
  // From and to [M][V + 1], the total last, as Python keeps it.
  void read(const View& v, const float* maxima, const float* sums) {
    for (int m = 0; m < v.M; ++m) {
      const float* row = sums + long(m) * (v.V + 1);
      put_column(row, v.V, m, v.M, sum);
      total[m] = row[v.V];
      max[m] = v.logarithmic() ? maxima[m] : 0;
    }
  }
  void write(const View& v, float* maxima, float* sums) const {
    for (int m = 0; m < v.M; ++m) {
      float* row = sums + long(m) * (v.V + 1);
      for (int j = 0; j < v.V; ++j) row[j] = sum[(j / PANEL * v.M + m) * PANEL + j % PANEL];
      row[v.V] = total[m];
      if (maxima && v.logarithmic()) maxima[m] = max[m];
    }
  }
  // The same for slice and sequence of arrays [.., B, K, M] and [.., B, K, M, V + 1].
  static long place(const View& v, long border) {
    return ((border * v.sequences() + v.sequence()) * v.p.num_features + v.first);
  }
  void read_border(const View& v, const float* maxima, const float* sums, long border) {
    read(v, maxima + place(v, border), sums + place(v, border) * (v.V + 1));
  }
  void write_border(const View& v, float* maxima, float* sums, long border) const {
    write(v, maxima ? maxima + place(v, border) : nullptr, sums + place(v, border) * (v.V + 1));
  }
  void begin(const View& v) {
    if (v.p.far_sum)
      read_border(v, v.p.far_max, v.p.far_sum, 0);
    else
      clear(v);
  }

  // What the sums become when the maxima move; some features or all.
  void scale(const View& v, const float* decay, int begin, int count) {
    for (long j = 0; j < v.height / PANEL; ++j)
      for (int m = begin; m < begin + count; ++m) {
        float* row = sum + (j * v.M + m) * PANEL;
        store(row, load(row) * splat(decay[m]));
        store(row + LANES, load(row + LANES) * splat(decay[m]));
      }
    for (int m = begin; m < begin + count; ++m) total[m] *= decay[m];
  }
  void scale(const View& v, const float* decay) { scale(v, decay, 0, v.M); }
};

}  // namespace subquad
