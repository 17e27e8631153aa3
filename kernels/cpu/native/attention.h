// Causal attention of the step's tokens over the paged cache. A task is a tile: the query heads that
// share a key-value head (a piece is some of them), times a few neighbouring tokens of a sequence. Its scores are held whole,
// so the softmax is the plain one: of a row, the same whatever else is in the tile.
#pragma once
#include "board.h"
#include "cache.h"

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

template <int ROWS, int PANELS>
static inline void store_panels(const Lanes (&sums)[ROWS][PANELS], float* y, long y_stride, int width) {
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; p++) {
    if (p * PANEL >= width) return;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) store(y + r * y_stride + p * PANEL, sums[r][p]);
  }
}

// Scores: y = rows x panels of keys.
template <class P, int PANELS>
struct Scores {
  const typename P::Row* x;
  long x_stride;
  const typename P::Weight* panels[PANELS];
  float* y;
  long y_stride;
  int k, width, row;

  template <int ROWS>
  void run() {
    Lanes sums[ROWS][PANELS];
    clear(sums);
    accumulate<P, 0>(sums, x + row * x_stride, x_stride, panels, k, 0);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) sums[r][p] = P::finish(sums[r][p], panels[p], k);
    store_panels(sums, y + row * y_stride, y_stride, width);
  }
};

// The weighted sum of values, times each row's factor: k runs over a sequence's pieces, sixteen
// tokens each.
template <class P, int PANELS>
struct WeightedSum {
  const typename P::Row* x;
  long x_stride;
  const typename P::Weight* const* pieces;
  int num_pieces;
  long offsets[PANELS];  // of the panels in a piece
  float* y;
  long y_stride;
  const float* factors;
  int width, row;

