// read_bandwidth THREADS: how fast memory is read, and nothing done with it: bytes per second, on
// pages of 4 KiB and of 2 MiB, the best of several passes over 1 GiB.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

typedef float Lane __attribute__((vector_size(64)));

static const size_t kBytes = (size_t)1 << 30, kHugePage = (size_t)2 << 20;
static const int kPasses = 9;

struct Part {
  const Lane *lanes;
  size_t count;
  float sum;
  pthread_barrier_t *barrier;
};

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *read_part(void *argument) {
  Part *part = (Part *)argument;
  for (int pass = 0; pass < kPasses; pass++) {
    pthread_barrier_wait(part->barrier);
    Lane a = {}, b = {}, c = {}, d = {};
    for (size_t i = 0; i + 4 <= part->count; i += 4) {
      const Lane *at = part->lanes + i;
      __builtin_prefetch(at + 64);
      __builtin_prefetch(at + 65);
      __builtin_prefetch(at + 66);
      __builtin_prefetch(at + 67);
      a += at[0];
      b += at[1];
      c += at[2];
      d += at[3];
    }
    a += b + c + d;
    for (int i = 0; i < 16; i++) part->sum += a[i];  // or the compiler leaves the reading out
    pthread_barrier_wait(part->barrier);
  }
  return nullptr;
}

static double bytes_per_second(int threads, bool huge) {
  char *mapped = (char *)mmap(nullptr, kBytes + kHugePage, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  float *floats = (float *)(((uintptr_t)mapped + kHugePage - 1) & ~(uintptr_t)(kHugePage - 1));
  madvise(floats, kBytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  for (size_t i = 0; i < kBytes / sizeof(float); i++) floats[i] = 1;

  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, threads + 1);
  Part *parts = (Part *)calloc(threads, sizeof(Part));
  pthread_t *ids = (pthread_t *)calloc(threads, sizeof(pthread_t));
  const size_t lanes = kBytes / sizeof(Lane) / threads;
  for (int i = 0; i < threads; i++) {
    parts[i] = {(const Lane *)floats + i * lanes, lanes, 0, &barrier};
    pthread_create(&ids[i], nullptr, read_part, &parts[i]);
  }
  double best = 1e9;
  for (int pass = 0; pass < kPasses; pass++) {
    pthread_barrier_wait(&barrier);
    const double began = now();
    pthread_barrier_wait(&barrier);
    const double took = now() - began;
    if (took < best) best = took;
  }
  float sum = 0;
  for (int i = 0; i < threads; i++) {
    pthread_join(ids[i], nullptr);
    sum += parts[i].sum;
  }
  munmap(mapped, kBytes + kHugePage);
  return sum > 0 ? (double)(lanes * threads * sizeof(Lane)) / best : 0;
}

int main(int count, char **arguments) {
  const int threads = count > 1 ? atoi(arguments[1]) : 1;
  printf("{\"pages_4k\": %.4g, \"pages_2m\": %.4g}\n", bytes_per_second(threads, false),
         bytes_per_second(threads, true));
  return 0;
}
