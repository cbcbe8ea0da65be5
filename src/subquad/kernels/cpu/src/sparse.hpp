// Exact attention of tiles of queries to some blocks of keys, and its gradients. Letters as in api.hpp.
#pragma once
#include "sparse_row.hpp"
#include "sparse_tile.hpp"
#include "workers.hpp"

namespace subquad {

// Keys that are packed at once, so that they and their weights stay in the second cache: one block at least.
inline long chunk_capacity(const Sparse& s) {
  constexpr long KEYS = 512;
  return std::max<long>(s.keys, std::min<long>(s.met * s.keys, KEYS / s.keys * s.keys));
}

// Tiles per task: enough products to be worth handing over to another thread.
inline long tiles_per_task(const Sparse& s) {
  constexpr double PRODUCTS = 1 << 21;
  return std::max(1L, long(PRODUCTS / (double(s.rows) * double(s.met * s.keys) * double(s.head_dim + s.value_dim))));
}

inline void sparse_forward(const Sparse& s) {
  const SharedMasks masks(s);
  const long step = tiles_per_task(s), tasks = (s.tiles + step - 1) / step;
  each_task(s.threads, tasks, [&](long task) {
    pool().reset();
    const long end = std::min<long>((task + 1) * step, s.tiles);
    if (s.rows == 1) {
      SparseRow row(s, masks);
      for (long tile = task * step; tile < end; ++tile) row.forward(tile);
      return;
    }
    Chunk chunk = Chunk::allocate(s, chunk_capacity(s), false);
    SparseTile rows(s, masks, chunk.capacity);
    for (long tile = task * step; tile < end; ++tile) {
      rows.begin(tile);
      for (long w = 0; w < s.met;) {
        w = chunk.load(s, tile, w);
        if (chunk.count) rows.attend(chunk);
      }
      rows.finish();
    }
  });
}

// Gradients of keys are sums over tiles, which tasks would have to share. So tiles are sorted by the first block that they
// meet and cut into portions; a block that one portion alone meets gets its sum in place, any other one in memory of each
// portion, and these are added in order.
class KeyGradients {
 public:
  KeyGradients(const Sparse& s, long portions) : s_(s), order_(s.tiles), owner_(s.blocks, NOBODY), shared_(portions), sums_(portions) {
    std::vector<long> first(s.tiles);
    for (long tile = 0; tile < s.tiles; ++tile) {
      order_[tile] = tile;
      first[tile] = *std::min_element(s.meets + tile * s.met, s.meets + (tile + 1) * s.met);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](long a, long b) { return first[a] < first[b]; });
    each_meeting([&](long portion, long b) {
      owner_[b] = owner_[b] == NOBODY || owner_[b] == portion ? portion : SEVERAL;
    });
    each_meeting([&](long portion, long b) {
      if (owner_[b] == SEVERAL) shared_[portion].push_back(b);
    });
    for (std::vector<long>& blocks : shared_) {
      std::sort(blocks.begin(), blocks.end());
      blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
      copies_ += long(blocks.size());
    }
  }
  // Blocks that are kept by portions, for all of them together.
  long copies() const { return copies_; }

  // Memory for a portion, before it begins.
  void open(long portion) {
    const size_t count = shared_[portion].size() * size();
    sums_[portion] = new_buffer(count);
    std::fill(sums_[portion].get(), sums_[portion].get() + count, 0.0f);
  }

