// Exact logits of a tile of queries: the sinks, the neighbouring blocks and the own one. Letters as in api.hpp.
#pragma once
#include "features.hpp"

namespace subquad {

struct Piece {
  enum Which { SINKS, NEIGHBOUR, OWN } which;
  Keys* keys;
  long begin;  // its first row among the logits
};

class Exact {
 public:
  // `capacity` keys in all.
  static Exact allocate(long capacity, bool backward) {
    Exact e;
    e.logits_ = pool().take(capacity * TILE);
    e.grad_ = backward ? pool().take(capacity * TILE) : nullptr;
    return e;
  }
  void clear() { count_ = 0, size_ = 0; }
  void add(Piece::Which which, Keys* keys) {
    pieces_[count_++] = {which, keys, size_};
    size_ += keys->count;
  }
  bool empty() const { return size_ == 0; }

  // Logits, -inf where not seen, and the largest of each row in `r.exact`. `offset`: the tile's place in its block.
  SUBQUAD_STAGE void logits(const View& v, Rows& r, int offset) {
    for (int j = 0; j < r.panel_count; ++j) {
      top_[0] = top_[1] = splat(-INFINITE);
      for (int i = 0; i < count_; ++i) {
        const Piece& piece = pieces_[i];
        const Keys& keys = *piece.keys;
        float* x = panel(logits_, j) + piece.begin * PANEL;
        const int seen = reach(v, piece, offset, j);
        multiply_panel<false>(seen, v.D, panels(keys.columns, keys.height), r.lanes + long(j) * v.D * PANEL, x, PANEL);
        for (int e = 0; e < seen; ++e, x += PANEL) mask(v, r, piece, offset, j, e, x);
      }
      store(r.exact + j * PANEL, top_[0]), store(r.exact + j * PANEL + LANES, top_[1]);
    }
  }

  // exp(logits - exact), 0 where not seen; their sums are added to `r.sum`.
  SUBQUAD_STAGE void weights(const View& v, Rows& r, int offset) {
    for (int j = 0; j < r.panel_count; ++j)
      for (int i = 0; i < count_; ++i) {
        const Piece& piece = pieces_[i];
        float* x = panel(logits_, j) + piece.begin * PANEL;
        const int seen = reach(v, piece, offset, j);
        for (int lane = 0; lane < PANEL; lane += LANES) {
          const Vec reference = load(r.exact + j * PANEL + lane);
          Vec sum = load(r.sum + j * PANEL + lane);
          for (int e = 0; e < seen; ++e) {
            const Vec weight = vexp(load(x + e * PANEL + lane) - reference);
            store(x + e * PANEL + lane, weight);
            sum += weight;
          }
          store(r.sum + j * PANEL + lane, sum);
        }
        std::fill(x + seen * PANEL, x + piece.keys->count * PANEL, 0.0f);
      }
  }

  // r.out [tokens][Dv] += weights^T values
  SUBQUAD_STAGE void add_values(const View& v, Rows& r, int offset) const {
    each_panel_and_piece(v, r, offset, [&](int j, const Piece& piece, int seen) {
      const Transposed A = transposed(panel(logits_, j) + piece.begin * PANEL, 0);
      const Right values{piece.keys->value_columns, piece.keys->height * PANEL};
      add_product(PANEL, v.Dv, seen, A, values, in_rows(r.out + j * PANEL * v.height, v.height));
    });
  }

  // Adds the gradients of queries (dx), keys and values. grad: [g] in lanes and columns, and minus g.out of each row.
  void backward(const View& v, Rows& r, int offset, const float* grad_lanes, const float* grad_columns,
                const float* minus_dot, float* dx) {
    each_panel_and_piece(v, r, offset, [&](int j, const Piece& piece, int seen) {
      const Keys& keys = *piece.keys;
      const float* weight = panel(logits_, j) + piece.begin * PANEL;
      float* grad = panel(grad_, j) + piece.begin * PANEL;
      const float* lanes = grad_lanes + long(j) * v.Dv * PANEL;
      multiply_panel<false>(seen, v.Dv, panels(keys.value_columns, keys.height), lanes, grad, PANEL);
      for (int i = 0; i < seen * PANEL; i += LANES) {
        const Vec shift = load(minus_dot + j * PANEL + i % PANEL);
        store(grad + i, (load(grad + i) + shift) * load(weight + i));
      }
      std::fill(grad + seen * PANEL, grad + keys.count * PANEL, 0.0f);
      const Right columns{keys.columns, keys.height * PANEL};
      add_product(PANEL, v.D, seen, transposed(grad, 0), columns, in_rows(dx + j * PANEL * padded(v.D), padded(v.D)));
    });
    for (int i = 0; i < count_; ++i) keys_backward(v, r, pieces_[i], offset, grad_columns);
  }

