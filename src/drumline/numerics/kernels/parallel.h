// Independent tasks over OpenMP threads. Which thread takes a task never changes its result.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

// Calls f(task, thread) for each task. One thread never enters OpenMP, whose pool does not survive a fork.
template <class F>
void parallel_for(int threads, long tasks, F f) {
#ifdef _OPENMP
  if (threads > 1 && tasks > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long task = 0; task < tasks; ++task) f(task, omp_get_thread_num());
    return;
  }
#endif
  for (long task = 0; task < tasks; ++task) f(task, 0);
}
