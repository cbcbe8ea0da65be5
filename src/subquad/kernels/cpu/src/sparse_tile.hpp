// A tile of queries and some of the keys that it meets: which pairs count, logits, outputs, gradients.
// Letters as in api.hpp; rows are queries, PANEL of them side by side, so that a vector has one key and several queries.
#pragma once
#include "tokens.hpp"
#include "view.hpp"

namespace subquad {

// Rows [count][width], dense, times `factor` and within +-limit, into the two layouts that products want, or one of them;
// zeros up to `height` rows. NaN stays NaN.
SUBQUAD_STAGE inline void pack_rows(const float* from, long count, int width, float factor, float limit, long height,
                                    float* lanes, float* columns) {
  for (long i = 0; i < height; i += LANES)
    for (int d = 0; d < padded(width); d += LANES) {
      Vec square[LANES] = {};
      for (int r = 0; r < LANES && i + r < count && d < width; ++r) {
        const Vec x = load_some(from + (i + r) * width + d, std::min(LANES, width - d)) * splat(factor);
        square[r] = vmin(splat(limit), vmax(splat(-limit), x));
      }
      if (columns) {
        float* to = columns + (d / PANEL * height + i) * PANEL + d % PANEL;
        for (int r = 0; r < LANES; ++r) store(to + r * PANEL, square[r]);
      }
      if (!lanes || d >= width) continue;
      transpose(square);
      float* to = lanes + (i / PANEL * width + d) * PANEL + i % PANEL;
      for (int r = 0; r < std::min(LANES, width - d); ++r) store(to + r * PANEL, square[r]);
    }
}

// As `bounded_` in kernels/precision.py.
inline float logit_limit(int head_dim) { return std::sqrt(std::numeric_limits<float>::max() / (4 * float(head_dim))); }

// Whether there is such a block: J stands for none where a tile meets fewer, and other numbers are passed over.
inline bool exists(const Sparse& s, int64_t block) { return block >= 0 && block < s.blocks; }

// Labels of a panel of rows, for comparisons with those of one key. Differences may wrap around, as in torch.
class RowLabels {
 public:
  RowLabels(const Sparse& s, long tile, long first) : s_(s), rounds_(s.q_code ? s.round < s.rounds ? s.round + 1 : s.rounds : 0) {
    codes_.resize(rounds_ * PANEL);
    for (int i = 0; i < PANEL; ++i) {
      const long row = first + i, at = (s.alike ? 0 : tile * s.rows) + row;
      const bool there = row < s.rows;
      place_[i] = there ? s.q_place[at] : ABSENT;
      for (int r = 0; r < rounds_; ++r) codes_[r * PANEL + i] = there ? s.q_code[at * s.rounds + r] : ABSENT;
    }
    skips_self_ = s.skip_self && (s.alike || s.place_low <= 0);
  }
  // Writes 0 for rows that see the key, -inf for others; returns whether any does.
  bool mask_key(int32_t place, const int32_t* codes, float* to) const {
    bool any = false;
    for (int lane = 0; lane < PANEL; lane += LANES) {
      const IVec own = whole(place_ + lane);
      IVec hidden = outside(own, place, s_.place_low, s_.place_high);
      if (skips_self_) hidden |= own == place;
      for (int r = 0; r < rounds_; ++r) {
        const IVec away = outside(whole(codes_.data() + r * PANEL + lane), codes[r], s_.code_low, s_.code_high);
        hidden |= r == s_.round ? away : ~away;
      }
      store(to + lane, hidden ? splat(-INFINITE) : Vec{});
      any |= some_zero(hidden);
    }
    return any;
  }

 private:
  static constexpr int32_t ABSENT = -(1 << 29), UNLIMITED = 1 << 28;  // as in kernels/sparse/torch.py
  typedef uint32_t UVec __attribute__((vector_size(SUBQUAD_VECTOR_BYTES), aligned(4), may_alias));

