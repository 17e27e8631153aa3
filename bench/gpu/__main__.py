"""The command; see this package's docstring."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.result_file import result_file


class Run:
    """What was found so far, and until when there is time."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self.result: dict[str, Any] = {
            "kernels": [],
            "engine": [],
            "left_out": [],
            "agreement": None,
        }

    def attempt(self, name: str, section: str, measure: Callable[[], Any]) -> None:
        """What fails is said and left out: the others count all the same."""
        if time.monotonic() > self._end:
            self.result["left_out"].append(f"{name}: no time was left")
            return
        try:
            found = measure()
        except Exception as error:
            self.result["left_out"].append(f"{name}: {type(error).__name__}: {error}")
            return
        self.result[section].append({**asdict(found), "of_floor": found.of_floor})
        _say(f"{found.name}: {found.seconds * 1e6:.1f} µs, {found.of_floor:.0%} of its floor")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1: a check failed, and nothing was measured; 2: there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--json", required=True, type=result_file, help="Markdown goes beside it")
    parser.add_argument("--dry", action="store_true", help="on a CPU, interpreted, tiny")
    parser.add_argument("--minutes", type=float, default=9, help="after which nothing is begun")
    args = parser.parse_args(arguments)
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton defines the kernels

    import torch
    import triton

    from bench.gpu import checks, device, report

    try:
        on = device.measured(args.dry)
    except RuntimeError as error:
        _say(str(error))
        return 2
    run = Run(args.minutes)
    found = checks.guarded(lambda: checks.run(on))
    run.result |= {
        "device": {"name": on.name, "bytes_per_s": on.bytes_per_s, "flops_per_s": on.flops_per_s},
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "checks": [{**asdict(check), "passed": check.passed} for check in found],
    }
    sound = all(check.passed for check in found)
    if sound:
        _measure(run, on)
    args.json.write_text(json.dumps(run.result, indent=1) + "\n")
    text = report.markdown(run.result)
    Path(args.json).with_suffix(".md").write_text(text)
    print(text)
    return 0 if sound else 1


def _measure(run: Run, on: Any) -> None:
    from bench.gpu import engine, kernels
    from services.worker.engine.config import KV_FORMATS, QUANTIZATIONS

    for number, each in enumerate(kernels.run(on)):
        run.attempt(f"kernel {number}", "kernels", each)
    shapes = [engine.TINY] if on.is_dry else [engine.LLAMA_1B, engine.QWEN3_600M]
    for shape in shapes:
        with engine.checkpoint(shape, on) as folder:
            if shape is shapes[0]:
                run.result["agreement"] = asdict(engine.agreement(folder, on))
            formats: list[dict[str, str]] = [{"kv_format": name} for name in KV_FORMATS]
            if shape is not engine.QWEN3_600M:
                few_bits = ("int4",) if on.is_dry else QUANTIZATIONS[1:]
                formats += [{"quantization": name} for name in few_bits]
            for of_it in formats:
                made = engine.engine(folder, on, **of_it)
                loads = [engine.MIXED] if shape is engine.QWEN3_600M else engine.LOADS
                for load in [engine.SMALL] if on.is_dry else loads:
                    name = f"{load.name}, {of_it}"
                    run.attempt(name, "engine", partial(engine.measure, made, load, on))
                del made


def _say(message: str) -> None:
    print(f"bench gpu: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
