"""`penstock down`: what `penstock up --address` left on a Ray cluster ends, streams first."""

import argparse
import sys

from services.cli.ground.joined_ray import JoinedRay
from services.common.config import Settings


def main(arguments: argparse.Namespace) -> int:
    settings = Settings()
    ray = JoinedRay(arguments.address, settings)
    try:
        ray.start()
        from services.app import delete_all, deployed

        if found := deployed(settings.namespace):
            print(f"· draining: {', '.join(found)}", file=sys.stderr, flush=True)
            delete_all(settings.namespace)
    finally:
        ray.stop()
    print("Penstock is down." if found else _nothing(settings))
    return 0


def _nothing(settings: Settings) -> str:
    return f"There was no Penstock of the namespace {settings.namespace!r} on this cluster."
