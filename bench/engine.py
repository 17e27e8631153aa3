"""`penstock bench engine`: a workload through the engine in-process, no services.

Writes per request its token ids, finish reason, TTFT and ITLs, and the totals of the run. Among
them `decode_bytes_per_s`: a decode step must read the weights once and the running sequences' KV,
so this rate, against what the machine can stream, says how near to the floor decoding is.
"""

import argparse
import json
import logging
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from bench import workload
from bench.result_file import result_file
from bench.workload import WorkloadError, WorkloadRequest
from services.worker.engine import EngineConfig, Request, RequestOutput, Sampling, StepOutput

if TYPE_CHECKING:
    from services.worker.engine.engine import Engine

REPORT_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--workload", required=True, help="JSON lines, see bench/workload.py")
    parser.add_argument("--json", required=True, type=result_file, help="where the result goes")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="default: as a worker chooses it",
    )
    parser.add_argument(
        "--quantization",
        choices=("auto", "int8", "int4", "fp8", "w8a8"),
        default="auto",
        help="of the weights; auto: as the checkpoint has them",
    )
    parser.add_argument(
        "--kv-format",
        choices=("auto", "int8", "fp8", "int4"),
        default="auto",
        help="of keys and values; auto: as they are computed",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="ranks that the model is cut over: on a GPU each, or on the CPU",
    )
    parser.add_argument(
        "--kernels", default="auto", help="of a CPU: an instruction set, or `reference`"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-bytes", type=int, default=512 * 2**20)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-batched-tokens", type=int, default=512)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument(
        "--packed-dir",
        default=None,
        help="of packed weights, as a worker has it; default: none",
    )
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="plan the next step while one runs; default: on a GPU",
    )
    parser.add_argument("--threads", type=int, default=None, help="default: all that it may use")
    parser.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_false", default=True
    )


def main(args: argparse.Namespace) -> int:
    """Exit status: 0, also when single requests failed; 1 when the run was not possible, or all
    of them did."""
    # Here, because the command line imports this module and shall start without torch.
    from services.worker.engine.engine import Engine
    from services.worker.engine.models.config import UnsupportedModel

    # What runs, and why it is not what was to be expected.
    logging.basicConfig(format="bench engine: %(message)s")
    logging.getLogger("services.worker.engine").setLevel(logging.INFO)
    try:
        lines = workload.load(args.workload)
        _say(f"loading {args.model}")
        engine = Engine(
            EngineConfig(
                model=args.model,
                dtype=args.dtype,
                quantization=args.quantization,
                kv_format=args.kv_format,
                device=args.device,
                tensor_parallel=args.tensor_parallel,
                kernels=args.kernels,
                block_size=args.block_size,
                kv_cache_bytes=args.kv_cache_bytes,
                max_model_len=args.max_model_len,
                max_batched_tokens=args.max_batched_tokens,
                max_running=args.max_running,
                prefix_caching=args.prefix_caching,
                overlap=args.overlap,
                threads=args.threads,
                packed_dir=args.packed_dir,
            )
        )
        requests = _to_requests(lines, Path(args.model))
    except (WorkloadError, UnsupportedModel, ValueError, OSError) as error:
        _say(f"error: {error}")
        return 1
    try:
        result = _Run(engine, [line.arrival_s for line in lines], requests).run()
    finally:
        engine.close()
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    _say(json.dumps(result["totals"]))
    errors = [f"{one['id']}: {one['error']}" for one in result["requests"] if one["error"]]
    if errors:
        _say(f"{len(errors)} of {len(requests)} requests failed, the first {errors[0]}")
    return 1 if len(errors) == len(requests) else 0


def _say(message: str) -> None:
    print(f"bench engine: {message}", file=sys.stderr, flush=True)


def _to_requests(lines: list[WorkloadRequest], model: Path) -> list[Request]:
    text = _Text(model)
    return [
        Request(
            line.id,
            text.token_ids(line),
            Sampling(
                max_tokens=line.max_tokens,
                temperature=line.temperature,
                seed=line.seed if line.seed is not None else number,
                ignore_eos=line.ignore_eos,
            ),
        )
        for number, line in enumerate(lines)
    ]


