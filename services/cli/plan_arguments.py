"""What `penstock plan` takes; the names of models and GPUs come with the module that has them."""

import argparse
import math
from collections.abc import Callable

from services.cli.arguments import whole


def plan(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    kv = actions.add_parser("kv", help="bytes of a model's keys and values")
    _model(kv)
    kv.add_argument(
        "--tokens", type=whole(1), default=4096, metavar="N", help="of a sequence (default 4096)"
    )
    kv.add_argument(
        "--sequences", type=whole(1), default=1, metavar="N", help="at once (default 1)"
    )
    kv.add_argument(
        "--memory",
        type=_above_0(),
        metavar="GIB",
        help="for keys and values: tells how many tokens and sequences it holds",
    )
    gpus = actions.add_parser("gpus", help="replicas and their speed on some GPUs")
    _model(gpus)
    gpus.add_argument(
        "--gpu",
        required=True,
        metavar="TYPE",
        help="as h100, or GIB:GB_PER_S:TFLOPS of one that is not known by name",
    )
    gpus.add_argument("--gpus", type=whole(1), default=1, metavar="N", help="of them (default 1)")
    gpus.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "fp8", "int8", "int4"),
        help="of the weights (default bfloat16, whatever the checkpoint has)",
    )
    gpus.add_argument(
        "--prompt", type=whole(1), default=1024, metavar="N", help="tokens (default 1024)"
    )
    gpus.add_argument(
        "--output",
        type=whole(1),
        default=256,
        metavar="N",
        help="tokens of an answer (default 256)",
    )
    gpus.add_argument(
        "--max-running",
        type=whole(1),
        default=256,
        metavar="N",
        help="sequences of a replica at once, if its memory holds as many (default 256)",
    )
    gpus.add_argument(
        "--requests-per-s",
        type=_above_0(),
        metavar="RATE",
        help="that are to be answered: tells how many GPUs that takes",
    )
    gpus.add_argument(
        "--efficiency",
        type=_above_0(most=1),
        default=0.75,
        metavar="SHARE",
        help="of the GPU's rates that is reached (default 0.75; 1: what cannot be surpassed)",
    )


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder with its config.json, or a name as llama-3.1-70b"
    )
    parser.add_argument(
        "--kv-format",
        choices=("float32", "bfloat16", "int8", "fp8", "int4"),
        help="of keys and values (default: the checkpoint's, as GPUs and CPUs with AVX512-BF16 "
        "compute in it; other CPUs: float32)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object, in bytes and seconds")


def _above_0(most: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not (0 < value <= most and value < math.inf):
            bounds = f", at most {most:g}" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0{bounds}")
        return value

    return parse
