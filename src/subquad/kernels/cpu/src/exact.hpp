// Exact attention of a tile of queries to the sinks, the neighbouring blocks and the own one, and its gradients.
// Letters as in api.hpp.
#pragma once
#include <vector>

#include "features.hpp"

namespace subquad {

// Keys that are attended to exactly: the sinks, or a block.
struct KeyRange {
  bool sinks;
  Keys* keys;
  long begin;  // its first row among the logits
};

class Exact {
  // Rows of a panel that share the limits of what they see: a vector of them, if products take as many at a time.
  static constexpr int PART = LANES % TALL == 0 ? LANES : PANEL;

 public:
  // `capacity` keys in all.
  static Exact allocate(long capacity, bool backward) {
    Exact e;
    e.logits_ = pool().take(capacity * TILE);
    e.grad_ = backward ? pool().take(capacity * TILE) : nullptr;
    return e;
  }
  void clear() { ranges_.clear(), size_ = 0; }
  void add(bool sinks, Keys* keys) {
    ranges_.push_back({sinks, keys, size_});
    size_ += keys->count;
  }
  bool empty() const { return size_ == 0; }

  // Logits, -inf where not seen, and the largest of each row in `r.exact`.
  SUBQUAD_STAGE void logits(const View& v, Rows& r) {
    for (int j = 0; j < r.panel_count; ++j) {
      top_[0] = top_[1] = splat(-INFINITE);
      for (const KeyRange& range : ranges_) {
        const Keys& keys = *range.keys;
        const Seen seen = keys_seen(v, r, range, j);
        float* x = panel(logits_, j) + (range.begin + seen.from) * PANEL;
        multiply_seen(v, r, range, j, v.D, keys.columns, r.lanes, logits_);
        const Seen whole = seen_by_all(v, r, range, j);
        for (int e = seen.from; e < seen.to; ++e, x += PANEL) mask(v, r, range, j, e, e >= whole.from && e < whole.to, x);
      }
      store(r.exact + j * PANEL, top_[0]), store(r.exact + j * PANEL + LANES, top_[1]);
    }
  }

  // exp(logits - exact), 0 where not seen; their sums are added to `r.sum`.
  SUBQUAD_STAGE void weights(const View& v, Rows& r) {
    for (int j = 0; j < r.panel_count; ++j)
      for (const KeyRange& range : ranges_) {
        float* x = panel(logits_, j) + range.begin * PANEL;
        for (int lane = 0; lane < PANEL; lane += LANES) {
          const Seen seen = keys_seen(v, r, range, j, lane / PART * PART, PART);
          const Vec reference = load(r.exact + j * PANEL + lane);
          Vec sum = load(r.sum + j * PANEL + lane);
          for (int e = seen.from; e < seen.to; ++e) {
            const Vec weight = vexp(load(x + e * PANEL + lane) - reference);
            store(x + e * PANEL + lane, weight);
            sum += weight;
          }
          store(r.sum + j * PANEL + lane, sum);
          fill_unseen(x + lane, seen, range);
        }
      }
  }

  // r.out [tokens][Dv] += weights^T values
  SUBQUAD_STAGE void add_values(const View& v, Rows& r) const {
    each_part_and_range(v, r, [&](int j, int first, const KeyRange& range, Seen seen) {
      const Transposed A = transposed(panel(logits_, j) + (range.begin + seen.from) * PANEL + first, 0);
      const Right values{range.keys->value_columns + seen.from * PANEL, range.keys->height * PANEL};
      add_product(PART, v.Dv, seen.to - seen.from, A, values, in_rows(r.out + (j * PANEL + first) * v.height, v.height));
    });
  }