  static IVec whole(const int32_t* from) { return *reinterpret_cast<const IVec*>(from); }
  static IVec less(IVec x, int32_t by) { return (IVec)((UVec)x - uint32_t(by)); }
  static IVec outside(IVec row, int32_t key, int32_t low, int32_t high) {
    if (low == high) return less(row, low) != key;
    const IVec below = less(row, low) < key;
    return high < UNLIMITED ? below | (less(row, high) > key) : below;
  }
  static bool some_zero(IVec x) {
    uint64_t both[SUBQUAD_VECTOR_BYTES / 8], all = ~uint64_t(0);
    std::memcpy(both, &x, sizeof both);
    for (const uint64_t two : both) all &= two;
    return ~all != 0;
  }

  const Sparse& s_;
  int rounds_;
  bool skips_self_;
  alignas(64) int32_t place_[PANEL];
  std::vector<int32_t> codes_;  // [rounds][PANEL]
};

// The masks of tiles that have the same labels, but for keys that are not there.
class SharedMasks {
 public:
  explicit SharedMasks(const Sparse& s) : keys_(s.met * s.keys) {
    if (!s.alike) return;
    const long panels = padded(s.rows) / PANEL;
    hidden_ = new_buffer(panels * keys_ * PANEL);
    any_.resize(panels * keys_);
    for (long j = 0; j < panels; ++j) {
      const RowLabels rows(s, 0, j * PANEL);
      for (long e = 0; e < keys_; ++e) any_[j * keys_ + e] = rows.mask_key(s.k_place[e], nullptr, hidden_.get() + (j * keys_ + e) * PANEL);
    }
  }
  // To 0 for the rows of a panel that see the key, -inf for others; whether any does.
  bool copy(long panel, long key, float* to) const {
    const float* from = hidden_.get() + (panel * keys_ + key) * PANEL;
    std::copy(from, from + PANEL, to);
    return any_[panel * keys_ + key];
  }
  bool first_row_sees(long key) const { return hidden_.get()[key * PANEL] == 0; }

 private:
  long keys_;
  Buffer hidden_;
  std::vector<char> any_;
};

// Keys of some of the blocks that a tile meets, packed. `capacity` keys fit.
struct Chunk {
  long capacity;
  long count, height;  // height: rounded up to whole panels
  float *columns, *value_columns;  // [keys][D], [keys][Dv]
  float *dk, *dv;                  // [keys][..] in padded rows, where gradients are collected
  std::vector<long> met, blocks;   // places among the blocks of the tile, and the blocks

  static Chunk allocate(const Sparse& s, long capacity, bool backward) {
    Chunk c{};
    c.capacity = capacity;
    c.columns = pool().take(padded(capacity) * padded(s.head_dim));
    c.value_columns = pool().take(padded(capacity) * padded(s.value_dim));
    c.dk = backward ? pool().take(capacity * padded(s.head_dim)) : nullptr;
    c.dv = backward ? pool().take(capacity * padded(s.value_dim)) : nullptr;
    return c;
  }
  // Blocks of the tile from place `w` on, as many as fit; returns the next place.
  long load(const Sparse& s, long tile, long w) {
    met.clear(), blocks.clear();
    const int64_t* meets = s.meets + tile * s.met;
    for (; w < s.met && (long(blocks.size()) + 1) * s.keys <= capacity; ++w)
      if (exists(s, meets[w])) met.push_back(w), blocks.push_back(meets[w]);
    count = long(blocks.size()) * s.keys, height = padded(count);
    const float limit = logit_limit(int(s.head_dim));
    long first = 0;
    for (const long b : blocks) {
      pack_columns(s.k + b * s.keys * s.head_dim, s.keys, int(s.head_dim), limit, first, columns);
      pack_columns(s.v + b * s.keys * s.value_dim, s.keys, int(s.value_dim), INFINITE, first, value_columns);
      first += s.keys;
    }
    return w;
  }
  void clear_gradients(const Sparse& s) {
    std::fill(dk, dk + count * padded(s.head_dim), 0.0f);
    std::fill(dv, dv + count * padded(s.value_dim), 0.0f);
  }

