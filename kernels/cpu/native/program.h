// What Python lays out (kernels/cpu/structures.py has the same structures) and the kernels read.
#pragma once
#include <stdint.h>

#include "allowed.h"
#include "linear.h"
#include "sampler.h"

enum Kind { EMBED = 0, LINEAR = 1, ROTARY = 2, ATTENTION = 3, GATHER = 4, SAMPLE = 5, ADD_NORM = 6, CAP = 7, POOL = 8,
            ROUTE = 9, EXPERTS = 10, MIX = 11 };
enum Which { ALL = 0, WANTED = 1, SAMPLED = 2 };  // of a step's rows: one for each token; sampled and pooled ones; the first of these
enum Format {
  FLOATS = 0,         // weights and cache are float32
  BF16_WEIGHTS = 1,
  BF16_CACHE = 2,     // and the weights
  BF16_PRODUCTS = 3,  // and the rows that meet them
};
enum KvFormat { AS_COMPUTED = 0, KV_INT8 = 1, KV_FP8 = 2, KV_INT4 = 3 };  // of the cache: as attention's products take it, or its own (cache.h)
enum Prelude { PLAIN = 0, NORM = 1, SILU_MUL = 2, GELU_MUL = 3 };  // what becomes of a linear's rows before it

struct Turn {  // of queries and keys, by their positions
  const float* cos;  // [positions, dims / 2], and so sin
  const float* sin;
  int dims;              // of a head: its first ones
  int q_width, k_width;  // features that are normed together before; 0: none are
  const float* q_norm;   // [q_width]
  const float* k_norm;
};

struct Scoring {  // of queries and keys, before their softmax
  float scale;
  float cap;   // c > 0: of a score s comes c tanh(s / c)
  int window;  // tokens that one sees, itself included; 0: all before it
};

enum { DELTA_PARTS = 3 };  // of a linear: queries, keys and values

// What an adapter adds to a linear (adapters.h), whose layers are parts of its columns, each with ranks of its own.
struct Delta {
  const float* down;  // A: [ranks, k], of one part after the other
  const float* up;    // B: of one part after the other [its ranks, its columns]
  int ranks;          // 0: it adds nothing
  int columns[DELTA_PARTS], part_ranks[DELTA_PARTS];
};

struct Mixture {  // of experts, of which each row chooses some (experts.h)
  int experts, chosen, normed;
  int shared;   // another one is every row's
  int* groups;  // [2 experts + 2]: see Groups. One layer's own: who lags behind still reads it
};

struct Groups {  // of a step's choices, ordered by expert
  int* count;   // of experts that somebody chose
  int* expert;  // [count], ascending
  int* first;   // [count + 1]: where the choices of each begin, and the end
};

static inline Groups groups_of(const Mixture* m) { return {m->groups, m->groups + 1, m->groups + 1 + m->experts}; }

struct Choices {  // of the rows of a layer of experts, [rows, chosen]
  int* ids;       // experts
  float* shares;  // of each in what becomes of its row
  int* order;     // of the choices ordered by expert, which they are
  int* places;    // of each choice its place in that order
};

struct Op {
  int kind, prelude, epilogue;
  int layer, group;    // ROTARY, ATTENTION: whose keys and values lie where in a block, and in which table's
  int source, target;  // buffers
  int which;           // its rows
  float epsilon;       // of norms
  const float* norm;   // NORM, ADD_NORM, POOL: [k]
  Matrix matrix;       // LINEAR; EXPERTS: one expert's, the first; EMBED: [vocab, width]
  float factor;        // EMBED: of the rows; CAP: c, see Scoring
  Turn turn;           // ROTARY
  Scoring scores;      // ATTENTION
  const Delta* deltas; // LINEAR: of each adapter's place; null: no adapter changes it
  const Mixture* mixture;  // ROUTE, EXPERTS, MIX
  int gathers;             // EXPERTS: the source has a row for each of `which`, else one for each choice, in their order
  int shared, shared_gate; // MIX, where there is such an expert: buffers of what it computed, and of its gate, [rows, 1]
};

struct Buffer {  // [rows, width] floats
  float* data;
  long width;
};

struct Shape {
  int heads, kv_heads, dim, layers, block_tokens;  // layers: of a block
  int kv_format;
};

struct Program {
  const Op* ops;
  int num_ops;
  const Buffer* buffers;
  Shape shape;
  char* arena;       // KV blocks
  char* operand;     // rows of a linear as its panels want them, OPERAND_PAD apart beyond k
  char* scratch;     // of each thread
  long scratch_bytes;
  int* tiles;        // [max tokens][4]
  float* low;        // [max tokens, low_width]: rows between A and B of a delta
  int low_width;
  Choices choices;   // for as many rows and choices as there may be
};

struct Step {
  int tokens, sequences, sampled, table_width;
  int pooled, pools;        // rows, and those that they are of
  int first, end;           // of the operations: a step may be launched in two parts
  const int* token_ids;     // [tokens]
  const int* positions;     // [tokens]
  const int* starts;        // [sequences + 1]: where each one's tokens begin
  const int* lengths;       // [sequences]: tokens in the cache, these included
  const int* block_tables;  // [groups, sequences, table_width]
  const int* rows;          // [sampled]: of the tokens after which one is to be sampled
  const int* pooled_rows;   // [pooled]: of the tokens whose states are summed up
  const int* pool_starts;   // [pools + 1]: where those of each sum begin
  float* sums;              // [pools, width], to be written
  const Sampling* samplings;  // [sampled]
  const int* grammars;        // [sampled]: which of `allowed` a row has, -1: none; 0 where no row has any
  const uint32_t* allowed;    // [grammars, words of the vocabulary] (allowed.h)
  const Edit* edits;        // of all rows
  int* top_ids;             // [sampled, top_width], to be written where logprobs are wanted
  float* top_logprobs;      // so, too
  int top_width;
  int* sampled_ids;         // [sampled], to be written; -1: the logits are not finite
  const int* adapters;      // [tokens]: the place of each one's adapter, -1: none; 0 where no token has any
  int ranks;                // of these, for one linear at most
};

// Of a sequence, in the group of the operation's layer.
static inline const int* table_of(const Step* s, const Op* op, int sequence) {
  return s->block_tables + ((long)op->group * s->sequences + sequence) * s->table_width;
}

struct Launch {  // a step, on its way (driver.cc)
  Step step;
  int* token_ids;      // the step's
  int num_awaited;
  const int* awaited;  // [num_awaited][2]: a place in them, and the row of `before` that fills it
  const int* before;   // sampled_ids of the step launched before
  int failed;          // what run_step gave
  int64_t started_ns;  // of CLOCK_MONOTONIC
  int64_t ended_ns;    // so, too; 0 until it has ended, written last
};

struct Team;
int run_step(Team*, const Program*, const Step*, Format);  // 0, or -1: no such format
