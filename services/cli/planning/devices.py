"""What a GPU has, as its maker says: of the SXM module where there are several."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float
    """In bfloat16, of dense matrices, summed in float32."""


def _device(gib: float, gb_per_s: float, tflops: float) -> Device:
    return Device(gib * GIB, gb_per_s * 1e9, tflops * 1e12)


DEVICES = {
    "a10": _device(24, 600, 125),
    "a100-40gb": _device(40, 1555, 312),
    "a100-80gb": _device(80, 2039, 312),
    "b200": _device(180, 8000, 2250),
    "h100": _device(80, 3350, 989),
    "h200": _device(141, 4800, 989),
    "l4": _device(24, 300, 121),
    "l40s": _device(48, 864, 362),
}


def device(text: str) -> Device:
    """By name, or GIB:GB_PER_S:TFLOPS of another. Raises ValueError."""
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    try:
        gib, gb_per_s, tflops = (float(part) for part in text.split(":"))
    except ValueError:
        gib = gb_per_s = tflops = 0.0
    if not all(0 < value < 1e9 for value in (gib, gb_per_s, tflops)):
        raise ValueError(
            f"--gpu: {text!r} is neither one of {', '.join(DEVICES)} nor GIB:GB_PER_S:TFLOPS of "
            "another, as 80:3350:989"
        )
    return _device(gib, gb_per_s, tflops)
