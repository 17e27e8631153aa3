"""Makes both models from a seed: `python -m models.recipe.make --out models --seed 0 --threads 2`.

Tokenizer, demo model, draft model, then evaluation. Every stage leaves its result in the run
folder; started again, the command goes on where it was. `--pools` longer than before trains on.
"""

import argparse
import os
from pathlib import Path

import torch

from models.recipe import evaluate, export
from models.recipe import tokenizer as bpe
from models.recipe.model import Shape
from models.recipe.train import Plan, train

RUNS = Path(__file__).parent / "runs"
SHAPES = {
    "demo": Shape(bpe.VOCABULARY),
    "draft": Shape(
        bpe.VOCABULARY, hidden=128, inner=384, layers=4, heads=4, kv_heads=2, head_dim=32
    ),
}
FOLDERS = {"demo": "demo", "draft": "demo-draft"}
POOLS = {"demo": 300, "draft": 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"), help="gets demo/, demo-draft/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder for checkpoints")
    parser.add_argument("--only", choices=list(SHAPES), help="make one of the two")
    parser.add_argument("--pools", type=int, help="length of the training, in pools of examples")
    parser.add_argument("--count", type=int, default=200, help="test conversations per skill")
    options = parser.parse_args()
    torch.set_num_threads(1)  # each thread of the training runs its own part of a step
    folder = options.runs / str(options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if not path.exists():
        bpe.train(options.seed).save(str(path))
    tokenizer = bpe.load(path)
    for name in [options.only] if options.only else list(SHAPES):
        plan = Plan(options.pools or POOLS[name], options.seed)
        model = train(SHAPES[name], plan, tokenizer, folder / name, options.device, options.threads)
        export.save(model, tokenizer, options.out / FOLDERS[name])
    if options.count:
        draft = options.out / FOLDERS["draft"]
        made = draft if (draft / "config.json").exists() else None
        evaluate.table(options.out / FOLDERS["demo"], options.count, made)


if __name__ == "__main__":
    main()