 private:
  float* panel(float* x, int j) const { return x + j * size_ * PANEL; }

  // How many keys of a piece panel j of the rows may see.
  static int reach(const View& v, const Piece& piece, int offset, int j) {
    if (piece.which != Piece::OWN || !v.p.causal) return piece.keys->count;
    return std::min(piece.keys->count, offset + (j + 1) * PANEL);
  }

  void mask(const View& v, const Rows& r, const Piece& piece, int offset, int j, int e, float* x) {
    if (piece.which == Piece::SINKS) {
      const int64_t* seen = v.p.sink_seen + v.mask_row() * v.p.length + r.token;
      for (int i = 0; i < PANEL; ++i)
        if (j * PANEL + i >= r.count || seen[j * PANEL + i] <= e) x[i] = -INFINITE;
    } else if (!piece.keys->alive[e]) {
      std::fill(x, x + PANEL, -INFINITE);
    } else if (piece.which == Piece::OWN && v.p.causal) {
      const int earlier = std::min(e - offset - j * PANEL, PANEL);
      for (int i = 0; i < earlier; ++i) x[i] = -INFINITE;
    }
    if (v.p.gaussian)
      for (int i = 0; i < PANEL; ++i) x[i] -= piece.keys->half_square[e];
    top_[0] = vmax(top_[0], load(x)), top_[1] = vmax(top_[1], load(x + LANES));
  }

  template <class Work>
  void each_panel_and_piece(const View& v, const Rows& r, int offset, Work work) const {
    for (int j = 0; j < r.panel_count; ++j)
      for (int i = 0; i < count_; ++i) work(j, pieces_[i], reach(v, pieces_[i], offset, j));
  }

  SUBQUAD_STAGE void keys_backward(const View& v, const Rows& r, const Piece& piece, int offset, const float* grad_columns) {
    Keys& keys = *piece.keys;
    const long depth = padded(v.D), height = r.height();
    for (int e = 0; e < keys.count; e += PANEL) {  // panels of rows before `j` see none of these keys
      const int j = piece.which == Piece::OWN && v.p.causal ? std::max(0, (e - offset) / PANEL) : 0;
      const int tall = std::min(PANEL, keys.count - e), rest = int(height) - j * PANEL;
      if (rest <= 0) break;
      const long at = (piece.begin + e) * PANEL, skipped = long(j) * PANEL * PANEL;
      add_product(tall, v.Dv, rest, panels(panel(logits_, j) + at, size_), {grad_columns + skipped, height * PANEL},
                  in_rows(keys.value_grad + e * v.height, v.height));
      add_product(tall, v.D, rest, panels(panel(grad_, j) + at, size_), {r.columns + skipped, height * PANEL},
                  in_rows(keys.grad + e * depth, depth));
    }
    if (!v.p.gaussian) return;
    for (int e = 0; e < keys.count; ++e) {
      Vec sum{};
      for (int j = 0; j < r.panel_count; ++j) {
        const float* x = panel(grad_, j) + (piece.begin + e) * PANEL;
        sum += load(x) + load(x + LANES);
      }
      const float factor = hsum(sum);
      for (int d = 0; d < v.D; ++d)
        keys.grad[e * depth + d] -= factor * keys.columns[(d / PANEL * keys.height + e) * PANEL + d % PANEL];
    }
  }

  Piece pieces_[4];
  int count_ = 0;
  long size_ = 0;
  float *logits_ = nullptr, *grad_ = nullptr;
  Vec top_[2];
};

}  // namespace subquad
