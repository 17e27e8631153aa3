// Runs a step: the list of operations, of which each is a phase of the team's job, or two.
#include "program.h"

#include "adapters.h"
#include "attention.h"
#include "board.h"
#include "experts.h"
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

static int parts_of(int count, int each) { return (count + each - 1) / each; }

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

// Choices that are ordered by expert: those of an expert are the rows, and its columns are tasks. Threads take experts one
// behind the other, so that few choices are a stream of their experts' weights, and nothing else is read.
template <class L, int PANELS>
struct ByExperts {
  enum { APART = 1 };
  typedef typename L::Row Row;
  const Row* operand;
  const Op* op;
  const Buffer* y;
  Groups groups;
  int threads, columns;

  ByExperts(const Run* run, const Op* op)
      : operand((const Row*)run->program->operand), op(op), y(&run->program->buffers[op->target]),
        groups(groups_of(op->mixture)), threads(run->threads) {
    columns = (op->matrix.n + PANELS * PANEL - 1) / (PANELS * PANEL);
  }

  int begin(int thread) const { return part_of(*groups.count * columns, thread, threads); }
  int rows(int group) const { return groups.first[group + 1] - groups.first[group]; }
  int pieces(int task) const { return tiles_of<PANELS>(rows(task / columns)); }
  long panel(int task) const {  // of all experts together
    return (long)groups.expert[task / columns] * (op->matrix.n / PANEL) + task % columns * PANELS;
  }
  void piece(int task, int piece, int next, int, Claim& claim) const {
    int group = task / columns, first = groups.first[group];
    long stride = L::stride(op->matrix.k), begin = (long)groups.expert[group] * (op->matrix.n / PANEL);
    Matrix own = op->matrix;
    own.panels = (const typename L::Weight*)own.panels + begin * L::size(own.k);
    linear_tile<L, PANELS>(
        operand + first * stride, stride, &own, y->data + first * y->width, y->width, rows(group), piece,
        panel(task) - begin, next < 0 ? -1 : panel(next) - begin, PUT, &claim);
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
      case INT8_GROUPS: return products<ByteGroups>(seat, run, op, rows);
      case INT4_ZEROS: return products<ZeroPanels>(seat, run, op, rows);
      case FP8: return products<Fp8Panels>(seat, run, op, rows);
      case FP8_BLOCKS: return products<Fp8Blocks>(seat, run, op, rows);
      case W8A8: return products<TokenPanels>(seat, run, op, rows);
    }
  }

  template <class W>
  static void products(Seat* seat, const Run* run, const Op* op, int rows) {
    const Program* p = run->program;
    const Buffer* x = &p->buffers[op->source];
    by_rows(seat, run, rows, x->width, [=](int row, int end, int thread) {
      for (; row < end; row++) {
        int of = op->gathers ? p->choices.order[row] / op->mixture->chosen : row;
        const float* from = x->data + of * x->width;
        typename W::Row* to = (typename W::Row*)p->operand + row * W::stride(op->matrix.k);
        if constexpr (W::SHORT) {
          float* whole = (float*)(p->scratch + thread * p->scratch_bytes);
          prelude(op, from, whole);
          if constexpr (W::OF_ROW)
            byte_row<W>(whole, to, op->matrix.k);
          else
            short_row<W>(whole, to, op->matrix.k);
        } else {
          prelude(op, from, to);
        }
      }
    });
    if (op->kind == EXPERTS) {
      if (rows <= FEW_ROWS * *groups_of(op->mixture).count)
        share_out(seat, ByExperts<W, FEW_PANELS>(run, op));
      else
        share_out(seat, ByExperts<W, TILE_PANELS>(run, op));
    } else if (rows <= FEW_ROWS) {
      share_out(seat, ByColumns<W, FEW_PANELS>(run, op, rows));
    } else {
      share_out(seat, ByColumns<W, TILE_PANELS>(run, op, rows));
    }
  }

  // Which experts each row chooses, and the order in which what follows has the choices.
  static void route(Seat* seat, const Run* run, const Op* op, int rows) {
    const Mixture* m = op->mixture;
    const Choices* choices = &run->program->choices;
    const Buffer* logits = &run->program->buffers[op->source];
    by_rows(seat, run, rows, logits->width, [=](int row, int end, int) {
      for (; row < end; row++) {
        long at = (long)row * m->chosen;
        const float* of_row = logits->data + row * logits->width;
        choose(of_row, m->experts, m->chosen, m->normed, choices->ids + at, choices->shares + at);
      }
    });
    by_rows(seat, run, 1, TASK_ROWS, [=](int, int, int) { group_choices(choices, m, rows * m->chosen); });
  }

  // What its adapter adds to each of a linear's rows. Tasks of the same weights lie together.
  static void adapt(Seat* seat, const Run* run, const Op* op, int rows) {
    const Program* p = run->program;
    const Step* s = run->step;
    const Buffer *x = &p->buffers[op->source], *y = &p->buffers[op->target];
    auto delta_of = [=](int row) {
      int token = op->which == ALL ? row : row < s->sampled ? s->rows[row] : s->pooled_rows[row - s->sampled];
      const Delta* delta = s->adapters[token] < 0 ? 0 : op->deltas + s->adapters[token];
      return delta && delta->ranks ? delta : 0;
    };
    int ranks = rows < PART_ROWS ? FEW_RANKS : RANKS, k = op->matrix.k, n = op->matrix.n;
    while ((long)parts_of(s->ranks, ranks) * rows > MOST_TASKS) ranks *= 2;
    by_rows(seat, run, parts_of(s->ranks, ranks) * rows, TASK_ROWS, [=](int task, int end, int thread) {
      for (; task < end; task++) {
        int row = task % rows, first = task / rows * ranks;
        const Delta* delta = delta_of(row);
        if (!delta || first >= delta->ranks) continue;
        float* whole = (float*)(p->scratch + thread * p->scratch_bytes);
        prelude(op, x->data + row * x->width, whole);
        for (int rank = first; rank < first + ranks && rank < delta->ranks; rank++)
          p->low[(long)row * p->low_width + rank] = dot(whole, delta->down + (long)rank * k, k);
      }
    });
    by_rows(seat, run, parts_of(n, SUM_COLUMNS) * rows, SUM_COLUMNS, [=](int task, int end, int) {
      for (; task < end; task++) {
        int row = task % rows, from = task / rows * SUM_COLUMNS, last = from + SUM_COLUMNS < n ? from + SUM_COLUMNS : n;
        if (const Delta* delta = delta_of(row))
          add_delta(delta, p->low + (long)row * p->low_width, y->data + row * y->width, from, last);
      }
    });
  }

  static void embed_row(const Op* op, int id, float* to) {
    switch (op->matrix.weights) {
      case AS_ROWS: return embed<L>(&op->matrix, id, op->factor, to);
      case INT8: return embed<BytePanels>(&op->matrix, id, op->factor, to);
      case INT4: return embed<NibblePanels>(&op->matrix, id, op->factor, to);
      case INT8_GROUPS: return embed<ByteGroups>(&op->matrix, id, op->factor, to);
      case INT4_ZEROS: return embed<ZeroPanels>(&op->matrix, id, op->factor, to);
      case FP8: return embed<Fp8Panels>(&op->matrix, id, op->factor, to);
      case FP8_BLOCKS: return embed<Fp8Blocks>(&op->matrix, id, op->factor, to);
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
        int block = table_of(s, op, sequence)[position / p->shape.block_tokens];
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
          if (rows && s->adapters && op->deltas) adapt(seat, run, op, rows);
          break;
        case ROUTE:
          if (rows) route(seat, run, op, rows);
          break;
        case EXPERTS:
          if (rows) linear(seat, run, op, rows * op->mixture->chosen);
          break;
        case MIX:
          each_row([=](int r, float* to) {
            const Mixture* m = op->mixture;
            long at = (long)r * m->chosen;
            const int* places = p->choices.places + at;
            const float* shares = p->choices.shares + at;
            const float* shared = m->shared ? p->buffers[op->shared].data + r * target->width : 0;
            float gate = m->shared ? p->buffers[op->shared_gate].data[r] : 0;
            mix_row(source->data, target->width, places, shares, m->chosen, shared, gate, op->epilogue == ADD, to);
          });
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
    case KV_INT4: return Kernels<L, KvNibbles<typename A::Row>>::work;
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

// Numbers [n, k] by rows, a byte each, into panels, with scales [n, k / GROUP] and zeros of the same shape, or null.
template <class P>
static void pack_groups(
    const uint8_t* from, const typename P::Scale* scales, const uint8_t* zeros, void* panels, long n, long k) {
  typename P::Weight* to = (typename P::Weight*)panels;
  for (long first = 0; first < n; first += PANEL, to += P::size(k)) {
    __builtin_memset(to, 0, P::size(k));
    for (int column = 0; column < PANEL && first + column < n; column++) {
      long row = first + column;
      for (long i = 0; i < k; i++) P::put(to + P::at(i, column), i, from[row * k + i]);
      for (long i = 0, group = row * k / P::GROUP; i < k; i += P::GROUP, group++) {
        ((typename P::Scale*)(to + P::scales_at(i)))[column] = scales[group];
        if constexpr (P::ZEROED) ((uint8_t*)(to + P::zeros_at(i)))[column] = zeros[group];
      }
    }
  }
}

// Likewise int8, or e4m3, with a scale for each row.
template <class P>
static void pack_rows(const int8_t* from, const float* scales, void* panels, long n, long k) {
  typename P::Weight* to = (typename P::Weight*)panels;
  for (long first = 0; first < n; first += PANEL, to += P::size(k)) {
    __builtin_memset(to, 0, P::size(k));
    for (int column = 0; column < PANEL && first + column < n; column++) {
      long row = first + column;
      for (long i = 0; i < k; i++) P::put(to + P::at(i, column), i, from[row * k + i]);
      ((float*)(to + k * PANEL))[column] = scales[row];
    }
  }
}

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Tokens of a step at most, for what a share can count (board.h); 0: the operations are too many.
EXPORT long penstock_most_tokens(const Program* program) {
  int phases = 0, chosen = 1;
  for (int i = 0; i < program->num_ops; i++) {
    const Op* op = &program->ops[i];
    phases += op->kind == LINEAR || op->kind == EXPERTS || op->kind == ROUTE || op->kind == POOL ? 2 : 1;
    if (op->deltas) phases += 2;
    if (op->mixture && op->mixture->chosen > chosen) chosen = op->mixture->chosen;
  }
  if (phases > MOST_PHASES) return 0;
  long tiles = (long)MOST_PIECES * most_rows<TILE_PANELS>(), heads = MOST_TASKS / program->shape.kv_heads;
  long most = tiles < heads ? tiles : heads, choices = MOST_TASKS / chosen;
  return most < choices ? most : choices;
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

// Numbers of few bits, into those of `weights`: int8 and e4m3 with a scale for each row, a float, k a multiple of four; or as
// `pack_groups`, of e4m3 floats, else halves, k a multiple of 64, with zeros or of e4m3 of 128.
EXPORT void penstock_pack_narrow(
    const uint8_t* from, const void* scales, const uint8_t* zeros, void* to, long n, long k, int weights) {
  const float* floats = (const float*)scales;
  const uint16_t* halves = (const uint16_t*)scales;
  switch (weights) {
    case INT8: return pack_rows<BytePanels>((const int8_t*)from, floats, to, n, k);
    case FP8: return pack_rows<Fp8Panels>((const int8_t*)from, floats, to, n, k);
    case W8A8: return pack_rows<TokenPanels>((const int8_t*)from, floats, to, n, k);
    case INT4: return pack_groups<NibblePanels>(from, halves, zeros, to, n, k);
    case INT8_GROUPS: return pack_groups<ByteGroups>(from, halves, zeros, to, n, k);
    case INT4_ZEROS: return pack_groups<ZeroPanels>(from, halves, zeros, to, n, k);
    case FP8_BLOCKS: return pack_groups<Fp8Blocks>(from, floats, zeros, to, n, k);
  }
}

}  // extern "C"
