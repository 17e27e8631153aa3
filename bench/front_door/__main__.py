"""What a request costs gateway, tokenizer and router, and what they add to its times.

    python -m bench.front_door [--parts chats prompts streams litellm] [--json FILE]

Behind them is a fake engine (engine.py): a chat's first token at once, the rest at a pace. So what
a client waits for is the front door's. Load, engine and all services share this machine's cores;
costs are processor seconds of each service, children included, so they hold whatever else runs.

chats    short chats (`--tokens` each, streamed), as many at once as `--connections`: processor time
         of each; then at half of that rate, arriving by chance: time to the first token, over all
         three services and of a gateway alone, and what that adds to the engine's own
prompts  prompts of 220 KB and of 2 MB, one tenant's, beside ten streams: processor time of each,
         and the longest that a token of the others was late
streams  1,000 and 5,000 streams at `--stream-pace` tokens a second: how late tokens come, memory of
         each stream
litellm  LiteLLM's proxy before the same engine, by the same load, in turn with ours: `--litellm
         DIR` is where it is, or will be, installed
"""

import argparse
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.front_door import stack
from bench.front_door.stack import Door
from bench.result_file import result_file
from services.common.children import dying_with_parent

PARTS = ("chats", "prompts", "streams", "litellm")
_PROMPTS = {"220 KB": 220_000, "2 MB": 2_000_000}
_BESIDE, _BESIDE_PACE = 10, 20.0
_STREAMS = (1_000, 5_000)


@dataclass
class Window:
    """What was seen, and what it took."""

    seconds: float
    cpu_s: dict[str, float]
    seen: dict[str, Any]

    @property
    def rate(self) -> float:
        """Whole chats a second."""
        return float(self.seen["chats"]) / self.seconds

    def cpu_ms(self, name: str) -> float:
        """Of a chat."""
        return float(self.cpu_s[name] / max(1, self.seen["chats"]) * 1e3)

    def per_core(self, *names: str) -> float:
        """Chats in a processor second of these."""
        taken = sum(self.cpu_s[name] for name in names)
        return float(self.seen["chats"]) / max(1e-9, taken)


