"""What Python lays out and the kernels read, as native/program.h and native/linear.h have it."""

import ctypes

EMBED, LINEAR, ROTARY, ATTENTION, GATHER, SAMPLE, ADD_NORM, CAP, POOL, ROUTE, EXPERTS, MIX = range(
    12
)
ALL, WANTED, SAMPLED = range(3)
FLOATS, BF16_WEIGHTS, BF16_CACHE, BF16_PRODUCTS = range(4)
AS_COMPUTED, KV_INT8, KV_FP8, KV_INT4 = range(4)
PLAIN, NORM, SILU_MUL, GELU_MUL = range(4)
PUT, ADD = range(2)
AS_ROWS, INT8, INT4, INT8_GROUPS, INT4_ZEROS, FP8, FP8_BLOCKS, W8A8 = range(8)
OPERAND_PAD = 32
DELTA_PARTS = 3


class Matrix(ctypes.Structure):
    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("weights", ctypes.c_int),
    ]


class Turn(ctypes.Structure):
    _fields_ = [
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("dims", "q_width", "k_width")),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
    ]


class Scores(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_float), ("cap", ctypes.c_float), ("window", ctypes.c_int)]


class Delta(ctypes.Structure):
    _fields_ = [
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("ranks", ctypes.c_int),
        ("columns", ctypes.c_int * DELTA_PARTS),
        ("part_ranks", ctypes.c_int * DELTA_PARTS),
    ]


class Mixture(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("experts", "chosen", "normed", "shared")),
        ("groups", ctypes.c_void_p),
    ]


class Choices(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("ids", "shares", "order", "places")]


class Op(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("prelude", ctypes.c_int),
        ("epilogue", ctypes.c_int),
        ("layer", ctypes.c_int),
        ("group", ctypes.c_int),
        ("source", ctypes.c_int),
        ("target", ctypes.c_int),
        ("which", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("matrix", Matrix),
        ("factor", ctypes.c_float),
        ("turn", Turn),
        ("scores", Scores),
        ("deltas", ctypes.c_void_p),
        ("mixture", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("gathers", "shared", "shared_gate")),
    ]


class Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("width", ctypes.c_long)]


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "dim", "layers", "block_tokens")),
        ("kv_format", ctypes.c_int),
    ]


class Program(ctypes.Structure):
    _fields_ = [
        ("ops", ctypes.POINTER(Op)),
        ("num_ops", ctypes.c_int),
        ("buffers", ctypes.POINTER(Buffer)),
        ("shape", Shape),
        ("arena", ctypes.c_void_p),
        ("operand", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_long),
        ("tiles", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("low_width", ctypes.c_int),
        ("choices", Choices),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("tokens", "sequences", "sampled", "table_width")),
        *((name, ctypes.c_int) for name in ("pooled", "pools")),
        *((name, ctypes.c_int) for name in ("first", "end")),
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "starts", "lengths", "block_tables", "rows")
        ),
        *((name, ctypes.c_void_p) for name in ("pooled_rows", "pool_starts", "sums")),
        ("samplings", ctypes.c_void_p),
        ("grammars", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("edits", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("top_width", ctypes.c_int),
        ("sampled_ids", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("ranks", ctypes.c_int),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("step", Step),
        ("token_ids", ctypes.c_void_p),
        ("num_awaited", ctypes.c_int),
        ("awaited", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("failed", ctypes.c_int),
        ("started_ns", ctypes.c_int64),
        ("ended_ns", ctypes.c_int64),
    ]
