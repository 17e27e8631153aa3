#include "team.h"

#include <pthread.h>
#include <stdlib.h>

#include "board.h"
#include "simd.h"

enum { CLOSED = 1 << 30 };

struct Event {  // threads wait for its value to change
  alignas(64) int value;
  int sleepers;
};

struct Team {
  Event start;    // jobs so far
  Event present;  // threads in the job, besides the caller; CLOSED: no other one may come
  Board board;
  int ending;
  Job job;
  void* argument;
  pthread_t* threads;
};

static int now(const Event* e) { return __atomic_load_n(&e->value, __ATOMIC_SEQ_CST); }

static void wait_beyond(Event* e, int old) {
  for (uint64_t start = __rdtsc(); __rdtsc() - start < SPIN; _mm_pause())
    if (now(e) != old) return;
  __atomic_fetch_add(&e->sleepers, 1, __ATOMIC_SEQ_CST);
  while (now(e) == old) syscall(SYS_futex, &e->value, FUTEX_WAIT_PRIVATE, old, 0, 0, 0);
  __atomic_fetch_sub(&e->sleepers, 1, __ATOMIC_SEQ_CST);
}

static void add(Event* e, int change) {
  __atomic_fetch_add(&e->value, change, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&e->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

struct Member {
  Team* team;
  int thread;
};

static void* live(void* argument) {
  Member member = *(Member*)argument;
  free(argument);
  Team* team = member.team;
  flush_subnormals();
  for (int seen = 0;;) {
    wait_beyond(&team->start, seen);
    seen = now(&team->start);
    if (__atomic_load_n(&team->ending, __ATOMIC_ACQUIRE)) return 0;
    if (!(__atomic_fetch_add(&team->present.value, 1, __ATOMIC_SEQ_CST) & CLOSED)) {
      Seat seat = {&team->board, member.thread, 0, 0, 0};
      team->job(team->argument, &seat);
    }
    add(&team->present, -1);
  }
}

Team* team_start(int size) {
  Team* team = (Team*)aligned_alloc(64, sizeof(Team));
  if (!team) return 0;
  *team = Team{};
  team->present.value = CLOSED;
  team->board.size = 1;
  team->board.hands = (Hand*)aligned_alloc(64, size * sizeof(Hand));
  team->threads = (pthread_t*)calloc(size, sizeof(pthread_t));
  int* made = &team->board.size;
  for (; team->board.hands && team->threads && *made < size; ++*made) {
    Member* member = (Member*)malloc(sizeof(Member));
    if (member) *member = {team, *made};
    if (!member || pthread_create(&team->threads[*made], 0, live, member)) {
      free(member);
      break;
    }
  }
  if (team->board.hands && team->threads && *made == size) return team;
  team_end(team);
  return 0;
}

void team_end(Team* team) {
  __atomic_store_n(&team->ending, 1, __ATOMIC_RELEASE);
  add(&team->start, 1);
  for (int i = 1; i < team->board.size; i++) pthread_join(team->threads[i], 0);
  free(team->threads);
  free(team->board.hands);
  free(team);
}

int team_size(const Team* team) { return team->board.size; }

void team_run(Team* team, Job job, void* argument) {
  Board* board = &team->board;
  board->done = 0;
  for (int i = 0; i < board->size; i++) board->hands[i].share = Share{};
  team->job = job;
  team->argument = argument;
  __atomic_fetch_and(&team->present.value, ~CLOSED, __ATOMIC_SEQ_CST);
  if (board->size > 1) add(&team->start, 1);
  Seat seat = {board, 0, 0, 0, 0};
  job(argument, &seat);
  int left = __atomic_or_fetch(&team->present.value, CLOSED, __ATOMIC_SEQ_CST);
  for (; left != CLOSED; left = now(&team->present)) wait_beyond(&team->present, left);
}
