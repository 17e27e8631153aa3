"""What retrieval finds, and what it costs: `python -m bench.retrieval quality`, and `--help`."""

import argparse
import json
import sys

from bench.result_file import result_file
from bench.retrieval import answers, chats, followups, indexing, jobs, quality, speed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    whats = parser.add_subparsers(metavar="WHAT", required=True)
    for module in (quality, followups, speed, indexing, jobs, chats, answers):
        name = module.__name__.rpartition(".")[-1]
        what = whats.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(what)
        what.add_argument("--json", type=result_file, help="where all figures go")
        what.set_defaults(run=module.run)
    given = parser.parse_args()
    found, table = given.run(given)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(*table, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
