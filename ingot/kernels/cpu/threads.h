// Dynamic scheduling: work is split into tasks that idle threads pop from a queue.
//
//   parallel_for_dynamic(tasks, [&](TaskQueue& queue) {
//     ...                                                  // once per participating thread
//     for (int64_t task; queue.pop(task);) ...
//   });
//
// The call returns when all tasks are done, not when all threads have arrived: a preempted thread
// only delays it while it holds a task. OpenMP regions wait for all threads; with two programs on
// two cores, that slowed decoding from 60 to 1.5 tokens/s.
//
// A thread spins for about 50 us before it sleeps, which is longer than Python takes between two
// ops. Results do not depend on which thread runs a task.
//
// A caller that knows what the next job reads can pass it to `hint_next`: an idle thread then
// prefetches the memory of its first task. The second thread was idle for a sixth of a decode step.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include "torch_abi.h"

namespace ingot {

// Reference to a callable that outlives the call it is passed to. Compared with std::function, it
// copies nothing and is less code for each callable.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class Function>
  FunctionRef(const Function& function)
      : function_(&function), call_([](const void* function, Args... args) -> R {
          return (*static_cast<const Function*>(function))(args...);
        }) {}
  FunctionRef(const FunctionRef&) = default;
  R operator()(Args... args) const { return call_(function_, args...); }

 private:
  const void* function_;
  R (*call_)(const void*, Args...);
};

class TaskQueue {
 public:
  TaskQueue(std::atomic<int64_t>& at, int64_t tasks) : at_(at), tasks_(tasks) {}
  bool pop(int64_t& task) {
    task = at_.fetch_add(1, std::memory_order_relaxed);
    return task < tasks_;
  }

 private:
  std::atomic<int64_t>& at_;
  int64_t tasks_;
};

using TaskBody = FunctionRef<void(TaskQueue&)>;

// Memory that a job will read: `tasks` contiguous parts of `bytes` each.
struct PrefetchHint {
  const char* begin = nullptr;
  int64_t bytes = 0, tasks = 0;
};

// Runs one job at a time. Its threads live as long as the process.
class ThreadPool {
 public:
  // Run on at most `threads` threads including the caller. A concurrent second caller runs
  // serially.
  [[gnu::noinline]] void run(int64_t tasks, int64_t threads, const TaskBody& body) {
    int64_t helpers = std::min(tasks, threads) - 1;
    reset_after_fork();
    if (helpers < 1 || busy_.exchange(true, std::memory_order_acquire))
      return run_serial(tasks, body);
    while (workers_ < helpers && start_worker()) workers_++;
    at_.store(0, std::memory_order_relaxed);
    tasks_ = tasks, body_ = &body, error_ = nullptr;
    failed_.clear();
    max_helpers_.store(helpers, std::memory_order_relaxed);
    state_.store(OPEN, std::memory_order_release);
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    run_tasks();
    state_.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int i = 0; state_.load(std::memory_order_acquire) != 0; i++) relax(i);
    std::exception_ptr error = error_;
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

  // Up to two hints. They are only prefetched, so the memory may be freed or a hint half updated.
  void hint_next(int index, const PrefetchHint& hint) {
    hints_[index].begin.store(hint.begin, std::memory_order_relaxed);
    hints_[index].bytes.store(hint.bytes, std::memory_order_relaxed);
    hints_[index].tasks.store(hint.tasks, std::memory_order_relaxed);
  }

  [[gnu::noinline]] static void run_serial(int64_t tasks, const TaskBody& body) {
    std::atomic<int64_t> at = 0;
    TaskQueue queue(at, tasks);
    body(queue);
  }

 private:
  // state_ is the flag OPEN plus the number of helpers times ONE.
  static constexpr int64_t OPEN = 1, ONE = 2;
  static constexpr int SPINS = 1000;