class _Text:
    """Tokenizes what is not token ids yet; loads what that takes when it is first needed."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._template: Any = None

    def token_ids(self, line: WorkloadRequest) -> list[int]:
        if line.prompt_token_ids is not None:
            return line.prompt_token_ids
        if line.messages is not None:
            if self._template is None:
                from transformers import AutoTokenizer

                self._template = AutoTokenizer.from_pretrained(self._model)
            ids = self._template.apply_chat_template(
                line.messages, add_generation_prompt=True, return_dict=False
            )
            return list(ids)
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            path = self._model / "tokenizer.json"
            if not path.exists():
                raise WorkloadError(f"request {line.id}: text needs {path}, which is missing")
            self._tokenizer = Tokenizer.from_file(str(path))
        return list(self._tokenizer.encode(line.prompt).ids)


@dataclass
class _Record:
    arrived_s: float
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    last: RequestOutput | None = None

    def as_json(self, request: Request) -> dict[str, Any]:
        assert self.last is not None
        return {
            "id": request.request_id,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": self.last.num_cached_tokens,
            "token_ids": self.token_ids,
            "finish_reason": self.last.finish_reason,
            "error": self.last.error.message if self.last.error else None,
            "ttft_s": self.times_s[0] - self.arrived_s if self.times_s else None,
            "itl_s": [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)],
        }


class _Run:
    """One pass of the workload at its own pace."""

    def __init__(self, engine: "Engine", arrivals: list[float], requests: list[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._arrivals = arrivals
        self._records: dict[str, _Record] = {}
        self._decode_bytes = 0
        self._decode_only_s = 0.0
        self._steps = 0
        self._preempted = 0
        self._computed = 0
        self._held_peak = 0

    def run(self) -> dict[str, Any]:
        start = reported = time.perf_counter()
        waiting = list(zip(self._arrivals, self._requests, strict=True))[::-1]
        while waiting or self._engine.has_work:
            now = time.perf_counter() - start
            while waiting and waiting[-1][0] <= now:
                arrival, request = waiting.pop()
                self._records[request.request_id] = _Record(arrival)
                self._engine.add(request)
            if not self._engine.has_work:
                time.sleep(waiting[-1][0] - now)
                continue
            self._take(self._engine.step(), time.perf_counter() - start)
            if time.perf_counter() - reported > REPORT_EVERY_S:
                reported = time.perf_counter()
                self._report_progress(reported - start)
        return self._result(time.perf_counter() - start)

    def _take(self, step: StepOutput, now_s: float) -> None:
        self._steps += 1
        self._preempted += len(step.preempted)
        self._computed += step.prefill_tokens
        # Blocks that sequences hold; what is cached besides goes first when room is short.
        held = step.load.total_blocks - step.load.free_blocks
        self._held_peak = max(self._held_peak, held)
        for output in step.outputs:
            record = self._records[output.request_id]
            record.token_ids += output.new_token_ids
            record.times_s += [now_s] * len(output.new_token_ids)
            if output.finish_reason:
                record.last = output
        if step.decode_tokens and not step.prefill_tokens:
            info = self._engine.info
            self._decode_bytes += (
                info.parameter_bytes + held * len(info.kv_groups) * info.kv_bytes_per_block
            )
            self._decode_only_s += step.duration_ns / 1e9

    def _report_progress(self, elapsed_s: float) -> None:
        done = sum(record.last is not None for record in self._records.values())
        tokens = sum(len(record.token_ids) for record in self._records.values())
        _say(
            f"{elapsed_s:.0f} s: {done} of {len(self._requests)} requests done, "
            f"{tokens} tokens out, {tokens / elapsed_s:.0f} tok/s"
        )

    def _result(self, wall_s: float) -> dict[str, Any]:
        details = [self._records[r.request_id].as_json(r) for r in self._requests]
        output_tokens = sum(len(detail["token_ids"]) for detail in details)
        prompt_tokens = sum(detail["prompt_tokens"] for detail in details)
        ttfts = sorted(d["ttft_s"] for d in details if d["ttft_s"] is not None)
        itls = sorted(itl for detail in details for itl in detail["itl_s"])
        info = self._engine.info
        totals = {
            "requests": len(details),
            "failed": sum(detail["error"] is not None for detail in details),
            "wall_s": wall_s,
            "prompt_tokens": prompt_tokens,
            "computed_prompt_tokens": self._computed,
            "output_tokens": output_tokens,
            "output_tok_per_s": output_tokens / wall_s,
            "total_tok_per_s": (prompt_tokens + output_tokens) / wall_s,
            "steps": self._steps,
            "preemptions": self._preempted,
            "ttft_s": _summary(ttfts),
            "itl_s": _summary(itls),
            "decode_bytes_per_s": (
                self._decode_bytes / self._decode_only_s if self._decode_only_s else None
            ),
        }
        engine = {
            "dtype": info.dtype,
            "quantization": self._engine.config.quantization,
            "kv_format": info.kv_format,
            "device": info.device,
            "tensor_parallel": self._engine.config.tensor_parallel,
            "parameters": info.num_parameters,
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "max_batched_tokens": self._engine.config.max_batched_tokens,
            "max_running": self._engine.config.max_running,
            "threads": info.threads,
            "kernels": info.kernels,
            "overlap": self._engine.config.overlaps,
        }
        memory = {
            "parameter_bytes": info.parameter_bytes,
            "weights": info.weights,
            "huge_bytes": info.huge_bytes,
            "workspace_bytes": info.workspace_bytes,
            "kv_cache_bytes": info.kv_bytes,
            "kv_used_peak_bytes": self._held_peak * len(info.kv_groups) * info.kv_bytes_per_block,
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        return {"totals": totals, "engine": engine, "memory": memory, "requests": details}


def _summary(ordered: list[float]) -> dict[str, float] | None:
    if not ordered:
        return None
    return {
        "mean": mean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    }


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
