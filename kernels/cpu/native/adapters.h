// What adapters of low rank (decision 0072) add to a linear: y += (x A^T) B^T, of each row its own adapter's. Floats all
// along, whatever the weights are; each sum has its order, whoever computes it and beside whom.
#pragma once
#include "rows.h"

enum { FEW_RANKS = 4, RANKS = 16 };  // that one task computes of a row: of few rows there are more tasks

static float dot(const float* x, const float* y, int width) {
  Lanes sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * PANEL <= width; i += 4 * PANEL)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) sums[j] = fma(load(x + i + j * PANEL), load(y + i + j * PANEL), sums[j]);
  for (; i + PANEL <= width; i += PANEL) sums[0] = fma(load(x + i), load(y + i), sums[0]);
  float rest = 0;
  for (; i < width; i++) rest += x[i] * y[i];
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) + rest;
}

// y[i] += the sum of low[j] up[j][i], of `width` columns; rows of `up` lie `stride` apart.
static void add_columns(const float* low, int ranks, const float* up, long stride, float* y, int width) {
  int i = 0;
  for (; i + PANEL <= width; i += PANEL) {
    Lanes total = zero();
    for (int j = 0; j < ranks; j++) total = fma(all(low[j]), load(up + j * stride + i), total);
    store(y + i, add(load(y + i), total));
  }
  for (; i < width; i++) {
    float total = 0;
    for (int j = 0; j < ranks; j++) total += low[j] * up[j * stride + i];
    y[i] += total;
  }
}

// Columns [from, end) of a row.
static void add_delta(const Delta* delta, const float* low, float* y, int from, int end) {
  const float* up = delta->up;
  for (int part = 0, column = 0, rank = 0; part < DELTA_PARTS; part++) {
    int columns = delta->columns[part], ranks = delta->part_ranks[part];
    int first = from > column ? from : column, last = end < column + columns ? end : column + columns;
    if (ranks && first < last) add_columns(low + rank, ranks, up + first - column, columns, y + first, last - first);
    up += (long)columns * ranks;
    column += columns, rank += ranks;
  }
}
