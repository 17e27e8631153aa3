"""`python -m bench.prediction.next_turn`: what computing ahead does for a chat's next turn, and to
who comes meanwhile.

Starts `penstock up` with a checkpoint of random weights (shape S of bench.peers) whose template
writes an answer otherwise once it is history, as those of models that reason do. In turn, after an
answer and a pause: its next turn, and the same with one word of the answer changed, so that nothing
that was computed ahead is of use. Then a short request at once behind an answer that is computed
ahead for, and behind one that is not (a completion).
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from bench.peers import checkpoints
from bench.platform import client_of, platform_up

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ ' said: ' if m.role == 'assistant' else ' ' }}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
_PAUSE_S = 3.0


class Answer(NamedTuple):
    text: str
    ttft_s: float
    prompt: int
    cached: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer", type=int, default=300, help="tokens")
    given = parser.parse_args()
    os.environ["PENSTOCK_TOKENIZER__WARM_TOKENS_PER_MINUTE"] = str(10**9)
    os.environ["PENSTOCK_TOKENIZER__WARM_LEAST_HITS"] = "0"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = checkpoints.write("S", folder)
        config = json.loads((model / "tokenizer_config.json").read_text())
        config["chat_template"] = _TEMPLATE
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "up").mkdir()
        with platform_up(model, folder / "up", "off") as running:
            print(*asyncio.run(_measured(running, given.turns, given.answer)), sep="\n")


async def _measured(running: Any, turns: int, size: int) -> list[str]:
    found: dict[str, list[Answer]] = defaultdict(list)
    async with client_of(running) as (http, model):
        for turn in range(turns + 1):
            pairs: dict[str, list[Answer]] = {}
            for how in ("next turn", "next turn of another answer"):
                talk = [_said("user", f"{how} {turn}: what is the pressure of the water?")]
                first = await _chat(http, model, talk, size)
                await asyncio.sleep(_PAUSE_S)
                answer = first.text if how == "next turn" else "So" + first.text[2:]
                talk += [_said("assistant", answer), _said("user", "Why?")]
                pairs[how] = [await _chat(http, model, talk, 4)]
                await asyncio.sleep(_PAUSE_S)
            for how in ("behind an answer", "behind a completion"):
                text = f"{how} {turn}: what is the pressure of the water?"
                if how == "behind an answer":
                    await _chat(http, model, [_said("user", text)], size)
                else:
                    await _complete(http, model, text, size)
                pairs[how] = [await _complete(http, model, f"{turn} {how} and so on", 4)]
                await asyncio.sleep(_PAUSE_S)
            for how, answers in pairs.items() if turn else ():
                found[how] += answers
    rows = ["| | prompt | cached | first token, ms: p50 | p90 |", "| --- " + "| ---: " * 4 + "|"]
    for how, answers in found.items():
        times = [one.ttft_s * 1e3 for one in answers]
        prompt, cached = (
            np.mean([getattr(one, n) for one in answers]) for n in ("prompt", "cached")
        )
        p50, p90 = np.percentile(times, (50, 90))
        rows.append(f"| {how} | {prompt:.0f} | {cached:.0f} | {p50:.1f} | {p90:.1f} |")
    return rows


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


async def _chat(
    http: aiohttp.ClientSession, model: str, messages: list[dict[str, str]], size: int
) -> Answer:
    return await _stream(http, "chat/completions", {"model": model, "messages": messages}, size)


async def _complete(http: aiohttp.ClientSession, model: str, prompt: str, size: int) -> Answer:
    return await _stream(http, "completions", {"model": model, "prompt": prompt}, size)


async def _stream(
    http: aiohttp.ClientSession, path: str, asked: dict[str, Any], size: int
) -> Answer:
    asked |= {"max_tokens": size, "stream": True, "temperature": 0, "ignore_eos": True}
    asked |= {"stream_options": {"include_usage": True}}
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    began, first = time.perf_counter(), 0.0
    async with http.post(path, json=asked) as answer:
        async for line in answer.content:
            if answer.status != 200:
                raise RuntimeError(line.decode())
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line.removeprefix(b"data: "))
            usage = told.get("usage") or usage
            for choice in told.get("choices") or ():
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if piece:
                    first = first or time.perf_counter() - began
                    pieces.append(piece)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer("".join(pieces), first, usage["prompt_tokens"], cached)


if __name__ == "__main__":
    main()
