// The cache of keys and values, as attention's products want it, and what is written to it.
#pragma once
#include "program.h"
#include "rows.h"

// Panels of 8 bits, [k][16 columns], and behind a piece's last one a float for each of its sixteen tokens: what its
// numbers are to be multiplied with. UNIT: of a number as the products take it.
struct WithScales : Ungrouped {
  static inline long size(long k) { return k * PANEL + PANEL * (long)sizeof(float); }
  static inline float* scales(const void* piece, long k) { return (float*)((char*)piece + k * PANEL); }
  static inline Lanes finish(Lanes sum, const void* piece, long k) { return mul(sum, load(scales(piece, k))); }
};

struct Int8s : WithScales {
  typedef int8_t Weight;
  static constexpr float FURTHEST = 127, UNIT = 1;
};

struct Fp8s : WithScales {
  typedef E4m3 Weight;
  static constexpr float FURTHEST = 448, UNIT = 0x1p-8f;
};

static inline Lanes wide(const int8_t* p) { return from_bytes(p); }
static inline Lanes wide(const E4m3* p) { return from_e4m3(p); }

// Of such what meets rows of floats, or of bf16.
template <class S, class R>
struct KvPanels : S {
  typedef R Row;
  enum { STEP = 1, STEPS = 4 };
  static inline Lanes step(const Row* row, const typename S::Weight* panel, Lanes sum) {
    return fma(all(row[0]), wide(panel), sum);
  }
};

#ifdef __AVX512BF16__
static inline Pairs pairs(const int8_t* p) { return pairs_of_bytes(p); }
static inline Pairs pairs(const E4m3* p) { return pairs_of_e4m3(p); }

template <class S>
struct KvPanels<S, bf16> : S {
  typedef bf16 Row;
  enum { STEP = 2, STEPS = 2 };
  static inline Lanes step(const Row* row, const typename S::Weight* panel, Lanes sum) {
    return dot_pairs(row, pairs(panel), sum);
  }
};
#endif

// By blocks, layers, keys or values, heads, and then in pieces of sixteen tokens, whose order is P's. Keys: a panel
// whose columns are tokens and whose k runs over the dims. Values: a panel for each sixteen dims, whose k runs over the
// tokens. Scales of keys multiply scores, those of values the weights that meet them.
template <class P>
struct Cache {
  typedef typename P::Weight Weight;
  enum { STEP = sizeof(Weight) == 2 ? 2 : 1, SCALED = sizeof(Weight) == 1 };
  Weight* arena;
  int kv_heads, dim, layers, block_tokens;

  Cache(const Program* p)
      : arena((Weight*)p->arena), kv_heads(p->shape.kv_heads), dim(p->shape.dim), layers(p->shape.layers),
        block_tokens(p->shape.block_tokens) {}

  // A piece: [16 tokens, dim] in its own order. `side`: 0 keys, 1 values.
  Weight* piece(int block, int layer, int side, int head, int token) const {
    long heads_of_block = ((long)block * layers + layer) * 2 + side;
    return arena + ((heads_of_block * kv_heads + head) * (block_tokens / PANEL) + token / PANEL) * P::size(dim);
  }
  long key_at(int token, int d) const { return ((long)(d / STEP) * PANEL + token % PANEL) * STEP + d % STEP; }
  long value_at(int token, int d) const {
    token %= PANEL;
    return (((long)(d / PANEL) * (PANEL / STEP) + token / STEP) * PANEL + d % PANEL) * STEP + token % STEP;
  }

  // A piece of values, zeros beyond the first `valid` tokens.
  void copy_values(const Weight* piece, int valid, Weight* to) const {
    const int size = PANEL * STEP;  // sixteen dims of STEP tokens
    for (int i = 0; i < dim; i += STEP, piece += size, to += size)
      for (int j = 0; j < size; j++) to[j] = i % PANEL + j % STEP < valid ? piece[j] : (Weight)0;
  }

  void fetch(const Weight* piece) const {
    const char* end = (const char*)(piece + P::size(dim));
    for (const char* line = (const char*)piece; line < end; line += LINE) prefetch_far(line);
  }

  // What a token's keys or values, x, are multiplied with to be stored in the piece; the inverse is its scale there.
  float factor(const float* x, Weight* piece, int token) const {
    if constexpr (SCALED) {
      Lanes most = zero(), none = zero();
      for (int d = 0; d < dim; d += PANEL) {
        most = max(absolute(load(x + d)), most);
        none = add(none, sub(load(x + d), load(x + d)));  // NaN, if any is no number
      }
      float furthest = largest(most) < LEAST ? P::FURTHEST : largest(most);
      P::scales(piece, dim)[token % PANEL] = furthest / (P::FURTHEST * P::UNIT) + sum(none);
      return P::FURTHEST / furthest;
    }
    return 1;
  }
  static constexpr float LEAST = 0x1p-100f;  // of what is stored as its furthest number; else all are 0
};

// One token's queries, keys and values, [heads + 2 kv_heads, dim]: norms and turns the first two and
// stores the last two.
template <class P>
static void rotate_and_store(const Program* p, const Op* op, float* qkv, int position, int block) {
  typedef typename P::Weight Weight;
  Cache<P> cache(p);
  const Turn* by = &op->turn;
  int dim = cache.dim, heads = p->shape.heads, layer = op->layer;
  norm_parts(qkv, heads * dim, by->q_norm, op->epsilon, by->q_width);
  norm_parts(qkv + (long)heads * dim, cache.kv_heads * dim, by->k_norm, op->epsilon, by->k_width);
  const float* cos = by->cos + (long)position * (by->dims / 2);
  const float* sin = by->sin + (long)position * (by->dims / 2);
  for (int head = 0; head < heads + cache.kv_heads; head++) turn(qkv + (long)head * dim, cos, sin, by->dims);
  int token = position % cache.block_tokens;
  for (int head = 0; head < cache.kv_heads; head++) {
    const float* k = qkv + (long)(heads + head) * dim;
    const float* v = k + (long)cache.kv_heads * dim;
    Weight* keys = cache.piece(block, layer, 0, head, token);
    Weight* values = cache.piece(block, layer, 1, head, token);
    Lanes of_key = all(cache.factor(k, keys, token)), of_value = all(cache.factor(v, values, token));
    for (int d = 0; d < dim; d += PANEL) {
      Weight row[2][PANEL];
      put_row(row[0], 0, mul(load(k + d), of_key));
      put_row(row[1], 0, mul(load(v + d), of_value));
      for (int i = 0; i < PANEL; i++) keys[cache.key_at(token, d + i)] = row[0][i];
      for (int i = 0; i < PANEL; i++) values[cache.value_at(token, d + i)] = row[1][i];
    }
  }
}
