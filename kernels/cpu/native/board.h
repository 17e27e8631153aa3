// How the threads of a job divide its phases. A phase is so many tasks. Each thread has a share of them, which lie
// together, and takes them from its front; who has none left takes half of what another has not begun. Threads wait for
// work, never for one another: a share is there for all, whether its thread has come or not, and what one was at when
// it lost its core is done again by who would wait for it.
//
// A task is pieces, one after the other. A piece is computed, claimed, and then written: of several who compute the same
// one, a single one claims it. It does not matter who: all come to the same, bit for bit.
//
// A thread may lag phases behind the others, computing what nobody waits for, from rows that change meanwhile. It will
// claim nothing of that. But what it reads must stay memory until it has left the job (team.h).
#pragma once
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_TASKS = 1 << 18, MOST_PIECES = 1 << 12, MOST_PHASES = 1 << 11 };  // of a phase, a task, a job

struct Share {
  uint64_t phase : 12;
  uint64_t state : 14;  // of its first task: 0, not begun; 2 i + 1, i pieces are written; 2 i + 2, another one is claimed
  uint64_t first : 19, end : 19;

  bool empty() const { return first == end; }
  bool claimed() const { return state && state % 2 == 0; }
  int piece() const { return (state - 1) / 2; }
};

struct Hand {  // of a thread: its share, changed as a whole
  alignas(64) Share share;
};

struct Board {
  alignas(64) int done;      // tasks of all phases
  alignas(64) int sleepers;  // until there is news
  int news;
  int size;  // of the team
  Hand* hands;
};

struct Seat {  // a thread's own
  Board* board;
  int thread, phase, total;  // total: what is done when the phase is over
  uint64_t took;             // by its last piece, in cycles
};

// Cycles, some 10 us: who has not come on for so long, and twice what a piece takes, is taken to have lost its core. And
// some 40 us, less than a sleeping thread takes to wake: beyond it the processor is somebody else's, who should have it.
#ifndef SPIN_CYCLES
#define SPIN_CYCLES 100000
#endif
static const uint64_t PATIENCE = 25000, SPIN = SPIN_CYCLES;

static inline Share read(const Hand* hand) {
  Share share;
  __atomic_load(&hand->share, &share, __ATOMIC_ACQUIRE);
  return share;
}

static inline bool same(Share a, Share b) { return !__builtin_memcmp(&a, &b, sizeof a); }

