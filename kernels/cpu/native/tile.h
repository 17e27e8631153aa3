// The inner loop of every product: a few rows times one or two panels.
//
// A panel is sixteen columns of a matrix [n, k], stored as the loop reads it: step by step along k,
// each step's sixteen columns together. In bf16 a step is two k's, and a column's two lie side by
// side, which is what the dot instruction wants and what a shift and a mask can take apart:
//
//     bf16   [k / 2][16 columns][2]        float   [k][16 columns]
//     int8   [k / 2][16 columns][2], behind them the columns' scales, floats [16]
//     int4   for each 64 k's the scales of 32 and of 32 more, halves [2][16 columns], then two to a byte
//            [16][16 columns][2]: in the lower nibble k and k + 1 of four, in the upper one k + 2 and k + 3; each of
//            them 8 more than it is
//     int4 with zeros   for each 128 k's [4][16 columns] halves, [4][16 columns] zeros, bytes, then as int4, 0 to 15
//     int8 by groups    for each 64 k's [2][16 columns] halves, then as int8
//     w8a8   as int8; where there are products of bytes [k / 4][16 columns][4], each of them 128 more than it is, then scales
//     fp8    e4m3, as int8
//     fp8 by blocks     for each 128 k's the columns' scales, floats [16], then as int8
//
// What a panel is of says a struct: `Row`s that meet it, its `Weight`s, the k's of a STEP, the steps of a LINE, where
// k's and their values are, how many weights it takes with its scales, and what becomes of a sum.
//
// Rows that meet int8 and int4 are int16: a group of k's has one power of two for its scale, its sum is exact in
// int32, and only sums of groups are floats. Behind a row lie its groups' `Part`s. Those that meet w8a8 have a scale for
// all of them, of which the furthest is 127. Those that meet fp8 are floats: of few rows the bytes are what takes time, and of
// many two products of floats are faster than one of pairs of bf16.
//
// Each output element is summed by one accumulator in the order of k, whatever the number of rows:
// what a row gives does not depend on the rows beside it.
#pragma once
#include "simd.h"

// Rows of an operand are this many elements further apart than they are long: a power of two between
// them would put all rows of a tile into the same few lines of the first cache.
enum { OPERAND_PAD = 32 };

struct Ungrouped {
  typedef Lanes Sum;
  enum { GROUP = 0, SHORT = 0 };
  static inline long stride(long k) { return k + OPERAND_PAD; }
  static inline long offset(long k) { return k * PANEL; }
};

struct Unscaled : Ungrouped {
  static inline long size(long k) { return k * PANEL; }
  static inline Lanes finish(Lanes sum, const void*, long) { return sum; }
};

struct FloatPanels : Unscaled {  // float rows, float panels
  typedef float Row;
  typedef float Weight;
  enum { STEP = 1, STEPS = 1 };
  static inline float value(const Weight* panel, long, long k, int column) { return panel[k * PANEL + column]; }
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) { return fma(all(row[0]), load(panel), sum); }
};

