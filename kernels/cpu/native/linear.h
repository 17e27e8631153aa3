// y = x W^T, x [rows, k] and W [n, k] in panels. A task is some columns, a piece of it some rows.
#pragma once
#include "board.h"
#include "tile.h"

struct Matrix {
  const void* panels;
  const float* bias;  // [n], or null
  int n, k;
  int weights;
};

// Of a matrix: in the program's format, or in their own (tile.h).
enum Weights { AS_ROWS = 0, INT8 = 1, INT4 = 2, INT8_GROUPS = 3, INT4_ZEROS = 4, FP8 = 5, FP8_BLOCKS = 6, W8A8 = 7 };

enum Epilogue { PUT = 0, ADD = 1 };

// Columns [16 * panel, + 16 * PANELS) of some rows.
template <class P, int PANELS>
struct Columns {
  const typename P::Row* x;
  long x_stride;
  const typename P::Weight* panels[PANELS];
  const char* ahead;  // what is read after them, from where this tile fetches it, or null
  bool whole;         // it fetches all of that: there is no other tile
  const float* bias;
  float* y;
  long y_stride;
  int k, width, row;
  Epilogue epilogue;
  Claim* claim;

  template <int ROWS>
  void run() {
    const typename P::Row* from = x + row * x_stride;
    float* to = y + row * y_stride;
    Lanes sums[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) prefetch_to_write(to + r * y_stride + p * PANEL);
    if (!ahead)
      multiply<P, 0>(sums, from, x_stride, panels, k, ahead);
    else if (whole)
      multiply<P, PANELS>(sums, from, x_stride, panels, k, ahead);
    else
      multiply<P, (PANELS + 1) / 2>(sums, from, x_stride, panels, k, ahead);
    if (!(*claim)()) return;
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) sums[r][p] = P::finish(sums[r][p], panels[p], k);
    if (width < PANELS * PANEL) return put_edge(sums, to);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) {
        float* at = to + r * y_stride + p * PANEL;
        if (bias) sums[r][p] = add(sums[r][p], load(bias + p * PANEL));
        store(at, epilogue == ADD ? add(sums[r][p], load(at)) : sums[r][p]);
      }
  }

  template <int ROWS>
  void put_edge(const Lanes (&sums)[ROWS][PANELS], float* to) {
    for (int r = 0; r < ROWS; r++, to += y_stride) {
      float values[PANELS * PANEL];
      for (int p = 0; p < PANELS; p++) store(values + p * PANEL, sums[r][p]);
      for (int i = 0; i < width; i++) {
        if (bias) values[i] += bias[i];
        to[i] = epilogue == ADD ? values[i] + to[i] : values[i];
      }
    }
  }
};

// Panels [panel, + PANELS) of a tile of the rows, while [next, + PANELS) come from memory, if that is not -1.
template <class P, int PANELS>
__attribute__((noinline)) static void linear_tile(
    const typename P::Row* x, long x_stride, const Matrix* w, float* y, long y_stride, int rows, int tile, int panel,
    int next, Epilogue epilogue, Claim* claim) {
  typedef typename P::Weight Weight;
  const Weight* all = (const Weight*)w->panels;
  long size = P::size(w->k);
  int last = (w->n - 1) / PANEL;
  Columns<P, PANELS> columns;
  for (int i = 0; i < PANELS; i++) columns.panels[i] = all + (panel + i < last ? panel + i : last) * size;
  columns.x = x, columns.x_stride = x_stride;
  columns.bias = w->bias ? w->bias + panel * PANEL : 0;
  columns.y = y + panel * PANEL, columns.y_stride = y_stride;
  columns.k = w->k, columns.width = w->n - panel * PANEL, columns.epilogue = epilogue, columns.claim = claim;
  int tiles = tiles_of<PANELS>(rows);
  // The last two tiles fetch half of it each: one alone would wait for memory.
  int fetching = tiles == 1 || PANELS == 1 ? 1 : 2;
  columns.whole = fetching == 1;
  int half = tile - (tiles - fetching);
  columns.ahead = half >= 0 && next >= 0 ? (const char*)(all + next * size + half * (PANELS / 2) * size) : 0;
  columns.row = (long)rows * tile / tiles;
  for_rows<most_rows<PANELS>()>((int)((long)rows * (tile + 1) / tiles) - columns.row, columns);
}
