// Causal attention of the step's tokens over the paged cache. A task is a tile: the query heads that
// share a key-value head, times a few neighbouring tokens of a sequence. Its scores are held whole,
// so the softmax is the plain one: of a row, the same whatever else is in the tile.
#pragma once
#include "rows.h"

enum { TILE_ROWS = 12 };

struct Tile {
  int sequence, token, count, first;  // tokens [token, + count) of the step; first tile of the sequence
};

// How many there are. Rows of a tile are tokens times heads.
static int lay_tiles(const Program* p, const Step* s) {
  int group = p->shape.heads / p->shape.kv_heads;
  int tokens = group < TILE_ROWS ? TILE_ROWS / group : 1;
  Tile* tiles = (Tile*)p->tiles;
  int count = 0;
  for (int i = 0; i < s->sequences; i++) {
    int first = count;
    for (int t = s->starts[i]; t < s->starts[i + 1]; t += tokens, count++) {
      int left = s->starts[i + 1] - t;
      tiles[count] = {i, t, left < tokens ? left : tokens, first};
    }
  }
  return count;
}

// Scores: y = rows x panels, `width` columns of them.
template <class P>
struct Scores {
  const typename P::Row* x;
  long x_stride;
  const typename P::Weight* panels[TILE_PANELS];
  float* y;
  long y_stride;
  int k, width, row;

  template <int ROWS>
  void run() {
    Lanes sums[ROWS][TILE_PANELS];
    clear(sums);
    accumulate<P, false>(sums, x + row * x_stride, x_stride, panels, k, 0);
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < TILE_PANELS && p * PANEL < width; p++) store(y + (row + r) * y_stride + p * PANEL, sums[r][p]);
  }
};

// The weighted sum of values, times each row's factor: k runs over a sequence's pieces, sixteen
// tokens each.
template <class P>
struct WeightedSum {
  const typename P::Row* x;
  long x_stride;
  const typename P::Weight* const* pieces;
  int num_pieces;
  long offsets[TILE_PANELS];  // of the panels in a piece
  float* y;
  long y_stride;
  const float* factors;
  int width, row;

  template <int ROWS>
  void run() {
    Lanes sums[ROWS][TILE_PANELS];
    clear(sums);
    for (int i = 0; i < num_pieces; i++) {
      const typename P::Weight* panels[TILE_PANELS];
      for (int p = 0; p < TILE_PANELS; p++) panels[p] = pieces[i] + offsets[p];
      accumulate<P, false>(sums, x + row * x_stride + (long)i * PANEL, x_stride, panels, PANEL, 0);
    }
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < TILE_PANELS && p * PANEL < width; p++)
        store(y + (row + r) * y_stride + p * PANEL, mul(sums[r][p], all(factors[row + r])));
  }
};

// Runs a product over a tile's rows, at most MAX_ROWS at a time.
template <class F>
static inline void over_rows(F& f, int rows) {
  int tiles = tiles_of(rows);
  for (int i = 0; i < tiles; i++) {
    f.row = rows * i / tiles;
    for_rows<MAX_ROWS>(rows * (i + 1) / tiles - f.row, f);
  }
}

// Scores of `length` tokens to weights e^(scale * (score - best)), zero beyond; returns 1 / sum.
template <class Row>
static float soften(float* scores, Row* weights, int length, int padded, float scale) {
  Lanes best = all(-__builtin_inff());
  for (int i = 0; i < length; i += PANEL) best = max(best, first(length - i, load(scores + i), all(-__builtin_inff())));
  Lanes shift = all(largest(best) * scale);
  Lanes total = zero();
  for (int i = 0; i < padded; i += PANEL) {
    Lanes weight = zero();
    if (i < length) weight = first(length - i, exponential(sub(mul(load(scores + i), all(scale)), shift)), zero());
    total = add(total, weight);
    put_row(weights, i, weight);
  }
  return 1 / sum(total);
}

static long round_up(long x, long to) { return (x + to - 1) / to * to; }

