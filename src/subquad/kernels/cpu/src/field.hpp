// The far field: for every feature the sum of its keys' weights times values, the sum of the weights, and the maximum
// that the weights are relative to. Values are relative to a centre. Letters as in api.hpp.
#pragma once
#include "view.hpp"

namespace subquad {

// Tokens: before, rounding a sum of gradients once per block costs less than 1e-5 of it.
constexpr long LOW_SUMS_FROM = 1 << 16;

struct Field {
  float *sum, *total, *max, *centre;  // [M][Dv] in panels, [M], [M], [Dv] in panels; one piece of memory
  float* low = nullptr;               // what rounding leaves out of sum and total, if that is kept

  static size_t size(long height, long features) { return size_t(height + 2) * features + height; }
  static size_t size(const View& v) { return size(v.height, v.M); }
  // Of one that sums up a whole sequence: with the low part, where that is long.
  static bool keeps_low(const Problem& p) { return std::max(p.length, p.key_length) >= LOW_SUMS_FROM; }
  static size_t running_size(const Problem& p, long height, long features) {
    return size(height, features) + (keeps_low(p) ? (height + 1) * features : 0);
  }
  static size_t running_size(const View& v) { return running_size(v.p, v.height, v.M); }
  static Field running(const View& v, float* memory) {
    Field field = over(v, memory);
    if (keeps_low(v.p)) field.low = memory + size(v);
    return field;
  }
  // Those that add up: sum and total.
  static long sums(const View& v) { return (v.height + 1) * v.M; }
  static Field over(const View& v, float* memory) {
    const long m = v.M;
    return {memory, memory + v.height * m, memory + (v.height + 1) * m, memory + (v.height + 2) * m};
  }
  void copy_from(const View& v, const Field& other) {
    copy_sums_from(v, other);
    std::copy(other.max, other.max + v.M, max);
    std::copy(other.centre, other.centre + v.height, centre);
  }
  void copy_sums_from(const View& v, const Field& other) {
    std::memcpy(sum, other.sum, sums(v) * sizeof(float));
    if (low && other.low)
      std::memcpy(low, other.low, sums(v) * sizeof(float));
    else
      clear_low(v);
  }

  // Sums and totals of some features.
  void copy_features_from(const View& v, const Field& other, int begin, int count) {
    for (long j = 0; j < v.height; j += PANEL)
      std::copy(other.row(v, j, begin), other.row(v, j, begin + count), row(v, j, begin));
    std::copy(other.total + begin, other.total + begin + count, total + begin);
  }
  void clear_features(const View& v, int begin, int count) {
    for (long j = 0; j < v.height; j += PANEL) std::fill(row(v, j, begin), row(v, j, begin + count), 0.0f);
    std::fill(total + begin, total + begin + count, 0.0f);
  }
  void add_features_of(const View& v, const Field& other, int begin, int count) {
    for (long j = 0; j < v.height; j += PANEL)
      for (const float* x = other.row(v, j, begin); x < other.row(v, j, begin + count); x += LANES) add(x - other.sum, load(x));
    for (int m = begin; m < begin + count; m += LANES) {
      const int some = std::min(LANES, begin + count - m);
      add_to_totals(m, load_some(other.total + m, some), some);
    }
  }

  void clear_low(const View& v) {
    if (low) std::fill(low, low + sums(v), 0.0f);
  }
  void clear(const View& v) {
    std::fill(sum, max, 0.0f);
    clear_low(v);
    std::fill(max, max + v.M, v.logarithmic() ? FLOOR : 0.0f);
    std::fill(centre, centre + v.height, 0.0f);
  }
  // Sums of feature m, from number j on, up to the end of the panel.
  float* row(const View& v, long j, long m) const { return sum + (j / PANEL * v.M + m) * PANEL + j % PANEL; }

