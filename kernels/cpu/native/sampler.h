// The next token of a row of logits. services/worker/engine/runners/sampler.py says what is computed,
// and from where: Philox noise by seed, position and token, Gumbel-max, top-k and top-p with ties kept.
// Here candidates come first: noise is drawn for those that may win, and a row costs what it asks for.
#pragma once
#include "allowed.h"
#include "simd.h"

struct Sampling {
  float temperature;  // 0: the best token
  int top_k;          // 0: off
  double top_p;       // 1: off
  uint64_t seed;
  int position;  // of the token to be sampled
  float min_p;   // 0: off
  int given;     // 0, or 1 + the token that is there already: none is sampled
  int logprobs;  // 0, or 1 + of how many best tokens
  int first_edit, num_edits;
};

struct Edit {
  int token;
  float factor, add;
};

// The noise's bounds follow from 23 bits and a half of uniform numbers: -log(-log(2^-24)) and
// -log(-log(1 - 2^-24)).
static const float LEAST_NOISE = -2.82f, MOST_NOISE = 16.65f;

struct Candidates {
  float* scores;  // scaled, the best is 0
  int* tokens;
  uint32_t* keys;  // room for sorting
  int count;
};

static long sampler_bytes(long vocab) { return (vocab + PANEL) * 4 * 5; }

// Of each of sixteen tokens the random word: Philox-4x32-10 with counter (token / 4, position, 0, 0).
static inline Words philox(uint64_t seed, Words tokens, int position) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  Words c[4] = {shift_right(tokens, 2), words((uint32_t)position), words(0), words(0)};
  for (int round = 0; round < 10; round++) {
    Words high0, high2;
    Words low0 = multiply(c[0], 0xD2511F53u, &high0), low2 = multiply(c[2], 0xCD9E8D57u, &high2);
    c[0] = exclusive(exclusive(high2, c[1]), words(k0)), c[1] = low2;
    c[2] = exclusive(exclusive(high0, c[3]), words(k1)), c[3] = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return chosen(tokens, 0, c[0], chosen(tokens, 1, c[1], chosen(tokens, 2, c[2], c[3])));
}

// Standard Gumbel noise of a random word.
static inline Lanes gumbel(Words bits) {
  Lanes uniform = mul(add(to_float(shift_right(bits, 9)), all(0.5f)), all(0x1p-23f));
  return sub(zero(), logarithm(sub(zero(), logarithm(uniform))));
}

// Instead of a token: a logit is NaN, or the best infinite; every token is out. As kernels/sampling.py has them.
enum { NOT_FINITE = -1, NONE_LEFT = -2 };

// The best score and its token, the first among equals, or why there is none.
static int find_best(const float* logits, int vocab, float* best) {
  Lanes high = all(-__builtin_inff());
  bool sound = true;
  for (int i = 0; i < vocab; i += PANEL) {
    Lanes x = i + PANEL <= vocab ? load(logits + i) : part(logits + i, vocab - i, -__builtin_inff());
    sound &= ordered(x);
    high = max(high, x);
  }
  *best = largest(high);
  if (!sound || *best == __builtin_inff()) return NOT_FINITE;
  if (*best == -__builtin_inff()) return NONE_LEFT;
  int token = 0;
  while (logits[token] != *best) token++;
  return token;
}

// Tokens whose score, scaled, is at least `least`; returns the sum of e^score over them.
static double gather(const float* logits, int vocab, float best, float temperature, float least, Candidates* found) {
  double mass = 0;
  found->count = 0;
  for (int i = 0; i < vocab; i += PANEL) {
    Lanes x = i + PANEL <= vocab ? load(logits + i) : part(logits + i, vocab - i, -__builtin_inff());
    Lanes score = div(sub(x, all(best)), all(temperature));
    unsigned mask = at_least(score, least);
    if (!mask) continue;
    float scores[PANEL], powers[PANEL];
    store(scores, score);
    store(powers, exponential(score));
    for (; mask; mask &= mask - 1) {
      int lane = __builtin_ctz(mask);
      found->scores[found->count] = scores[lane];
      found->tokens[found->count++] = i + lane;
      mass += powers[lane];
    }
  }
  return mass;
}

