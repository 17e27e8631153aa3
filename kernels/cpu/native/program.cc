// Runs a step: the list of operations, of which each is a phase of the team's job, or two.
#include "program.h"

#include "attention.h"
#include "board.h"
#include "rows.h"
#include "team.h"

struct Run {
  const Program* program;
  const Step* step;
  int threads, num_tiles;
};

enum { PART_ROWS = 48 };   // with fewer a thread would wait for the weights, which each one reads then
enum { TASK_ROWS = 1 << 13 };  // features: what works row by row takes so many at once, some microseconds
enum { SUM_COLUMNS = 256 };    // that are summed up at once, of pooled rows

static int rows_of(const Op* op, const Step* s) {
  return op->which == ALL ? s->tokens : op->which == SAMPLED ? s->sampled : s->sampled + s->pooled;
}

// A phase that works row by row, each row once: `body(from, end, thread)`. Row by row the same threads as in others.
template <class Body>
struct ByRows {
  enum { APART = 0 };
  int rows, tasks, threads;
  Body body;

  int begin(int thread) const { return part_of(tasks, thread, threads); }
  int pieces(int) const { return 1; }
  void piece(int task, int, int, int thread, Claim&) const {
    body(part_of(rows, task, tasks), part_of(rows, task + 1, tasks), thread);
  }
};

// `width`: features of a row.
template <class Body>
static void by_rows(Seat* seat, const Run* run, int rows, long width, Body body) {
  if (!rows) return;
  long together = width < TASK_ROWS ? TASK_ROWS / width : 1, each = (rows + run->threads - 1) / run->threads;
  int tasks = (each + together - 1) / together * run->threads;
  share_out(seat, ByRows<Body>{rows, tasks < rows ? tasks : rows, run->threads, body});
}

// Of few rows threads take columns. Many are divided among them: a row stays with its thread from one operation to the
// next, since another core's cache is far.
template <class L, int PANELS>
struct ByColumns {
  enum { APART = 1 };
  typedef typename L::Row Row;
  const Row* operand;
  const Op* op;
  const Buffer* y;
  int rows, threads, parts, columns;  // tasks of a part of the rows

  ByColumns(const Run* run, const Op* op, int rows)
      : operand((const Row*)run->program->operand), op(op), y(&run->program->buffers[op->target]), rows(rows),
        threads(run->threads) {
    columns = (op->matrix.n + PANELS * PANEL - 1) / (PANELS * PANEL);
    parts = rows < PART_ROWS * threads || (long)columns * threads > MOST_TASKS ? 1 : threads;
  }

  int begin(int thread) const { return part_of(columns * parts, thread, threads); }
  int first_row(int part) const { return part_of(rows, part, parts); }
  int pieces(int task) const {
    int part = task / columns;
    return tiles_of<PANELS>(first_row(part + 1) - first_row(part));
  }
  void piece(int task, int piece, int next, int, Claim& claim) const {
    int part = task / columns, first = first_row(part), count = first_row(part + 1) - first;
    long stride = L::stride(op->matrix.k);
    linear_tile<L, PANELS>(
        operand + first * stride, stride, &op->matrix, y->data + first * y->width, y->width, count, piece,
        task % columns * PANELS, next < 0 ? -1 : next % columns * PANELS, (Epilogue)op->epilogue, &claim);
  }
};

template <class A>
struct ByTiles {  // of attention
  enum { APART = 1 };
  const Run* run;
  const Op* op;

