"""A Dockerfile as its stages, and what a build sees of a folder."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from docker.utils import exclude_paths


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest of it

    def said(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    @property
    def environment(self) -> dict[str, str]:
        words = [word for rest in self.said("ENV") for word in shlex.split(rest)]
        return dict(word.split("=", 1) for word in words)


def stages(text: str) -> dict[str, Stage]:
    """In their order; the last one, which may have no name, is called "" then."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found: dict[str, Stage] = {}
    stage = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, called = rest.partition(" AS ")
            stage = found[called] = Stage(called, base)
        elif stage is not None:
            stage.steps.append((name, rest.strip()))
    return found


def steps_of(name: str, of: dict[str, Stage]) -> list[tuple[str, str]]:
    """All that made an image: the steps of its bases first."""
    stage = of[name]
    return [*(steps_of(stage.base, of) if stage.base in of else []), *stage.steps]


def exec_form(rest: str) -> list[str]:
    """`["tini", "--", …]` as a list, whatever options stand before it."""
    words: list[str] = json.loads(rest[rest.index("[") :])
    return words


def build_context(root: Path) -> set[str]:
    """The files below `root` that its .dockerignore leaves to a build."""
    patterns = (root / ".dockerignore").read_text().splitlines()
    lines = [line for line in patterns if line and not line.startswith("#")]
    seen = exclude_paths(str(root), lines) - {".dockerignore"}  # which goes along, but not in
    return {name for name in seen if (root / name).is_file()}
