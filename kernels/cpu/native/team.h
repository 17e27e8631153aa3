// The threads that run a program together. The caller is one of them; the others spin for a moment
// when there is nothing to do, for the next step comes soon, and then sleep.
#pragma once
struct Seat;
struct Team;

Team* team_start(int threads);  // 0: no thread could be made
void team_end(Team*);
int team_size(const Team*);

// A job is phases (board.h), through which the caller goes with those who come before it is through. Returns when all
// who came have left.
typedef void (*Job)(void* argument, Seat*);
void team_run(Team*, Job, void* argument);