  bool is_centred(const View& v) const {
    return std::any_of(centre, centre + v.Dv, [](float x) { return x != 0; });
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

  // Where products of weights and values are added, from feature m on.
  Result sums_from(const View& v, long m) const {
    Result result = in_panels(sum + m * PANEL, v.M);
    if (low) result.low = low - sum;
    return result;
  }
  // To LANES of the sums.
  void add(long at, Vec more) const {
    if (low)
      add_exactly(sum + at, low + at, more);
    else
      store(sum + at, load(sum + at) + more);
  }
  // To the totals of some features from m on.
  void add_to_totals(int m, Vec more, int some) {
    Vec high = load_some(total + m, some);
    if (low) {
      float* low_total = low + (total - sum) + m;
      Vec rest = load_some(low_total, some);
      add_exactly(high, rest, more);
      store_some(low_total, rest, some);
    } else {
      high += more;
    }
    store_some(total + m, high, some);
  }

  // From and to [M][V], the total last, as Python keeps it.
  void read(const View& v, const float* maxima, const float* sums) {
    clear_low(v);
    for (int m = 0; m < v.M; ++m) {
      const float* row = sums + long(m) * (v.Dv + 1);
      put_column(row, v.Dv, m, v.M, sum);
      total[m] = row[v.Dv];
      max[m] = maxima && v.logarithmic() ? maxima[m] : 0;
    }
  }
  void write(const View& v, float* maxima, float* sums) const {
    for (int m = 0; m < v.M; ++m) {
      float* row = sums + long(m) * (v.Dv + 1);
      for (int j = 0; j < v.Dv; ++j) row[j] = *this->row(v, j, m);
      row[v.Dv] = total[m];
      if (maxima && v.logarithmic()) maxima[m] = max[m];
    }
  }
  // The same for slice and sequence of borders [.., B, K, M] and [.., B, K, M + 1, V], whose last row is the centre.
  static long place(const View& v, long border) {
    return ((border * v.sequences() + v.sequence()) * v.p.num_features + v.first);
  }
  static long border_row(const View& v, long border, long row) {
    return ((border * v.sequences() + v.sequence()) * (v.p.num_features + 1) + row) * (v.Dv + 1);
  }
  void read_border(const View& v, const float* maxima, const float* sums, long border) {
    read(v, maxima + place(v, border), sums + border_row(v, border, v.first));
    const float* from = sums + border_row(v, border, v.p.num_features);
    std::fill(std::copy(from, from + v.Dv, centre), centre + v.height, 0.0f);
  }
  void write_border(const View& v, float* maxima, float* sums, long border) const {
    write(v, maxima + place(v, border), sums + border_row(v, border, v.first));
    if (v.slice == 0) *std::copy(centre, centre + v.Dv, sums + border_row(v, border, v.p.num_features)) = 0;
  }
  // And of states [B, K, M] and [B, K, M, V], sums of the values themselves.
  void read_state(const View& v, const float* maxima, const float* sums) {
    read(v, maxima ? maxima + place(v, 0) : nullptr, sums + place(v, 0) * (v.Dv + 1));
    std::fill(centre, centre + v.height, 0.0f);
  }
  void write_state(const View& v, float* maxima, float* sums) {
    if (is_centred(v))
      for (long j = 0; j < v.height; j += LANES) move_centre(v, j, Vec{});
    write(v, maxima ? maxima + place(v, 0) : nullptr, sums + place(v, 0) * (v.Dv + 1));
  }
  void begin(const View& v) {
    if (v.p.far_sum)
      read_state(v, v.p.far_max, v.p.far_sum);
    else
      clear(v);
  }

  // What the sums become when the maxima move; some features or all.
  void scale(const View& v, const float* decay, int begin, int count) {
    scale(v, decay, begin, count, sum);
    if (low) scale(v, decay, begin, count, low);
  }
  void scale(const View& v, const float* decay) { scale(v, decay, 0, v.M); }

 private:
  static void scale(const View& v, const float* decay, int begin, int count, float* sums) {
    for (long j = 0; j < v.height / PANEL; ++j)
      for (int m = begin; m < begin + count; ++m) {
        float* row = sums + (j * v.M + m) * PANEL;
        store(row, load(row) * splat(decay[m]));
        store(row + LANES, load(row + LANES) * splat(decay[m]));
      }
    float* totals = sums + v.height * v.M;
    for (int m = begin; m < begin + count; ++m) totals[m] *= decay[m];
  }
};

}  // namespace subquad