  template <int ROWS>
  void run() {
    Lanes sums[ROWS][PANELS];
    clear(sums);
    for (int i = 0; i < num_pieces; i++) {
      const typename P::Weight* panels[PANELS];
      for (int p = 0; p < PANELS; p++) panels[p] = pieces[i] + offsets[p];
      accumulate<P, 0>(sums, x + row * x_stride + (long)i * PANEL, x_stride, panels, PANEL, 0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) sums[r][p] = mul(sums[r][p], all(factors[row + r]));
    store_panels(sums, y + row * y_stride, y_stride, width);
  }
};

// Runs a product of PANELS panels over a tile's rows.
template <int PANELS, class F>
static inline void over_rows(F& f, int rows) {
  int tiles = tiles_of<PANELS>(rows);
  for (int i = 0; i < tiles; i++) {
    f.row = rows * i / tiles;
    for_rows<most_rows<PANELS>()>(rows * (i + 1) / tiles - f.row, f);
  }
}

// Of a softmax, whose best weight is 1; less is nothing beside it. Else what weights come to with values and scales would
// be subnormal, which takes a processor a hundred cycles each.
static const float LEAST_WEIGHT = 0x1p-64f;

// Scores of the tokens [start, length) to weights e^(scale * (score - best)), zero elsewhere; returns 1 / sum. What meets
// the values is a weight times its token's scale, where the cache has such.
template <class P>
static float soften(
    float* scores, typename P::Row* weights, const typename P::Weight* const* values, int dim, int start, int length,
    int padded, float scale) {
  const Lanes lowest = all(-__builtin_inff());
  int from = start / PANEL * PANEL, whole = length / PANEL * PANEL, left = length - whole;
  if (start > from) store(scores + from, first(start - from, lowest, load(scores + from)));
  Lanes best = left ? first(left, load(scores + whole), lowest) : lowest;
  for (int i = from; i < whole; i += PANEL) best = max(best, load(scores + i));
  Lanes factor = all(scale), shift = all(-largest(best) * scale), total = zero();
  for (int i = 0; i < from; i += PANEL) put_row(weights, i, zero());
  for (int i = from; i < padded; i += PANEL) {
    auto inside = [=](Lanes weight) {  // a scale beyond may be NaN, which is chosen away, not multiplied
      if (i >= length) return zero();
      if (i == whole) weight = first(left, weight, zero());
      return i < start ? first(start - i, zero(), weight) : weight;
    };
    Lanes weight = no_less(LEAST_WEIGHT, exponential(fma(load(scores + i), factor, shift)));
    total = add(total, inside(weight));
    put_row(weights, i, inside(P::finish(weight, values[i / PANEL], dim)));
  }
  return 1 / sum(total);
}

static long round_up(long x, long to) { return (x + to - 1) / to * to; }

// `first`: of its sequence's tiles and heads, so that its keys and values are still in memory. Tokens are counted
// from `before` on: no row of the tile sees one that is further back.
template <class P, int PANELS>
static void attend(
    const Program* p, const Step* s, const Op* op, const Tile* tile, bool first, int head, int group_first, int group,
    char* scratch, Claim* claim) {
  typedef typename P::Row Row;
  typedef typename P::Weight Weight;
  Cache<P> cache(p);
  int dim = cache.dim, heads = p->shape.heads, rows = tile->count * group;
  int window = op->scores.window, seen = window ? s->positions[tile->token] + 1 - window : 0;
  int before = seen > 0 ? seen / PANEL * PANEL : 0;
  int length = s->positions[tile->token + tile->count - 1] + 1 - before;  // of the tile's last token
  int pieces = (length + PANEL - 1) / PANEL, padded = pieces * PANEL;
  const int* table = table_of(s, op, tile->sequence);
  const Buffer* qkv = &p->buffers[op->source];
  const Buffer* out = &p->buffers[op->target];

  // The scratch of a thread: queries, scores, weights, pointers, and a copied piece.
  long row_stride = padded + PANEL;
  Row* queries = (Row*)scratch;
  float* scores = (float*)(scratch + round_up((long)TILE_ROWS * dim * sizeof(Row), 64));
  Row* weights = (Row*)(scores + TILE_ROWS * row_stride);
  const Weight** keys = (const Weight**)round_up((long)(weights + TILE_ROWS * row_stride), 64);
  const Weight** values = keys + pieces;
  Weight* last = (Weight*)round_up((long)(values + pieces), 64);
  float* result = (float*)(last + (long)PANEL * dim);
  float factors[TILE_ROWS];

  for (int i = 0; i < pieces; i++) {
    int at = before + i * PANEL, block = table[at / cache.block_tokens], token = at % cache.block_tokens;
    keys[i] = cache.piece(block, op->layer, 0, head, token);
    values[i] = cache.piece(block, op->layer, 1, head, token);
  }
  for (int i = 0; first && i < PANELS && i < pieces; i++) cache.fetch(keys[i]);
  for (int r = 0; r < rows; r++) {
    int token = tile->token + r / group, h = head * (heads / cache.kv_heads) + group_first + r % group;
    plain_row(qkv->data + token * qkv->width + (long)h * dim, queries + (long)r * dim, dim);
  }

  Scores<typename Sides<P>::Keys, PANELS> product;
  product.x = queries, product.x_stride = dim, product.k = dim, product.y_stride = row_stride;
  for (int i = 0; i < pieces; i += PANELS) {
    for (int j = i; first && j < i + PANELS && j < pieces; j++) {
      if (j + PANELS < pieces) cache.fetch(keys[j + PANELS]);
      cache.fetch(values[j]);
    }
    for (int j = 0; j < PANELS; j++) product.panels[j] = keys[i + j < pieces ? i + j : i];
    product.y = scores + (long)i * PANEL;
    product.width = (pieces - i) * PANEL;
    over_rows<PANELS>(product, rows);
  }

  for (int r = 0; r < rows; r++) {
    int row_length = s->positions[tile->token + r / group] + 1 - before;
    int start = window && row_length > window ? row_length - window : 0;
    float* row = scores + r * row_stride;
    float scale = op->scores.scale, cap = op->scores.cap;
    if (cap) {
      for (int i = 0; i < padded; i += PANEL) store(row + i, capped(mul(load(row + i), all(scale / cap)), cap));
      scale = 1;
    }
    factors[r] = soften<P>(row, weights + r * row_stride, values, dim, start, row_length, padded, scale);
  }

  int valid = s->lengths[tile->sequence] - before - (pieces - 1) * PANEL;
  if (!cache.SCALED && valid < PANEL) {  // what lies beyond may be NaN, which a weight of zero would not silence
    cache.copy_values(values[pieces - 1], valid, last);
    values[pieces - 1] = last;
  }
  WeightedSum<typename Sides<P>::Values, PANELS> sum;
  sum.x = weights, sum.x_stride = row_stride, sum.pieces = values, sum.num_pieces = pieces, sum.factors = factors;
  sum.y_stride = dim;
  for (int d = 0; d < dim; d += PANELS * PANEL) {
    sum.width = dim - d;
    for (int j = 0; j < PANELS; j++) sum.offsets[j] = P::offset(d + j * PANEL < dim ? d + j * PANEL : d);
    sum.y = result + d;
    over_rows<PANELS>(sum, rows);
  }
  if (!(*claim)()) return;
  for (int r = 0; r < rows; r++) {
    int token = tile->token + r / group, h = head * (heads / cache.kv_heads) + group_first + r % group;
    if (Sides<P>::MIXED) mix_head(result + (long)r * dim, dim);
    plain_row(result + (long)r * dim, out->data + token * out->width + (long)h * dim, dim);
  }
}
