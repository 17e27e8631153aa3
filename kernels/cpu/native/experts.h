// Layers of experts (decision 0076). Each row chooses some, and what follows works on choices: row `i` of those is the
// `i`th of all when they are ordered by expert. So an expert's choices lie together, and meet its matrix as any rows do.
#pragma once
#include "rows.h"

// e^(x - most) of `count` numbers; `to` may be x.
static void exponentials(const float* x, float most, float* to, int count) {
  for (int i = 0; i < count; i += PANEL) {
    int some = count - i < PANEL ? count - i : PANEL;
    float values[PANEL];
    store(values, exponential(sub(part(x + i, some, most), all(most))));
    for (int j = 0; j < some; j++) to[i + j] = values[j];
  }
}

static float summed(const float* x, int count) {
  float total = 0;
  for (int i = 0; i < count; i++) total += x[i];
  return total;
}

// The `chosen` largest of a row's logits, of equals the first, into `ids`, and their shares of the softmax of all: or of
// the chosen ones alone, normed. Shares of what is not finite are NaN, and ids are experts in any case.
static void choose(const float* logits, int experts, int chosen, bool normed, int* ids, float* shares) {
  for (int j = 0, found = 0; j < experts; j++) {
    if (found == chosen && !(logits[j] > logits[ids[chosen - 1]])) continue;
    int at = found < chosen ? found++ : chosen - 1;
    for (; at && logits[j] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
    ids[at] = j;
  }
  float most = logits[ids[0]];
  for (int i = 0; i < chosen; i++) shares[i] = logits[ids[i]];
  exponentials(shares, most, shares, chosen);
  float total = normed ? summed(shares, chosen) : 0;
  float some[PANEL];
  for (int j = 0; !normed && j < experts; j += PANEL) {
    int count = experts - j < PANEL ? experts - j : PANEL;
    exponentials(logits + j, most, some, count);
    total += summed(some, count);
  }
  for (int i = 0; i < chosen; i++) shares[i] /= total;
}

// Orders the choices of all rows by expert, within one by row, and tells whose they are.
static void group_choices(const Choices* choices, const Mixture* mixture, int count) {
  Groups groups = groups_of(mixture);
  int* behind = groups.first;  // of each expert first how many, then where the next one goes
  for (int e = 0; e <= mixture->experts; e++) behind[e] = 0;
  for (int i = 0; i < count; i++) behind[choices->ids[i]]++;
  for (int e = 0, before = 0; e < mixture->experts; e++) {
    int own = behind[e];
    behind[e] = before, before += own;
  }
  for (int i = 0; i < count; i++) {
    int place = behind[choices->ids[i]]++;
    choices->order[place] = i;
    choices->places[i] = place;
  }
  int found = 0;
  for (int e = 0, before = 0; e < mixture->experts; e++) {
    int end = behind[e];
    if (end == before) continue;
    groups.expert[found] = e;
    groups.first[found++] = before;
    before = end;
  }
  groups.first[found] = count;
  *groups.count = found;
}

// The sum of what a row's experts made of it, times their shares, in the order of choice; and of the shared one, or null.
static void mix_row(
    const float* from, long width, const int* places, const float* shares, int chosen, const float* shared, float gate,
    bool adds, float* to) {
  Lanes of_shared = logistic_times(all(1), all(gate));
  long i = 0;
  for (; i + PANEL <= width; i += PANEL) {
    Lanes total = zero();
    for (int j = 0; j < chosen; j++) total = fma(all(shares[j]), load(from + places[j] * width + i), total);
    if (shared) total = fma(of_shared, load(shared + i), total);
    store(to + i, adds ? add(load(to + i), total) : total);
  }
}
