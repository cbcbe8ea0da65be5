// Tokens from memory into the two layouts that products want.
//
// "lanes" [n][tokens]: panels of PANEL tokens, so that a vector holds one number of several tokens.
// "columns" [tokens][n]: panels of PANEL numbers.
#pragma once
#include "api.hpp"
#include "gemm.hpp"
#include "memory.hpp"

namespace subquad {

constexpr int TILE = 64;  // tokens whose features are held at once

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline float from_float16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
  float f;
  if (rest < 0x400) {  // zero and subnormal numbers, multiples of 2^-24
    f = float(rest) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  const uint32_t bits = rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000;
  const uint32_t all = sign | bits;
  std::memcpy(&f, &all, 4);
  return f;
}

// `count` numbers of one token, as float, times `factor`.
inline void read_token(const void* data, long offset, int dtype, int count, float factor, float* row) {
  if (dtype == FLOAT32) {
    const float* x = static_cast<const float*>(data) + offset;
    for (int i = 0; i < count; ++i) row[i] = x[i] * factor;
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(data) + offset;
  if (dtype == BFLOAT16)
    for (int i = 0; i < count; ++i) row[i] = from_bfloat16(x[i]) * factor;
  else
    for (int i = 0; i < count; ++i) row[i] = from_float16(x[i]) * factor;
}

inline void read_token(const Array& a, int dtype, long b, long h, long t, int count, float factor, float* row) {
  read_token(a.data, b * a.batch + h * a.head + t * a.token, dtype, count, factor, row);
}

// One token into place i of a matrix in lanes; `count` numbers per token.
inline void put_lane(const float* row, int count, int i, float* lanes) {
  float* to = lanes + long(i / PANEL) * count * PANEL + i % PANEL;
  for (int d = 0; d < count; ++d) to[d * PANEL] = row[d];
}

// One token into row i of a matrix in columns of `height` tokens; numbers up to the end of the last panel are zero.
inline void put_column(const float* row, int count, int i, long height, float* columns) {
  float* to = columns + long(i) * PANEL;
  for (; count >= PANEL; count -= PANEL, row += PANEL, to += height * PANEL) {
    store(to, load(row));
    store(to + LANES, load(row + LANES));
  }
  for (int j = 0; j < PANEL && count > 0; ++j) to[j] = j < count ? row[j] : 0;
}

inline float dot(const float* a, const float* b, int count) {
  Vec sums{};
  int i = 0;
  for (; i + LANES <= count; i += LANES) sums += load(a + i) * load(b + i);
  float sum = hsum(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace subquad
