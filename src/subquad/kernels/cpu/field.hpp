// The far field: for every feature the sum of its keys' weights times values, the sum of the weights, and the maximum
// that the weights are relative to. Values are relative to a centre.
#pragma once
#include "view.hpp"

namespace subquad {

struct Field {
  float *sum, *total, *max, *centre;  // [M][V] in panels, [M], [M], [V] in panels; one piece of memory

  static size_t size(long height, long features) { return size_t(height + 2) * features + height; }
  static size_t size(const View& v) { return size(v.height, v.M); }
  // Those that add up: sum and total.
  static long sums(const View& v) { return (v.height + 1) * v.M; }
  static Field over(const View& v, float* memory) {
    const long m = v.M;
    return {memory, memory + v.height * m, memory + (v.height + 1) * m, memory + (v.height + 2) * m};
  }
  void copy_from(const View& v, const Field& other) { std::memcpy(sum, other.sum, size(v) * sizeof(float)); }

  void clear(const View& v) {
    std::fill(sum, max, 0.0f);
    std::fill(max, max + v.M, v.logarithmic() ? FLOOR : 0.0f);
    std::fill(centre, centre + v.height, 0.0f);
  }
  // Sums of feature m, from number j on, up to the end of the panel.
  float* row(const View& v, long j, long m) const { return sum + (j / PANEL * v.M + m) * PANEL + j % PANEL; }

  bool is_centred(const View& v) const {
    return std::any_of(centre, centre + v.V, [](float x) { return x != 0; });
  }
  // Numbers [j, j + LANES) of the centre, and what that makes of the sums.
  void move_centre(const View& v, long j, Vec to) {
    const Vec by = load(centre + j) - to;
    for (int m = 0; m < v.M; ++m) store(row(v, j, m), load(row(v, j, m)) + by * splat(total[m]));
    store(centre + j, to);
  }
  void move_centre(const View& v, const float* to) {
    for (long j = 0; j < v.height; j += LANES) move_centre(v, j, load(to + j));
  }

  // From and to [M][V + 1], the total last, as Python keeps it.
  void read(const View& v, const float* maxima, const float* sums) {
    for (int m = 0; m < v.M; ++m) {
      const float* row = sums + long(m) * (v.V + 1);
      put_column(row, v.V, m, v.M, sum);
      total[m] = row[v.V];
      max[m] = maxima && v.logarithmic() ? maxima[m] : 0;
    }
  }
  void write(const View& v, float* maxima, float* sums) const {
    for (int m = 0; m < v.M; ++m) {
      float* row = sums + long(m) * (v.V + 1);
      for (int j = 0; j < v.V; ++j) row[j] = *this->row(v, j, m);
      row[v.V] = total[m];
      if (maxima && v.logarithmic()) maxima[m] = max[m];
    }
  }
  // The same for slice and sequence of borders [.., B, K, M] and [.., B, K, M + 1, V + 1], whose last row is the centre.
  static long place(const View& v, long border) {
    return ((border * v.sequences() + v.sequence()) * v.p.num_features + v.first);
  }
  static long border_row(const View& v, long border, long row) {
    return ((border * v.sequences() + v.sequence()) * (v.p.num_features + 1) + row) * (v.V + 1);
  }
  void read_border(const View& v, const float* maxima, const float* sums, long border) {
    read(v, maxima + place(v, border), sums + border_row(v, border, v.first));
    const float* from = sums + border_row(v, border, v.p.num_features);
    std::fill(std::copy(from, from + v.V, centre), centre + v.height, 0.0f);
  }
  void write_border(const View& v, float* maxima, float* sums, long border) const {
    write(v, maxima + place(v, border), sums + border_row(v, border, v.first));
    if (v.slice == 0) *std::copy(centre, centre + v.V, sums + border_row(v, border, v.p.num_features)) = 0;
  }
  // And of states [B, K, M] and [B, K, M, V + 1], sums of the values themselves.
  void read_state(const View& v, const float* maxima, const float* sums) {
    read(v, maxima ? maxima + place(v, 0) : nullptr, sums + place(v, 0) * (v.V + 1));
    std::fill(centre, centre + v.height, 0.0f);
  }
  void write_state(const View& v, float* maxima, float* sums) {
    if (is_centred(v))
      for (long j = 0; j < v.height; j += LANES) move_centre(v, j, Vec{});
    write(v, maxima ? maxima + place(v, 0) : nullptr, sums + place(v, 0) * (v.V + 1));
  }
  void begin(const View& v) {
    if (v.p.far_sum)
      read_state(v, v.p.far_max, v.p.far_sum);
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