 private:
  // Rows into columns from row `first` on.
  SUBQUAD_STAGE void pack_columns(const float* from, long rows, int width, float limit, long first, float* to) const {
    for (int d = 0; d < padded(width); d += LANES)
      for (long i = 0; i < rows; ++i) {
        const Vec x = d < width ? load_some(from + i * width + d, std::min(LANES, width - d)) : Vec{};
        store(to + (d / PANEL * height + first + i) * PANEL + d % PANEL, vmin(splat(limit), vmax(splat(-limit), x)));
      }
  }
};

// The rows of a tile, a panel of them at a time, against one chunk of keys after the other.
class SparseTile {
 public:
  // `capacity` keys at a time.
  SparseTile(const Sparse& sparse, const SharedMasks& masks, long capacity)
      : s(sparse), masks_(masks), height_(padded(s.rows)), depth_(padded(s.head_dim)), width_(padded(s.value_dim)),
        D(int(s.head_dim)), Dv(int(s.value_dim)) {
    lanes_ = pool().take(height_ * D);
    top_ = pool().take(height_);
    hidden_ = pool().take(capacity * PANEL);
    weights_ = pool().take(capacity * GROUP);
    if (!s.grad_out) {
      sum_ = pool().take(height_);
      values_ = pool().take(height_ * width_);
      return;
    }
    columns_ = pool().take(height_ * depth_);
    grad_lanes_ = pool().take(height_ * Dv), grad_columns_ = pool().take(height_ * width_);
    dlogits_ = pool().take(capacity * GROUP);
    low_ = pool().take(height_), shift_ = pool().take(height_);
    dx_ = pool().take(height_ * depth_);
  }

  // The forward ---------------------------------------------------------------------------------------------------------

  void begin(long tile) {
    load_queries(tile);
    std::fill(top_, top_ + height_, -INFINITE);
    std::fill(sum_, sum_ + height_, 0.0f);
    std::fill(values_, values_ + height_ * width_, 0.0f);
  }
  void attend(const Chunk& keys) {
    for (long row = 0; row < height_; row += PANEL) {
      const Seen seen = mask(keys, row);
      if (seen.from >= seen.to) continue;
      multiply_panel<false>(seen.to - seen.from, D, panels(keys.columns + seen.from * PANEL, keys.height), lanes_ + row * D,
                            weights_ + seen.from * PANEL, PANEL);
      weigh(row, seen);
      add_product(PANEL, Dv, seen.to - seen.from, transposed(weights_ + seen.from * PANEL, 0),
                  {keys.value_columns + seen.from * PANEL, keys.height * PANEL}, in_rows(values_ + row * width_, width_));
    }
  }
  SUBQUAD_STAGE void finish() const {
    for (long row = 0; row < s.rows; ++row) {
      const float total = sum_[row];
      const bool sees = !(total == 0);  // NaN does
      const long at = tile_ * s.rows + row;
      for (int d = 0; d < Dv; ++d) s.out[at * Dv + d] = sees ? values_[row * width_ + d] / total : 0;
      s.log_normaliser[at] = sees ? double(top_[row]) + std::log(double(total)) : -double(INFINITE);
    }
  }

  // Gradients -----------------------------------------------------------------------------------------------------------

