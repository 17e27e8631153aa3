"""`python -m tests.fuzz`: see the package."""

import argparse
import logging
import secrets
import sys
import time
import traceback
from collections import Counter

from tests.fuzz.rounds import play

ROUND = 250


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the first round")
    asked = parser.parse_args()
    logging.disable()  # of what is broken on purpose
    began, done, met = time.monotonic(), 0, Counter[str]()
    print(f"seed {asked.seed}", flush=True)
    while done < asked.requests:
        seed, count = asked.seed + done // ROUND, min(ROUND, asked.requests - done)
        try:
            met += play(seed, count)
        except Exception:
            traceback.print_exc()
            print(f"again: python -m tests.fuzz --requests {count} --seed {seed}")
            return 1
        done += count
    took_s = time.monotonic() - began
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(met.items()))
    print(f"{done} requests ended once each in {took_s:.0f} s; {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
