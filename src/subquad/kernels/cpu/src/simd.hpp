// Vectors of floats by the compiler's own types: one source for AVX2, AVX-512, NEON and plain machines.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define SUBQUAD_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define SUBQUAD_VECTOR_BYTES 32
#else
#define SUBQUAD_VECTOR_BYTES 16
#endif

// A stage of the computation that a profiler should see by its name.
#define SUBQUAD_STAGE __attribute__((noinline))

namespace subquad {

constexpr int LANES = SUBQUAD_VECTOR_BYTES / 4;
constexpr int PANEL = 2 * LANES;  // columns of a panel: two vectors

typedef float Vec __attribute__((vector_size(SUBQUAD_VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(SUBQUAD_VECTOR_BYTES), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, also for x = -0, so only the broadcast remains
// b where either is NaN. Compilers do not find the single instruction by themselves.
#if defined(__AVX512F__)
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX2__)
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
#else
inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
inline Vec vmin(Vec a, Vec b) { return a < b ? a : b; }
#endif
inline Vec vsqrt(Vec a) {
  for (int i = 0; i < LANES; ++i) a[i] = std::sqrt(a[i]);
  return a;
}
inline Vec vabs(Vec a) { return a < Vec{} ? -a : a; }

// Folds the upper half onto the lower one until two numbers are left.
template <int COUNT, class Operation>
inline float horizontal(const void* numbers, Operation combine) {
  if constexpr (COUNT == 2) {
    float pair[2];
    std::memcpy(pair, numbers, sizeof pair);
    return combine(pair[0], pair[1]);
  } else {
    typedef float Half __attribute__((vector_size(COUNT * 2)));
    Half low, high;
    std::memcpy(&low, numbers, sizeof low);
    std::memcpy(&high, static_cast<const char*>(numbers) + sizeof low, sizeof high);
    low = combine(low, high);
    return horizontal<COUNT / 2>(&low, combine);
  }
}
inline float hmax(Vec v) {
  return horizontal<LANES>(&v, [](auto a, auto b) { return a > b ? a : b; });
}
inline float hsum(Vec v) {
  return horizontal<LANES>(&v, [](auto a, auto b) { return a + b; });
}

// The first `count` numbers; the others are 0 and stay where they are.
inline Vec load_some(const float* p, int count) {
  if (count >= LANES) return load(p);
  Vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}
inline void store_some(float* p, Vec v, int count) {
  if (count >= LANES) return store(p, v);
  std::memcpy(p, &v, count * sizeof(float));
}

// Zeros in the first `count` places.
template <int... I>
inline Vec without_first(Vec v, int count, std::integer_sequence<int, I...>) {
  return IVec{I...} < count ? Vec{} : v;
}
inline Vec without_first(Vec v, int count) { return without_first(v, count, std::make_integer_sequence<int, LANES>()); }

// Two rows of a matrix, as vectors, trade blocks: numbers whose place has the bit HALF, from a, for those without, from b.
template <int HALF, int... I>
inline __attribute__((always_inline)) void trade(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
#ifdef __clang__
  const Vec low = __builtin_shufflevector(a, b, (I & HALF ? LANES + I - HALF : I)...);
  b = __builtin_shufflevector(a, b, (I & HALF ? LANES + I : I + HALF)...);
#else
  const Vec low = __builtin_shuffle(a, b, IVec{(I & HALF ? LANES + I - HALF : I)...});
  b = __builtin_shuffle(a, b, IVec{(I & HALF ? LANES + I : I + HALF)...});
#endif
  a = low;
}
template <int HALF>
inline __attribute__((always_inline)) void trade(Vec& a, Vec& b) {
  trade<HALF>(a, b, std::make_integer_sequence<int, LANES>());
}

// A square of numbers, mirrored: 2 x 2 blocks trade places, then the blocks within them.
template <int HALF = LANES / 2>
inline __attribute__((always_inline)) void transpose(Vec (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & HALF)) trade<HALF>(rows[i], rows[i + HALF]);
  if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

// One number for each of LANES vectors, all at once: `combine` over its numbers. The vectors are used up.
template <int HALF = LANES / 2, class Operation>
inline __attribute__((always_inline)) Vec across(Vec (&vectors)[LANES], Operation combine) {
#pragma GCC unroll 8
  for (int i = 0; i < HALF; ++i) {
    trade<HALF>(vectors[i], vectors[i + HALF]);
    vectors[i] = combine(vectors[i], vectors[i + HALF]);
  }
  if constexpr (HALF > 1)
    return across<HALF / 2>(vectors, combine);
  else
    return vectors[0];
}
inline Vec sums_across(Vec (&vectors)[LANES]) {
  return across(vectors, [](Vec a, Vec b) { return a + b; });
}
inline Vec maxima_across(Vec (&vectors)[LANES]) { return across(vectors, vmax); }

// exp with a relative error below 3e-7; 0 below -87.7, at most 2^127; NaN stays NaN.
inline __attribute__((always_inline)) Vec vexp(Vec x) {
  x = vmin(splat(88.0f), vmax(splat(-88.03f), x));  // 2^-127 has the bits of zero
  const Vec magic = splat(12582912.0f + 127);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  const Vec shifted = x * splat(1.44269504f) + magic;
  const Vec n = shifted - magic;
  Vec r = x - n * splat(0.693145752f);  // ln 2 in two parts
  r = r - n * splat(1.42860677e-6f);
  Vec p = splat(0.008312501297f);  // least relative error on |r| < ln 2 / 2, with exp(0) = 1
  p = p * r + splat(0.04189033172f);
  p = p * r + splat(0.1666711539f);
  p = p * r + splat(0.4999923031f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  return p * (Vec)((IVec)shifted << 23);
}

}  // namespace subquad
