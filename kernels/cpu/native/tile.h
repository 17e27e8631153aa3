// The inner loop of every product: a few rows times one or two panels.
//
// A panel is sixteen columns of a matrix [n, k], stored as the loop reads it: step by step along k,
// each step's sixteen columns together. In bf16 a step is two k's, and a column's two lie side by
// side, which is what the dot instruction wants and what a shift and a mask can take apart:
//
//     bf16   [k / 2][16 columns][2]        float   [k][16 columns]
//     int8   [k][16 columns], behind them the columns' scales, floats [16]
//
// What a panel is of says a struct: `Row`s that meet it, its `Weight`s, the k's of a STEP, the steps of a LINE, where k
// of a column lies, how many weights it takes with its scales, what becomes of sums with them.
//
// Each output element is summed by one accumulator in the order of k, whatever the number of rows:
// what a row gives does not depend on the rows beside it.
#pragma once
#include "simd.h"

struct Unscaled {
  static inline long size(long k) { return k * PANEL; }
  static inline float scale(const void*, long, int) { return 1; }
  static inline Lanes finish(Lanes sum, const void*, long) { return sum; }
};

struct FloatPanels : Unscaled {  // float rows, float panels
  typedef float Row;
  typedef float Weight;
  enum { STEP = 1, STEPS = 1 };
  static inline long at(long k, int column) { return k * PANEL + column; }
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) { return fma(all(row[0]), load(panel), sum); }
};

struct InPairs : Unscaled {
  typedef bf16 Weight;
  enum { STEP = 2, STEPS = 1 };
  static inline long at(long k, int column) { return (k / 2 * PANEL + column) * 2 + k % 2; }
};

struct WidePanels : InPairs {  // float rows, bf16 panels, float arithmetic
  typedef float Row;
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    return fma(all(row[1]), seconds(panel), fma(all(row[0]), firsts(panel), sum));
  }
};

#ifdef __AVX512BF16__
struct DotPanels : InPairs {  // bf16 rows and panels, their products summed in float
  typedef bf16 Row;
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    return dot_pairs(row, load_pairs(panel), sum);
  }
};
#endif

struct Bytes {  // int8 panels; k's are a multiple of four, so that panels begin with lines
  typedef int8_t Weight;
  static inline long at(long k, int column) { return k * PANEL + column; }
  static inline long size(long k) { return k * PANEL + PANEL * (long)sizeof(float); }
  static inline const float* scales(const Weight* panel, long k) { return (const float*)(panel + k * PANEL); }
  static inline float scale(const Weight* panel, long k, int column) { return scales(panel, k)[column]; }
  static inline Lanes finish(Lanes sum, const Weight* panel, long k) { return mul(sum, load(scales(panel, k))); }
};

template <class Row>
struct BytePanels;

template <>
struct BytePanels<float> : Bytes {
  typedef float Row;
  enum { STEP = 1, STEPS = 4 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    return fma(all(row[0]), from_bytes(panel), sum);
  }
};

#ifdef __AVX512BF16__
template <>
struct BytePanels<bf16> : Bytes {
  typedef bf16 Row;
  enum { STEP = 2, STEPS = 2 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    return dot_pairs(row, pairs_of_bytes(panel), sum);
  }
};
#endif

template <int ROWS, int PANELS>
static inline void clear(Lanes (&sums)[ROWS][PANELS]) {
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sums[r][p] = zero();
}

// sums[r][p] += rows r (a stride apart) times panels p, over `count` k's. AHEAD lines for each, from `ahead` on, come into
// the second cache meanwhile: a panel's STEPS are one line.
template <class P, int AHEAD, int ROWS, int PANELS>
static inline void accumulate(
    Lanes (&sums)[ROWS][PANELS], const typename P::Row* rows, long stride, const typename P::Weight* const* panels,
    int count, const char* ahead) {
  // Three rows from each pointer: there are no registers for twelve, but p + stride and p + 2 stride are addresses.
  const typename P::Row* threes[(ROWS + 2) / 3];
  for (int i = 0; i < (ROWS + 2) / 3; i++) threes[i] = rows + 3 * i * stride;
#pragma GCC unroll 1
  for (int line = 0; line < count; line += P::STEP * P::STEPS) {
#pragma GCC unroll 4
    for (int i = 0; i < AHEAD; i++, ahead += LINE) prefetch_far(ahead);
#pragma GCC unroll 4
    for (int s = 0; s < P::STEPS; s++) {
      int k = line + s * P::STEP;
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
          sums[r][p] = P::step(threes[r / 3] + r % 3 * stride + k, panels[p] + (long)k * PANEL, sums[r][p]);
    }
  }
}

// Calls f.template run<ROWS>() for 1 <= rows <= MAX_ROWS.
template <int ROWS, class F>
static inline void for_rows(int rows, F& f) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return for_rows<ROWS - 1>(rows, f);
  }
  f.template run<ROWS>();
}

// Tiles of PANELS panels and nearly equal height that `rows` are cut into: no last one of a single row.
template <int PANELS>
constexpr int most_rows() {
  return PANELS == TILE_PANELS ? MAX_ROWS : FEW_ROWS;
}
template <int PANELS>
static inline int tiles_of(int rows) {
  return (rows + most_rows<PANELS>() - 1) / most_rows<PANELS>();
}