static double total_mass(const float* logits, int vocab, float best, float temperature) {
  double mass = 0;
  for (int i = 0; i < vocab; i += PANEL) {
    Lanes x = i + PANEL <= vocab ? load(logits + i) : part(logits + i, vocab - i, -__builtin_inff());
    Lanes score = div(sub(x, all(best)), all(temperature));
    mass += sum(first(vocab - i, exponential(score), zero()));
  }
  return mass;
}

// Keys in rising order, by their 32 bits: three passes of a counting sort.
static uint32_t* sort(uint32_t* keys, uint32_t* room, int count) {
  for (int shift = 0; shift < 33; shift += 11) {
    int starts[2048] = {0};
    for (int i = 0; i < count; i++) starts[keys[i] >> shift & 2047]++;
    int at = 0;
    for (int b = 0; b < 2048; b++) {
      int size = starts[b];
      starts[b] = at;
      at += size;
    }
    for (int i = 0; i < count; i++) room[starts[keys[i] >> shift & 2047]++] = keys[i];
    uint32_t* swap = keys;
    keys = room, room = swap;
  }
  return keys;
}

static float power_of(uint32_t key) {
  float distance, powers[PANEL];
  __builtin_memcpy(&distance, &key, 4);
  store(powers, exponential(all(-distance)));
  return powers[0];
}

// The least score that top_k and top_p leave in, among candidates that are enough to tell.
static float border(const Candidates* c, const Sampling* s, double total) {
  for (int i = 0; i < c->count; i++) {  // of a negative score the bits less the sign rise as it falls
    float distance = 0 - c->scores[i];
    __builtin_memcpy(&c->keys[i], &distance, 4);
  }
  uint32_t* keys = sort(c->keys, c->keys + c->count, c->count);
  int end = s->top_k > 0 && s->top_k < c->count ? s->top_k : c->count;
  double wanted = total;
  if (s->top_p < 1) {
    double sums = 0;
    int last = end;
    if (s->top_k > 0) {
      wanted = 0;
      for (int i = 0; i < end; i++) wanted += power_of(keys[i]);
    }
    wanted *= s->top_p;
    for (int i = 0; i < end; i++) {
      sums += power_of(keys[i]);
      if (sums >= wanted) {
        last = i + 1;
        break;
      }
    }
    end = last;
  }
  float distance;
  __builtin_memcpy(&distance, &keys[end - 1], 4);
  return -distance;
}

// Enough candidates for the row's top_k and top_p, which decide the least score of them that may be
// drawn: it is returned.
static float filter(const float* logits, int vocab, float best, const Sampling* s, Candidates* c) {
  double total = s->top_k == 0 ? total_mass(logits, vocab, best, s->temperature) : 0;
  int wanted = s->top_k < vocab ? s->top_k : vocab;
  for (float depth = 4;; depth *= 4) {
    float least = depth > 100 ? -__builtin_inff() : -depth;
    double mass = gather(logits, vocab, best, s->temperature, least, c);
    if (least < -100 || (wanted ? c->count >= wanted : mass >= s->top_p * total)) return border(c, s, total);
  }
}

static void edit(float* logits, const Edit* edits, int count) {
  for (int i = 0; i < count; i++) {
    float x = logits[edits[i].token];
    logits[edits[i].token] = (x > 0 ? x / edits[i].factor : x * edits[i].factor) + edits[i].add;
  }
}

