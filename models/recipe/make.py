"""Makes both models from a seed: `python -m models.recipe.make --out models --seed 0`.

Tokenizer; a reader that looks both ways; the demo model, told by it and then taught to answer; the
draft model; then evaluation, whose figures go into the model card. Every stage leaves its result in
the run folder; started again, the command goes on where it was. A changed recipe begins a new run.
"""

import argparse
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from models.recipe import begin, evaluate, export
from models.recipe import tokenizer as bpe
from models.recipe.card import begin_anew, card_in, write_figures
from models.recipe.files import alone, replacing, state_of
from models.recipe.lessons import Answers, Draft, Lesson, Reading, Saying, Source, Told
from models.recipe.model import Llama, Shape
from models.recipe.reader import Reader
from models.recipe.swaps import Swaps
from models.recipe.train import Plan, halves, train
from models.recipe.vocabulary import movable

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
    ),
    "draft": Shape(
        bpe.VOCABULARY,
        hidden=96,
        inner=192,
        layers=4,
        heads=4,
        head_dim=32,
        theta=1e9,
        context=4096,
    ),
}
FOLDERS = {"demo": "demo", "draft": "demo-draft"}
PLANS = {
    "reader": Plan(100, 1e-4, 4e-4, (0.2, 0.5)),
    "told": Plan(50, 1e-3, 0.0, (0.1, 0.3), decay_from=0.4),
    "saying": Plan(20, 0.0, 1e-3, (0.6, 0.6)),
    "answers": Plan(120, 1.2e-4, 3.5e-4, (0.6, 0.95), warm_up=40, decay_from=0.35),
    "settling": Plan(16, 0.0, 2e-4, (0.95, 0.95)),
    "draft": Plan(90, 0.0, 2e-3, (0.1, 1.0)),
}

# Sources that shape no weights.
OTHERS = {
    "card.py", "check.py", "evaluate.py", "export.py", "files.py", "ordinary.py", "set_file.py",
    "shown.py",
}  # fmt: skip


def fingerprint() -> str:
    """Changes with every source that shapes the weights, with shapes and with plans."""
    sources = [p for p in sorted(RECIPE.rglob("*")) if p.suffix in (".py", ".jinja", ".txt")]
    text = b"".join(path.read_bytes() for path in sources if path.name not in OTHERS)
    return f"{zlib.crc32(text):08x}"


def made_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a run, trained if there is none yet."""
    if not path.exists():
        with replacing(path) as unfinished:
            bpe.train().save(str(unfinished))
    return Tokenizer.from_file(str(path))


@dataclass
class Run:
    """The stages of a run, each of which needs those before it."""

    folder: Path
    seed: int
    threads: int
    plans: dict[str, Plan]

    def __post_init__(self) -> None:
        self.tokenizer = made_tokenizer(self.folder / "tokenizer.json")
        self.swaps = Swaps.of(self.tokenizer)

    def models(self) -> dict[str, Llama]:
        """All stages."""
        torch.manual_seed(self.seed)
        reader, demo, draft = Reader(self.tokenizer), Llama(SHAPES["demo"]), Llama(SHAPES["draft"])
        moves = movable(self.tokenizer)
        self._learn("reader", Reading(reader), reader)
        self._learn("told", Told(demo, reader), demo, partial(begin.layers, demo))
        self._learn("saying", Saying(demo, moves), demo, partial(begin.heads, demo, reader))
        self._learn("answers", Answers(demo, moves), demo)
        self._learn("settling", Saying(demo, moves), demo)
        self._learn("draft", Draft(draft, moves), draft, partial(begin.draft, draft))
        return {"demo": demo, "draft": draft}

    def _learn(
        self,
        stage: str,
        lesson: Lesson,
        made: nn.Module,
        begins: Callable[[Source], None] = lambda _: None,
    ) -> None:
        """Trains what a stage makes, or takes it from where an earlier start left it. `begins`
        writes what it starts from. What a stage draws does not depend on those before it.
        """
        done, checkpoint = self.folder / f"{stage}.done.pt", self.folder / f"{stage}.pt"
        if not done.exists():
            context = SHAPES["demo"].context
            source = Source(self.tokenizer, self.swaps, f"{self.seed}/{stage}", context)
            torch.manual_seed(zlib.crc32(source.seed.encode()))
            if not checkpoint.exists():
                begins(source)
            train(lesson, self.plans[stage], source, checkpoint, self.threads, halves())
            with replacing(done) as unfinished:
                torch.save(made.state_dict(), unfinished)
        made.load_state_dict(state_of(done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"), help="gets demo/, demo-draft/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=evaluate.at_least_one, default=2)
    parser.add_argument(
        "--runs", type=Path, default=Path("build/model"), help="folder for checkpoints"
    )
    parser.add_argument(
        "--count", type=evaluate.at_least_one, default=200, help="test conversations per skill"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # each thread of the training runs its own part of a step
    folder = options.runs / f"{options.seed}-{fingerprint()}"
    demo, draft = (options.out / FOLDERS[name] for name in ("demo", "draft"))
    with alone(options.out), alone(folder):
        card = card_in(demo)
        run = Run(folder, options.seed, options.threads, PLANS)
        models = run.models()
        begin_anew(card, options.seed)  # first: else they may stand under figures of others
        for name, model in models.items():
            export.save(model, run.tokenizer, options.out / FOLDERS[name])
        torch.set_num_threads(options.threads)
        write_figures(card, evaluate.table(demo, draft, options.count))


if __name__ == "__main__":
    main()
