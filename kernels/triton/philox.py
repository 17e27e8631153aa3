"""Noise by seed, position and token; engine/runners/sampler.py says of what kind."""

import triton
import triton.language as tl


@triton.jit
def philox(seed, c0, c1):
    """Philox-4x32-10 of the key `seed`, int64, and counters (c0, c1, 0, 0), uint32: four words."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high2, low2 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel_noise(seed, position, first, TILE: tl.constexpr):
    """Standard Gumbel noise of the tokens [first, first + TILE), `first` a multiple of 4."""
    lanes = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = philox(seed, lanes, lanes * 0 + position.to(tl.uint32))
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = ((words >> 9).to(tl.float32) + 0.5) * (1 / 8388608)
    return -tl.log(-tl.log(uniform))