  int group() const { return run->program->shape.heads / run->program->shape.kv_heads; }
  int begin(int thread) const {
    return part_of(run->num_tiles * run->program->shape.kv_heads, thread, run->threads);
  }
  int pieces(int) const { return (group() + TILE_ROWS - 1) / TILE_ROWS; }
  void piece(int task, int piece, int, int thread, Claim& claim) const {
    const Program* p = run->program;
    const Tile* tiles = (const Tile*)p->tiles;
    // A sequence's tasks lie together, and of those a head's: it finds its keys still in the cache.
    const Tile* any = &tiles[task / p->shape.kv_heads];
    int end = any - tiles;
    while (end < run->num_tiles && tiles[end].sequence == any->sequence) end++;
    int count = end - any->first, local = task - any->first * p->shape.kv_heads;
    const Tile* tile = &tiles[any->first + local % count];
    int first = piece * TILE_ROWS, heads = group() - first < TILE_ROWS ? group() - first : TILE_ROWS;
    auto of_height = heads * tile->count <= FEW_ROWS ? attend<A, FEW_PANELS> : attend<A, TILE_PANELS>;
    of_height(
        p, run->step, op, tile, local % count + first == 0, local / count, first, heads,
        p->scratch + thread * p->scratch_bytes, &claim);
  }
};

// L: of linears, A: of attention and its cache.
template <class L, class A>
struct Kernels {
  template <class To>
  static void prelude(const Op* op, const float* from, To* to) {
    switch (op->prelude) {
      case PLAIN: return plain_row(from, to, op->matrix.k);
      case NORM: return norm_row(from, op->norm, op->epsilon, to, op->matrix.k);
      case SILU_MUL: return gated_row<Silu>(from, to, op->matrix.k);
      case GELU_MUL: return gated_row<Gelu>(from, to, op->matrix.k);
    }
  }

  static void linear(Seat* seat, const Run* run, const Op* op, int rows) {
    switch (op->matrix.weights) {
      case AS_ROWS: return products<L>(seat, run, op, rows);
      case INT8: return products<BytePanels>(seat, run, op, rows);
      case INT4: return products<NibblePanels>(seat, run, op, rows);
    }
  }

  template <class W>
  static void products(Seat* seat, const Run* run, const Op* op, int rows) {
    const Program* p = run->program;
    const Buffer* x = &p->buffers[op->source];
    by_rows(seat, run, rows, x->width, [=](int row, int end, int thread) {
      for (; row < end; row++) {
        const float* from = x->data + row * x->width;
        typename W::Row* to = (typename W::Row*)p->operand + row * W::stride(op->matrix.k);
        if constexpr (W::GROUP) {
          float* whole = (float*)(p->scratch + thread * p->scratch_bytes);
          prelude(op, from, whole);
          short_row<W>(whole, to, op->matrix.k);
        } else {
          prelude(op, from, to);
        }
      }
    });
    if (rows <= FEW_ROWS)
      share_out(seat, ByColumns<W, FEW_PANELS>(run, op, rows));
    else
      share_out(seat, ByColumns<W, TILE_PANELS>(run, op, rows));
  }

  static void embed_row(const Op* op, int id, float* to) {
    switch (op->matrix.weights) {
      case AS_ROWS: return embed<L>(&op->matrix, id, op->factor, to);
      case INT8: return embed<BytePanels>(&op->matrix, id, op->factor, to);
      case INT4: return embed<NibblePanels>(&op->matrix, id, op->factor, to);
    }
  }

  static void rotary(Seat* seat, const Run* run, const Op* op) {
    const Program* p = run->program;
    const Step* s = run->step;
    const Buffer* qkv = &p->buffers[op->source];
    by_rows(seat, run, s->tokens, qkv->width, [=](int token, int end, int) {
      for (int sequence = 0; token < end; token++) {
        while (s->starts[sequence + 1] <= token) sequence++;
        int position = s->positions[token];
        int block = s->block_tables[(long)sequence * s->table_width + position / p->shape.block_tokens];
        rotate_and_store<A>(p, op, qkv->data + token * qkv->width, position, block);
      }
    });
  }

  static void sample_rows(Seat* seat, const Run* run, const Op* op) {
    const Program* p = run->program;
    const Buffer* logits = &p->buffers[op->source];
    const Step* s = run->step;
    by_rows(seat, run, s->sampled, logits->width, [=](int r, int end, int thread) {
      int vocab = logits->width, words = (vocab + WORD - 1) / WORD;
      for (; r < end; r++) {
        int grammar = s->grammars ? s->grammars[r] : -1;
        const uint32_t* allowed = grammar < 0 ? 0 : s->allowed + (long)grammar * words;
        long top = (long)r * s->top_width;
        s->sampled_ids[r] = sample_row(
            logits->data + r * logits->width, vocab, &s->samplings[r], s->edits, allowed, s->top_ids + top,
            s->top_logprobs + top, p->scratch + thread * p->scratch_bytes);
      }
    });
  }

