// What Python lays out (kernels/cpu/structures.py has the same structures) and the kernels read.
#pragma once
#include <stdint.h>

#include "allowed.h"
#include "linear.h"
#include "sampler.h"

enum Kind { EMBED = 0, LINEAR = 1, ROTARY = 2, ATTENTION = 3, GATHER = 4, SAMPLE = 5, ADD_NORM = 6, CAP = 7, POOL = 8 };
enum Which { ALL = 0, WANTED = 1, SAMPLED = 2 };  // of a step's rows: one for each token; sampled and pooled ones; the first of these
enum Format {
  FLOATS = 0,         // weights and cache are float32
  BF16_WEIGHTS = 1,
  BF16_CACHE = 2,     // and the weights
  BF16_PRODUCTS = 3,  // and the rows that meet them
};
enum KvFormat { AS_COMPUTED = 0, KV_INT8 = 1, KV_FP8 = 2 };  // of the cache: as attention's products take it, or its own (cache.h)
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

struct Op {
  int kind, prelude, epilogue, layer;
  int source, target;  // buffers
  int which;           // its rows
  float epsilon;       // of norms
  const float* norm;   // NORM, ADD_NORM, POOL: [k]
  Matrix matrix;       // LINEAR; EMBED: [vocab, width]
  float factor;        // EMBED: of the rows; CAP: c, see Scoring
  Turn turn;           // ROTARY
  Scoring scores;      // ATTENTION
};

struct Buffer {  // [rows, width] floats
  float* data;
  long width;
};

struct Shape {
  int heads, kv_heads, dim, layers, block_tokens;
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
};

struct Step {
  int tokens, sequences, sampled, table_width;
  int pooled, pools;        // rows, and those that they are of
  int first, end;           // of the operations: a step may be launched in two parts
  const int* token_ids;     // [tokens]
  const int* positions;     // [tokens]
  const int* starts;        // [sequences + 1]: where each one's tokens begin
  const int* lengths;       // [sequences]: tokens in the cache, these included
  const int* block_tables;  // [sequences, table_width]
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
};

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
