// Prefetches the tokens of the next block while products run.
#pragma once
#include <cstdint>

namespace subquad {

// A queue of tokens, prefetched a few at a time: all at once, requests would queue up in front of the products.
class Prefetcher {
 public:
  void clear() { begin_ = end_ = 0; }
  // Adds `count` tokens of `bytes` each, `stride` bytes apart.
  void add(const char* first, long stride, long count, long bytes) {
    if (count > 0 && end_ < CAPACITY) runs_[end_++] = {first, stride, count, bytes};
  }
  // Prefetches the next few cache lines of the queue.
  void some() {
    for (long lines = 0; lines < LINES && begin_ < end_;) {
      Run& run = runs_[begin_];
      for (long i = 0; i < run.bytes; i += LINE, ++lines) __builtin_prefetch(run.at + i, 0, 2);
      run.at += run.stride;
      if (--run.count == 0) ++begin_;
    }
  }

 private:
  static constexpr int CAPACITY = 64;  // runs; more, of many heads that share their keys, are not worth a prefetch
  static constexpr long LINE = 64, LINES = 32;  // bytes of a cache line; lines at a time
  struct Run {
    const char* at;
    long stride, count, bytes;
  };
  Run runs_[CAPACITY];
  int begin_, end_;
};

inline Prefetcher& prefetcher() {
  static thread_local Prefetcher instance;  // all zero: empty. What a call leaves, the next may prefetch in vain
  return instance;
}

}  // namespace subquad
