"""What share of small wrong changes the tests notice: `make mutants [FILES=...]`, by mutmut.

Files and tests are chosen in pyproject.toml, [tool.mutmut]. A mutant that runs until its time is
over counts as caught. For mutmut's runs of pytest this module is a plugin as well.
"""

import subprocess
import sys
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, Phase, settings

MUTMUT = (sys.executable, "-m", "mutmut")

# Only whether a test fails is asked: no search for the smallest example, and no luck.
settings.register_profile(
    "mutants",
    phases=[Phase.explicit, Phase.generate],
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first: the first that fails ends a mutant."""
    items.sort(key=lambda item: hasattr(getattr(item, "obj", None), "hypothesis"))


def main(files: list[str]) -> int:
    """`files`: paths, or patterns of paths; none: all that are chosen."""
    patterns = [file.removesuffix(".py").replace("/", ".") + ".*" for file in files]
    run = subprocess.run([*MUTMUT, "run", "--max-children", "2", *patterns], check=False)
    if run.returncode:
        return run.returncode
    results = subprocess.run(
        [*MUTMUT, "results", "--all", "true"], check=True, capture_output=True, text=True
    )
    report(results.stdout)
    return 0


def report(results: str) -> None:
    """`results`: a line "name: status" for each mutant."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in results.splitlines():
        name, _, status = line.strip().partition(": ")
        if status in ("", "not checked"):
            continue
        module = name.rpartition(".")[0]
        counts[module]["all"] += 1
        if status in ("killed", "timeout"):
            counts[module]["caught"] += 1
        else:
            print(f"{status}: {name}")
    print("\n`.venv/bin/python -m mutmut show NAME` shows one of them.\n")
    for module, count in counts.items():
        share = count["caught"] / count["all"]
        print(f"{module:45} {count['caught']:4} of {count['all']:4} caught, {share:.0%}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