  // Adds the gradients of queries (dx), keys and values. grad: [g] in lanes and columns, and minus g.out of each row.
  void backward(const View& v, Rows& r, const float* grad_lanes, const float* grad_columns, const float* minus_dot,
                float* dx) {
    for (int j = 0; j < r.panel_count; ++j)
      for (const KeyRange& range : ranges_) multiply_seen(v, r, range, j, v.Dv, range.keys->value_columns, grad_lanes, grad_);
    each_part_and_range(v, r, [&](int j, int first, const KeyRange& range, Seen seen) {
      const Keys& keys = *range.keys;
      const float* weight = panel(logits_, j) + range.begin * PANEL + first;
      float* grad = panel(grad_, j) + range.begin * PANEL + first;
      for (int lane = 0; lane < PART; lane += LANES) {
        const Vec shift = load(minus_dot + j * PANEL + first + lane);
        for (int at = seen.from * PANEL + lane; at < seen.to * PANEL; at += PANEL)
          store(grad + at, (load(grad + at) + shift) * load(weight + at));
        fill_unseen(grad + lane, seen, range);
      }
      const Right columns{keys.columns + seen.from * PANEL, keys.height * PANEL};
      const long depth = padded(v.D);
      add_product(PART, v.D, seen.to - seen.from, transposed(grad + seen.from * PANEL, 0), columns,
                  in_rows(dx + (j * PANEL + first) * depth, depth));
    });
    for (const KeyRange& range : ranges_) keys_backward(v, r, range, grad_columns);
  }

 private:
  float* panel(float* x, int j) const { return x + j * size_ * PANEL; }

  // Zeros for a vector of rows and the keys that it does not see.
  static void fill_unseen(float* x, Seen seen, const KeyRange& range) {
    for (int e = 0; e < seen.from; ++e) store(x + e * PANEL, Vec{});
    for (int e = seen.to; e < range.keys->count; ++e) store(x + e * PANEL, Vec{});
  }

  // Keys of a range that some row of panel j may see, or some of the rows of a part of it.
  static Seen keys_seen(const View& v, const Rows& r, const KeyRange& range, int j, int first = 0, int rows = PANEL) {
    const int count = range.keys->count;
    if (range.sinks) return {0, count};
    const long row = r.token + j * PANEL + first, last = row + rows - 1, near = v.p.near, token = range.keys->token;
    const long begin = (row / near - v.p.reach) * near, end = v.p.causal ? last + 1 : (last / near + v.p.reach + 1) * near;
    const int from = int(std::min<long>(count, std::max(0L, begin - token)));
    return {from, int(std::max<long>(from, std::min<long>(count, end - token)))};
  }

  // columns [keys][depth] of a range times lanes [depth][rows] of panel j, where some row of a part of it may see the key.
  void multiply_seen(const View& v, const Rows& r, const KeyRange& range, int j, int depth, const float* columns,
                     const float* lanes, float* to) const {
    const Keys& keys = *range.keys;
    const float* right = lanes + long(j) * depth * PANEL;
    float* result = panel(to, j) + range.begin * PANEL;
    Seen both = keys_seen(v, r, range, j);
    if constexpr (PART < PANEL) {
      const Seen parts[] = {keys_seen(v, r, range, j, 0, PART), keys_seen(v, r, range, j, PART, PART)};
      both.from = std::max(parts[0].from, parts[1].from);
      both.to = std::max(both.from, std::min(parts[0].to, parts[1].to));
      for (int i = 0; i < 2; ++i)
        for (const Seen alone : {Seen{parts[i].from, std::min(parts[i].to, both.from)},
                                 Seen{std::max(parts[i].from, both.to), parts[i].to}})
          multiply_half_panel<false>(alone.to - alone.from, depth, panels(columns + alone.from * PANEL, keys.height),
                                     right + i * PART, result + alone.from * PANEL + i * PART, PANEL);
    }
    multiply_panel<false>(both.to - both.from, depth, panels(columns + both.from * PANEL, keys.height), right,
                          result + both.from * PANEL, PANEL);
  }
  // Keys of a range that every row of panel j may see.
  static Seen seen_by_all(const View& v, const Rows& r, const KeyRange& range, int j) {
    const long row = r.token + j * PANEL, last = row + PANEL - 1, near = v.p.near, token = range.keys->token;
    const long begin = (last / near - v.p.reach) * near, end = v.p.causal ? row + 1 : (row / near + v.p.reach + 1) * near;
    return {int(std::max(0L, begin - token)), int(std::max(0L, end - token))};
  }
  // Rows of panel j that may see key e.
  static Seen rows_seeing(const View& v, const Rows& r, const KeyRange& range, int j, int e) {
    const long row = r.token + j * PANEL, near = v.p.near, token = range.keys->token + e, block = token / near;
    const long first = v.p.causal ? token : (block - v.p.reach) * near, end = (block + v.p.reach + 1) * near;
    return {int(std::min<long>(PANEL, std::max(0L, first - row))), int(std::min<long>(PANEL, std::max(0L, end - row)))};
  }

