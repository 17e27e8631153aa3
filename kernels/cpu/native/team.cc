#include "team.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

// Turns of a spin: some 30 us, more than one thread is ahead of another, less than a sleeping
// thread takes to wake. Beyond it the processor is somebody else's, who should have it.
enum { SPINS = 1000 };

struct Event {  // counts up; threads wait for it to leave a value
  alignas(64) int value;
  int sleepers;
};

struct Team {
  Event start, meeting;
  alignas(64) int arrived;
  alignas(64) int size;
  int ending;
  Job job;
  void* argument;
  pthread_t* threads;
};

static int now(const Event* e) { return __atomic_load_n(&e->value, __ATOMIC_ACQUIRE); }

static void wait_beyond(Event* e, int old) {
  for (int i = 0; i < SPINS; i++) {
    if (now(e) != old) return;
    _mm_pause();
  }
  __atomic_fetch_add(&e->sleepers, 1, __ATOMIC_SEQ_CST);
  while (now(e) == old) syscall(SYS_futex, &e->value, FUTEX_WAIT_PRIVATE, old, 0, 0, 0);
  __atomic_fetch_sub(&e->sleepers, 1, __ATOMIC_SEQ_CST);
}

static void raise(Event* e) {
  __atomic_fetch_add(&e->value, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&e->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

void team_meet(Team* team) {
  if (team->size == 1) return;
  int turn = now(&team->meeting);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    raise(&team->meeting);
  } else {
    wait_beyond(&team->meeting, turn);
  }
}

struct Member {
  Team* team;
  int thread;
};

static void* live(void* argument) {
  Member member = *(Member*)argument;
  free(argument);
  Team* team = member.team;
  for (int turn = 0;; turn++) {
    wait_beyond(&team->start, turn);
    if (team->ending) return 0;
    team->job(team->argument, member.thread);
    team_meet(team);
  }
}

Team* team_start(int size) {
  Team* team = (Team*)aligned_alloc(64, (sizeof(Team) + 63) / 64 * 64);
  if (!team) return 0;
  *team = Team{};
  team->size = 1;
  team->threads = (pthread_t*)calloc(size, sizeof(pthread_t));
  for (; team->threads && team->size < size; team->size++) {
    Member* member = (Member*)malloc(sizeof(Member));
    if (member) *member = {team, team->size};
    if (!member || pthread_create(&team->threads[team->size], 0, live, member)) {
      free(member);
      break;
    }
  }
  if (team->size == size) return team;
  team_end(team);
  return 0;
}

void team_end(Team* team) {
  team->ending = 1;
  raise(&team->start);
  for (int i = 1; i < team->size; i++) pthread_join(team->threads[i], 0);
  free(team->threads);
  free(team);
}

int team_size(const Team* team) { return team->size; }

void team_run(Team* team, Job job, void* argument) {
  team->job = job;
  team->argument = argument;
  if (team->size > 1) raise(&team->start);
  job(argument, 0);
  team_meet(team);
}
