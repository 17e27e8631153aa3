// What a grammar allows next, as bits of tokens: the logits of all others become -inf.
#pragma once
#include <stdint.h>

enum { WORD = 32 };

// `words`: [vocab / 32, rounded up]; bit i % 32 of word i / 32 is set where token i is allowed.
static void keep_allowed(float* logits, int vocab, const uint32_t* words) {
  for (int first = 0; first < vocab; first += WORD) {
    uint32_t bits = words[first / WORD];
    if (bits == 0xFFFFFFFFu) continue;
    int count = vocab - first < WORD ? vocab - first : WORD;
    for (int i = 0; i < count; i++) logits[first + i] = bits >> i & 1 ? logits[first + i] : -__builtin_inff();
  }
}
