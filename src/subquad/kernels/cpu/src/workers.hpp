// Threads of our own, for machines that have other work to do as well.
//
// A parallel region of OpenMP ends when every thread of the team has come, and waits for it in a busy loop: where other
// processes want the cores, a thread that the system has put aside holds up all others for milliseconds, again and
// again. Here the caller takes part in its own job and waits only for threads that are inside a step. A thread that never
// wakes up costs nothing, and no thread spins for longer than a wake-up takes.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __unix__
#include <pthread.h>
#endif

namespace subquad {

// Chains of steps: the steps of a chain are done in order, one at a time, by any thread; chains are independent.
class Job {
 public:
  using Work = std::function<void(long chain, long step)>;
  Job(long chains, long steps, int helpers, Work work) : helpers(helpers), steps_(steps), work_(std::move(work)) {
    for (long chain = 0; chain < chains; ++chain) ready_.push_back({chain, 0});
  }

  // Steps until none is free. All chains advance together, so that at the end little is left of each. `lock` is held
  // except during the work. Returns whether the job is over.
  bool take_part(std::unique_lock<std::mutex>& lock) {
    while (!ready_.empty()) {
      const Next next = ready_.front();
      ready_.pop_front();
      ++busy_;
      lock.unlock();
      std::exception_ptr failure;
      try {
        work_(next.chain, next.step);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      --busy_;
      if (failure)
        failure_ = failure, ready_.clear();
      else if (!failure_ && next.step + 1 < steps_)
        ready_.push_back({next.chain, next.step + 1});
    }
    return over();
  }
  bool over() const { return busy_ == 0 && ready_.empty(); }
  bool wants_help() const { return helpers > 0 && !ready_.empty(); }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  int helpers;  // that may still join

 private:
  struct Next {
    long chain, step;
  };
  std::deque<Next> ready_;
  long steps_, busy_ = 0;
  std::exception_ptr failure_;
  Work work_;
};

class Workers {
 public:
  // One for the process. Never destroyed: threads may still wait in it when the process ends.
  static Workers& instance() {
#ifdef __unix__
    static const int prepared = pthread_atfork(nullptr, nullptr, [] { current() = nullptr; });  // threads do not fork
    (void)prepared;
#endif
    Workers* there = current();
    if (there) return *there;
    Workers* made = new Workers;
    if (current().compare_exchange_strong(there, made)) return *made;
    delete made;  // another thread was faster
    return *there;
  }

  void run(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    hire(job.helpers);
    jobs_.push_back(&job);
    ++published_;
    for (int i = 0; i < std::min(job.helpers, asleep_); ++i) wake_.notify_one();
    if (!job.take_part(lock)) wait_for(job, lock);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  }

 private:
  static constexpr auto PATIENCE = std::chrono::microseconds(20);  // about what it takes to wake a thread

  static std::atomic<Workers*>& current() {
    static std::atomic<Workers*> workers{nullptr};
    return workers;
  }
  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
  // Whether `happened` within the patience.
  template <class Condition>
  static bool soon(Condition happened) {
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    do {
      for (int i = 0; i < 16; ++i, pause())
        if (happened()) return true;
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  // Fewer threads, if the system gives no more, are slower and as right.
  void hire(int count) {
    try {
      for (; hired_ < count; ++hired_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto job = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* j) { return j->wants_help(); });
      if (job != jobs_.end()) {
        --(*job)->helpers;
        if ((*job)->take_part(lock)) ++finished_, done_.notify_all();
        continue;
      }
      const long seen = published_;
      lock.unlock();
      const bool called = soon([&] { return published_.load(std::memory_order_relaxed) != seen; });
      lock.lock();
      if (called || published_ != seen) continue;
      ++asleep_;
      wake_.wait(lock);
      --asleep_;
    }
  }

  void wait_for(const Job& job, std::unique_lock<std::mutex>& lock) {
    while (!job.over()) {
      const long seen = finished_;
      lock.unlock();
      soon([&] { return finished_.load(std::memory_order_relaxed) != seen; });
      lock.lock();
      if (!job.over() && finished_ == seen) done_.wait(lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<Job*> jobs_;
  std::atomic<long> published_{0}, finished_{0};
  int hired_ = 0, asleep_ = 0;
};

// work(chain, step) for all steps of all chains, on `threads` threads at most. What a step throws is thrown here.
template <class Work>
inline void each_step(int threads, long chains, long steps, Work work) {
  if (threads <= 1 || chains <= 1) {
    for (long chain = 0; chain < chains; ++chain)
      for (long step = 0; step < steps; ++step) work(chain, step);
    return;
  }
  Job job(chains, steps, int(std::min<long>(threads, chains)) - 1, work);
  Workers::instance().run(job);
  job.rethrow();
}

// work(i) for 0 <= i < count.
template <class Work>
inline void each_task(int threads, long count, Work work) {
  each_step(threads, count, 1, [&](long i, long) { work(i); });
}

// Lets tasks do something in their order, whichever was first. A task may wait for an earlier one: that was begun before.
class Turns {
 public:
  // Task i's place in the order, given up when it goes, also by an exception.
  class Turn {
   public:
    Turn(Turns& turns, long i) : turns_(turns), i_(i) {}
    ~Turn() {
      wait();
      const std::lock_guard<std::mutex> lock(turns_.mutex_);
      ++turns_.next_;
      turns_.moved_.notify_all();
    }
    void wait() {
      std::unique_lock<std::mutex> lock(turns_.mutex_);
      turns_.moved_.wait(lock, [&] { return turns_.next_ == i_; });
    }

   private:
    Turns& turns_;
    long i_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable moved_;
  long next_ = 0;
};

}  // namespace subquad
