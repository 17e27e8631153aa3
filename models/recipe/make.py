"""Makes both models from a seed: `python -m models.recipe.make --out models --seed 0`.

Tokenizer, demo model, draft model, then evaluation, whose figures the model card gets. Every stage
leaves its result in the run folder; started again, the command goes on where it was. A changed
recipe begins a new run.
"""

import argparse
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.recipe import evaluate, export
from models.recipe import tokenizer as bpe
from models.recipe.model import Shape
from models.recipe.train import Plan, train

RECIPE = Path(__file__).parent
SHAPES = {
    "demo": Shape(bpe.VOCABULARY),
    "draft": Shape(bpe.VOCABULARY, hidden=128, inner=384, layers=4, heads=4, head_dim=32),
}
FOLDERS = {"demo": "demo", "draft": "demo-draft"}
POOLS = {"demo": 260, "draft": 120}


def fingerprint() -> str:
    """Changes with every source that shapes the weights."""
    others = {"make.py", "evaluate.py", "export.py"}
    sources = [p for p in sorted(RECIPE.rglob("*")) if p.suffix in (".py", ".jinja")]
    text = b"".join(path.read_bytes() for path in sources if path.name not in others)
    return f"{zlib.crc32(text):08x}"


def made_tokenizer(path: Path, seed: int) -> Tokenizer:
    """The tokenizer of a run, trained if there is none yet."""
    if not path.exists():
        partial = path.with_suffix(".tmp")
        bpe.train(seed).save(str(partial))
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
    tokenizer = made_tokenizer(folder / "tokenizer.json", options.seed)
    models = {
        name: train(
            shape,
            Plan(POOLS[name], options.seed),
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
    figures = evaluate.table(demo, draft, options.count)
    if (card := demo / "README.md").exists():
        evaluate.write_card(card, figures)


if __name__ == "__main__":
    main()