  // Workers block signals, which belong to Python's threads. If no thread can be started, the
  // existing ones do the work.
  bool start_worker() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    auto worker = std::make_unique<Worker>(this, workers_ + 1);
    pthread_t thread;
    bool started = pthread_create(&thread, nullptr, start, worker.get()) == 0;
    if (started) worker.release(), pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  struct Worker {
    ThreadPool* pool;
    int64_t number;
  };
  static void* start(void* argument) {
    std::unique_ptr<Worker> worker(static_cast<Worker*>(argument));
    worker->pool->worker_loop(worker->number);
    return nullptr;
  }

  void worker_loop(int64_t number) {
    PrefetchCursor cursor[2];
    for (uint32_t seen_job = 0;;) {
      for (int i = 0; i < SPINS && job_.load(std::memory_order_acquire) == seen_job; i++) {
        bool more = prefetch(number, hints_[0], cursor[0]);
        if (prefetch(number, hints_[1], cursor[1]) || more) continue;
        relax(0);
      }
      job_.wait(seen_job, std::memory_order_acquire);
      seen_job = job_.load(std::memory_order_acquire);
      // A late thread finds this job closed or the next one open; a job's data are set before it
      // opens.
      int64_t state = state_.load(std::memory_order_acquire);
      while ((state & OPEN) && state / ONE < max_helpers_.load(std::memory_order_relaxed))
        if (state_.compare_exchange_weak(state, state + ONE, std::memory_order_acq_rel)) {
          run_tasks();
          state_.fetch_sub(ONE, std::memory_order_acq_rel);
          break;
        }
    }
  }

  struct PrefetchCursor {
    const char* begin = nullptr;
    int64_t at = 0;
  };
  struct AtomicHint {
    std::atomic<const char*> begin{nullptr};
    std::atomic<int64_t> bytes{0}, tasks{0};
  };

  // Prefetch four cache lines of the task this thread will likely pop; return false at its end.
  static bool prefetch(int64_t number, const AtomicHint& hint, PrefetchCursor& cursor) {
    const char* begin = hint.begin.load(std::memory_order_relaxed);
    int64_t bytes = hint.bytes.load(std::memory_order_relaxed);
    if (begin != cursor.begin) cursor = {begin, 0};
    if (cursor.at >= bytes || number >= hint.tasks.load(std::memory_order_relaxed)) return false;
    for (int64_t end = cursor.at + 256; cursor.at < end; cursor.at += 64)
      __builtin_prefetch(begin + number * bytes + cursor.at, 0, 2);
    return true;
  }

  void run_tasks() {
    TaskQueue queue(at_, tasks_);
    try {
      (*body_)(queue);
    } catch (...) {
      at_.store(tasks_, std::memory_order_relaxed);
      if (!failed_.test_and_set()) error_ = std::current_exception();
    }
  }

  static void relax(int spin) {
#if defined(__x86_64__)
    if (spin < SPINS) return __builtin_ia32_pause();
#endif
    sched_yield();
  }

  // A forked child has its parent's memory but none of its threads.
  void reset_after_fork() {
    if (process_ == getpid()) return;
    process_ = getpid();
    workers_ = 0, state_ = 0, busy_ = false;
  }

  alignas(64) AtomicHint hints_[2];
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int64_t> state_{0};
  alignas(64) std::atomic<int64_t> at_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int64_t> max_helpers_{0};
  int64_t workers_ = 0, tasks_ = 0;
  pid_t process_ = getpid();
  const TaskBody* body_ = nullptr;
  std::exception_ptr error_;
  std::atomic_flag failed_;
};

// The process-wide pool, created by the library that was loaded first.
inline ThreadPool* thread_pool = nullptr;

// Not inlined, as the compiler would also inline the work into run_serial().
INGOT_NOINLINE void parallel_for_dynamic(int64_t tasks, const TaskBody& body) {
  int64_t threads = thread_pool && tasks > 1 ? num_threads() : 1;
  if (threads > 1) thread_pool->run(tasks, threads, body);
  else ThreadPool::run_serial(tasks, body);
}

}  // namespace ingot