// False, and `from` is what is there: it was not `from`.
static inline bool change(Hand* hand, Share* from, Share to) {
  return __atomic_compare_exchange(&hand->share, from, &to, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

static inline bool over(const Seat* seat) {
  return __atomic_load_n(&seat->board->done, __ATOMIC_ACQUIRE) - seat->total >= 0;
}

// Behind a change of a share, or of what is done.
static inline void wake_sleepers(Board* board) {
  if (!__atomic_load_n(&board->sleepers, __ATOMIC_SEQ_CST)) return;
  __atomic_fetch_add(&board->news, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &board->news, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

// Asked once a piece is computed: whether to write it.
struct Claim {
  Hand* hand;
  Share of;
  bool won = false;

  bool operator()() {
    for (Share now = read(hand); now.phase == of.phase && now.first == of.first && now.state == of.state && !now.empty();) {
      Share next = now;
      next.state++;
      if (change(hand, &now, next)) return won = true;
    }
    return false;
  }
};

// Of `count` in nearly equal parts, where one begins. The first ones are the larger: what is alone is for the caller,
// who has come.
static inline int part_of(int count, int part, int parts) { return ((long)count * part + parts - 1) / parts; }

// What a phase does. Tasks of thread t's share are [begin(t), begin(t + 1)). `apart`: a piece may be computed by several
// at once, for until it has its claim it writes to nothing but its thread's own. `next`: the task after this one, or -1.
//
//     enum { APART };
//     int begin(int thread) const;
//     int pieces(int task) const;
//     void piece(int task, int piece, int next, int thread, Claim& claim) const;

// The share of one, in this phase; in a later one if this is over.
template <class Work>
static Share share_of(const Seat* seat, const Work& work, int thread) {
  Hand* hand = &seat->board->hands[thread];
  Share found = read(hand);
  while ((unsigned)(seat->phase - found.phase - 1) % (2 * MOST_PHASES) < MOST_PHASES) {  // an earlier one
    Share opened = {(uint64_t)seat->phase, 0, (uint64_t)work.begin(thread), (uint64_t)work.begin(thread + 1)};
    if (change(hand, &found, opened)) return opened;
  }
  return found;
}

// The next piece of a share's first task, which is begun; false: another one did it.
template <class Work>
static bool do_piece(Seat* seat, const Work& work, Hand* hand, Share share, int next) {
  uint64_t start = __rdtsc();
  Claim claim = {hand, share};
  if (!Work::APART && !claim()) return false;
  work.piece(share.first, share.piece(), next, seat->thread, claim);
  seat->took = __rdtsc() - start;
  if (!claim.won) return false;
  bool last = share.piece() + 1 == work.pieces(share.first), own = hand == &seat->board->hands[seat->thread];
  Share now = read(hand), then;
  do {
    then = now;
    if (!last) {
      then.state++;
    } else {
      then.first++;
      then.state = own && !then.empty();
    }
  } while (!change(hand, &now, then));
  if (last) __atomic_fetch_add(&seat->board->done, 1, __ATOMIC_SEQ_CST);
  wake_sleepers(seat->board);
  return true;
}

// A piece of the thread's own share; false: there is none to be computed.
template <class Work>
static bool go_on(Seat* seat, const Work& work) {
  Hand* hand = &seat->board->hands[seat->thread];
  Share own = share_of(seat, work, seat->thread);
  if ((int)own.phase != seat->phase || own.empty() || own.claimed()) return false;
  if (!own.state) {
    Share begun = own;
    begun.state = 1;
    if (!change(hand, &own, begun)) return true;
    own = begun;
  }
  do_piece(seat, work, hand, own, own.first + 1 < own.end ? own.first + 1 : -1);
  return true;
}

// Fills the thread's own share, if it is empty, from another; false: there is nothing that is not begun.
template <class Work>
static bool take_over(Seat* seat, const Work& work) {
  Hand* hands = seat->board->hands;
  if (!read(&hands[seat->thread]).empty()) return false;
  for (int i = 1; i < seat->board->size; i++) {
    int thread = (seat->thread + i) % seat->board->size;
    Share other = share_of(seat, work, thread);
    if ((int)other.phase != seat->phase) return false;
    int left = other.end - other.first - (other.state > 0);
    if (left <= 0) continue;
    Share rest = other;
    rest.end -= (left + 1) / 2;
    if (change(&hands[thread], &other, rest)) {
      Share own = {other.phase, 1, rest.end, other.end};
      __atomic_store(&hands[seat->thread].share, &own, __ATOMIC_SEQ_CST);  // empty, it was nobody else's to change
      wake_sleepers(seat->board);  // who looked in between saw it nowhere
    }
    return true;
  }
  return false;
}

// Somebody is, or was, at a piece of this share that nobody has claimed.
static inline bool computed(const Seat* seat, Share share) {
  return (int)share.phase == seat->phase && !share.empty() && share.state % 2;
}

// Until something has changed, or what another is at has been done for it; false: the phase is over.
template <class Work>
static bool wait(Seat* seat, const Work& work) {
  Board* board = seat->board;
  Hand* hand = &board->hands[seat->thread];
  for (int i = 0; i < board->size && read(hand).empty(); i++) hand = &board->hands[(seat->thread + i) % board->size];
  Share seen = read(hand);
  bool again = computed(seat, seen);
  uint64_t limit = !again ? SPIN : 2 * seat->took > PATIENCE ? 2 * seat->took : PATIENCE;
  for (uint64_t start = __rdtsc(); __rdtsc() - start < limit; _mm_pause()) {
    if (over(seat)) return false;
    if (!same(read(hand), seen)) return true;
  }
  if (again) {
    while (do_piece(seat, work, hand, seen, -1) && computed(seat, seen = read(hand))) {}
    return true;
  }
  // Who lost its core before it looked for the first time may have slept through the end: nobody would wake it.
  __atomic_fetch_add(&board->sleepers, 1, __ATOMIC_SEQ_CST);
  int news = __atomic_load_n(&board->news, __ATOMIC_SEQ_CST);
  bool ended = over(seat);
  if (!ended && same(read(hand), seen)) syscall(SYS_futex, &board->news, FUTEX_WAIT_PRIVATE, news, 0, 0, 0);
  __atomic_fetch_sub(&board->sleepers, 1, __ATOMIC_SEQ_CST);
  return !ended;
}

// The next phase; all threads go through the same ones in the same order. Returns when it is over.
template <class Work>
static void share_out(Seat* seat, const Work& work) {
  seat->phase = (seat->phase + 1) % (2 * MOST_PHASES);
  seat->total += work.begin(seat->board->size);
  seat->took = 0;
  while (go_on(seat, work) || take_over(seat, work) || wait(seat, work)) {}
}
