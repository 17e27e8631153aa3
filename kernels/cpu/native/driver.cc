// Runs steps one after the other in a thread of its own: the next one may lie ready while one runs.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "program.h"
#include "team.h"

struct Driver {
  Team* team;
  const Program* program;
  int* tasks;
  int format;
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

static void* drive(void* argument) {
  Driver* driver = (Driver*)argument;
  Launch* launch;
  while (read(driver->launched, &launch, sizeof launch) == sizeof launch) {
    fill(launch);
    launch->failed = run_step(driver->team, driver->program, &launch->step, driver->tasks, driver->format);
    uint64_t one = 1;
    if (write(driver->ended, &one, sizeof one) != sizeof one) break;
  }
  return 0;
}

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Addresses of launches are read from the pipe `launched`, in whose order they run; of each that has
// ended one is added to the eventfd `ended`. 0: no thread could be made.
EXPORT Driver* penstock_driver(
    int threads, const Program* program, int* tasks, int format, int launched, int ended) {
  Driver* driver = (Driver*)malloc(sizeof(Driver));
  Team* team = driver ? team_start(threads) : 0;
  if (team) {
    *driver = {team, program, tasks, format, launched, ended, 0};
    if (!pthread_create(&driver->thread, 0, drive, driver)) return driver;
    team_end(team);
  }
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
