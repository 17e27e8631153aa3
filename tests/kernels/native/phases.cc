// A job whose pieces are the test's: it is called when one is computed, and what is written is counted.

// What takes over other threads' tasks stores its share so; in between nobody has them.
static void (*between)() = 0;
#define __atomic_store(...) (between ? between() : (void)0, __atomic_store(__VA_ARGS__))
#include "board.h"
#include "team.h"

typedef void (*Computed)(int thread, int phase, int task, int piece);

struct Phases {
  int count, tasks, pieces, threads;
  Computed computed;
  int* written;  // [count, tasks, pieces]
};

template <int APART_>
struct Phase {
  enum { APART = APART_ };
  const Phases* all;
  int number;

  int begin(int thread) const { return part_of(all->tasks, thread, all->threads); }
  int pieces(int) const { return all->pieces; }
  void piece(int task, int piece, int, int thread, Claim& claim) const {
    all->computed(thread, number, task, piece);
    if (!APART || claim()) all->written[(number * all->tasks + task) * all->pieces + piece]++;
  }
};

template <int APART>
static void work(void* argument, Seat* seat) {
  const Phases* all = (const Phases*)argument;
  for (int i = 0; i < all->count; i++) share_out(seat, Phase<APART>{all, i});
}

extern "C" {

Team* start(int threads) { return team_start(threads); }
void end(Team* team) { team_end(team); }
void call_between(void (*called)()) { between = called; }
int begin(int tasks, int thread, int threads) { return part_of(tasks, thread, threads); }

void run(Team* team, int apart, int phases, int tasks, int pieces, Computed computed, int* written) {
  Phases all = {phases, tasks, pieces, team_size(team), computed, written};
  team_run(team, apart ? work<1> : work<0>, &all);
}
}