struct InPairs : Unscaled {
  typedef bf16 Weight;
  enum { STEP = 2, STEPS = 1 };
  static inline float value(const Weight* panel, long, long k, int column) {
    return from_bf16(panel[(k / 2 * PANEL + column) * 2 + k % 2]);
  }
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

struct Part {  // of a row, GROUP k's
  float scale;  // of its int16
  int begun;    // where its sums start: by this and what the columns have
};

template <int K, class R = int16_t>
struct Shortened {  // a group is K k's, or what is left of a row
  typedef R Row;
  typedef Words Sum;
  enum { GROUP = K, SHORT = 1, OF_ROW = 0 };
  static inline long parts_at(long k) { return (k + PANEL - 1) / PANEL * PANEL; }
  static inline long stride(long k) {
    return parts_at(k) + (k + GROUP - 1) / GROUP * (long)(sizeof(Part) / sizeof(Row)) + OPERAND_PAD;
  }
  static inline Part* parts(Row* row, long k) { return (Part*)(row + parts_at(k)); }
  static inline const Part* parts(const Row* row, long k) { return (const Part*)(row + parts_at(k)); }
};

struct InBytes {  // int8
  typedef int8_t Weight;
  enum { STEP = 2, STEPS = 2, MIDDLE = 0 };
  static inline long offset(long k) { return k * PANEL; }
  static inline long place(long k, int column) { return (k / 2 * PANEL + column) * 2 + k % 2; }
  static inline void put(Weight* at, long, int number) { *at = (Weight)number; }
  static inline int number(const Weight* at, long) { return *at; }
  static inline Words step(const int16_t* row, const Weight* panel, Words sum) {
    return dot_pairs(row, shorts_of_bytes(panel), sum);
  }
};

struct InNibbles {  // int4, each MIDDLE more than it is
  typedef uint8_t Weight;
  enum { STEP = 4, STEPS = 2, MIDDLE = 8 };
  static inline long offset(long k) { return k * PANEL / 2; }
  static inline long place(long k, int column) { return offset(k / 4 * 4) + column * 2 + k % 2; }
  static inline int shift(long k) { return k % 4 / 2 * 4; }
  static inline void put(Weight* at, long k, int number) { *at |= number << shift(k); }
  static inline int number(const Weight* at, long k) { return *at >> shift(k) & 15; }
  static inline Words step(const int16_t* row, const Weight* panel, Words sum) {
    TwoShorts by = shorts_of_nibbles(panel);
    return dot_pairs(row + 2, by.second, dot_pairs(row, by.first, sum));
  }
};

struct InE4m3 {
  typedef float Row;
  typedef E4m3 Weight;
  enum { STEP = E4M3_STEP, STEPS = 4 / STEP };
  static inline long offset(long k) { return k * PANEL; }
  static inline long place(long k, int column) { return InBytes::place(k, column); }
  static inline void put(Weight* at, long, int number) { *at = (Weight)number; }
  static inline float number(const Weight* at, long) { return exact(*at); }
  static inline Lanes step(const Row* row, const Weight* panel, Lanes sum) { return dot_e4m3(row, panel, sum); }
  static inline Lanes whole(Lanes sum) { return mul(sum, all(0x1p8f)); }  // of such products
};

#ifdef __AVX512VNNI__
struct InFours {  // int8, each MIDDLE more than it is
  typedef uint8_t Weight;
  typedef int8_t Row;
  enum { STEP = 4, STEPS = 1, MIDDLE = 128 };
  static inline long offset(long k) { return k * PANEL; }
  static inline long place(long k, int column) { return (k / 4 * PANEL + column) * 4 + k % 4; }
  static inline void put(Weight* at, long, int number) { *at = (Weight)(number + MIDDLE); }
  static inline Words step(const Row* row, const Weight* panel, Words sum) { return dot_fours(row, panel, sum); }
};
#else
struct InFours : InBytes {  // so many of these are the same instructions
  typedef int16_t Row;
};
#endif

// A scale for each row of them, behind all; k's are a multiple of four, so that panels begin with lines.
template <class Numbers>
struct ScaledRows : Numbers {
  typedef typename Numbers::Weight Weight;
  typedef float Scale;
  enum { HEAD = 0 };
  static inline long at(long k, int column) { return Numbers::place(k, column); }
  static inline long size(long k) { return k * PANEL + PANEL * (long)sizeof(float); }
  static inline const float* scales(const Weight* panel, long k) { return (const float*)(panel + k * PANEL); }
  static inline float value(const Weight* panel, long size, long k, int column) {
    return Numbers::number(panel + at(k, column), k) * scales(panel, size)[column];
  }
};

// Of 256 k's a sum is below 2^31.
struct BytePanels : Shortened<256>, ScaledRows<InBytes> {
  static inline int begun(int) { return 0; }
  static inline Words start(int begun, const Weight*, long) { return words((uint32_t)begun); }
  static inline bool scales_before(long) { return false; }
  static inline Lanes scaled(float by, const Weight*, long) { return all(by); }
  static inline Lanes finish(Lanes sum, const Weight* panel, long k) { return mul(sum, load(scales(panel, k))); }
};

// Rows of so many k's have a sum below 2^31, too: products are of 127 and 128 at most.
struct TokenPanels : Shortened<1 << 16, InFours::Row>, ScaledRows<InFours> {
  typedef InFours::Row Row;
  enum { OF_ROW = 1 };
  static inline int begun(int total) { return -InFours::MIDDLE * total; }
  static inline Words start(int begun, const Weight*, long) { return words((uint32_t)begun); }
  static inline bool scales_before(long) { return false; }
  static inline Lanes scaled(float by, const Weight*, long) { return all(by); }
  static inline Lanes finish(Lanes sum, const Weight* panel, long k) { return mul(sum, load(scales(panel, k))); }
};

struct Fp8Panels : Ungrouped, ScaledRows<InE4m3> {
  using InE4m3::offset;
  static inline Lanes finish(Lanes sum, const Weight* panel, long k) { return mul(whole(sum), load(scales(panel, k))); }
};

// A scale for each 128 of a row; k's are a multiple of so many.
struct Fp8Blocks : Ungrouped, InE4m3 {
  typedef float Scale;
  using InE4m3::offset;
  enum { GROUP = 128, HEAD = PANEL * 4, ZEROED = 0 };
  static inline long size(long k) { return k / GROUP * (HEAD + offset(GROUP)); }  // of whole blocks
  static inline long at(long k, int column) { return size(k) + HEAD + place(k % GROUP, column); }
  static inline long scales_at(long k) { return size(k); }
  static inline Lanes scales(const Weight* panel, long k) { return load((const float*)(panel + scales_at(k))); }
  static inline float value(const Weight* panel, long, long k, int column) {
    return number(panel + at(k, column), k) * ((const float*)(panel + scales_at(k)))[column];
  }
  static inline Lanes finish(Lanes sum, const void*, long) { return whole(sum); }
};

// A scale for each 32 of a row, and a zero if they have ZEROS; k's are a multiple of BLOCK, so that scales are whole lines.
template <class Numbers, int K, bool ZEROS>
struct GroupPanels : Shortened<32>, Numbers {
  typedef typename Numbers::Weight Weight;
  typedef uint16_t Scale;
  enum { BLOCK = K, ZEROS_AT = BLOCK / GROUP * PANEL * 2, HEAD = ZEROS_AT + (ZEROS ? BLOCK / GROUP * PANEL : 0), ZEROED = ZEROS };
  static inline long size(long k) { return k / BLOCK * (HEAD + Numbers::offset(BLOCK)); }  // of whole blocks
  static inline long at(long k, int column) { return size(k) + HEAD + Numbers::place(k % BLOCK, column); }
  static inline long scales_at(long k) { return size(k) + k % BLOCK / GROUP * PANEL * 2; }  // of k's group
  static inline long zeros_at(long k) { return size(k) + ZEROS_AT + k % BLOCK / GROUP * PANEL; }
  static inline const uint8_t* zeros(const Weight* panel, long k) { return (const uint8_t*)panel + zeros_at(k); }
  static inline Lanes scales(const Weight* panel, long k) { return from_halves((const uint16_t*)(panel + scales_at(k))); }
  static inline float value(const Weight* panel, long, long k, int column) {
    float of_columns[PANEL];
    store(of_columns, scales(panel, k));
    int zero = ZEROS ? zeros(panel, k)[column] : (int)Numbers::MIDDLE;
    return (Numbers::number(panel + at(k, column), k) - zero) * of_columns[column];
  }
  // What is taken off a group's sum is the row's `total` times the zero: where that is the columns' own, as one more pair of
  // k's, for of 32 int16 a total is two: how often 128 is in it, and the rest.
  static inline int begun(int total) {
    if (!ZEROS) return -Numbers::MIDDLE * total;
    return (int)((uint32_t)(-total >> 7) << 16 | (-total & 127));
  }
  static inline Words start(int begun, const Weight* panel, long k) {
    if constexpr (!ZEROS) {
      return words((uint32_t)begun);
    } else {
      int16_t pair[2];
      __builtin_memcpy(pair, &begun, 4);
      return dot_pairs(pair, shorts_of_zeros(zeros(panel, k)), words(0));
    }
  }
  static inline bool scales_before(long k) { return k % BLOCK == 0; }
  static inline Lanes scaled(float by, const Weight* panel, long k) { return mul(all(by), scales(panel, k)); }
  static inline Lanes finish(Lanes sum, const void*, long) { return sum; }
};
typedef GroupPanels<InNibbles, 64, false> NibblePanels;
typedef GroupPanels<InNibbles, 128, true> ZeroPanels;
typedef GroupPanels<InBytes, 64, false> ByteGroups;

template <int ROWS, int PANELS>
static inline void clear(Lanes (&sums)[ROWS][PANELS]) {
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sums[r][p] = zero();
}

// sums[r][p] += rows r (a stride apart) times panels p, over `count` k's. AHEAD lines for each, from `ahead` on, come into
// the second cache meanwhile: a panel's STEPS are one line.
template <class P, int AHEAD, int ROWS, int PANELS>
static inline void accumulate(
    typename P::Sum (&sums)[ROWS][PANELS], const typename P::Row* rows, long stride,
    const typename P::Weight* const* panels, int count, const char* ahead) {
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
          sums[r][p] = P::step(threes[r / 3] + r % 3 * stride + k, panels[p] + P::offset(k), sums[r][p]);
    }
  }
}

