// The centre of a far field, and what depends on it; why there is one is said in kernels/centre.py.
#pragma once
#include "field.hpp"

namespace subquad {

constexpr long FIRST_CENTRE = 512;  // tokens; these three as in kernels/centre.py
constexpr long CENTRE_STEPS = 4;
constexpr float AGREEMENT = 1 / 16.0f;

// Whether a centre is to be chosen after `now` tokens, when the last occasion was after `before`.
inline bool centre_is_due(long before, long now) {
  if (now < FIRST_CENTRE) return false;
  long unit = 1;
  while (unit * 2 <= now) unit *= 2;
  unit = std::max(1L, unit / CENTRE_STEPS);
  return now / unit * unit > before;
}

// The mean over the features of all slices of a head, weighted by their totals; 0 where they do not agree on it. Numbers
// [j, j + LANES) of it.
inline Vec agreed_mean(const View* views, const Field* fields, int slices, long j) {
  Vec sum{}, squares{};
  float mass = 0;
  for (int i = 0; i < slices; ++i)
    for (int m = 0; m < views[i].M; ++m) {
      const float total = fields[i].total[m], weight = std::fabs(total);
      if (!(weight > 0)) continue;
      const Vec own = load(fields[i].row(views[i], j, m)), mean = own / splat(total) + load(fields[i].centre + j);
      sum += mean * splat(weight), squares += mean * mean * splat(weight);
      mass += weight;
    }
  const Vec mean = sum / splat(mass), square = squares / splat(mass);
  return square < mean * mean * splat(1 + AGREEMENT) ? mean : Vec{};  // never with NaN, nor with infinite squares
}

// Chooses the centre of a head's field anew.
inline void recentre(const View* views, Field* fields, int slices) {
  for (long j = 0; j < views[0].height; j += LANES) {
    const Vec chosen = agreed_mean(views, fields, slices, j);
    for (int i = 0; i < slices; ++i) fields[i].move_centre(views[i], j, chosen);
  }
}

// One row of outputs: sums over a normaliser, those of the far field relative to its centre.
struct CentredRow {
  float far_share;   // of the row's weight
  float near_share;  // 1 less that, without the rounding of a difference

  // The outputs, and with LOW in place of the sums what rounding left out of them. Where the far field matters, a row is the centre
  // and a small difference; else the centre, which may be large, is left out.
  template <bool LOW>
  void finish(const float* __restrict__ centre, int count, float factor, float* __restrict__ sums,
              float* __restrict__ out) const {
    const bool mostly_far = far_share >= 0.5f;
    const float origin_share = mostly_far ? 1 : 0, share = mostly_far ? -near_share : far_share;
    for (int j = 0; j < count; ++j) {
      const float origin = origin_share * centre[j], more = sums[j] * factor + share * centre[j];
      const float rounded = origin + more;
      if (LOW) sums[j] = more - (rounded - origin);
      out[j] = rounded;
    }
  }
};

}  // namespace subquad
