// Scratch memory: one growing pool per thread, so that a call costs no allocation and no page faults after the first.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace subquad {

constexpr size_t ALIGNMENT = 64;  // bytes: a cache line, and the widest vector

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete(p, std::align_val_t(ALIGNMENT)); }
};
using Buffer = std::unique_ptr<float, AlignedDelete>;

// In tests, memory that nobody wrote is NaN wherever it is read.
inline float* poisoned(float* p, size_t count) {
#ifdef SUBQUAD_POISON
  std::fill(p, p + count, std::numeric_limits<float>::quiet_NaN());
#else
  (void)count;
#endif
  return p;
}

inline Buffer new_buffer(size_t count) {
  void* made = ::operator new(std::max<size_t>(count, 1) * 4, std::align_val_t(ALIGNMENT));
  return Buffer(poisoned(static_cast<float*>(made), count));
}

// Whole pages within some numbers: their first address, and bytes; none if they are few.
struct Pages {
  uintptr_t begin;
  size_t size;
  static constexpr uintptr_t PAGE = 4096;
  Pages(float* data, long count) {
    begin = (uintptr_t(data) + PAGE - 1) / PAGE * PAGE;
    const uintptr_t end = uintptr_t(data + count) / PAGE * PAGE;
    size = data && begin + 64 * PAGE < end ? end - begin : 0;
  }
};

// Whether it pays to ask for them: see large_pages.py.
inline std::atomic<bool>& large_pages() {
  static std::atomic<bool> wanted{false};
  return wanted;
}

// Fresh memory gets pages of 2 MB where it can, if Linux lets programs ask.
inline void ask_for_large_pages(float* data, long count) {
#if defined(__linux__)
  const Pages pages(data, count);
  if (pages.size && large_pages()) madvise(reinterpret_cast<void*>(pages.begin), pages.size, MADV_HUGEPAGE);
#else
  (void)data, (void)count;
#endif
}

// Asks for the pages of fresh memory at once: one by one, at first touch, they cost more than filling them.
inline void touch_pages(float* data, long count) {
#if defined(__linux__)
  constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE of Linux 5.14; older ones refuse, and nothing is lost
  const Pages pages(data, count);
  if (pages.size) madvise(reinterpret_cast<void*>(pages.begin), pages.size, POPULATE_WRITE);
#else
  (void)data, (void)count;
#endif
}

class Pool {
 public:
  // Everything taken before is given back.
  void reset() {
    const size_t wanted = total_;
    used_ = total_ = 0;
    if (pieces_.size() < 2) return;
    pieces_.clear();
    add(wanted);  // one piece that would have sufficed
  }
  float* take(size_t count) {
    const size_t line = ALIGNMENT / 4, rounded = (count + line - 1) / line * line;
    if (pieces_.empty() || used_ + rounded > size_) add(std::max(rounded, MINIMUM));
    total_ += rounded;  // not what could not be had: the next call would ask for it again
    float* p = pieces_.back().get() + used_;
    used_ += rounded;
    return poisoned(p, rounded);
  }
  float* zeros(size_t count) {
    float* p = take(count);
    std::fill(p, p + count, 0.0f);
    return p;
  }

 private:
  static constexpr size_t MINIMUM = 1 << 16;
  void add(size_t count) {
    pieces_.push_back(new_buffer(count));
    size_ = count;
    used_ = 0;
  }
  std::vector<Buffer> pieces_;
  size_t size_ = 0, used_ = 0, total_ = 0;
};

inline Pool& pool() {
  static thread_local Pool instance;
  return instance;
}
// What outlives the steps of a call: of the thread that makes it. Memory given back to the system after each call costs
// the pages again, and interrupts the other cores: 3 % of causal linear attention.
inline Pool& call_pool() {
  static thread_local Pool instance;
  return instance;
}

}  // namespace subquad
