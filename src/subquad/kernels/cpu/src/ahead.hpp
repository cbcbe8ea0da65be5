// Tokens that are read soon, asked for while products run.
#pragma once
#include <cstdint>

namespace subquad {

// A few tokens at a time: asked for all at once, they would wait for each other, and the products for them.
class Ahead {
 public:
  void forget() { begin_ = end_ = 0; }
  // `count` tokens of `bytes` each, `stride` bytes apart.
  void expect(const char* first, long stride, long count, long bytes) {
    if (count > 0 && end_ < CAPACITY) runs_[end_++] = {first, stride, count, bytes};
  }
  void some() {
    for (long lines = 0; lines < LINES && begin_ < end_;) {
      Run& run = runs_[begin_];
      for (long i = 0; i < run.bytes; i += LINE, ++lines) __builtin_prefetch(run.at + i, 0, 2);
      run.at += run.stride;
      if (--run.count == 0) ++begin_;
    }
  }

 private:
  static constexpr int CAPACITY = 64;  // more than that, of many heads that share their keys, is not worth asking for
  static constexpr long LINE = 64, LINES = 16;  // bytes of a cache line; lines at a time
  struct Run {
    const char* at;
    long stride, count, bytes;
  };
  Run runs_[CAPACITY];
  int begin_, end_;
};

inline Ahead& ahead() {
  static thread_local Ahead instance;  // all zero: nothing expected. What a call leaves, the next may ask for in vain
  return instance;
}

}  // namespace subquad
