// The inner loop of every product: a few rows times one or two panels.
//
// A panel is sixteen columns of a matrix [n, k], stored as the loop reads it: step by step along k,
// each step's sixteen columns together. In bf16 a step is two k's, and a column's two lie side by
// side, which is what the dot instruction wants and what a shift and a mask can take apart:
//
//     bf16   [k / 2][16 columns][2]        float   [k][16 columns]
//
// Each output element is summed by one accumulator in the order of k, whatever the number of rows:
// what a row gives does not depend on the rows beside it.
#pragma once
#include "simd.h"

struct FloatPanels {  // float rows, float panels
  typedef float Row;
  typedef float Weight;
  enum { STEP = 1 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) { return fma(all(row[0]), load(panel), sum); }
};

struct WidePanels {  // float rows, bf16 panels, float arithmetic
  typedef float Row;
  typedef bf16 Weight;
  enum { STEP = 2 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) {
    return fma(all(row[1]), seconds(panel), fma(all(row[0]), firsts(panel), sum));
  }
};

#ifdef __AVX512BF16__
struct DotPanels {  // bf16 rows and panels, their products summed in float
  typedef bf16 Row;
  typedef bf16 Weight;
  enum { STEP = 2 };
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) { return dot_pairs(row, panel, sum); }
};
#endif

template <int ROWS, int PANELS>
static inline void clear(Lanes (&sums)[ROWS][PANELS]) {
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sums[r][p] = zero();
}

// sums[r][p] += rows r (a stride apart) times panels p, over `count` k's. AHEAD lines a step, from `ahead` on, come into
// the second cache meanwhile: a panel's step is one line.
template <class P, int AHEAD, int ROWS, int PANELS>
static inline void accumulate(
    Lanes (&sums)[ROWS][PANELS], const typename P::Row* rows, long stride, const typename P::Weight* const* panels,
    int count, const char* ahead) {
  // Three rows from each pointer: there are no registers for twelve, but p + stride and p + 2 stride are addresses.
  const typename P::Row* threes[(ROWS + 2) / 3];
  for (int i = 0; i < (ROWS + 2) / 3; i++) threes[i] = rows + 3 * i * stride;
#pragma GCC unroll 1
  for (int k = 0; k < count; k += P::STEP) {
#pragma GCC unroll 4
    for (int i = 0; i < AHEAD; i++, ahead += LINE) prefetch_far(ahead);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++)
        sums[r][p] = P::step(threes[r / 3] + r % 3 * stride + k, panels[p] + (long)k * PANEL, sums[r][p]);
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
