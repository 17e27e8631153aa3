"""`penstock down`: what `penstock up --address` left on a Ray cluster ends, streams first."""

import argparse
import sys

from services.cli.joined_ray import JoinedRay
from services.common.config import Settings


def main(arguments: argparse.Namespace) -> int:
    ray = JoinedRay(arguments.address, Settings())
    try:
        ray.start()
        from services.app import delete_all, deployed

        if found := deployed():
            print(f"· draining: {', '.join(found)}", file=sys.stderr, flush=True)
            delete_all()
    finally:
        ray.stop()
    print("Penstock is down." if found else "There was no Penstock on this cluster.")
    return 0