  // Of the states behind the model's last norm, which lie behind those of sampled rows: normed where they are, then
  // summed up by columns, each in the order of the rows.
  static void pool(Seat* seat, const Run* run, const Op* op) {
    const Buffer* x = &run->program->buffers[op->source];
    const Step* s = run->step;
    long width = x->width;
    float* states = x->data + s->sampled * width;
    by_rows(seat, run, s->pooled, width, [=](int row, int end, int) {
      for (; row < end; row++) norm_row(states + row * width, op->norm, op->epsilon, states + row * width, width);
    });
    if (!s->pools) return;
    long parts = (width + SUM_COLUMNS - 1) / SUM_COLUMNS, each = (long)s->pooled * SUM_COLUMNS / s->pools;
    if (s->pools * parts > MOST_TASKS) parts = 1;
    by_rows(seat, run, s->pools * parts, each + 1, [=](int part, int end, int) {
      for (; part < end; part++) {
        int pool = part / parts, first = width * (part % parts) / parts, last = width * (part % parts + 1) / parts;
        float* sum = s->sums + pool * width;
        __builtin_memset(sum + first, 0, (last - first) * sizeof(float));
        for (int row = s->pool_starts[pool]; row < s->pool_starts[pool + 1]; row++)
          for (int j = first; j < last; j++) sum[j] += states[row * width + j];
      }
    });
  }

  static void work(void* argument, Seat* seat) {
    const Run* run = (const Run*)argument;
    const Program* p = run->program;
    const Step* s = run->step;
    for (const Op* op = p->ops + s->first; op < p->ops + s->end; op++) {
      int rows = rows_of(op, s);
      const Buffer* source = &p->buffers[op->source];
      const Buffer* target = &p->buffers[op->target];
      auto each_row = [=](auto body) {
        by_rows(seat, run, rows, target->width, [=](int row, int end, int) {
          for (; row < end; row++) body(row, target->data + row * target->width);
        });
      };
      switch (op->kind) {
        case EMBED: each_row([=](int t, float* to) { embed_row(op, s->token_ids[t], to); }); break;
        case LINEAR:
          if (rows) linear(seat, run, op, rows);
          break;
        case ROTARY: rotary(seat, run, op); break;
        case ATTENTION: share_out(seat, ByTiles<A>{run, op}); break;
        case GATHER:
          each_row([=](int r, float* to) {
            int t = r < s->sampled ? s->rows[r] : s->pooled_rows[r - s->sampled];
            plain_row(source->data + t * source->width, to, target->width);
          });
          break;
        case ADD_NORM:
          each_row([=](int t, float* to) {
            add_norm_row(source->data + t * source->width, op->norm, op->epsilon, to, target->width);
          });
          break;
        case CAP: each_row([=](int, float* to) { cap_row(to, op->factor, target->width); }); break;
        case POOL: pool(seat, run, op); break;
        case SAMPLE: sample_rows(seat, run, op);
      }
    }
  }
};

typedef void Work(void*, Seat*);

// L: of linears, A: of a cache that has no format of its own. Null: there is no such format.
template <class L, class A>
static Work* work_of(int kv_format) {
  switch (kv_format) {
    case AS_COMPUTED: return Kernels<L, A>::work;
    case KV_INT8: return Kernels<L, KvPanels<Int8s, typename A::Row>>::work;
    case KV_FP8: return Kernels<L, KvPanels<Fp8s, typename A::Row>>::work;
    default: return 0;
  }
}

static Work* work_of(Format format, int kv_format) {
  switch (format) {
    case FLOATS: return work_of<FloatPanels, FloatPanels>(kv_format);
    case BF16_WEIGHTS: return work_of<WidePanels, FloatPanels>(kv_format);
    case BF16_CACHE: return work_of<WidePanels, WidePanels>(kv_format);
#ifdef __AVX512BF16__
    case BF16_PRODUCTS: return work_of<DotPanels, DotPanels>(kv_format);
#endif
    default: return 0;
  }
}

