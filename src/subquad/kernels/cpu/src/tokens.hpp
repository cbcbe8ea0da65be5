// Tokens from memory into the two layouts that products want.
//
// "lanes" [n][tokens]: panels of PANEL tokens, so that a vector holds one number of several tokens.
// "columns" [tokens][n]: panels of PANEL numbers. Letters as in api.hpp.
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

// LANES tokens on their way from memory into the layouts: read where they lie if they are whole vectors of floats,
// converted into rows of their own first if not.
class Stage {
 public:
  static Stage allocate(int count) {
    Stage stage;
    stage.count_ = count;
    stage.rows_ = pool().zeros((LANES + 1) * padded(count));  // what lies between count and stride stays zero
    return stage;
  }
  // Token `first + i` becomes row i, times `factor`, for every i of which `there(i)` holds; the others are zeros.
  template <class There>
  void read(const Array& a, int dtype, long b, long h, long first, float factor, There there) {
    std::fill(factor_, factor_ + LANES, factor);
    const bool in_place = dtype == FLOAT32 && count_ % LANES == 0;
    for (int i = 0; i < LANES; ++i) {
      float* own = rows_ + i * padded(count_);
      row_[i] = rows_ + LANES * padded(count_);  // zeros
      if (!there(i)) continue;
      const long offset = b * a.batch + h * a.head + (first + i) * a.token;
      if (!in_place) read_token(a.data, offset, dtype, count_, 1, own);
      row_[i] = in_place ? static_cast<const float*>(a.data) + offset : own;
    }
  }
  void scale_row(int i, float factor) { factor_[i] *= factor; }
  const float* row(int i) const { return row_[i]; }
  Vec at(int i, int d) const { return load(row_[i] + d) * splat(factor_[i]); }

  // As tokens from `begin` on, a multiple of LANES, in one layout or both; less a centre, if there is one.
  void write(int begin, long height, float* lanes, float* columns, const float* centre = nullptr) const {
    for (int d = 0; d < count_; d += LANES) {
      const Vec less = centre ? load(centre + d) : Vec{};
      Vec square[LANES];
      for (int i = 0; i < LANES; ++i) square[i] = at(i, d) - less;
      if (columns) {
        float* column = columns + (d / PANEL * height + begin) * PANEL + d % PANEL;
        for (int i = 0; i < LANES; ++i) store(column + i * PANEL, square[i]);
      }
      if (!lanes) continue;
      transpose(square);
      float* to = lanes + long(begin / PANEL) * count_ * PANEL + begin % PANEL;
      for (int i = 0; i < std::min(LANES, count_ - d); ++i) store(to + (d + i) * PANEL, square[i]);
    }
    for (int d = (count_ + LANES - 1) / LANES * LANES; columns && d < padded(count_); d += LANES)
      for (int i = 0; i < LANES; ++i) store(columns + (d / PANEL * height + begin + i) * PANEL + d % PANEL, Vec{});
  }

 private:
  int count_;
  float factor_[LANES];
  float* rows_;  // [LANES + 1] converted tokens, and zeros
  const float* row_[LANES];
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
