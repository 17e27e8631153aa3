// Runs steps one after the other in a thread of its own: the next one may lie ready while one runs.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "program.h"
#include "team.h"

struct Driver {
  Team* team;
  const Program* program;
  Format format;
  int launched, ended;  // file descriptors
  pthread_t thread;
};

// Ids that were not known when the step was planned: the step before has sampled them by now. Of one
// that is not finite nothing comes but what is thrown away.
static void fill(const Launch* launch) {
  for (int i = 0; i < launch->num_awaited; i++) {
    int id = launch->before[launch->awaited[2 * i + 1]];
    launch->token_ids[launch->awaited[2 * i]] = id < 0 ? 0 : id;
  }
}

static int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000L + now.tv_nsec;
}

// The next launch; 0 once there will be none.
static Launch* next(const Driver* driver) {
  Launch* launch;
  ssize_t size;
  do size = read(driver->launched, &launch, sizeof launch);
  while (size < 0 && errno == EINTR);
  return size == sizeof launch ? launch : 0;
}

static void* drive(void* argument) {
  Driver* driver = (Driver*)argument;
  flush_subnormals();
  while (Launch* launch = next(driver)) {
    launch->started_ns = now_ns();
    fill(launch);
    launch->failed = run_step(driver->team, driver->program, &launch->step, driver->format);
    __atomic_store_n(&launch->ended_ns, now_ns(), __ATOMIC_RELEASE);  // from here on it may be freed
    const uint64_t one = 1;
    while (write(driver->ended, &one, sizeof one) < 0 && errno == EINTR) {}
  }
  return 0;
}

// Signals are the interpreter's: its threads take them, those that it knows nothing of do not, but for
// what a thread's own fault raises. Gives the mask before; new threads inherit the calling one's.
static sigset_t block_signals() {
  sigset_t blocked, before;
  sigfillset(&blocked);
  const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  for (int number : own) sigdelset(&blocked, number);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  return before;
}

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Addresses of launches are read from the pipe `launched`, in whose order they run; after each end one
// is added to the eventfd `ended`. 0: no thread could be made.
EXPORT Driver* penstock_driver(
    int threads, const Program* program, int format, int launched, int ended) {
  Driver* driver = (Driver*)malloc(sizeof(Driver));
  sigset_t before = block_signals();  // for all the threads made here
  Team* team = driver ? team_start(threads) : 0;
  int failed = 1;
  if (team) {
    *driver = {team, program, (Format)format, launched, ended, 0};
    failed = pthread_create(&driver->thread, 0, drive, driver);
    if (failed) team_end(team);
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
  if (!failed) return driver;
  free(driver);
  return 0;
}

// Once the pipe's other end is closed: what was launched is run first.
EXPORT void penstock_end_driver(Driver* driver) {
  pthread_join(driver->thread, 0);
  team_end(driver->team);
  free(driver);
}

}  // extern "C"
