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
inline void read_token(const void* data, long offset, int dtype, int count, float factor, float* __restrict__ row) {
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

// LANES tokens on their way from memory into the layouts, as rows.
class Stage {
 public:
  static Stage allocate(int count) {
    Stage stage;
    stage.count_ = count, stage.stride_ = padded(count);
    stage.rows_ = pool().zeros(LANES * stage.stride_);  // what lies between count and stride stays zero
    return stage;
  }
  float* row(int i) const { return rows_ + i * stride_; }

  // Token `first + i` into row i, for every i of which `there(i)` holds; zeros into the others.
  template <class There>
  void read(const Array& a, int dtype, long b, long h, long first, float factor, There there) const {
    for (int i = 0; i < LANES; ++i)
      if (there(i))
        read_token(a, dtype, b, h, first + i, count_, factor, row(i));
      else
        std::fill(row(i), row(i) + count_, 0.0f);
  }
  // As tokens from `begin` on, a multiple of LANES.
  void to_lanes(int begin, float* lanes) const {
    float* to = lanes + long(begin / PANEL) * count_ * PANEL + begin % PANEL;
    for (int d = 0; d < count_; d += LANES) {
      Vec square[LANES];
      for (int i = 0; i < LANES; ++i) square[i] = load(row(i) + d);
      transpose(square);
      for (int i = 0; i < std::min(LANES, count_ - d); ++i) store(to + (d + i) * PANEL, square[i]);
    }
  }
  void to_columns(int begin, long height, float* columns) const {
    for (int i = 0; i < LANES; ++i) put_column(row(i), count_, begin + i, height, columns);
  }

 private:
  int count_;
  long stride_;
  float* rows_;
};

// Products of each of LANES tokens in lanes [count][tokens], from `begin` on, with itself, or with `other` [count].
inline Vec squares(const float* lanes, int count, int begin) {
  const float* x = lanes + long(begin / PANEL) * count * PANEL + begin % PANEL;
  Vec sum{};
  for (int d = 0; d < count; ++d) sum += load(x + d * PANEL) * load(x + d * PANEL);
  return sum;
}
inline Vec products(const float* lanes, const float* other, int count, int begin) {
  const float* x = lanes + long(begin / PANEL) * count * PANEL + begin % PANEL;
  Vec sum{};
  for (int d = 0; d < count; ++d) sum += load(x + d * PANEL) * splat(other[d]);
  return sum;
}

}  // namespace subquad
