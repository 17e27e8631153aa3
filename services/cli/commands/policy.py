"""`penstock policy test FILE`: whether it is a policy, whose rules do what their tests say."""

import argparse
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from services.cli.console import console, folding_table
from services.common.config import Settings
from services.common.policy import read_policy
from services.common.policy.trial import Case, Embed, trial

_SHOWN = 80  # characters of a text


def main(arguments: argparse.Namespace) -> int:
    rules = read_policy(arguments.file).rules
    cases = list(trial(rules, _embed() if rules.by_meaning else None))
    out = console()
    if failed := [case for case in cases if not case.passed]:
        out.print(_failures(failed))
    tried = Counter(case.rule for case in cases)
    untested = [rule.name for rule in rules.spec.rules if not tried[rule.name]]
    if untested:
        out.print(f"without tests: {', '.join(untested)}")
    out.print(
        f"{arguments.file}, version {rules.version}: {_count(len(rules.spec.rules), 'rule')}, "
        f"{_count(len(cases), 'case')}, {len(failed)} failed"
    )
    return 1 if failed else 0


def _failures(failed: Sequence[Case]) -> Table:
    table = folding_table("rule", "place", "should", "text", title="Failed")
    for case in failed:
        text = case.text if len(case.text) <= _SHOWN else case.text[:_SHOWN] + "…"
        table.add_row(case.rule, case.place, "match" if case.wanted else "pass", text)
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _embed() -> Embed:
    """With the model that retrieval has by the settings here."""
    from services.retrieval.embedding_model import EmbeddingModel

    model = EmbeddingModel.load(Settings().retrieval.embedding_model)

    def embed(texts: Sequence[str]) -> list[list[float]]:
        vectors = model.encode([model.reader.query(text).ids for text in texts])
        return [[float(value) for value in vector] for vector in vectors]

    return embed
