// The threads that run a program together. The caller is one of them; the others spin for a moment
// when there is nothing to do, for the next step comes soon, and then sleep.
#pragma once
#include <stdint.h>

struct Team;

Team* team_start(int threads);  // 0: no thread could be made
void team_end(Team*);
int team_size(const Team*);

typedef void (*Job)(void* argument, int thread);
void team_run(Team*, Job, void* argument);  // in every thread; returns when all have returned

void team_meet(Team*);  // a job's threads wait here for one another
