// Runs a step: every thread goes through the same list of operations, and they meet after each.
#include "program.h"

#include "attention.h"
#include "rows.h"
#include "team.h"

struct Run {
  Team* team;
  const Program* program;
  const Step* step;
  int* tasks;  // next one, of each operation and thread's part of it
  int num_tiles;
};

enum { PART_ROWS = 48 };  // with fewer a thread would wait for the weights, which each one reads then

static int part_of(int rows, int part, int parts) { return (long)rows * part / parts; }  // where it begins

static int rows_of(const Op* op, const Step* s) {
  return op->which == ALL ? s->tokens : op->which == SAMPLED ? s->sampled : s->sampled + s->pooled;
}

static int take(int* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// L: of linears, A: of attention and its cache.
template <class L, class A>
struct Kernels {
  typedef typename L::Row Row;

  static void prepare(const Op* op, const Buffer* x, int row, Row* to) {
    const float* from = x->data + row * x->width;
    switch (op->prelude) {
      case PLAIN: return plain_row(from, to, op->matrix.k);
      case NORM: return norm_row(from, op->norm, op->epsilon, to, op->matrix.k);
      case SILU_MUL: return gated_row<Silu>(from, to, op->matrix.k);
      case GELU_MUL: return gated_row<Gelu>(from, to, op->matrix.k);
    }
  }

  // Of few rows threads take columns. Many are divided among them: a row stays with its thread from one operation to
  // the next, since another core's cache is far. Who has done his part helps the others.
  static void linear(const Run* run, const Op* op, int thread, int rows, int* tasks) {
    const Program* p = run->program;
    const Buffer* y = &p->buffers[op->target];
    long stride = op->matrix.k + OPERAND_PAD;
    Row* operand = (Row*)p->operand;
    int size = team_size(run->team), parts = rows < PART_ROWS * size ? 1 : size;
    for (int row = part_of(rows, thread, size); row < part_of(rows, thread + 1, size); row++)
      prepare(op, &p->buffers[op->source], row, operand + row * stride);
    team_meet(run->team);
    for (int i = 0; i < parts; i++) {
      int part = (thread + i) % parts, first = part_of(rows, part, parts), count = part_of(rows, part + 1, parts) - first;
      auto of_height = rows <= FEW_ROWS ? columns<FEW_PANELS> : columns<TILE_PANELS>;
      of_height(operand + first * stride, op, y->data + first * y->width, y->width, count, &tasks[part]);
    }
  }

  template <int PANELS>
  static void columns(const Row* operand, const Op* op, float* y, long y_stride, int rows, int* task) {
    int panels = (op->matrix.n + PANEL - 1) / PANEL;
    for (int panel = take(task) * PANELS, next; panel < panels; panel = next) {
      next = take(task) * PANELS;  // already now, to have it in the cache by then
      linear_columns<L, PANELS>(
          operand, op->matrix.k + OPERAND_PAD, &op->matrix, y, y_stride, rows, panel, next, (Epilogue)op->epilogue);
    }
  }

  static void rotary(const Run* run, const Op* op, int thread) {
    const Program* p = run->program;
    const Step* s = run->step;
    const Buffer* qkv = &p->buffers[op->source];
    int size = team_size(run->team), end = part_of(s->tokens, thread + 1, size), sequence = 0;
    for (int t = part_of(s->tokens, thread, size); t < end; t++) {
      while (s->starts[sequence + 1] <= t) sequence++;
      int position = s->positions[t];
      int block = s->block_tables[(long)sequence * s->table_width + position / p->shape.block_tokens];
      rotate_and_store<typename A::Weight>(p, op, qkv->data + t * qkv->width, position, block);
    }
  }

  static void attention(const Run* run, const Op* op, int thread, int* task) {
    const Program* p = run->program;
    const Tile* tiles = (const Tile*)p->tiles;
    int kv_heads = p->shape.kv_heads, group = p->shape.heads / kv_heads;
    for (int i; (i = take(task)) < run->num_tiles * kv_heads;) {
      // A sequence's tasks lie together, and of those a head's: it finds its keys still in the cache.
      const Tile* any = &tiles[i / kv_heads];
      int end = any - tiles;
      while (end < run->num_tiles && tiles[end].sequence == any->sequence) end++;
      int count = end - any->first, local = i - any->first * kv_heads;
      const Tile* tile = &tiles[any->first + local % count];
      for (int g = 0; g < group; g += TILE_ROWS) {
        int heads = group - g < TILE_ROWS ? group - g : TILE_ROWS;
        auto of_height = heads * tile->count <= FEW_ROWS ? attend<A, FEW_PANELS> : attend<A, TILE_PANELS>;
        of_height(p, run->step, op, tile, local % count + g == 0, local / count, g, heads, p->scratch + thread * p->scratch_bytes);
      }
    }
  }

  static void sample_rows(const Run* run, const Op* op, int thread, int* task) {
    const Buffer* logits = &run->program->buffers[op->source];
    const Step* s = run->step;
    int vocab = logits->width, words = (vocab + WORD - 1) / WORD;
    char* scratch = run->program->scratch + thread * run->program->scratch_bytes;
    for (int r; (r = take(task)) < s->sampled;) {
      int grammar = s->grammars ? s->grammars[r] : -1;
      const uint32_t* allowed = grammar < 0 ? 0 : s->allowed + (long)grammar * words;
      long top = (long)r * s->top_width;
      s->sampled_ids[r] = sample_row(
          logits->data + r * logits->width, vocab, &s->samplings[r], s->edits, allowed, s->top_ids + top,
          s->top_logprobs + top, scratch);
    }
  }

  // Of the states behind the model's last norm, which lie behind those of sampled rows.
  static void pool(const Run* run, const Op* op, int thread, int* task) {
    const Buffer* x = &run->program->buffers[op->source];
    const Step* s = run->step;
    float* normed = (float*)(run->program->scratch + thread * run->program->scratch_bytes);
    for (int i; (i = take(task)) < s->pools;) {
      float* sum = s->sums + i * x->width;
      __builtin_memset(sum, 0, x->width * sizeof(float));
      for (int row = s->pool_starts[i]; row < s->pool_starts[i + 1]; row++) {
        norm_row(x->data + (s->sampled + row) * x->width, op->norm, op->epsilon, normed, x->width);
        for (int j = 0; j < x->width; j++) sum[j] += normed[j];
      }
    }
  }

  static void work(void* argument, int thread) {
    const Run* run = (const Run*)argument;
    const Program* p = run->program;
    const Step* s = run->step;
    int size = team_size(run->team);
    for (int i = s->first; i < s->end; i++) {
      const Op* op = &p->ops[i];
      int* tasks = run->tasks + i * size;
      int rows = rows_of(op, s);
      const Buffer* target = &p->buffers[op->target];
      switch (op->kind) {
        case EMBED:
          for (int t = part_of(rows, thread, size); t < part_of(rows, thread + 1, size); t++)
            embed<L>(&op->matrix, s->token_ids[t], op->factor, target->data + t * target->width);
          break;
        case LINEAR:
          if (rows) linear(run, op, thread, rows, tasks);
          break;
        case ROTARY: rotary(run, op, thread); break;
        case ATTENTION: attention(run, op, thread, tasks); break;
        case GATHER: {
          const Buffer* source = &p->buffers[op->source];
          for (int r = part_of(rows, thread, size); r < part_of(rows, thread + 1, size); r++) {
            int t = r < s->sampled ? s->rows[r] : s->pooled_rows[r - s->sampled];
            plain_row(source->data + t * source->width, target->data + r * target->width, target->width);
          }
          break;
        }
        case ADD_NORM: {
          const Buffer* source = &p->buffers[op->source];
          for (int t = part_of(rows, thread, size); t < part_of(rows, thread + 1, size); t++)
            add_norm_row(source->data + t * source->width, op->norm, op->epsilon, target->data + t * target->width, target->width);
          break;
        }
        case CAP:
          for (int r = part_of(rows, thread, size); r < part_of(rows, thread + 1, size); r++)
            cap_row(target->data + r * target->width, op->factor, target->width);
          break;
        case POOL: pool(run, op, thread, tasks); break;
        case SAMPLE: sample_rows(run, op, thread, tasks);
      }
      team_meet(run->team);
    }
  }
};

// `tasks` are zeros, for each operation as many as threads, and zeros again when it returns.
int run_step(Team* team, const Program* program, const Step* step, int* tasks, Format format) {
  Run run = {team, program, step, tasks, lay_tiles(program, step)};
  switch (format) {
    case FLOATS: team_run(team, Kernels<FloatPanels, FloatPanels>::work, &run); break;
    case BF16_WEIGHTS: team_run(team, Kernels<WidePanels, FloatPanels>::work, &run); break;
    case BF16_CACHE: team_run(team, Kernels<WidePanels, WidePanels>::work, &run); break;
#ifdef __AVX512BF16__
    case BF16_PRODUCTS: team_run(team, Kernels<DotPanels, DotPanels>::work, &run); break;
#endif
    default: return -1;
  }
  __builtin_memset(tasks, 0, sizeof(int) * program->num_ops * team_size(team));
  return 0;
}

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Bytes that a thread needs: for attention over `tokens` tokens, or to sample one of `vocab`.
EXPORT long penstock_scratch_bytes(int dim, int tokens, int vocab) {
  long row = round_up(tokens, PANEL) + PANEL;
  long attention = (long)TILE_ROWS * dim * 8 + TILE_ROWS * row * 8 + (row / PANEL) * 16 + (long)PANEL * dim * 4 + 1024;
  return attention > sampler_bytes(vocab) ? attention : sampler_bytes(vocab);
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

}  // extern "C"
