"""All kernels compile for an H100 (sm_90), with the constants that several models bring."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kernels.cpu.matrix import NARROW

KERNELS = {
    *("embed_kernel", "norm_kernel", "gated_kernel", "rotary_kernel"),
    *("route_kernel", "experts_kernel", "mix_kernel"),
    *("shrink_kernel", "expand_kernel"),
    *("linear_kernel", "sum_kernel", "int8_kernel", "narrow_embed_kernel"),
    *("mix_heads_kernel", "store_4_bits_kernel"),
    *("decode_kernel", "merge_kernel", "prefill_kernel"),
    *("best_kernel", "border_kernel", "draw_kernel", "pick_kernel"),
}
SHARED_BYTES = 227 * 1024
"""Of a program at most, on sm_90."""


def test_all_kernels_compile_and_fit(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "kernels.triton.aot"]
    told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    found = [json.loads(line) for line in told.splitlines()]
    assert {line["kernel"] for line in found} == KERNELS
    for line in found:
        assert line["shared_bytes"] <= SHARED_BYTES, line
        if "*fp32" not in line["types"][:2] or line["kernel"] == "decode_kernel":
            assert line["stack_bytes"] == 0, f"registers spill: {line}"
    products = [line["constants"] for line in found if line["kernel"] == "linear_kernel"]
    assert {constants["HELD"] for constants in products} == {*NARROW}
    assert {16, 128} == {constants["ROWS"] for constants in products}
    assert {False, True} == {constants["SPLITS"] > 1 for constants in products}
    routed = [line["constants"] for line in found if line["kernel"] == "route_kernel"]
    assert {1, 16, 32} <= {constants["BAND"] for constants in routed}
    attention = [line["constants"] for line in found if line["kernel"] == "decode_kernel"]
    assert {1, 3, 8} <= {constants["GROUP"] for constants in attention}
    assert {64, 128, 256} == {constants["DIM"] for constants in attention}
    assert {False, True} == {constants["SCALED"] for constants in attention}
