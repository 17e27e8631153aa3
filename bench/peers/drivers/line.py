"""How a contestant is asked: it says when it is ready, then runs the workload file that each line
of its input names, and answers with a line of JSON. Standard library only: each peer's own Python
runs this.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
"""A line of a workload: `id`, `prompt_token_ids`, `max_tokens`."""
Answer = dict[str, Any]
"""`wall_s`, and for each of `requests` its `ttft_s` and `itl_s`."""
Run = Callable[[list[Request]], Answer]


class Stamps:
    """When each request's tokens came."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._times: dict[str, list[float]] = {request["id"]: [] for request in requests}
        self._began = time.perf_counter()

    def add(self, request_id: str, tokens: int) -> None:
        """So many tokens of a request are there now."""
        now = time.perf_counter() - self._began
        self._times[request_id] += [now] * tokens

    def answer(self) -> Answer:
        """Raises RuntimeError where a request has not all of its tokens."""
        wall = time.perf_counter() - self._began
        for request in self._requests:
            came = len(self._times[request["id"]])
            if came != request["max_tokens"]:
                raise RuntimeError(
                    f"request {request['id']}: {came} of {request['max_tokens']} tokens came"
                )
        return {
            "wall_s": wall,
            "requests": [
                {
                    "ttft_s": times[0],
                    "itl_s": [b - a for a, b in itertools.pairwise(times)],
                }
                for times in self._times.values()
            ],
        }


def serve(load: Callable[[], Run]) -> None:
    """Until the input ends. What libraries print goes to the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run = load()
    print(json.dumps({"ready": True}), file=answers)
    for path in sys.stdin:
        with open(path.strip(), encoding="utf-8") as file:
            requests = [json.loads(line) for line in file]
        print(json.dumps(run(requests)), file=answers)
