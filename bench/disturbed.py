"""What a process beside the engine costs it: decodes in-process, alone and beside one that takes a
part of one processor in short bursts, as services do, in turn, many times a second.

    python -m bench.disturbed --model DIR [--streams 16] [--share 0.1] [--seconds 20]

No thread of the engine may be waited for while it is off its processor: then what remains is what
the other process leaves over, which is told beside what came. On a machine with other work, both at
real-time priority (`chrt -f 1`; the process beside takes one more).
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bench.result_file import checkpoint_folder

THREADS = len(os.sched_getaffinity(0))
BURST_S = (0.0002, 0.001)
TURN_S = 0.11
"""No part of a second: what a scheduler does once in it must not fall on one side."""
PROMPT, OUTPUT = 64, 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=checkpoint_folder, required=True)
    add("--streams", type=int, default=16)
    add("--share", type=float, default=0.1, help="of one processor, that the bursts take")
    add("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    decodes = _Decodes(given.model, given.streams)
    decodes.run(2 * TURN_S)
    alone, beside = [], []
    with subprocess.Popen([sys.executable, __file__, str(given.share)]) as other:
        try:
            time.sleep(0.2)
            used_s = 0.0
            for _ in range(round(given.seconds / (2 * TURN_S))):
                before_s = _cpu_s(other.pid)
                beside.append(decodes.run(TURN_S))
                used_s += _cpu_s(other.pid) - before_s
                other.send_signal(signal.SIGSTOP)
                alone.append(decodes.run(TURN_S))
                other.send_signal(signal.SIGCONT)
        finally:
            other.kill()
    left = 1 - used_s / (len(beside) * TURN_S * THREADS)
    kept = median(beside) / median(alone)
    rates = f"alone {median(alone):.0f} tok/s, beside {median(beside):.0f}"
    print(f"{rates}: {kept:.1%}; left over is {left:.1%}")
    return 0


class _Decodes:
    """So many streams, for ever."""

    def __init__(self, model: Path, streams: int) -> None:
        from services.worker.engine import EngineConfig
        from services.worker.engine.engine import Engine

        config = EngineConfig(str(model), kv_cache_bytes=2**30, threads=THREADS)
        self._engine = Engine(config)
        self._streams = streams
        self._begun = 0

    def run(self, seconds: float) -> float:
        """Tokens per second, in so many seconds of steps that only decode."""
        tokens, spent_s = 0, 0.0
        while spent_s < seconds:
            if not self._engine.has_work:
                self._fill()
            begun = time.perf_counter()
            step = self._engine.step()
            if not step.prefill_tokens:
                tokens += step.decode_tokens
                spent_s += time.perf_counter() - begun
        return tokens / spent_s

    def _fill(self) -> None:
        from services.worker.engine import Request, Sampling

        for _ in range(self._streams):
            prompt = random.choices(range(16, self._engine.info.vocab_size), k=PROMPT)
            sampling = Sampling(OUTPUT, temperature=0, ignore_eos=True)
            self._engine.add(Request(str(self._begun), prompt, sampling))
            self._begun += 1


def _cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _disturb(share: float) -> None:
    """Bursts on the last processor, for ever."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        priority = os.sched_getparam(0).sched_priority + 1
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    while True:
        burst = random.uniform(*BURST_S)
        end = time.perf_counter() + burst
        while time.perf_counter() < end:
            pass
        time.sleep(burst * (1 / share - 1))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1][0].isdigit():
        _disturb(float(sys.argv[1]))
    sys.exit(main())