class Client:
    """A process of the load, whose window begins when it says so."""

    def __init__(self, run: ExitStack, door: Door, **asked: Any) -> None:
        asked["address"] = door.url.removeprefix("http://")
        asked["headers"] = [f"Authorization: Bearer {door.key}"]
        command = [sys.executable, "-m", "bench.front_door.client", json.dumps(asked)]
        self._asked = asked
        self._process = run.enter_context(
            subprocess.Popen([*dying_with_parent(), *command], stdout=subprocess.PIPE, text=True)
        )
        run.callback(self._process.terminate)

    def begun(self) -> None:
        self._line("begin")

    def ended(self) -> None:
        self._line("end")

    def seen(self) -> dict[str, Any]:
        """Raises RuntimeError where a chat failed."""
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        if told["failed"]:
            raise RuntimeError(f"{told['failed']} of {told['chats']} failed: {told['why']}")
        return told

    def _line(self, wanted: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != wanted:
            raise RuntimeError(f"the load said {line!r}, not {wanted!r}")


def window(door: Door, **asked: Any) -> Window:
    with ExitStack() as run:
        client = Client(run, door, **asked)
        client.begun()
        before = door.cpu_s()
        client.ended()
        used = {name: after - before[name] for name, after in door.cpu_s().items()}
        return Window(asked["seconds"], used, client.seen())


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


# ---- the parts ------------------------------------------------------------------------------


def chats(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    openers: dict[str, Callable[[], AbstractContextManager[Door]]] = {
        "all three": lambda: stack.services(folder, given.pace),
        "gateway alone": lambda: stack.gateway_alone(folder, given.pace),
    }
    for name, opened in openers.items():
        with opened() as door:
            told[name] = _chats(door, given)
    with stack.engine_alone(folder, given.pace) as door:
        for one in told.values():
            _measure_added(door, given, one)
    return told


def _measure_added(door: Door, given: argparse.Namespace, one: dict[str, Any]) -> None:
    """To what asking the engine itself takes at the same rate."""
    asked = {"tokens": given.tokens, "connections": given.connections, "warm_s": 3.0}
    alone = window(door, mode="open", rate=one["half_rate"], seconds=given.seconds, **asked)
    for percent in (50, 99):
        took = percentile(alone.seen["ttft_ms"], percent)
        one[f"engine_ttft_ms_p{percent}"] = took
        one[f"added_ms_p{percent}"] = one[f"ttft_ms_p{percent}"] - took


def _chats(door: Door, given: argparse.Namespace) -> dict[str, Any]:
    asked = {"tokens": given.tokens, "seconds": given.seconds, "warm_s": 3.0}
    full = window(door, mode="closed", connections=given.connections, **asked)
    ours = [name for name in full.cpu_s if name != "redis"]
    rate = given.rate or full.rate / 2
    half = window(door, mode="open", rate=rate, connections=given.connections, first=10**6, **asked)
    return {
        "chats_per_s": full.rate,
        **{f"{name}_cpu_ms": full.cpu_ms(name) for name in full.cpu_s},
        **{f"per_{name}_core": full.per_core(name) for name in ours},
        "per_core": full.per_core(*ours),
        "half_rate": half.rate,
        "ttft_ms_p50": percentile(half.seen["ttft_ms"], 50),
        "ttft_ms_p99": percentile(half.seen["ttft_ms"], 99),
        **{f"half_{name}_cpu_ms": half.cpu_ms(name) for name in half.cpu_s},
    }


def prompts(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with stack.services(folder, _BESIDE_PACE) as door:
        for name, size in {"none": 0, **_PROMPTS}.items():
            told[name] = _beside(door, given, size)
    return told


def _beside(door: Door, given: argparse.Namespace, size: int) -> dict[str, Any]:
    """Streams, with large prompts beside them or nothing."""
    tokens = int(given.seconds * _BESIDE_PACE * 4)
    common = {"seconds": given.seconds, "warm_s": 2.0}
    with ExitStack() as run:
        streams = {"tokens": tokens, "stamps": True, "hold": True, "connections": _BESIDE}
        others = Client(run, door, mode="closed", first=size, **streams, **common)
        used: dict[str, float] = {}
        if size:
            large = Client(
                run,
                door,
                **{"mode": "closed", "tokens": 1, "connections": 2, "prompt_bytes": size},
                **{**common, "first": 2 * 10**6 + size},
            )
            large.begun()
            before = door.cpu_s()
        others.begun()
        others.ended()
        if size:
            large.ended()
            used = {name: after - before[name] for name, after in door.cpu_s().items()}
        seen = others.seen()
        late = lateness(seen, door.left())
        told: dict[str, Any] = {"late_ms_p50": percentile(late, 50), "late_ms_max": max(late)}
        told["late_ms_p99"] = percentile(late, 99)
        if size:
            found = Window(given.seconds, used, large.seen())
            ours = [service for service in used if service != "redis"]
            told |= {f"{service}_cpu_ms": found.cpu_ms(service) for service in ours}
            told |= {"per_s": found.rate, "per_core": found.per_core(*ours)}
            told["ttft_ms_p50"] = percentile(found.seen["ttft_ms"], 50)
        return told


def streams(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for count in given.streams:
        with stack.services(folder, given.stream_pace) as door, ExitStack() as run:
            before = door.unique_bytes()
            many = {"connections": count, "stamps": True, "hold": True, "first": count}
            asked = {"tokens": 100_000, "seconds": given.seconds, "warm_s": 2.0}
            client = Client(run, door, mode="closed", **many, **asked)
            client.begun()
            cpu = door.cpu_s()
            during = door.unique_bytes()
            client.ended()
            cpu = {name: after - cpu[name] for name, after in door.cpu_s().items()}
            seen = client.seen()
            late = lateness(seen, door.left())
            told[f"{count} streams"] = {
                "late_ms_p50": percentile(late, 50),
                "late_ms_p99": percentile(late, 99),
                "tokens_per_s": seen["tokens"] / given.seconds,
                **{f"{n}_us_per_token": s / seen["tokens"] * 1e6 for n, s in cpu.items()},
                **{f"{n}_kb_per_stream": (during[n] - before[n]) / count / 1e3 for n in before},
            }
    return told


def lateness(seen: dict[str, Any], left: dict[int, list[int]]) -> list[float]:
    """ms between a token's leaving the engine and its arrival, of those that left in the window: a
    thousand streams that begin at once are late at first."""
    begin, end = seen["window"]
    return [
        (came - went) / 1e6
        for key, times in seen["arrived"].items()
        for went, came in zip(left.get(int(key), ()), times, strict=False)
        if begin <= went < end
    ]


def litellm(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    environment = given.litellm or folder / "litellm"
    install(environment)
    told: dict[str, Any] = {}
    openers: dict[str, Callable[[], AbstractContextManager[Door]]] = {
        "ours": lambda: stack.services(folder, given.pace),
        "litellm": lambda: stack.litellm(folder, environment, given.pace),
    }
    for turn in range(given.turns):
        for name, opened in openers.items():
            with opened() as door:
                told[f"{name} {turn + 1}"] = _chats(door, given)
    return told


def install(environment: Path) -> None:
    """In a virtual environment of its own, unless it is there."""
    if (environment / "bin" / "litellm").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", stack.LITELLM]
    subprocess.run(pip, check=True)


def table(told: dict[str, dict[str, float]]) -> Iterator[str]:
    names = list(told)
    yield f"| | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for figure in dict.fromkeys(figure for one in told.values() for figure in one):
        values = (told[name].get(figure) for name in names)
        cells = ["" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.2f}" for v in values]
        yield f"| {figure} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["chats", "prompts", "streams"])
    add("--seconds", type=float, default=10.0, help="measured, each time")
    add("--tokens", type=int, default=4, help="of a short chat")
    add("--pace", type=float, default=100.0, help="tokens a second of each short chat")
    add("--connections", type=int, default=64)
    add("--rate", type=float, help="chats a second at half load (default: half the most)")
    add("--streams", type=int, nargs="+", default=list(_STREAMS))
    add("--stream-pace", type=float, default=10.0, help="tokens a second of each of these")
    add("--litellm", type=Path, help="its virtual environment")
    add("--turns", type=int, default=2, help="of ours and LiteLLM's")
    add("--json", type=result_file, help="where the figures go, too")
    given = parser.parse_args()
    os.environ["PENSTOCK_INTERNAL_SECRET"] = secrets.token_urlsafe(32)  # of all child processes
    run = {"chats": chats, "prompts": prompts, "streams": streams, "litellm": litellm}
    told = {}
    for part in given.parts:
        with tempfile.TemporaryDirectory() as folder:
            told[part] = run[part](given, Path(folder))
        print(f"\n{part}\n", *table(told[part]), sep="\n", flush=True)
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
