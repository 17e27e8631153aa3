"""`python -m models.recipe.bank.check FILE…`: checks files of the bank, and shows samples of each.

What is wrong is printed by file and line, and makes the exit status 1; warnings do not.
"""

import argparse
import random
import sys
from pathlib import Path

from models.recipe.bank import compose, documents, relations, subjects, talk
from models.recipe.bank.render import Bindings, render
from models.recipe.bank.text import BankError, definitions

DRAWS = 25  # renderings of each document that are tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=None, help="of the samples")
    parser.add_argument("--samples", type=int, default=2, help="of each file")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    wrong = 0
    for path in options.files:
        print(f"=== {path}")
        try:
            errors = _checked(path, rng, options.samples)
        except (BankError, OSError) as failure:
            errors = str(failure).split("\n")
        except UnicodeDecodeError as failure:
            errors = [f"{path.name}: not UTF-8: {failure.reason}"]
        for error in errors:
            print("ERROR", error)
        wrong += len(errors)
    sys.exit(1 if wrong else 0)


def _checked(path: Path, rng: random.Random, samples: int) -> list[str]:
    folder = path.resolve().parent.name
    if folder not in CHECKS:
        raise BankError(f"{path.name}: the bank's files are in {', '.join(CHECKS)}")
    return CHECKS[folder](path, rng, samples)


def check_documents(path: Path, rng: random.Random, samples: int) -> list[str]:
    """What is wrong with a file of documents; prints samples and warnings."""
    templates = documents.read(path)
    errors: list[str] = []
    for template in templates:
        errors += _tried(template, rng)
        _warn(template)
    if errors:
        return errors
    for template in rng.sample(templates, min(samples, len(templates))):
        print(f"--- {path.name}:{template.line}\n{_sample(template, rng)}")
    told = sum(len(template.told) for template in templates)
    untold = sum(len(template.untold) for template in templates)
    print(f"--- {len(templates)} documents, {told} told questions, {untold} not told")
    return errors


def _tried(template: documents.Template, rng: random.Random) -> list[str]:
    """Errors that show only when the document is filled in."""
    errors: dict[str, None] = {}
    for _ in range(DRAWS):
        filled = None
        for question in template.questions:
            where = f"{template.file}:{question.line}"
            try:
                filled = filled or template.filled(rng, held_out=False)
                for wording in question.wordings:
                    filled.ask(wording)
                if question.answer and not filled.found(question):
                    errors[f"{where}: the answer is not in the text"] = None
            except BankError as error:
                errors[f"{where}: {error}"] = None
                break
    return list(errors)[:3]


def _warn(template: documents.Template) -> None:
    where = f"{template.file}:{template.line}"
    if not 3 <= len(template.told) <= 12:
        print(f"WARNING {where}: {len(template.told)} told questions")
    if len(template.untold) < 2:
        print(f"WARNING {where}: {len(template.untold)} not told questions")
    for slot in template.definitions.values():
        if slot.choices and len(slot.choices) < 4:
            print(f"WARNING {where}: {{{slot.name}}} has {len(slot.choices)} choices, not four")
    for question in template.told:
        if len(question.wordings) < 2:
            print(f"WARNING {template.file}:{question.line}: one wording alone")


def _sample(template: documents.Template, rng: random.Random) -> str:
    filled = template.filled(rng, held_out=False)
    lines = [f"# {filled.title}", filled.body.text, ""]
    for question in template.questions:
        asked = filled.ask(rng.choice(question.wordings)).text
        if question.answer:
            start, end = filled.found(question)[0]
            lines.append(f"{asked} -> {filled.body.text[start:end]}")
        else:
            lines.append(f"{asked} -> (not told)")
    return "\n".join(lines)


def check_relations(path: Path, rng: random.Random, samples: int) -> list[str]:
    """What is wrong with a file of relations; prints samples."""
    kinds = relations.read(path)
    errors: dict[str, None] = {}
    for kind in kinds:
        for one in kind.relations:
            try:
                _tried_relation(kind, one, rng)
            except (BankError, KeyError) as error:
                errors[f"{path.name}:{one.line}: {error}"] = None
    if errors:
        return list(errors)
    for kind in kinds:
        told = sum(len(one.full) + len(one.short) for one in kind.relations)
        print(f"--- {kind.name}: {len(kind.relations)} relations, {told} statements")
    for _ in range(samples):
        kind = rng.choice(kinds)
        subject = subjects.Subject.drawn(rng, kind, False, set())
        some = rng.sample(kind.relations, min(5, len(kind.relations)))
        made = compose.composed(rng, subject, some)
        print(f"--- {path.name}:{kind.line}\n{made.body.text}\n")
        for one in some:
            text = rng.choice(one.asks)
            asked = render(text, subject.within(one, rng, text)).text
            print(f"{asked} -> {subject.facts[one.name]}")
    return []


def _tried_relation(kind: relations.Kind, one: relations.Relation, rng: random.Random) -> None:
    """Renders every text. Raises BankError or KeyError."""
    for text in (*one.full, *one.short, *one.asks, *one.finds):
        subject = subjects.Subject.drawn(rng, kind, False, set())
        render(text, subject.within(one, rng, text))
        for start in ("it's", "its its", "a the", "the the", "  "):
            if start in (shown := render(text, subject.within(one, rng, text)).text.lower()):
                print(f"WARNING {kind.file}:{one.line}: {start!r} in {shown!r}")


def check_talk(path: Path, rng: random.Random, samples: int) -> list[str]:
    """What is wrong with a file of talk; prints samples."""
    for one in rng.sample(found := talk.read(path), min(samples, len(found))):
        asked, answered = rng.choice(one.asks), rng.choice(one.answers)
        bindings = Bindings(rng, definitions(asked, answered))
        print(f"--- {render(asked, bindings).text} -> {render(answered, bindings).text}")
    return []


CHECKS = {"documents": check_documents, "relations": check_relations, "talk": check_talk}

if __name__ == "__main__":
    main()
