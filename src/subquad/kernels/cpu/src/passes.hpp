// In which order the blocks of a sequence are visited, and where states are kept for the backward.
#pragma once
#include <vector>

#include "view.hpp"
#include "workers.hpp"

namespace subquad {

struct Pass {
  enum Kind { ALONG, BACK, OWN, GATHER, SCATTER, EXACT } kind;
  long blocks;
  long first_border;
  // The block that is visited i-th.
  long block(long i) const { return kind == BACK ? blocks - 1 - i : i; }
};

struct Passes {
  Pass pass[2];
  int count;
};

inline Passes passes_of(const Problem& p) {
  const long blocks = (p.length + p.block - 1) / p.block, key_blocks = (p.key_length + p.block - 1) / p.block;
  const long borders = (blocks + p.blocks_per_segment - 1) / p.blocks_per_segment;
  if (!p.far) return {{{Pass::EXACT, blocks, 0}, {}}, 1};
  if (p.causal) return {{{p.near_blocks ? Pass::ALONG : Pass::OWN, blocks, 0}, {}}, 1};
  if (p.near_blocks) return {{{Pass::ALONG, blocks, 0}, {Pass::BACK, blocks, borders}}, 2};
  return {{{Pass::GATHER, key_blocks, 0}, {Pass::SCATTER, blocks, 0}}, 2};
}

// Blocks visited between two meetings of the slices; a single slice never waits.
inline long blocks_per_chunk(const Problem& p, const Pass& pass) {
  if (p.slices == 1) return std::max(pass.blocks, 1L);
  const long segments = std::max(1L, 4096L / (long(p.block) * p.blocks_per_segment));
  return segments * p.blocks_per_segment;
}

inline long task_count(const Problem& p) { return long(p.batch) * p.key_heads * p.slices; }

// Blocks [from, to) of a pass: what a thread does of a head before it looks for another.
struct Portion {
  int pass;
  long from, to;
};

// Some milliseconds each, in whole segments: a thread that is held up must not hold up a whole head.
inline std::vector<Portion> portions_of(const Problem& p, const Passes& passes) {
  constexpr long WORK = 1 << 26;  // features of a portion times numbers that each of them meets
  const long numbers = long(p.num_features) * (p.head_dim + p.value_dim), segment = long(p.block) * p.blocks_per_segment;
  const long step = std::max(1L, WORK / (numbers * segment)) * p.blocks_per_segment;
  std::vector<Portion> portions;
  for (int i = 0; i < passes.count; ++i)
    for (long from = 0; from < passes.pass[i].blocks; from += step)
      portions.push_back({i, from, std::min(from + step, passes.pass[i].blocks)});
  return portions;
}

// Whether heads are so many that each is a small part of the work, and can be done in one go.
inline bool heads_are_many(const Problem& p) { return p.threads <= 1 || task_count(p) >= 16L * p.threads; }

}  // namespace subquad
