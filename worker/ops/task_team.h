// OpenMP threads for kernels that call oneDNN: tasks of uneven cost, whose inner products are
// single-threaded. (parallel.h splits plain loops.)
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>

namespace zeroshard::cpu {

// While it lives, the OpenMP threads that this thread's next parallel region gets (also oneDNN's).
class OmpThreads {
 public:
  explicit OmpThreads(int threads) : before_(omp_get_max_threads()), changed_(before_ != threads) {
    if (changed_) omp_set_num_threads(threads);
  }
  ~OmpThreads() {
    if (changed_) omp_set_num_threads(before_);
  }
  OmpThreads(const OmpThreads&) = delete;
  OmpThreads& operator=(const OmpThreads&) = delete;

 private:
  const int before_;
  const bool changed_;
};

// Calls task(i, t) for each i of [0, tasks): t in [0, threads) is the thread's number within this
// call, and OpenMP inside a task is single-threaded. Which thread runs a task may differ from run
// to run: a task writes only what no other does. The first exception is thrown again at the end.
template <typename Task>
void RunTasks(int threads, int64_t tasks, const Task& task) {
  const auto team = static_cast<int>(std::min<int64_t>(threads, tasks));
  if (team <= 1) {
    const OmpThreads single(1);
    for (int64_t i = 0; i < tasks; ++i) task(i, 0);
    return;
  }
  std::exception_ptr failure;
  std::mutex mutex;
#pragma omp parallel num_threads(team)
  {
    const OmpThreads single(1);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      try {
        task(i, omp_get_thread_num());
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace zeroshard::cpu