int run_step(Team* team, const Program* program, const Step* step, Format format) {
  Work* work = work_of(format, program->shape.kv_format);
  if (!work) return -1;
  Run run = {program, step, team_size(team), lay_tiles(program, step)};
  team_run(team, work, &run);
  return 0;
}

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Tokens of a step at most, for what a share can count (board.h); 0: the operations are too many.
EXPORT long penstock_most_tokens(const Program* program) {
  int phases = 0;
  for (int i = 0; i < program->num_ops; i++)
    phases += program->ops[i].kind == LINEAR || program->ops[i].kind == POOL ? 2 : 1;
  if (phases > MOST_PHASES) return 0;
  long tiles = (long)MOST_PIECES * most_rows<TILE_PANELS>(), heads = MOST_TASKS / program->shape.kv_heads;
  return tiles < heads ? tiles : heads;
}

// Bytes that a thread needs: for attention over `tokens` tokens, to sample one of `vocab`, or for a row of `width` that
// is to meet int8 or int4.
EXPORT long penstock_scratch_bytes(int dim, int tokens, int vocab, int width) {
  long row = round_up(tokens, PANEL) + PANEL;
  long attention = (long)TILE_ROWS * dim * 8 + TILE_ROWS * row * 8 + (row / PANEL) * 16 + (long)PANEL * dim * 4 + 1024;
  long row_bytes = round_up(width, PANEL) * (long)sizeof(float);
  long most = attention > row_bytes ? attention : row_bytes;
  return most > sampler_bytes(vocab) ? most : sampler_bytes(vocab);
}

// A matrix [n, k] by rows, of 4- or 2-byte elements, into panels; k even, missing columns zeros.
EXPORT void penstock_pack(const void* from, void* to, long n, long k, int bytes) {
  long panels = (n + PANEL - 1) / PANEL;
  for (long panel = 0; panel < panels; panel++)
    for (long column = 0; column < PANEL; column++) {
      long row = panel * PANEL + column;
      for (long i = 0; i < k; i++) {
        if (bytes == 4)
          ((float*)to)[(panel * k + i) * PANEL + column] = row < n ? ((const float*)from)[row * k + i] : 0;
        else
          ((bf16*)to)[((panel * k / 2 + i / 2) * PANEL + column) * 2 + i % 2] =
              row < n ? ((const bf16*)from)[row * k + i] : 0;
      }
    }
}

// Likewise int8 with a scale for each row; k a multiple of four.
EXPORT void penstock_pack_bytes(const int8_t* from, const float* scales, int8_t* to, long n, long k) {
  for (long first = 0; first < n; first += PANEL, to += BytePanels::size(k))
    for (long column = 0; column < PANEL; column++) {
      long row = first + column;
      for (long i = 0; i < k; i++) to[BytePanels::at(i, column)] = row < n ? from[row * k + i] : 0;
      ((float*)(to + k * PANEL))[column] = row < n ? scales[row] : 0;
    }
}

// Likewise int4, a byte each, of 0 to 15, with scales [n, k / 32], halves; k a multiple of 64.
EXPORT void penstock_pack_nibbles(const uint8_t* from, const uint16_t* scales, uint8_t* to, long n, long k) {
  long groups = k / NibblePanels::GROUP;
  for (long first = 0; first < n; first += PANEL, to += NibblePanels::size(k)) {
    __builtin_memset(to, 0, NibblePanels::size(k));
    for (int column = 0; column < PANEL && first + column < n; column++) {
      long row = first + column;
      for (long i = 0; i < k; i++) to[NibblePanels::at(i, column)] |= from[row * k + i] << NibblePanels::shift(i);
      for (long g = 0; g < groups; g++)
        ((uint16_t*)(to + NibblePanels::scales_at(g * NibblePanels::GROUP)))[column] = scales[row * groups + g];
    }
  }
}

}  // extern "C"
