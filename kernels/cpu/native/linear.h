// y = x W^T, x [rows, k] and W [n, k] in panels. Threads take columns as they come.
#pragma once
#include "tile.h"

struct Matrix {
  const void* panels;
  const float* bias;  // [n], or null
  int n, k;
};

enum Epilogue { PUT = 0, ADD = 1 };

// Columns [16 * panel, + 16 * PANELS) of all rows.
template <class P, int PANELS>
struct Columns {
  const typename P::Row* x;
  long x_stride;
  const typename P::Weight* panels[PANELS];
  const float* bias;
  float* y;
  long y_stride;
  int k, width, row;
  Epilogue epilogue;

  template <int ROWS>
  void run() {
    Lanes sums[ROWS][PANELS];
    clear(sums);
    accumulate<P>(sums, x + row * x_stride, x_stride, panels, k);
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) put(sums[r][p], y + (row + r) * y_stride + p * PANEL, p * PANEL);
  }

  void put(Lanes sum, float* to, int column) {
    int left = width - column;
    if (left <= 0) return;
    if (left >= PANEL) {
      if (bias) sum = add(sum, load(bias + column));
      store(to, epilogue == ADD ? add(sum, load(to)) : sum);
      return;
    }
    float values[PANEL];
    store(values, sum);
    for (int i = 0; i < left; i++) {
      float value = values[i] + (bias ? bias[column + i] : 0);
      to[i] = epilogue == ADD ? to[i] + value : value;
    }
  }
};

// Rows in tiles of at most MAX_ROWS and of nearly equal height: no last tile of one row.
static inline int tiles_of(int rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }

// Panels [panel, + TILE_PANELS) of all rows; beyond the last one there is nothing to do.
template <class P>
static void linear_columns(
    const typename P::Row* x, long x_stride, const Matrix* w, float* y, long y_stride, int rows, int panel, Epilogue epilogue) {
  typedef typename P::Weight Weight;
  int last = (w->n - 1) / PANEL;
  Columns<P, TILE_PANELS> columns;
  for (int i = 0; i < TILE_PANELS; i++)
    columns.panels[i] = (const Weight*)w->panels + (long)(panel + i < last ? panel + i : last) * w->k * PANEL;
  columns.x = x, columns.x_stride = x_stride;
  columns.bias = w->bias ? w->bias + panel * PANEL : 0;
  columns.y = y + panel * PANEL, columns.y_stride = y_stride;
  columns.k = w->k, columns.width = w->n - panel * PANEL, columns.epilogue = epilogue;
  int tiles = tiles_of(rows);
  for (int tile = 0; tile < tiles; tile++) {
    columns.row = (long)rows * tile / tiles;
    for_rows<MAX_ROWS>((int)((long)rows * (tile + 1) / tiles) - columns.row, columns);
  }
}
