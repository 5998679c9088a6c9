// Work in pieces, shared out among threads: whoever is free takes the next one.
//
//   shared(pieces, [&](Next& next) {
//     ...                                                  // once for each thread that takes part
//     for (int64_t piece; next(piece);) ...
//   });
//
// It returns when all pieces are done, not when all threads have come: a thread that has lost its core
// to another program is not waited for unless it holds a piece. OpenMP's regions do wait, and where two
// programs share two cores, decoding fell from 60 to 1.5 tokens/s for it.
//
// A thread looks for work for some 50 us before it sleeps, which is longer than Python takes from one
// op to the next. Who computes a piece has no influence on its bits.
//
// Who knows what the next job will read can say so with `expect`: a waiting thread fetches its first
// piece into its cache. A sixth of a second thread's time in a decode step was waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <system_error>
#include <thread>

#include <signal.h>
#include <unistd.h>

#include <torch/csrc/stable/ops.h>

namespace ingot {

class Next {
 public:
  Next(std::atomic<int64_t>& at, int64_t pieces) : at_(at), pieces_(pieces) {}
  bool operator()(int64_t& piece) {
    piece = at_.fetch_add(1, std::memory_order_relaxed);
    return piece < pieces_;
  }

 private:
  std::atomic<int64_t>& at_;
  int64_t pieces_;
};

using Body = std::function<void(Next&)>;

// Memory that a job will read, in pieces.
struct Expected {
  const char* begin = nullptr;
  int64_t bytes = 0, pieces = 0;  // of one, how many
};

// One job at a time. Its threads live as long as the process.
class Pool {
 public:
  // With so many threads at most, this one included. A second caller meanwhile works alone.
  void run(int64_t pieces, int64_t threads, const Body& body) {
    int64_t helpers = std::min(pieces, threads) - 1;
    after_fork();
    if (helpers < 1 || busy_.exchange(true, std::memory_order_acquire)) return alone(pieces, body);
    while (workers_ < helpers && start()) workers_++;
    at_.store(0, std::memory_order_relaxed);
    pieces_ = pieces, body_ = &body, error_ = nullptr;
    failed_.clear();
    limit_.store(helpers, std::memory_order_relaxed);
    inside_.store(OPEN, std::memory_order_release);
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    take_part();
    inside_.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int i = 0; inside_.load(std::memory_order_acquire) != 0; i++) relax(i);
    std::exception_ptr error = error_;
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

  // Up to two at once. Nothing depends on them, so they may have been freed since, or be half renewed.
  void expect(int which, const Expected& next) {
    next_[which].begin.store(next.begin, std::memory_order_relaxed);
    next_[which].bytes.store(next.bytes, std::memory_order_relaxed);
    next_[which].pieces.store(next.pieces, std::memory_order_relaxed);
  }

  static void alone(int64_t pieces, const Body& body) {
    std::atomic<int64_t> at = 0;
    Next next(at, pieces);
    body(next);
  }

 private:
  static constexpr int64_t OPEN = 1, ONE = 2;  // of inside_: a flag, and a count above it
  static constexpr int SPINS = 1000;

  // Signals are for the threads that Python knows. Without a new thread those that are there do it.
  bool start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread([this, number = workers_ + 1] { work(number); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  void work(int64_t number) {
    Fetching fetching[2];
    for (uint32_t seen = 0;;) {
      for (int i = 0; i < SPINS && job_.load(std::memory_order_acquire) == seen; i++) {
        bool more = fetch(number, next_[0], fetching[0]);
        if (fetch(number, next_[1], fetching[1]) || more) continue;
        relax(0);
      }
      job_.wait(seen, std::memory_order_acquire);
      seen = job_.load(std::memory_order_acquire);
      // Who comes late finds the job closed, or the next one open: its data were there before it was.
      int64_t inside = inside_.load(std::memory_order_acquire);
      while ((inside & OPEN) && inside / ONE < limit_.load(std::memory_order_relaxed))
        if (inside_.compare_exchange_weak(inside, inside + ONE, std::memory_order_acq_rel)) {
          take_part();
          inside_.fetch_sub(ONE, std::memory_order_acq_rel);
          break;
        }
    }
  }

  struct Fetching {
    const char* of = nullptr;
    int64_t at = 0;
  };
  struct Shown {
    std::atomic<const char*> begin{nullptr};
    std::atomic<int64_t> bytes{0}, pieces{0};
  };

  // Some lines of the piece that this thread will likely take; false if there is nothing left.
  static bool fetch(int64_t number, const Shown& next, Fetching& fetching) {
    const char* begin = next.begin.load(std::memory_order_relaxed);
    int64_t bytes = next.bytes.load(std::memory_order_relaxed);
    if (begin != fetching.of) fetching = {begin, 0};
    if (fetching.at >= bytes || number >= next.pieces.load(std::memory_order_relaxed)) return false;
    for (int64_t end = fetching.at + 256; fetching.at < end; fetching.at += 64)
      __builtin_prefetch(begin + number * bytes + fetching.at, 0, 2);
    return true;
  }

  void take_part() {
    Next next(at_, pieces_);
    try {
      (*body_)(next);
    } catch (...) {
      at_.store(pieces_, std::memory_order_relaxed);
      if (!failed_.test_and_set()) error_ = std::current_exception();
    }
  }

  static void relax(int turn) {
#if defined(__x86_64__)
    if (turn < SPINS) return __builtin_ia32_pause();
#endif
    std::this_thread::yield();
  }

  // A child has the memory of its parent, but not its threads.
  void after_fork() {
    if (process_ == getpid()) return;
    process_ = getpid();
    workers_ = 0, inside_ = 0, busy_ = false;
  }

  alignas(64) Shown next_[2];
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
  alignas(64) std::atomic<int64_t> at_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int64_t> limit_{0};
  int64_t workers_ = 0, pieces_ = 0;
  pid_t process_ = getpid();
  const Body* body_ = nullptr;
  std::exception_ptr error_;
  std::atomic_flag failed_;
};

// The one of the process, which the library that was loaded first has made.
inline Pool* pool = nullptr;

template <class Work>
inline void shared(int64_t pieces, const Work& work) {
  int64_t threads = pool && pieces > 1 ? torch::stable::get_num_threads() : 1;
  if (threads > 1) pool->run(pieces, threads, work);
  else Pool::alone(pieces, work);
}

}  // namespace ingot