// sums[r][p] = rows r times panels p, without what is done behind the last k. As `accumulate`.
template <class P, int AHEAD, int ROWS, int PANELS>
static inline void multiply(
    Lanes (&sums)[ROWS][PANELS], const typename P::Row* rows, long stride, const typename P::Weight* const* panels,
    int k, const char* ahead) {
  clear(sums);
  if constexpr (!P::GROUP) {
    return accumulate<P, AHEAD>(sums, rows, stride, panels, k, ahead);
  } else if constexpr (!P::SHORT) {
#pragma GCC unroll 1
    for (int first = 0; first < k; first += P::GROUP, ahead += AHEAD * P::offset(P::GROUP)) {
      for (int i = 0; i < AHEAD * P::HEAD / LINE; i++, ahead += LINE) prefetch_far(ahead);
      const typename P::Weight* at[PANELS];
      for (int p = 0; p < PANELS; p++) at[p] = panels[p] + P::at(first, 0);
      Lanes of_group[ROWS][PANELS];
      clear(of_group);
      accumulate<P, AHEAD>(of_group, rows + first, stride, at, P::GROUP, ahead);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums[r][p] = fma(of_group[r][p], P::scales(panels[p], first), sums[r][p]);
    }
  } else {
    const Part* parts = P::parts(rows, k);
    const long apart = stride * (long)sizeof *rows / (long)sizeof *parts;
#pragma GCC unroll 1
    for (int first = 0; first < k; first += P::GROUP, parts++) {
      int count = k - first < P::GROUP ? k - first : P::GROUP;
      // With the head of a block come the lines that it is.
      if (P::scales_before(first))
        for (int i = 0; i < AHEAD * P::HEAD / LINE; i++, ahead += LINE) prefetch_far(ahead);
      const typename P::Weight* at[PANELS];
      for (int p = 0; p < PANELS; p++) at[p] = panels[p] + P::at(first, 0);
      Words of_group[ROWS][PANELS];
      for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) of_group[r][p] = P::start(parts[r * apart].begun, panels[p], first);
      accumulate<P, AHEAD>(of_group, rows + first, stride, at, count, ahead);
      ahead += AHEAD * P::offset(count);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
          sums[r][p] = fma(to_float(of_group[r][p]), P::scaled(parts[r * apart].scale, panels[p], first), sums[r][p]);
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
