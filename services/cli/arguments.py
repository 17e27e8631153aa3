"""What each command takes. Imports next to nothing: help and wrong arguments are told at once."""

import argparse
from collections.abc import Callable
from pathlib import Path

SORTS = ("role", "kv", "running", "waiting", "tokens")


def up(parser: argparse.ArgumentParser) -> None:
    _stack(parser)
    parser.add_argument(
        "--port",
        type=whole(0, 65535),
        help="HTTP port (default 8000; 0: a free one); gRPC: the next",
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="deploy on the Ray cluster with this address (HOST:PORT, or auto: the one that this "
        "host is a node of) instead of starting one",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="with --address: leave it up and return; `penstock down` ends it",
    )


def down(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default="auto",
        metavar="ADDRESS",
        help="of the Ray cluster (default auto: the one that this host is a node of)",
    )


def demo(parser: argparse.ArgumentParser) -> None:
    _stack(parser)
    parser.add_argument(
        "--documents",
        type=Path,
        default=Path("examples/documents"),
        metavar="DIR",
        help="answer from this folder's documents, of any kind that can be uploaded; those below "
        "it are left out (default examples/documents)",
    )
    parser.add_argument(
        "--question",
        metavar="TEXT",
        help="ask this (default: the first of questions.jsonl beside the folder)",
    )


def chat(parser: argparse.ArgumentParser) -> None:
    _server(parser)
    parser.add_argument("--model", help="default: the first that is served")
    parser.add_argument("--system", help="a system message")
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="VECTOR_STORE_ID",
        help="answer from this vector store's files, may be repeated",
    )
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("message", nargs="*", help="ask this once and leave")


def index(parser: argparse.ArgumentParser) -> None:
    _server(parser)
    parser.add_argument(
        "folder", type=_folder, metavar="DIR", help="its files, and those of folders in it"
    )
    parser.add_argument(
        "--store",
        required=True,
        type=_name,
        metavar="NAME",
        help="name or id; made where there is none",
    )
    parser.add_argument(
        "--embedder",
        default="",
        metavar="MODEL",
        help="embedding model of a store that is made; one that is there must have it",
    )
    parser.add_argument(
        "--prune", action="store_true", help="remove from the store what left the folder"
    )
    parser.add_argument(
        "--watch", action="store_true", help="stay, and take what changes, until Ctrl-C"
    )
    parser.add_argument(
        "--json", action="store_true", help="what became of each file, an object a round"
    )


def status(parser: argparse.ArgumentParser) -> None:
    """None: it looks where the settings point, or at the Penstock of this data directory."""


def drain(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--replica", metavar="ID", help="this one, as `penstock status` lists it")
    which.add_argument(
        "--node", metavar="HOST", help="those at this address (default: those of this host)"
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="until they run nothing any more, each service after those that call it",
    )


def probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "service",
        nargs="?",
        choices=["gateway", "retrieval", "tokenizer", "router", "worker"],
        default="gateway",
        help="default gateway, which answers when all that it needs does",
    )


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON list of all findings")
    parser.add_argument("--strict", action="store_true", help="warnings fail, too (exit code 1)")


def top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="between two looks (default 2)",
    )
    parser.add_argument(
        "--once", action="store_true", help="look twice, an interval apart, print it and leave"
    )
    parser.add_argument(
        "--sort",
        choices=SORTS,
        default=SORTS[0],
        help=f"order of the workers; the key s changes it (default {SORTS[0]})",
    )


def quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a checkpoint's folder or id of the hub, or a GGUF file"
    )
    parser.add_argument(
        "--format",
        choices=("int8", "int4", "fp8", "w8a8"),
        required=True,
        help="int8, fp8: a scale for each row; int4: one for each 32 of a row; w8a8: as int8, and "
        "so is what meets them, with a scale for each token",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is made")


def policy(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    test = actions.add_parser("test", help="read a policy file and run its rules' tests")
    test.add_argument("file", type=Path, metavar="FILE", help="as PENSTOCK_POLICY__FILE names it")


def models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="what is served, starts or leaves")
    add = actions.add_parser("add", help="start a model's workers; returns when it is served")
    add.add_argument("path", metavar="DIR_OR_HF_ID", help="its checkpoint, or a GGUF file")
    add.add_argument("--name", help="what requests call it (default: the path's last part)")
    _pools(add)
    add.add_argument(
        "--worker",
        metavar="JSON",
        help="""settings of its workers in place of PENSTOCK_WORKER__..., as '{"threads": 2}'""",
    )
    add.add_argument(
        "--adapter-of",
        metavar="MODEL",
        help="the path is of an adapter (LoRA) for a model that is served, whose workers load it",
    )
    remove = actions.add_parser(
        "remove",
        help="end a model's workers, or have them drop an adapter; its requests finish first",
    )
    remove.add_argument("name", help="as listed")


def _stack(parser: argparse.ArgumentParser) -> None:
    """What `up` and `demo` share."""
    parser.add_argument(
        "--profile",
        choices=["laptop"],
        default="laptop",
        help="laptop: this machine alone, on its CPU unless PENSTOCK_WORKER__DEVICE names another "
        "device; in bfloat16 if the checkpoint is and the CPU has AVX512-BF16, else in float32",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="DIR_OR_HF_ID",
        help="checkpoint to serve, or a GGUF file; may be repeated (default: the shipped model)",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="adapter of the model (the peft library's files), which requests use by that name; "
        "may be repeated. For several models: their `adapters` in PENSTOCK_MODELS",
    )
    parser.add_argument(
        "--quantization",
        choices=("auto", "int8", "int4", "fp8", "w8a8"),
        help="of the weights of all models that do not say so themselves; int8, int4, fp8, w8a8: "
        "rounded when they are loaded, but for what has as few bits; auto: as the checkpoint has "
        "them (default PENSTOCK_WORKER__QUANTIZATION, else auto)",
    )
    parser.add_argument(
        "--kv-format",
        choices=("auto", "int8", "fp8", "int4"),
        help="of keys and values of all models that do not say so themselves; int8, fp8: some half "
        "of bfloat16's bytes; int4: some quarter; auto: as they are computed (default "
        "PENSTOCK_WORKER__KV_FORMAT, else auto)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=whole(1, 64),
        metavar="N",
        help="ranks over which each worker cuts its model, for all models that do not say so "
        "themselves: on a GPU each, or on a CPU (default PENSTOCK_WORKER__TENSOR_PARALLEL, else 1)",
    )
    _pools(parser)


def _pools(parser: argparse.ArgumentParser) -> None:
    """How many workers a model has."""
    parser.add_argument(
        "--prefill",
        type=whole(0),
        metavar="N",
        help="prefill workers of a model that names no pools; 0: the decode workers do both "
        "(default PENSTOCK_WORKER__REPLICAS, else 1)",
    )
    parser.add_argument(
        "--decode",
        type=whole(1),
        metavar="N",
        help="decode workers of such a model (default likewise)",
    )


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="default: the Penstock that runs with this data directory")
    parser.add_argument("--key", help="API key (default: PENSTOCK_API_KEY, or the laptop's own)")
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="authorities that the server's certificate may be of, PEM (default: the system's)",
    )


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def _name(text: str) -> str:
    if not text.strip():  # it would be that of every store without a name
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    """An argument's type: a whole number within bounds."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not least <= int(text) <= most:
            told = most < 2**31 or len(text) > 9
            bounds = f"from {least} to {most}" if told else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return parse
