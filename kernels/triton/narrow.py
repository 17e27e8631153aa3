"""Products with weights of few bits, which become numbers in registers: the inner loop of `linear`
and of experts. See matrix.py for how they lie.

A matrix is the first operand and rows are the second, so what is made of bytes needs no way through
shared memory: a product takes its first operand from registers. Four bytes of a word become two
pairs of bfloat16 by a mask each, and whole numbers of at most eight bits are bfloat16s, so nothing
is rounded before the sum; a scale multiplies the sum that it is of.
"""

import triton
import triton.language as tl

from kernels.triton.numbers import product


@triton.jit
def apart(words):
    """Of words [n, w] of four bytes pairs of bytes, [n, 2 w], each in a half of its word."""
    both = tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF)
    return tl.reshape(both, [words.shape[0], 2 * words.shape[1]])


@triton.jit
def bfloats(pairs, x, WIDE: tl.constexpr):
    """Of pairs [n, w] of bfloat16's bits the numbers, [n, 2 w], float32 where rows are that, or the
    interpreter runs, which knows bfloat16 by its bits alone."""
    if WIDE or x.dtype.element_ty == tl.float32:
        lower = (pairs << 16).to(tl.float32, bitcast=True)
        upper = ((pairs >> 16) << 16).to(tl.float32, bitcast=True)
    else:
        lower = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        upper = ((pairs >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(lower, upper), [pairs.shape[0], 2 * pairs.shape[1]])


@triton.jit
def of_int8(words, x, WIDE: tl.constexpr):
    """Seven bits behind those of 128 are so much more than 128; a sign bit, so added, makes 256 of
    what is taken off again."""
    pairs = apart(words)
    without = bfloats((pairs & 0x007F007F) | 0x43004300, x, WIDE)
    return without - bfloats((pairs & 0x00800080) | 0x43004300, x, WIDE)


@triton.jit
def of_e4m3(words, x, WIDE: tl.constexpr):
    """Its bits are those of a bfloat16 that is 2^-120 of it, the smallest included, on any GPU; NaN
    is a number."""
    pairs = apart(words)
    found = bfloats((pairs & 0x00800080) << 8 | (pairs & 0x007F007F) << 4, x, WIDE)
    return found * tl.full([], 1.329227995784916e36, found.dtype)


@triton.jit
def narrow_products(
    x,
    x_stride,
    rows,
    inside,
    numbers,
    scales,
    zeros,
    columns,
    first,
    end,
    N: tl.constexpr,
    K: tl.constexpr,
    BYTES: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """float32 [COLUMNS, ROWS]: rows of a matrix [N, K], `columns` [COLUMNS], times `rows` [ROWS] of
    x that are `inside`, over steps [first, end) of STEP bytes each, of BYTES. Of w8a8 x is int8,
    too, and its scales are left to the caller."""
    EACH: tl.constexpr = 1 if HELD == "w8a8" else 4  # bytes of an element of `numbers`
    CHUNK: tl.constexpr = 32 // EACH
    at, ks = tl.arange(0, STEP // EACH), tl.arange(0, STEP)
    panels = (columns // 16).to(tl.int64) * (BYTES * 16 // EACH) + columns % 16 * CHUNK
    own = numbers + panels[:, None] + (at // CHUNK * (16 * CHUNK) + at % CHUNK)[None, :]
    from_rows = x + rows[None, :].to(tl.int64) * x_stride + ks[:, None]
    mask = inside[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.int32 if HELD == "w8a8" else tl.float32)
    for step in range(first, end):
        raw = tl.load(own + step * (STEP * 16 // EACH))
        if HELD == "int4" or HELD == "int4_zeros":
            for half in tl.static_range(2):
                group = 2 * step + half
                nibbles = (raw >> (4 * half)) & 0x0F0F0F0F
                a = bfloats(apart(nibbles) | 0x43004300, x, WIDE)
                zero = tl.full([COLUMNS], 8, tl.int32)
                if HELD == "int4_zeros":
                    zero = tl.load(zeros + group * N + columns).to(tl.int32)
                a -= (128 + zero).to(tl.float32).to(a.dtype)[:, None]
                b = tl.load(from_rows + group * 32, mask=mask, other=0.0)
                scale = tl.load(scales + group * N + columns).to(tl.float32)
                total += product(a, b, WIDE) * scale[:, None]
        else:
            if K % STEP:
                mask = inside[None, :] & (step * STEP + ks < K)[:, None]
            b = tl.load(from_rows + step * STEP, mask=mask, other=0)
            if HELD == "w8a8":
                total = tl.dot(raw, b, total)
            elif HELD == "int8":
                total += product(of_int8(raw, x, WIDE), b, WIDE)
            elif HELD == "fp8":
                total += product(of_e4m3(raw, x, WIDE), b, WIDE)
            else:
                a = of_e4m3(raw, x, WIDE) if HELD == "fp8_blocks" else of_int8(raw, x, WIDE)
                scale = tl.load(scales + step * N + columns).to(tl.float32)
                total += product(a, b, WIDE) * scale[:, None]
    total = total.to(tl.float32)
    if HELD == "int8" or HELD == "fp8" or HELD == "w8a8":
        total *= tl.load(scales + columns)[:, None]
    return total
