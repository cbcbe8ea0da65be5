// The keys around a block: a few blocks kept ready, the sinks, and which of them are attended to exactly.
// Letters as in api.hpp.
#pragma once
#include "exact.hpp"

namespace subquad {

// Where gradients of one key head go: rows of all its query heads, keys and values, from some token on.
struct GradientWindow {
  float *q, *k, *v;
  long first, tokens;          // queries of each head
  long key_first, key_tokens;
  bool add;                    // to what is there; else every row comes once
  static constexpr long NEVER = std::numeric_limits<long>::max();
  long keys_met = NEVER;       // keys from this token on have something there in any case
};

// Rows with padding, times `factor`, to dense ones, without those outside [0, limit).
template <bool ADD>
inline void copy_rows(const float* __restrict__ from, long stride, int count, int width, float factor, long token,
                      long limit, float* __restrict__ to, long first) {
  for (int i = 0; i < count; ++i) {
    if (token + i < 0 || token + i >= limit) continue;
    float* __restrict__ row = to + (token + i - first) * width;
    for (int d = 0; d < width; ++d) row[d] = factor * from[i * stride + d] + (ADD ? row[d] : 0);
  }
}
inline void give_rows(bool add, const float* from, long stride, int count, int width, float factor, long token,
                      long limit, float* to, long first) {
  const auto copy = add ? copy_rows<true> : copy_rows<false>;
  copy(from, stride, count, width, factor, token, limit, to, first);
}

class Neighbours {
 public:
  // With a window, blocks collect gradients and hand them over when they leave.
  Neighbours(const View& view, const GradientWindow* window) : v(view), window_(window) {
    const bool near = v.p.near_blocks, backward = window != nullptr;
    // The backward makes its features elsewhere, unless all keys share one field; groups and squares need the numbers too.
    const bool lanes = !backward || !(near || v.p.causal) || v.p.rule == GROUPS || v.p.gaussian;
    slots_ = near ? std::max(3L, v.around() * (v.p.causal ? 1 : 2) + 1) : 1;
    ring_.resize(slots_), held_.resize(slots_);
    for (long i = 0; i < slots_; ++i) {
      ring_[i] = Keys::allocate(v, near ? v.p.block : TILE, lanes, backward ? !v.in_place() : near, backward);
      held_[i] = NOTHING;
    }
    if (v.p.sinks) {
      sinks = Keys::allocate(v, v.p.sinks, true, true, backward);
      sinks.load_sinks(v);
    }
    exact = Exact::allocate(v.p.sinks + (near ? slots_ * v.p.block : 0), backward);
  }

  // Blocks of keys are not those of rows, but `View::key_offset` away. In a sweep back, nothing but what is folded is read.
  long token(long b, bool back = false) const { return b * v.p.block + (back ? 1 : -1) * View::key_offset(v.p); }
  Keys& block(long b, bool back = false) {
    const long slot = b % slots_;
    if (held_[slot] != b) {
      if (held_[slot] != NOTHING) give_back(ring_[slot]);
      ring_[slot].load(v, token(b, back), v.p.block);
      held_[slot] = b;
    }
    return ring_[slot];
  }
  // The block of keys that enters the far field after block b was read; null if there is none.
  Keys* folded(bool back, long b) {
    const long distance = long(v.p.reach) * v.p.near / v.p.block, other = back ? b + distance : b - distance;
    return there(other, back) ? &block(other, back) : nullptr;
  }
  // near = 0: any tokens, until the next call.
  Keys& tokens(long begin, int count) {
    ring_[0].load(v, begin, count);
    return ring_[0];
  }
  bool there(long b, bool back = false) const {
    return token(b, back) + v.p.block > 0 && token(b, back) < v.p.key_length;
  }
  // The first and the last one that rows of block b may see.
  long first_around(long b) const {
    const long back = long(v.p.reach) * v.p.near - View::key_offset(v.p);
    return b - (back + v.p.block - 1) / v.p.block;
  }
  long last_around(long b) const {
    const long end = (b + 1) * v.p.block + (v.p.causal ? 0 : long(v.p.reach) * v.p.near);
    return (end - 1 + View::key_offset(v.p)) / v.p.block;
  }

  // What the rows of block b attend to exactly: nothing, the sinks, or the sinks and the blocks around. Which keys of a
  // block a row sees is up to `Exact`.
  void attend_to_nothing() { exact.clear(); }
  void attend_to_sinks(long b) {
    exact.clear();
    if (v.p.sinks && v.exact_turn(b)) exact.add(true, &sinks);
  }
  void attend_around(long b) {
    attend_to_sinks(b);
    if (!v.exact_turn(b)) return;
    for (long other = first_around(b); other <= last_around(b); ++other)
      if (there(other)) exact.add(false, &block(other));
  }

  SUBQUAD_STAGE void give_back(Keys& keys) {
    if (!window_) return;
    const GradientWindow& w = *window_;
    const bool add = w.add || keys.token >= w.keys_met;
    give_rows(add, keys.grad, padded(v.D), keys.count, v.D, v.p.root, keys.token, v.p.key_length, w.k, w.key_first);
    give_rows(add, keys.value_grad, v.height, keys.count, v.Dv, 1, keys.token, v.p.key_length, w.v, w.key_first);
    std::fill(keys.grad, keys.grad + keys.height * padded(v.D), 0.0f);
    std::fill(keys.value_grad, keys.value_grad + keys.height * v.height, 0.0f);
  }
  void give_back_all() {
    for (long i = 0; i < slots_; ++i)
      if (held_[i] != NOTHING) give_back(ring_[i]);
  }

  Exact exact;
  Keys sinks;

 private:
  static constexpr long NOTHING = -2;  // no block has this number
  View v;
  const GradientWindow* window_;
  long slots_;
  std::vector<Keys> ring_;
  std::vector<long> held_;
};

}  // namespace subquad
