// In which order the blocks of a sequence are visited, and where states are kept for the backward.
#pragma once
#include "view.hpp"

namespace subquad {

struct Pass {
  enum Kind { ALONG, BACK, OWN, GATHER, SCATTER } kind;
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

}  // namespace subquad