template <class P>
static void attend(const Program* p, const Step* s, const Op* op, const Tile* tile, int head, int group_first, int group, char* scratch) {
  typedef typename P::Row Row;
  typedef typename P::Weight Weight;
  Cache<Weight> cache(p);
  int dim = cache.dim, heads = p->shape.heads, rows = tile->count * group;
  int length = s->positions[tile->token + tile->count - 1] + 1;  // of the tile's last token
  int pieces = (length + PANEL - 1) / PANEL, padded = pieces * PANEL;
  const int* table = s->block_tables + (long)tile->sequence * s->table_width;
  const Buffer* qkv = &p->buffers[op->source];
  const Buffer* out = &p->buffers[op->target];

  // The scratch of a thread: queries, scores, weights, pointers, and a copied piece.
  long row_stride = padded + PANEL;
  Row* queries = (Row*)scratch;
  float* scores = (float*)(scratch + round_up((long)TILE_ROWS * dim * sizeof(Row), 64));
  Row* weights = (Row*)(scores + TILE_ROWS * row_stride);
  const Weight** values = (const Weight**)round_up((long)(weights + TILE_ROWS * row_stride), 64);
  Weight* last = (Weight*)round_up((long)(values + pieces), 64);
  float* result = (float*)(last + (long)PANEL * dim);
  float factors[TILE_ROWS];

  for (int r = 0; r < rows; r++) {
    int token = tile->token + r / group, h = head * (heads / cache.kv_heads) + group_first + r % group;
    plain_row(qkv->data + token * qkv->width + (long)h * dim, queries + (long)r * dim, dim);
  }

  Scores<P> product;
  product.x = queries, product.x_stride = dim, product.k = dim, product.y_stride = row_stride;
  for (int i = 0; i < pieces; i += TILE_PANELS) {
    for (int j = 0; j < TILE_PANELS; j++) {
      int token = (i + j < pieces ? i + j : i) * PANEL;
      product.panels[j] = cache.piece(table[token / cache.block_tokens], op->layer, 0, head, token % cache.block_tokens);
    }
    product.y = scores + (long)i * PANEL;
    product.width = (pieces - i) * PANEL;
    over_rows(product, rows);
  }

  for (int r = 0; r < rows; r++) {
    int row_length = s->positions[tile->token + r / group] + 1;
    factors[r] = soften(scores + r * row_stride, weights + r * row_stride, row_length, padded, p->shape.scale);
  }

  for (int i = 0; i < pieces; i++) {
    int token = i * PANEL;
    values[i] = cache.piece(table[token / cache.block_tokens], op->layer, 1, head, token % cache.block_tokens);
  }
  int valid = s->lengths[tile->sequence] - (pieces - 1) * PANEL;
  if (valid < PANEL) {  // what lies beyond may be NaN, which a weight of zero would not silence
    const Weight* from = values[pieces - 1];
    for (int t = 0; t < PANEL; t++)
      for (int d = 0; d < dim; d++) {
        long at = cache.value_at(t, d);
        last[at] = t < valid ? from[at] : 0;
      }
    values[pieces - 1] = last;
  }

  WeightedSum<P> sum;
  sum.x = weights, sum.x_stride = row_stride, sum.pieces = values, sum.num_pieces = pieces, sum.factors = factors;
  sum.y_stride = dim;
  for (int d = 0; d < dim; d += TILE_PANELS * PANEL) {
    sum.width = dim - d;
    for (int j = 0; j < TILE_PANELS; j++) sum.offsets[j] = (long)(d + j * PANEL < dim ? d + j * PANEL : d) * PANEL;
    sum.y = result + d;
    over_rows(sum, rows);
  }
  for (int r = 0; r < rows; r++) {
    int token = tile->token + r / group, h = head * (heads / cache.kv_heads) + group_first + r % group;
    plain_row(result + (long)r * dim, out->data + token * out->width + (long)h * dim, dim);
  }
}
