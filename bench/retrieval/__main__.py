"""What retrieval finds, and what it costs: `python -m bench.retrieval`.

    python -m bench.retrieval [--set FILE ...] [--rankings dense …] [--questions 2000] [--json FILE]

Recall and MRR of each way of ranking over 2,000 questions made up here (made.py), and over those of
files of one's own (sets.py says how they are written), each set in a collection of its own. All
through the service's own calls.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from bench.result_file import result_file
from bench.retrieval import sets
from bench.retrieval.made import QUESTIONS, made
from bench.retrieval.quality import ALL, RANKINGS, measured
from bench.retrieval.served import served


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--set", type=Path, action="append", default=[], help="JSON lines, instead of the made one")
    add("--rankings", nargs="+", choices=RANKINGS, default=list(RANKINGS), help="default: all")
    add("--questions", type=int, default=QUESTIONS, help="of the made set")
    add("--json", type=result_file, help="where all figures go")
    given = parser.parse_args()
    found = asyncio.run(_quality(given))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(*_table(found), sep="\n")
    return 0


async def _quality(given: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = [sets.read(path) for path in given.set] or [made(questions=given.questions)]
    found = []
    async with served() as service:
        for asked in chosen:
            chunks, seconds = await service.index(asked.name, asked.documents)
            _say(
                f"{asked.name}: {len(asked.documents)} documents, {chunks} chunks, {seconds:.0f} s"
            )
            for ranking in given.rankings:
                told = await measured(service, asked.name, asked, ranking)
                figures = {sort: one._asdict() for sort, one in told.items()}
                found.append({"set": asked.name, "ranking": ranking, "figures": figures})
                _say(f"{asked.name}, {ranking}: recall@1 {told[ALL].recall_1:.3f}")
    return found


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| set | questions | ranking | n | recall@1 | recall@5 | MRR |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        for sort, its in one["figures"].items():
            rows.append(
                f"| {one['set']} | {sort} | {one['ranking']} | {its['questions']} "
                f"| {its['recall_1']:.1%} | {its['recall_5']:.1%} | {its['mrr']:.3f} |"
            )
    return rows


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
