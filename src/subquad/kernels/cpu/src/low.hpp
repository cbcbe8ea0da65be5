// What rounding leaves out of outputs, in eight bits for each number: the backward of long sequences needs it.
#pragma once
#include <limits>

#include "gemm.hpp"

namespace subquad {

// A 127th of what the largest number of a row may be rounded by, twice.
inline float unit_of_low(const float* out, int count) {
  Vec largest{};
  for (int j = 0; j < count; j += LANES) largest = vmax(vabs(load_some(out + j, count - j)), largest);
  return hmax(largest) * (std::numeric_limits<float>::epsilon() / 127);
}

inline void encode_low(const float* out, const float* low, int count, int8_t* packed) {
  const float inverse = 1 / unit_of_low(out, count), factor = std::isfinite(inverse) ? inverse : 0;
  for (int j = 0; j < count; ++j) {
    const float x = low[j] * factor;
    packed[j] = x >= -127 && x <= 127 ? int8_t(x) : 0;
  }
}

inline void decode_low(const float* out, const int8_t* packed, int count, float* low) {
  const float unit = unit_of_low(out, count);
  for (int j = 0; j < count; ++j) low[j] = unit * packed[j];
}

}  // namespace subquad
