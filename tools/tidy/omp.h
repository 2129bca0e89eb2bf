// The OpenMP functions that our sources and LibTorch's headers call, for clang-tidy alone: its wheel brings no omp.h,
// and GCC's uses an attribute that clang refuses.
#pragma once

extern "C" {
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
int omp_in_parallel();
void omp_set_num_threads(int);
}
