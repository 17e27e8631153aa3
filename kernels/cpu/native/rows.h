// What works row by row: embedding, a linear's operand, rotary with the cache's write.
#pragma once
#include "program.h"

static inline void put_row(float* to, int at, Lanes x) { store(to + at, x); }
static inline void put_row(bf16* to, int at, Lanes x) { store_bf16(to + at, x); }
static inline void put_one(float* to, float x) { *to = x; }
static inline void put_one(bf16* to, float x) { *to = to_bf16(x); }

// Row `id` of a matrix in panels: its column of each step. Slower than a row that lies together, and nothing beside
// the linears; a table that is the model's last matrix, too, lies once.
template <class P>
static void embed(const Matrix* table, int id, float factor, float* x) {
  int k = table->k, column = id % PANEL;
  const typename P::Weight* panel = (const typename P::Weight*)table->panels + id / PANEL * P::size(k);
  for (int i = 0; i < k; i++) x[i] = P::value(panel, k, i, column) * factor;
}

template <class Row>
static void plain_row(const float* x, Row* to, int width) {
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) put_row(to, i, load(x + i));
  for (; i < width; i++) put_one(to + i, x[i]);
}

// What a norm multiplies its row with, besides the weights.
static float norm_factor(const float* x, float epsilon, int width) {
  Lanes squares = zero();
  float rest = 0;
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) squares = fma(load(x + i), load(x + i), squares);
  for (; i < width; i++) rest += x[i] * x[i];
  return 1 / __builtin_sqrtf((sum(squares) + rest) / width + epsilon);
}

// `to` may be x.
template <class Row>
static void norm_row(const float* x, const float* weight, float epsilon, Row* to, int width) {
  float scale = norm_factor(x, epsilon, width);
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) put_row(to, i, mul(load(weight + i), mul(load(x + i), all(scale))));
  for (; i < width; i++) put_one(to + i, weight[i] * (x[i] * scale));
}

// x += the norm of y.
static void add_norm_row(const float* y, const float* weight, float epsilon, float* x, int width) {
  float scale = norm_factor(y, epsilon, width);
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) store(x + i, fma(load(weight + i), mul(load(y + i), all(scale)), load(x + i)));
  for (; i < width; i++) x[i] += weight[i] * (y[i] * scale);
}

static inline Lanes logistic_times(Lanes x, Lanes y) {  // x / (1 + e^-y)
  return div(x, add(all(1), exponential(min(sub(zero(), y), all(88)))));
}

struct Silu {
  static inline Lanes of(Lanes x) { return logistic_times(x, x); }
};

struct Gelu {  // x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
  static inline Lanes of(Lanes x) {
    Lanes cubed = mul(mul(x, x), x);
    return logistic_times(x, mul(all(1.5957691216057308f), fma(all(0.044715f), cubed, x)));
  }
};

// x is [gate | up], each of `width`.
template <class Activation, class Row>
static void gated_row(const float* x, Row* to, int width) {
  const float* up = x + width;
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) put_row(to, i, mul(Activation::of(load(x + i)), load(up + i)));
  if (i == width) return;
  float gates[PANEL] = {0};
  for (int j = i; j < width; j++) gates[j - i] = x[j];
  store(gates, Activation::of(load(gates)));
  for (int j = i; j < width; j++) put_one(to + j, gates[j - i] * up[j]);
}

static inline Lanes capped(Lanes ratio, float cap) {  // cap tanh(ratio)
  Lanes e = exponential(min(all(88), add(ratio, ratio)));  // in this order NaN stays
  return mul(all(cap), div(sub(e, all(1)), add(e, all(1))));
}

// x to cap tanh(x / cap).
static void cap_row(float* x, float cap, int width) {
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) store(x + i, capped(mul(load(x + i), all(1 / cap)), cap));
  if (i == width) return;
  float last[PANEL];
  store(last, capped(mul(part(x + i, width - i, 0), all(1 / cap)), cap));
  for (int j = i; j < width; j++) x[j] = last[j - i];
}

// Norms of each `width` features of x, in place; of none if that is 0.
static void norm_parts(float* x, int count, const float* weight, float epsilon, int width) {
  for (int i = 0; width && i < count; i += width) norm_row(x + i, weight, epsilon, x + i, width);
}

// Turns the pairs (x[i], x[i + dims / 2]) by a position's angles.
static void turn(float* x, const float* cos, const float* sin, int dims) {
  float* y = x + dims / 2;
  int i = 0;
  for (; i + PANEL <= dims / 2; i += PANEL) {
    Lanes a = load(x + i), b = load(y + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(y + i, fma(b, c, mul(a, s)));
  }
  for (; i < dims / 2; i++) {
    float a = x[i], b = y[i];
    x[i] = a * cos[i] - b * sin[i];
    y[i] = b * cos[i] + a * sin[i];
  }
}

// The cache as attention's products want it, by blocks, layers, keys or values, heads, and then in
// pieces of sixteen tokens. Keys: panels whose columns are tokens and whose k runs over the dims.
// Values: a panel for each sixteen dims, whose k runs over the tokens.
template <class T>
struct Cache {
  enum { STEP = sizeof(T) == 2 ? 2 : 1 };
  T* arena;
  int kv_heads, dim, layers, block_tokens;

  Cache(const Program* p)
      : arena((T*)p->arena), kv_heads(p->shape.kv_heads), dim(p->shape.dim), layers(p->shape.layers),
        block_tokens(p->shape.block_tokens) {}

  // A piece: [16 tokens, dim] in its own order. `side`: 0 keys, 1 values.
  T* piece(int block, int layer, int side, int head, int token) const {
    long heads_of_block = ((long)block * layers + layer) * 2 + side;
    return arena + ((heads_of_block * kv_heads + head) * block_tokens + token / PANEL * PANEL) * dim;
  }
  long key_at(int token, int d) const { return ((long)(d / STEP) * PANEL + token % PANEL) * STEP + d % STEP; }
  long value_at(int token, int d) const {
    token %= PANEL;
    return (((long)(d / PANEL) * (PANEL / STEP) + token / STEP) * PANEL + d % PANEL) * STEP + token % STEP;
  }

  // A piece of values, zeros beyond the first `valid` tokens.
  void copy_values(const T* piece, int valid, T* to) const {
    const int size = PANEL * STEP;  // sixteen dims of STEP tokens
    for (int i = 0; i < dim; i += STEP, piece += size, to += size)
      for (int j = 0; j < size; j++) to[j] = i % PANEL + j % STEP < valid ? piece[j] : (T)0;
  }

  void fetch(const T* piece) const {
    for (int i = 0; i < dim * PANEL; i += LINE / sizeof(T)) prefetch_far(piece + i);
  }
};

// One token's queries, keys and values, [heads + 2 kv_heads, dim]: norms and turns the first two and
// stores the last two.
template <class T>
static void rotate_and_store(const Program* p, const Op* op, float* qkv, int position, int block) {
  Cache<T> cache(p);
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
    T* keys = cache.piece(block, layer, 0, head, token);
    T* values = cache.piece(block, layer, 1, head, token);
    for (int d = 0; d < dim; d += PANEL) {
      T row[2][PANEL];
      put_row(row[0], 0, load(k + d));
      put_row(row[1], 0, load(v + d));
      for (int i = 0; i < PANEL; i++) keys[cache.key_at(token, d + i)] = row[0][i];
      for (int i = 0; i < PANEL; i++) values[cache.value_at(token, d + i)] = row[1][i];
    }
  }
}
