// The threads that a call works on.

#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <functional>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace {

// A share of all blocks: part `index` of `count` that work at the same time.
struct Part {
  int64_t index, count;

  int64_t first_of(int64_t units) const { return units * index / count; }
  int64_t past_of(int64_t units) const { return units * (index + 1) / count; }
};

// The pool of threads that torch computes with (GNU OpenMP; LLVM's answers to the same names), found in the process and
// not linked: a pool of our own would compete with it, and to start threads costs a third of a call's time. Without it
// the caller does all the work.
struct Pool {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*index)();
  int (*count)();

  Pool() {
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    index = reinterpret_cast<decltype(index)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    count = reinterpret_cast<decltype(count)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
  }
  bool usable() const { return parallel && index && count; }
};

// How a thread treats denormals is its own: those of the pool shall do as the caller does.
struct FloatMode {
#ifdef __SSE__
  unsigned control = _mm_getcsr();
  void set() const { _mm_setcsr(control); }
#else
  void set() const {}
#endif
};

struct Job {
  const Pool& pool;
  const std::function<int(Part)>& work;
  std::atomic<int> worst;  // status
  FloatMode mode = {};
};

void run_job(void* data) {
  Job& job = *static_cast<Job*>(data);
  const FloatMode own;
  job.mode.set();
  const int status = job.work(Part{job.pool.index(), job.pool.count()});  // there may be fewer than were asked for
  own.set();
  int seen = job.worst.load();
  while (status > seen && !job.worst.compare_exchange_weak(seen, status)) {
  }
}

int run_parts(int threads, const std::function<int(Part)>& work) {
  static const Pool pool;  // of the process, as the names are
  if (threads <= 1 || !pool.usable()) return work(Part{0, 1});
  Job job{pool, work, {0}};
  pool.parallel(run_job, &job, static_cast<unsigned>(threads), 0);
  return job.worst.load();
}

}  // namespace
