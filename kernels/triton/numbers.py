"""Arithmetic that Triton's interpreter needs otherwise than a GPU: WIDE says that it runs."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """a b, summed in float32. The interpreter knows bfloat16 by its bits alone: float32 first."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def nearest(x):
    """x, of at most 2^22, to the nearest whole number, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x, WIDE: tl.constexpr):
    """x, float32 of at most 448, to the nearest float8_e4m3fn. The interpreter loses what rounding
    carries, and gets numbers that need none."""
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        small = (x + 24576.0) - 24576.0  # below 2^-6 the step is 2^-9
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def numbers_of_4_bits(x):
    """Of bytes [.., n] the two numbers of each, float32 [.., 2 n]: see kv_layer.INT4."""
    lower, upper = (x & 15).to(tl.float32) - 8, (x >> 4).to(tl.float32) - 8
    return tl.interleave(lower, upper)
