// What works row by row: embedding, a linear's operand, rotary.
#pragma once
#include "program.h"

static inline void put_row(float* to, int at, Lanes x) { store(to + at, x); }
static inline void put_row(bf16* to, int at, Lanes x) { store_bf16(to + at, x); }
static inline void put_row(int8_t* to, int at, Lanes x) { store_bytes(to + at, x); }
static inline void put_row(E4m3* to, int at, Lanes x) { store_e4m3(to + at, x); }
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

static inline int exponent_of(float x) {  // e of 2^e <= x < 2^(e + 1), for normal x > 0
  int bits;
  __builtin_memcpy(&bits, &x, 4);
  return (bits >> 23) - 127;
}
static inline float power_of_two(int exponent) {
  int bits = (exponent + 127) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// What meets int8 and int4: x, of `width` with room up to whole lanes, as int16 with a scale for each group of P. The scale
// is a power of two: what has few bits stays as it is, and products by it are exact. A group with NaN or infinity is
// all NaN.
template <class P>
static void short_row(float* x, int16_t* to, int width) {
  for (int i = width; i % PANEL; i++) x[i] = 0;
  Part* part = P::parts(to, width);
  for (int first = 0; first < width; first += P::GROUP, part++) {
    int end = first + P::GROUP < width ? first + P::GROUP : width;
    Lanes most = zero(), nothing = zero(), total = zero();
    for (int i = first; i < end; i += PANEL) {
      Lanes value = load(x + i);
      most = max(value, max(sub(zero(), value), most));
      nothing = fma(value, zero(), nothing);  // NaN of what is not finite
    }
    // The furthest is 2^14 to 2^15 of its scale. Below 2^-64 it is less: what comes of such a scale and a group's of int4
    // is no subnormal number, which would take a hundred cycles, of each group of zeros.
    int exponent = exponent_of(largest(most));
    if (exponent < -64) exponent = -64;
    float inverse = power_of_two(14 - exponent);
    for (int i = first; i < end; i += PANEL) {
      Lanes value = max(min(nearest(mul(load(x + i), all(inverse))), all(32767)), all(-32768));
      total = add(total, value);
      store_shorts(to + i, value);
    }
    part->scale = sum(nothing) == 0 ? power_of_two(exponent - 14) : __builtin_nanf("");
    part->begun = P::begun((int)sum(total));
  }
}

static inline void store_numbers(int16_t* p, Lanes x) { store_shorts(p, x); }
static inline void store_numbers(int8_t* p, Lanes x) { store_bytes(p, x); }

// What meets w8a8: x, likewise, as numbers of -127 to 127 with one scale. A row with NaN or infinity is all NaN.
template <class P>
static void byte_row(float* x, typename P::Row* to, int width) {
  for (int i = width; i % PANEL; i++) x[i] = 0;
  Lanes most = zero(), nothing = zero();
  for (int i = 0; i < width; i += PANEL) {
    most = max(absolute(load(x + i)), most);
    nothing = fma(load(x + i), zero(), nothing);
  }
  float furthest = largest(most) < 0x1p-64f ? 0x1p-64f : largest(most);  // as above
  float scale = sum(nothing) == 0 ? furthest / 127 : __builtin_nanf("");
  Part* part = P::parts(to, width);
  for (int first = 0; first < width; first += P::GROUP, part++) {
    int end = width - first < P::GROUP ? width : first + P::GROUP;
    Lanes total = zero();
    for (int i = first; i < end; i += PANEL) {
      Lanes value = max(min(nearest(mul(load(x + i), all(127 / furthest))), all(127)), all(-127));
      total = add(total, value);
      store_numbers(to + i, value);
    }
    *part = {scale, P::begun((int)sum(total))};
  }
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
