// One key head of one sequence, and a slice of its features: what one task works on.
//
// Features only ever meet in sums, so slices of them are independent tasks: that is how one head of FAVOR uses several
// threads. Stretches of tokens would be computed twice (a summary, then the outputs) and meet at different maxima.
// Letters as in api.hpp.
#pragma once
#include <limits>
#include <numeric>

#include "tokens.hpp"

namespace subquad {

constexpr float FLOOR = -1e30f;  // running maximum of no key at all: finite, because -inf - -inf is NaN
constexpr float DEAD = -1e32f;   // log-weight of a key that does not count: exp(DEAD - FLOOR) is 0
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Tokens, keys or rows [from, to).
struct Seen {
  int from, to;
};

constexpr int LEAST_SECTION = 16;  // tokens; fewer make products inefficient. Whole vectors
static_assert(LEAST_SECTION % LANES == 0, "sections begin with a vector");

struct View {
  const Problem& p;
  long b, h;   // sequence, key head
  int slice;   // of p.slices
  int D, Dv;   // numbers per key and per value
  int first;   // feature
  int M;       // features of this slice
  long height; // Dv rounded up to panels
  long fold_end;  // keys from here on are not in the last state, whose last block is `reach` before the last one
  int section; // tokens of a block that read the field at one time: whole near blocks and whole vectors, or the block
  const float *query, *key, *bias, *offset_weight;
  const float *query_panels = nullptr, *key_panels = nullptr;  // the maps as products want them; see `with_maps`
  float offset_bias, query_norms, key_norms;

  View(const Problem& problem, long task) : p(problem) {
    slice = int(task % p.slices);
    h = task / p.slices % p.key_heads;
    b = task / p.slices / p.key_heads;
    D = p.head_dim, Dv = p.value_dim, height = padded(Dv);
    fold_end = p.causal && p.near_blocks ? ((p.length + p.near - 1) / p.near - p.reach) * p.near : p.key_length;
    section = std::min(std::lcm(int(p.near), LEAST_SECTION), int(p.block));
    const long unit = p.rule == GROUPS ? p.num_features / p.rule_groups : 1, units = p.num_features / unit;
    first = int(units * slice / p.slices * unit);
    M = int(units * (slice + 1) / p.slices * unit) - first;
    const long head = p.map_heads > 1 ? h : 0, row = head * p.num_features + first;
    query = p.query ? p.query + row * D : nullptr;
    key = p.key ? p.key + row * D : nullptr;
    bias = p.key_bias ? p.key_bias + row : nullptr;
    offset_weight = p.offset_weight ? p.offset_weight + head * D : nullptr;
    offset_bias = p.offset_bias ? p.offset_bias[head] : 0;
    query_norms = p.rule == NORM ? 1 : 0;
    key_norms = query_norms + (p.gaussian ? 1 : 0);
  }

  bool logarithmic() const { return p.kind == EXP; }
  // Whether a block has several near blocks, some of which read others by features.
  bool tiled() const { return is_tiled(p); }
  int sections() const { return (p.block + section - 1) / section; }
  // The i-th section in the order of a sweep, of `tokens`, padding included, which belongs to the last one.
  Seen section_at(int i, bool back, long tokens) const {
    const int from = (back ? sections() - 1 - i : i) * section, to = from + section;
    return {from, to < p.block ? std::min(to, int(tokens)) : int(tokens)};
  }
  static bool is_tiled(const Problem& p) { return p.near_blocks && p.block > p.near; }
  // Blocks on one side of a block in which its rows may have exact keys, or keys that it folds.
  static long around(const Problem& p) { return p.near_blocks ? (long(p.reach) * p.near + p.block - 1) / p.block : 1; }
  long around() const { return around(p); }
  // Blocks of keys begin this much before (in a sweep back: after) those of rows, so that keys are folded as whole blocks.
  static long key_offset(const Problem& p) { return is_tiled(p) && p.far ? long(p.reach) * p.near % p.block : 0; }
  // The first of the keys that enter the far field after block b was read.
  long folded_token(bool back, long b) const { return b * p.block + (back ? 1L : -1L) * p.reach * p.near; }
  bool in_place() const { return !query; }  // features are made of the numbers themselves, where they were read
  long blocks(long length) const { return (length + p.block - 1) / p.block; }
  long mask_row() const { return p.mask_batch > 1 ? b : 0; }
  bool counts(const uint8_t* mask, long token) const {
    return token >= 0 && token < p.key_length && (!mask || mask[mask_row() * p.key_length + token]);
  }
  const uint8_t* fold_mask() const { return p.fold ? p.fold : p.alive; }
  long query_head(int group) const { return h * p.groups + group; }
  // Exact logits belong to no slice of the features; the slices take turns.
  bool exact_turn(long block) const { return block % p.slices == slice; }
  long sequences() const { return long(p.batch) * p.key_heads; }
  long sequence() const { return b * p.key_heads + h; }

  // Queue what is read soon for prefetching: keys and values of a block from a token on, or rows of all query heads that
  // share them.
  // A block that does not exist queues nothing.
  static constexpr long NO_BLOCK = -2, NO_TOKEN = -(1L << 40);
  void prefetch_keys(long token) const {
    prefetch(p.k, h, token, p.key_length, D);
    prefetch(p.v, h, token, p.key_length, Dv);
  }
  void prefetch_rows(const Array& a, long block, int width) const {
    for (int group = 0; group < p.groups; ++group) prefetch(a, query_head(group), block * p.block, p.length, width);
  }

 private:
  void prefetch(const Array& a, long head, long token, long length, int width) const {
    const long size = p.dtype == FLOAT32 ? 4 : 2;
    const long first = std::max(0L, token), end = std::min(length, token + p.block);
    if (first >= end) return;
    const char* data = static_cast<const char*>(a.data) + (b * a.batch + head * a.head + first * a.token) * size;
    prefetcher().add(data, a.token * size, end - first, width * size);
  }
};

// The same view with its maps [M][D] in panels, kept in this thread's pool.
inline View with_maps(View v) {
  const auto pack = [&](const float* weight) {
    float* packed = pool().take(padded(v.D) * v.M);
    for (int m = 0; m < v.M; ++m) put_column(weight + long(m) * v.D, v.D, m, v.M, packed);
    return packed;
  };
  if (v.query) v.query_panels = pack(v.query);
  if (v.key) v.key_panels = v.key == v.query ? v.query_panels : pack(v.key);
  return v;
}

// Calls `work(begin, count)` for features a few at a time: what one product leaves, the next finds in the first cache.
template <class Work>
inline void each_chunk(const View& v, Work work) {
  const int step = v.p.rule == GROUPS ? v.M : 64;  // groups are normalised as a whole
  for (int begin = 0; begin < v.M; begin += step) work(begin, std::min(step, v.M - begin));
}

}  // namespace subquad
