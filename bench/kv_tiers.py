"""What a prefix costs that comes back: from disk, beside computing it.

    python -m bench.kv_tiers --model DIR --disk FOLDER [--tokens 1024] [--rounds 5] [--json FILE]

Each round takes another prompt and asks for its first token three times: when nobody knows it
(`computed`); when its KV blocks were evicted to disk, whose files are not in memory either
(`disk`); and when they are on the device (`device`). So all are of one run, alternating. Of each
the time by the clock, and processor time of the whole process, in which the disk's threads count.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.result_file import checkpoint_folder, result_file
from services.common.checkpoints.checkpoint import digest
from services.worker.engine.config import EngineConfig
from services.worker.engine.messages import Request, Sampling

if TYPE_CHECKING:
    from services.worker.engine.engine import Engine

WAYS = ("computed", "disk", "device")
Seconds = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=checkpoint_folder, required=True)
    add("--disk", type=Path, required=True, help="folder on the disk that is measured; new files")
    add("--tokens", type=int, default=1024, help="of the prefix")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=None)
    add("--json", type=result_file, help="where the rounds go")
    given = parser.parse_args()
    from services.worker.engine.engine import Engine

    config = EngineConfig(
        str(given.model),
        max_model_len=given.tokens + 32,
        num_blocks=given.tokens // 8,
        kv_disk_dir=str(given.disk),
        checkpoint=digest(given.model),
        threads=given.threads,
    )
    engine = Engine(config)
    try:
        rounds = [_round(engine, given.disk, given.tokens, seed) for seed in range(given.rounds)]
    finally:
        engine.close()
    found = {
        "processor": platform.processor() or platform.machine(),
        "threads": engine.info.threads,
        "tokens": given.tokens,
        "bytes": engine.info.kv_bytes_per_block * (given.tokens // engine.info.block_size),
        "rounds": rounds,
        "median": {
            way: {kind: median(one[way][kind] for one in rounds) for kind in ("wall_s", "cpu_s")}
            for way in WAYS
        },
    }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["median"]))
    return 0


def _round(engine: "Engine", disk: Path, tokens: int, seed: int) -> dict[str, Seconds]:
    draw = random.Random(seed)
    # One token more, so that the prefix is of whole blocks, and the last is computed in any case.
    prompt = [draw.randrange(10, engine.info.vocab_size) for _ in range(tokens + 1)]
    found = {"computed": _first_token(engine, prompt, cached=0)}
    _evict(engine, disk)
    found["disk"] = _first_token(engine, prompt, cached=tokens)
    found["device"] = _first_token(engine, prompt, cached=tokens)
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def _first_token(engine: "Engine", prompt: list[int], cached: int) -> Seconds:
    began, began_cpu = time.perf_counter(), time.process_time()
    engine.add(Request("it", prompt, Sampling(1, temperature=0, ignore_eos=True)))
    outputs = []
    while engine.scheduler.sequences:
        outputs += engine.step().outputs
    took = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
    (last,) = [one for one in outputs if one.finish_reason]
    if last.error or last.num_cached_tokens != cached:
        raise SystemExit(f"{last.num_cached_tokens} tokens were cached, not {cached}: {last.error}")
    return took


def _evict(engine: "Engine", disk: Path) -> None:
    """All blocks go to disk, and out of the system's memory."""
    pool, loader = engine.pool, engine.loader
    assert loader is not None
    blocks = pool.allocate(pool.num_free)
    loader.copy_out(pool.take_evicted())
    pool.free(blocks)
    while loader.tier.num_on_way:
        loader.tier.wait(1.0)
        loader.come_back(idle=False)
    for path in disk.rglob("*-*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    sys.exit(main())