  void mask(const View& v, const Rows& r, const KeyRange& range, int j, int e, bool seen_by_all, float* x) {
    if (range.sinks) {
      const int64_t* seen = v.p.sink_seen + v.mask_row() * v.p.length + r.token;
      for (int i = 0; i < PANEL; ++i)
        if (j * PANEL + i >= r.count || seen[j * PANEL + i] <= e) x[i] = -INFINITE;
    } else if (!range.keys->alive[e]) {
      std::fill(x, x + PANEL, -INFINITE);
    } else if (!seen_by_all) {
      const Seen rows = rows_seeing(v, r, range, j, e);
      for (int i = 0; i < rows.from; ++i) x[i] = -INFINITE;
      for (int i = rows.to; i < PANEL; ++i) x[i] = -INFINITE;
    }
    if (v.p.gaussian)
      for (int i = 0; i < PANEL; ++i) x[i] -= range.keys->half_square[e];
    top_[0] = vmax(top_[0], load(x)), top_[1] = vmax(top_[1], load(x + LANES));
  }

  // Rows of panel j from `first` on, and the keys of a range that some of them may see.
  template <class Work>
  void each_part_and_range(const View& v, const Rows& r, Work work) const {
    for (int j = 0; j < r.panel_count; ++j)
      for (const KeyRange& range : ranges_)
        for (int first = 0; first < PANEL; first += PART) work(j, first, range, keys_seen(v, r, range, j, first, PART));
  }

  SUBQUAD_STAGE void keys_backward(const View& v, const Rows& r, const KeyRange& range, const float* grad_columns) {
    Keys& keys = *range.keys;
    const long depth = padded(v.D), height = r.height();
    for (int e = 0; e < keys.count; e += PANEL) {
      const int tall = std::min(PANEL, keys.count - e);
      const auto sees = [&](int j) {
        const Seen seen = keys_seen(v, r, range, j);
        return seen.from < e + tall && seen.to > e;
      };
      int j = 0, end = r.panel_count;  // panels of rows before `j` and from `end` on see none of these keys
      while (j < end && !sees(j)) ++j;
      while (end > j && !sees(end - 1)) --end;
      const int rest = (end - j) * PANEL;
      if (!rest) continue;
      const long at = (range.begin + e) * PANEL, skipped = long(j) * PANEL * PANEL;
      add_product(tall, v.Dv, rest, panels(panel(logits_, j) + at, size_), {grad_columns + skipped, height * PANEL},
                  in_rows(keys.value_grad + e * v.height, v.height));
      add_product(tall, v.D, rest, panels(panel(grad_, j) + at, size_), {r.columns + skipped, height * PANEL},
                  in_rows(keys.grad + e * depth, depth));
    }
    if (!v.p.gaussian) return;
    for (int e = 0; e < keys.count; ++e) {
      Vec sum{};
      for (int j = 0; j < r.panel_count; ++j) {
        const float* x = panel(grad_, j) + (range.begin + e) * PANEL;
        sum += load(x) + load(x + LANES);
      }
      const float factor = hsum(sum);
      for (int d = 0; d < v.D; ++d)
        keys.grad[e * depth + d] -= factor * keys.columns[(d / PANEL * keys.height + e) * PANEL + d % PANEL];
    }
  }

  std::vector<KeyRange> ranges_;
  long size_ = 0;
  float *logits_ = nullptr, *grad_ = nullptr;
  Vec top_[2];
};

}  // namespace subquad