// Of the token, and of the `wanted` best ones behind it (ties: the first), their logarithms of probability.
static void log_probabilities(const float* logits, int vocab, int token, int wanted, int* ids, float* values) {
  float best, lost[PANEL];
  if (find_best(logits, vocab, &best) < 0) best = __builtin_nanf("");  // what was hidden is none: nor are these any
  store(lost, logarithm(all((float)total_mass(logits, vocab, best, 1))));
  ids[0] = token;
  values[0] = logits[token] - best - lost[0];
  int* top = ids + 1;
  float* of_top = values + 1;
  int count = 0;
  for (int i = 0; wanted && i < vocab; i += PANEL) {
    Lanes x = i + PANEL <= vocab ? load(logits + i) : part(logits + i, vocab - i, -__builtin_inff());
    unsigned mask = at_least(x, count < wanted ? -__builtin_inff() : of_top[count - 1]);
    for (; mask; mask &= mask - 1) {
      int id = i + __builtin_ctz(mask), at = count;
      if (id >= vocab) break;
      while (at > 0 && of_top[at - 1] < logits[id]) at--;
      if (at == wanted) continue;
      if (count < wanted) count++;
      for (int j = count - 1; j > at; j--) top[j] = top[j - 1], of_top[j] = of_top[j - 1];
      top[at] = id, of_top[at] = logits[id];
    }
  }
  for (int i = 0; i < count; i++) of_top[i] = of_top[i] - best - lost[0];
  for (int i = count; i < wanted; i++) top[i] = -1;
}

// As `find_best` where there is no token.
static int sample(const float* logits, int vocab, const Sampling* s, Candidates* c) {
  float best;
  int token = find_best(logits, vocab, &best);
  if (token < 0 || s->temperature == 0 || s->top_k == 1) return token;
  float least = LEAST_NOISE - MOST_NOISE;  // below it, none can win over the best with the worst luck
  if (s->top_k > 0 || s->top_p < 1)
    least = filter(logits, vocab, best, s, c);
  else
    gather(logits, vocab, best, s->temperature, least, c);
  if (s->min_p > 0) {
    float floor[PANEL];
    store(floor, logarithm(all(s->min_p)));
    if (floor[0] > least) least = floor[0];
  }

  float highest = -__builtin_inff();
  int padded = (c->count + PANEL - 1) / PANEL * PANEL;
  for (int i = c->count; i < padded; i++) c->scores[i] = -__builtin_inff(), c->tokens[i] = 0;
  for (int i = 0; i < padded; i += PANEL) {
    Lanes scores = load(c->scores + i);
    unsigned mask = at_least(scores, least) & at_least(scores, highest - MOST_NOISE);
    if (!mask) continue;
    float totals[PANEL];
    store(totals, add(scores, gumbel(philox(s->seed, load_words(c->tokens + i), s->position))));
    for (; mask; mask &= mask - 1) {
      int lane = __builtin_ctz(mask);
      if (totals[lane] > highest) highest = totals[lane], token = c->tokens[i + lane];
    }
  }
  return token;
}

static Candidates candidates_in(char* scratch, int vocab) {
  long room = vocab + PANEL;
  float* scores = (float*)scratch;
  return {scores, (int*)(scores + room), (uint32_t*)(scores + 2 * room), 0};
}

// A row's token, or why there is none, and its logprobs as the model gives them, before edits and what a grammar
// allows. The row is changed.
static int sample_row(
    float* logits, int vocab, const Sampling* s, const Edit* edits, const uint32_t* allowed, int* ids, float* values,
    char* scratch) {
  Candidates room = candidates_in(scratch, vocab);
  const float* raw = logits;
  float best;
  if (s->logprobs && (s->num_edits || allowed)) {
    raw = (float*)scratch + 4L * (vocab + PANEL);
    __builtin_memcpy((void*)raw, logits, vocab * 4L);
  }
  edit(logits, edits + s->first_edit, s->num_edits);
  if (allowed) keep_allowed(logits, vocab, allowed);
  int token = s->given ? find_best(logits, vocab, &best) : sample(logits, vocab, s, &room);
  if (s->given && token >= 0) token = s->given - 1;
  if (s->logprobs && token >= 0) log_probabilities(raw, vocab, token, s->logprobs - 1, ids, values);
  return token;
}
