// The cache of keys and values, as attention's products want it, and what is written to it.
#pragma once
#include "program.h"
#include "rows.h"

// Panels of few BITS, and behind a piece's last one a float for each of its sixteen tokens: what its numbers are to be
// multiplied with. UNIT: of a number as the products take it.
template <int BITS>
struct WithScales {
  typedef Lanes Sum;
  enum { GROUP = 0 };
  static inline long offset(long k) { return k * PANEL * BITS / 8; }
  static inline long size(long k) { return offset(k) + PANEL * (long)sizeof(float); }
  static inline float* scales(const void* piece, long k) { return (float*)((char*)piece + offset(k)); }
  static inline Lanes finish(Lanes sum, const void* piece, long k) { return mul(sum, load(scales(piece, k))); }
};

struct Int8s : WithScales<8> {  // [k][16 columns]
  typedef int8_t Weight;
  static constexpr float FURTHEST = 127, UNIT = 1;
};

struct Fp8s : WithScales<8> {  // likewise
  typedef E4m3 Weight;
  static constexpr float FURTHEST = 448, UNIT = 0x1p-8f;
};

// -8 to 7, stored 8 more, of a head that was mixed: the furthest number is -8, so of it and its scale one is below 0. The
// two numbers of a byte are one token's, since tokens are written at once:
//
//     keys     [k / 4][16 tokens][2]: in the lower nibble k and k + 1 of four, in the upper one k + 2 and k + 3
//     values   [k / 2][8][2 tokens]: of sixteen columns the first eight in the lower nibble, the others in the upper one
struct Int4s : WithScales<4> {
  enum class Weight : uint8_t {};
  static constexpr float FURTHEST = -8, UNIT = 1;
  static inline Weight both(int8_t lower, int8_t upper) { return (Weight)(((lower + 8) & 15) | ((upper + 8) & 15) << 4); }
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

template <class R>
struct KeyNibbles : Int4s {
  typedef R Row;
  enum { STEP = 4, STEPS = 2 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    FourNumbers k = numbers_of_words(panel);
    sum = fma(all(row[1]), k.second, fma(all(row[0]), k.first, sum));
    return fma(all(row[3]), k.fourth, fma(all(row[2]), k.third, sum));
  }
  static void put(Weight* piece, int token, int d, const int8_t* numbers) {
    for (int k = 0; k < PANEL; k += k % 2 ? 3 : 1)
      piece[offset((d + k) / 4 * 4) + token % PANEL * 2 + k % 2] = both(numbers[k], numbers[k + 2]);
  }
};
template <class R>
struct ValueNibbles : Int4s {
  typedef R Row;
  enum { STEP = 2, STEPS = 4 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    TwoNumbers v = numbers_of_half(panel);
    return fma(all(row[1]), v.second, fma(all(row[0]), v.first, sum));
  }
  static void put(Weight* piece, int token, int d, const int8_t* numbers) {
    Weight* at = piece + offset(d) + token % PANEL / 2 * PANEL + token % 2;
    for (int j = 0; j < PANEL / 2; j++) at[2 * j] = both(numbers[j], numbers[j + PANEL / 2]);
  }
};

#ifdef __AVX512BF16__
template <>
inline Lanes KeyNibbles<bf16>::step(const bf16* row, const Weight* panel, Lanes sum) {
  TwoPairs k = pairs_of_words(panel);
  return dot_pairs(row + 2, k.second, dot_pairs(row, k.first, sum));
}
template <>
inline Lanes ValueNibbles<bf16>::step(const bf16* row, const Weight* panel, Lanes sum) {
  return dot_pairs(row, pairs_of_half(panel), sum);
}
#endif

template <class R>
struct KvNibbles : Int4s {
  typedef R Row;
};

// Of a cache's format what its keys, and its values, are to the products.
template <class P>
struct Sides {
  typedef P Keys, Values;
  enum { MIXED = 0 };
};
template <class R>
struct Sides<KvNibbles<R>> {
  typedef KeyNibbles<R> Keys;
  typedef ValueNibbles<R> Values;
  enum { MIXED = 1 };
};

// A head, as many of its dims together as a power of two divides, by the Walsh-Hadamard matrix: a rotation that is its
// own inverse. What lay far out in one dim is spread over all, and products of two that are mixed are as before.
static inline void mix_head(float* x, int dim) {
  int together = dim & -dim;
  Lanes unit = all(1 / __builtin_sqrtf((float)together));
  for (int d = 0; d < dim; d += PANEL) store(x + d, mul(mixed(load(x + d)), unit));
  for (int apart = PANEL; apart < together; apart *= 2)
    for (int d = 0; d < dim; d += 2 * apart)
      for (int i = d; i < d + apart; i += PANEL) {
        Lanes a = load(x + i), b = load(x + i + apart);
        store(x + i, add(a, b));
        store(x + i + apart, sub(a, b));
      }
}

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

  // Sixteen dims of a token, from d on, into its pieces.
  void put(Weight* keys, Weight* values, int token, int d, Lanes k, Lanes v) const {
    if constexpr (Sides<P>::MIXED) {
      int8_t numbers[2][PANEL];
      store_bytes(numbers[0], min(k, all(7)));
      store_bytes(numbers[1], min(v, all(7)));
      Sides<P>::Keys::put(keys, token, d, numbers[0]);
      Sides<P>::Values::put(values, token, d, numbers[1]);
    } else {
      Weight row[2][PANEL];
      put_row(row[0], 0, k);
      put_row(row[1], 0, v);
      for (int i = 0; i < PANEL; i++) keys[key_at(token, d + i)] = row[0][i];
      for (int i = 0; i < PANEL; i++) values[value_at(token, d + i)] = row[1][i];
    }
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
      Lanes most = zero(), high = all(-__builtin_inff()), none = zero();
      for (int d = 0; d < dim; d += PANEL) {
        most = max(absolute(load(x + d)), most);
        high = max(load(x + d), high);
        none = add(none, sub(load(x + d), load(x + d)));  // NaN, if any is no number
      }
      float furthest = largest(most);
      if (furthest < LEAST) furthest = P::FURTHEST;
      else if (P::FURTHEST < 0 && largest(high) < furthest) furthest = -furthest;
      P::scales(piece, dim)[token % PANEL] = furthest / (P::FURTHEST * P::UNIT) + sum(none);
      return P::FURTHEST / furthest;
    }
    return 1;
  }
  static constexpr float LEAST = 0x1p-100f;  // of what is stored as its furthest number; else all are 0
};

// One token's queries, keys and values, [heads + 2 kv_heads, dim]: norms and turns the first two, mixes all where the
// cache is of such, and stores the last two.
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
  if (Sides<P>::MIXED)
    for (int head = 0; head < heads + 2 * cache.kv_heads; head++) mix_head(qkv + (long)head * dim, dim);
  int token = position % cache.block_tokens;
  for (int head = 0; head < cache.kv_heads; head++) {
    const float* k = qkv + (long)(heads + head) * dim;
    const float* v = k + (long)cache.kv_heads * dim;
    Weight* keys = cache.piece(block, layer, 0, head, token);
    Weight* values = cache.piece(block, layer, 1, head, token);
    Lanes of_key = all(cache.factor(k, keys, token)), of_value = all(cache.factor(v, values, token));
    for (int d = 0; d < dim; d += PANEL)
      cache.put(keys, values, token, d, mul(load(k + d), of_key), mul(load(v + d), of_value));
  }
}