  SUBQUAD_STAGE void begin_back(long tile) {
    load_queries(tile);
    const long first = tile * s.rows;
    pack_rows(s.grad_out + first * Dv, s.rows, Dv, 1, INFINITE, height_, grad_lanes_, grad_columns_);
    for (long row = 0; row < height_; ++row) {
      const bool there = row < s.rows;
      const double normaliser = there ? s.log_normaliser[first + row] : -double(INFINITE);
      const bool sees = !(std::fabs(normaliser) > double(std::numeric_limits<float>::max()));  // weights are 0 else; NaN sees
      top_[row] = sees ? float(normaliser) : INFINITE;  // of 1e4, one float alone would leave out 5e-4
      low_[row] = sees ? float(normaliser - double(top_[row])) : 0;
      shift_[row] = there ? float(s.shift[first + row]) : 0;
      if (there && s.out) shift_[row] -= dot(s.grad_out + (first + row) * Dv, s.out + (first + row) * Dv, Dv);
    }
    std::fill(dx_, dx_ + height_ * depth_, 0.0f);
  }
  // Adds the keys' gradients to those of the chunk.
  void attend_back(Chunk& keys) {
    for (long row = 0; row < height_; row += GROUP) {
      const int panels = int(std::min<long>(GROUP, height_ - row) / PANEL);
      Seen seen[GROUP / PANEL], all{int(keys.count), 0};
      for (int j = 0; j < panels; ++j) {
        seen[j] = mask(keys, row + j * PANEL);
        if (seen[j].from >= seen[j].to) continue;
        all = {std::min(all.from, seen[j].from), std::max(all.to, seen[j].to)};
        differentiate(keys, row + j * PANEL, seen[j], j * keys.count * PANEL);
      }
      for (int j = 0; j < panels; ++j)
        for (float* x : {weights_ + j * keys.count * PANEL, dlogits_ + j * keys.count * PANEL}) clear_unseen(x, seen[j], all);
      if (all.from < all.to) add_key_gradients(keys, row, panels * PANEL, all);
    }
  }
  SUBQUAD_STAGE void finish_back() const {
    for (long row = 0; row < s.rows; ++row)
      for (int d = 0; d < D; ++d) s.dq[(tile_ * s.rows + row) * D + d] = dx_[row * depth_ + d] * s.scale;
  }

 private:
  static constexpr int GROUP = TILE;  // rows whose keys get their gradients in one product

  void load_queries(long tile) {
    tile_ = tile;
    pack_rows(s.q + tile * s.rows * D, s.rows, D, s.scale, logit_limit(D), height_, lanes_, columns_);
    if (s.alike) return;
    labels_.clear();
    for (long row = 0; row < height_; row += PANEL) labels_.emplace_back(s, tile, row);
  }

  // Fills `hidden_` for a panel of rows; the limits of the keys that any of them sees.
  SUBQUAD_STAGE Seen mask(const Chunk& keys, long row) {
    Seen seen{int(keys.count), 0};
    int e = 0;
    for (size_t i = 0; i < keys.blocks.size(); ++i)
      for (long inside = 0; inside < s.keys; ++inside, ++e)
        if (mask_key(row / PANEL, keys.blocks[i] * s.keys + inside, keys.met[i] * s.keys + inside, hidden_ + e * PANEL))
          seen = {std::min(seen.from, e), e + 1};
    return seen;
  }
  // The same for one key, of all keys and of those that the tile meets.
  bool mask_key(long panel, long key, long met, float* to) const {
    if (!s.alike) return labels_[panel].mask_key(s.k_place[key], s.k_code ? s.k_code + key * s.rounds : nullptr, to);
    if (!s.alive || s.alive[key]) return masks_.copy(panel, met, to);
    std::fill(to, to + PANEL, -INFINITE);
    return false;
  }

  // From logits to exp(logit - largest so far), which earlier sums are made relative to as well.
  SUBQUAD_STAGE void weigh(long row, Seen seen) {
    for (int lane = 0; lane < PANEL; lane += LANES) {
      Vec top = load(top_ + row + lane), sum{};
      const Vec before = top;
      for (int e = seen.from; e < seen.to; ++e) {
        float* x = weights_ + e * PANEL + lane;
        const Vec logit = load(hidden_ + e * PANEL + lane) < Vec{} ? splat(-INFINITE) : load(x);
        store(x, logit);
        top = vmax(top, logit);
      }
      const Vec reference = top == splat(-INFINITE) ? Vec{} : top, decay = vexp(before - reference);
      for (int e = seen.from; e < seen.to; ++e) {
        float* x = weights_ + e * PANEL + lane;
        const Vec weight = vexp(load(x) - reference);
        store(x, weight);
        sum += weight;
      }
      store(top_ + row + lane, top);
      store(sum_ + row + lane, load(sum_ + row + lane) * decay + sum);
      for (int i = 0; i < LANES; ++i) {
        float* out = values_ + (row + lane + i) * width_;
        for (long d = 0; d < width_ && decay[i] != 1; d += LANES) store(out + d, load(out + d) * splat(decay[i]));
      }
    }
  }

