"""Makes both models from a seed: `python -m models.recipe.make --out models --seed 0`.

Every stage leaves its result in the run folder; started again, the command goes on where it was.
"""

import argparse
from pathlib import Path

import torch

from models.recipe import tokenizer as bpe
from models.recipe.model import Shape
from models.recipe.train import Plan, train

RUNS = Path(__file__).parent / "runs"
SHAPES = {
    "demo": Shape(bpe.VOCABULARY),
    "draft": Shape(bpe.VOCABULARY, hidden=128, inner=384, layers=4, heads=4, kv_heads=2, head_dim=32),
}
POOLS = {"demo": 260, "draft": 130}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for demo/ and demo-draft/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder for checkpoints")
    parser.add_argument("--only", choices=list(SHAPES), help="make one of the two")
    parser.add_argument("--pools", type=int, help="length of the training, in pools of 256 examples")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.runs / str(options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if not path.exists():
        bpe.train(options.seed).save(str(path))
    tokenizer = bpe.load(path)
    for name in [options.only] if options.only else list(SHAPES):
        plan = Plan(options.pools or POOLS[name], options.seed)
        train(SHAPES[name], plan, tokenizer, folder / name, options.device)


if __name__ == "__main__":
    main()