  template <class Work>
  void each_tile(long portion, Work work) const {
    const long count = long(shared_.size());
    for (long i = s_.tiles * portion / count; i < s_.tiles * (portion + 1) / count; ++i) work(order_[i]);
  }
  void add(long portion, const Chunk& chunk) const {
    for (size_t i = 0; i < chunk.blocks.size(); ++i) {
      const long first = long(i) * s_.keys;
      const SparseRow::Sums sums = of_block(portion, chunk.blocks[i]);
      for (long e = 0; e < s_.keys; ++e) {
        add_row(chunk.dk + (first + e) * padded(s_.head_dim), s_.head_dim, sums.dk + e * s_.head_dim);
        add_row(chunk.dv + (first + e) * padded(s_.value_dim), s_.value_dim, sums.dv + e * s_.value_dim);
      }
    }
  }
  // Where a portion adds those of a block.
  SparseRow::Sums of_block(long portion, long b) const {
    if (owner_[b] != SEVERAL) return {s_.dk + b * s_.keys * s_.head_dim, s_.dv + b * s_.keys * s_.value_dim};
    const std::vector<long>& blocks = shared_[portion];
    float* sums = sums_[portion].get() + (std::lower_bound(blocks.begin(), blocks.end(), b) - blocks.begin()) * size();
    return {sums, sums + s_.keys * s_.head_dim};
  }
  // Adds up what several portions have, for blocks b with b % tasks == task.
  void merge(long task, long tasks) const {
    for (size_t portion = 0; portion < shared_.size(); ++portion)
      for (size_t i = 0; i < shared_[portion].size(); ++i) {
        const long b = shared_[portion][i];
        if (b % tasks != task) continue;
        const float* sums = sums_[portion].get() + i * size();
        add_row(sums, s_.keys * s_.head_dim, s_.dk + b * s_.keys * s_.head_dim);
        add_row(sums + s_.keys * s_.head_dim, s_.keys * s_.value_dim, s_.dv + b * s_.keys * s_.value_dim);
      }
  }

 private:
  static constexpr long NOBODY = -1, SEVERAL = -2;
  long size() const { return s_.keys * (s_.head_dim + s_.value_dim); }
  static void add_row(const float* __restrict__ from, long count, float* __restrict__ to) {
    for (long i = 0; i < count; ++i) to[i] += from[i];
  }
  template <class Work>
  void each_meeting(Work work) const {
    for (long portion = 0; portion < long(shared_.size()); ++portion)
      each_tile(portion, [&](long tile) {
        for (const int64_t* met = s_.meets + tile * s_.met; met < s_.meets + (tile + 1) * s_.met; ++met)
          if (exists(s_, *met)) work(portion, long(*met));
      });
  }

  const Sparse& s_;
  std::vector<long> order_, owner_;          // of tiles; of blocks
  std::vector<std::vector<long>> shared_;    // of each portion: blocks that others meet too, ascending
  long copies_ = 0;
  std::vector<Buffer> sums_;                 // of each of these blocks: [E][D], then [E][Dv]
};

// Zeros for gradients that are sums, each thread a part of them.
inline void clear_in_parallel(const Sparse& s, float* sums, long count) {
  ask_for_large_pages(sums, count);
  each_task(s.threads, s.threads, [&](long part) {
    std::fill(sums + count * part / s.threads, sums + count * (part + 1) / s.threads, 0.0f);
  });
}

inline void sparse_backward(const Sparse& s) {
  constexpr long PORTIONS_PER_THREAD = 4;  // a thread that another process delays must not hold up the rest
  constexpr long MOST_COPIES = 4;          // of all keys' gradients: where tiles share all blocks, fewer threads work
  const SharedMasks masks(s);
  long portions = s.threads == 1 ? 1 : std::min<long>(s.threads * PORTIONS_PER_THREAD, s.tiles);
  auto gradients = std::make_unique<KeyGradients>(s, portions);
  for (; gradients->copies() > MOST_COPIES * s.blocks; gradients = std::make_unique<KeyGradients>(s, portions))
    portions = std::max(1L, portions / 2);
  clear_in_parallel(s, s.dk, s.blocks * s.keys * s.head_dim);
  clear_in_parallel(s, s.dv, s.blocks * s.keys * s.value_dim);
  each_task(s.threads, portions, [&](long portion) {
    pool().reset();
    gradients->open(portion);
    if (s.rows == 1) {
      SparseRow row(s, masks);
      gradients->each_tile(portion, [&](long tile) {
        row.backward(tile, [&](long block) { return gradients->of_block(portion, block); });
      });
      return;
    }
    Chunk chunk = Chunk::allocate(s, chunk_capacity(s), true);
    SparseTile rows(s, masks, chunk.capacity);
    gradients->each_tile(portion, [&](long tile) {
      rows.begin_back(tile);
      for (long w = 0; w < s.met;) {
        w = chunk.load(s, tile, w);
        if (!chunk.count) continue;
        chunk.clear_gradients(s);
        rows.attend_back(chunk);
        gradients->add(portion, chunk);
      }
      rows.finish_back();
    });
  });
  each_task(s.threads, s.threads, [&](long task) { gradients->merge(task, s.threads); });
}

}  // namespace subquad