  // Weights of a panel of rows and the gradients of their logits, at `at` in both matrices; the gradient of the rows.
  SUBQUAD_STAGE void differentiate(const Chunk& keys, long row, Seen seen, long at) {
    float *weights = weights_ + at, *dlogits = dlogits_ + at;
    const int count = seen.to - seen.from;
    multiply_panel<false>(count, D, panels(keys.columns + seen.from * PANEL, keys.height), lanes_ + row * D,
                          weights + seen.from * PANEL, PANEL);
    multiply_panel<false>(count, Dv, panels(keys.value_columns + seen.from * PANEL, keys.height), grad_lanes_ + row * Dv,
                          dlogits + seen.from * PANEL, PANEL);
    for (int lane = 0; lane < PANEL; lane += LANES) {
      const Vec high = load(top_ + row + lane), low = load(low_ + row + lane);
      const Vec shift = load(shift_ + row + lane);
      for (long i = seen.from * PANEL + lane; i < seen.to * PANEL; i += PANEL) {
        const Vec weight = load(hidden_ + i) < Vec{} ? Vec{} : vexp(load(weights + i) - high - low);
        const Vec slope = weight * (load(dlogits + i) + shift);
        store(weights + i, weight), store(dlogits + i, weight == Vec{} ? Vec{} : slope);
      }
    }
    add_product(PANEL, D, count, transposed(dlogits + seen.from * PANEL, 0),
                {keys.columns + seen.from * PANEL, keys.height * PANEL}, in_rows(dx_ + row * depth_, depth_));
  }
  // Zeros for a panel of rows and the keys in `all` that it does not see.
  static void clear_unseen(float* x, Seen seen, Seen all) {
    if (seen.from >= seen.to) seen = {all.to, all.to};
    if (all.from < seen.from) std::fill(x + all.from * PANEL, x + seen.from * PANEL, 0.0f);
    if (seen.to < all.to) std::fill(x + seen.to * PANEL, x + all.to * PANEL, 0.0f);
  }
  SUBQUAD_STAGE void add_key_gradients(Chunk& keys, long row, int rows, Seen all) const {
    const int count = all.to - all.from;
    add_product(count, Dv, rows, panels(weights_ + all.from * PANEL, keys.count), {grad_columns_ + row * PANEL, height_ * PANEL},
                in_rows(keys.dv + all.from * width_, width_));
    add_product(count, D, rows, panels(dlogits_ + all.from * PANEL, keys.count), {columns_ + row * PANEL, height_ * PANEL},
                in_rows(keys.dk + all.from * depth_, depth_));
  }

  const Sparse& s;
  const SharedMasks& masks_;
  const long height_, depth_, width_;  // rows, D and Dv rounded up to panels
  const int D, Dv;
  long tile_ = 0;
  std::vector<RowLabels> labels_;        // of each panel of rows, unless tiles look alike
  float* lanes_ = nullptr;               // [D][rows] queries
  float* columns_ = nullptr;             // [rows][D] the same
  float* top_ = nullptr;                 // [rows] the largest logit so far; in the backward the log-normaliser
  float* low_ = nullptr;                 // [rows] what rounding left out of that
  float* hidden_ = nullptr;              // [keys][PANEL] 0 where a row sees the key, else -inf
  float* weights_ = nullptr;             // [keys][GROUP]
  float* sum_ = nullptr;                 // [rows] of weights
  float* values_ = nullptr;              // [rows][Dv] sums of weights times values
  float* grad_lanes_ = nullptr;          // [Dv][rows] gradients of outputs
  float* grad_columns_ = nullptr;        // [rows][Dv] the same
  float* dlogits_ = nullptr;             // [keys][GROUP]
  float* shift_ = nullptr;               // [rows] gradient of the log-normaliser less gradient times output
  float* dx_ = nullptr;                  // [rows][D] gradients of queries
};

}  // namespace subquad
