"""Makes both models from a seed: `python -m models.recipe.make --out models --seed 0`.

Tokenizer, demo model, draft model, then evaluation, whose figures go into the model card. Every
stage leaves its result in the run folder; started again, the command goes on where it was. A
changed recipe begins a new run.
"""

import argparse
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.recipe import evaluate, export
from models.recipe import tokenizer as bpe
from models.recipe.model import Shape
from models.recipe.train import Plan, train

RECIPE = Path(__file__).parent
SHAPES = {
    "demo": Shape(
        bpe.VOCABULARY,
        hidden=448,
        inner=704,
        layers=7,
        heads=14,
        head_dim=32,
        theta=1e9,
        context=4096,
        biased=True,
    ),
    "draft": Shape(bpe.VOCABULARY, hidden=96, inner=192, layers=6, heads=6, head_dim=16),
}
FOLDERS = {"demo": "demo", "draft": "demo-draft"}
PLANS = {
    "demo": Plan(150, distilled=12, layer_rate=3e-4, step_tokens=3072),
    "draft": Plan(120),
}


def fingerprint() -> str:
    """Changes with every source that shapes the weights."""
    others = {"make.py", "evaluate.py", "export.py", "ordinary.py"}
    sources = [p for p in sorted(RECIPE.rglob("*")) if p.suffix in (".py", ".jinja", ".txt")]
    text = b"".join(path.read_bytes() for path in sources if path.name not in others)
    return f"{zlib.crc32(text):08x}"


def made_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a run, trained if there is none yet."""
    if not path.exists():
        partial = path.with_suffix(".tmp")
        bpe.train().save(str(partial))
        partial.replace(path)
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"), help="gets demo/, demo-draft/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=2, help="on a CPU; a step has work for two, late for four"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--runs", type=Path, default=Path("build/model"), help="folder for checkpoints"
    )
    parser.add_argument("--count", type=int, default=200, help="test conversations per skill")
    options = parser.parse_args()
    torch.set_num_threads(1)  # each thread of the training runs its own part of a step
    folder = options.runs / f"{options.seed}-{fingerprint()}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = made_tokenizer(folder / "tokenizer.json")
    models = {
        name: train(
            shape,
            replace(PLANS[name], seed=options.seed),
            tokenizer,
            folder / name,
            options.device,
            options.threads if options.device == "cpu" else 1,
        )
        for name, shape in SHAPES.items()
    }
    for name, model in models.items():  # both at once: they share a tokenizer
        export.save(model, tokenizer, options.out / FOLDERS[name])
    demo, draft = (options.out / FOLDERS[name] for name in ("demo", "draft"))
    evaluate.write_card(demo / "README.md", evaluate.table(demo, draft, options.count))


if __name__ == "__main__":
    main()
