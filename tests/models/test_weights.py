"""The shipped weights: form, size, agreement with transformers, and a floor under each skill."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from models.recipe.evaluate import (
    ANSWER,
    SKILLS,
    Writer,
    agreement,
    measure,
)
from models.recipe.export import load
from models.recipe.model import QUERIES, Llama
from services.tokenizer.checkpoints.own_sampling import read_own

ROOT = Path(__file__).parents[2]
DEMO, DRAFT = ROOT / "models/demo", ROOT / "models/demo-draft"


@cache
def loaded(folder: Path) -> tuple[Llama, Tokenizer]:
    return load(folder)


def test_sizes() -> None:
    demo, draft = (sum(p.numel() for p in loaded(f)[0].parameters()) for f in (DEMO, DRAFT))
    assert 16e6 <= demo <= 24e6
    assert draft <= demo / 4
    assert sum((f / "model.safetensors").stat().st_size for f in (DEMO, DRAFT)) <= 48e6
    assert json.loads((DEMO / "config.json").read_text())["max_position_embeddings"] >= 4096
    assert (DEMO / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("folder", [DEMO, DRAFT])
def test_logits_equal_those_of_transformers(folder: Path) -> None:
    ours, _ = loaded(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(
        0, ours.shape.vocab, (2, 2 * QUERIES + 5), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("folder", [DEMO, DRAFT])
def test_a_request_that_names_no_temperature_gets_the_likeliest_tokens(folder: Path) -> None:
    assert read_own(folder) == {"temperature": 0}


def test_generates_through_transformers() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to 5."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=40)
    said = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said == "1, 2, 3, 4, 5"


# One conversation and a little below what they were measured at, for another CPU's rounding.
FLOORS = {
    "passages": 55,
    "large": 30,
    "not_told": 60,
    "recall": 88,
    "not_stated": 85,
    "json": 55,
    "json_of_prose": 17,
    "tools": 80,
    "tool_result": 95,
    "no_tool": 92,
    "short": 52,
    "about": 85,
    "talk": 77,
    "long": 30,
    "bare": 87,
    "vain": 87,
}
# Of the others 40; of 20 chance was as large as a skill.
COUNTS = {"recall": 60, "long": 20, "passages": 60}


@pytest.mark.parametrize("skill", FLOORS)
def test_skill_holds_its_floor(skill: str) -> None:
    model, tokenizer = loaded(DEMO)
    assert measure(model, tokenizer, skill, COUNTS.get(skill, 40)) >= FLOORS[skill]


def test_draft_agrees() -> None:
    assert agreement(Writer(DEMO), loaded(DRAFT)[0], SKILLS, 3, ANSWER) >= 75


def passages_of(source: str) -> list[dict[str, str]]:
    """An example document cut at its blank lines, each piece titled with the document's heading."""
    title, *parts = re.split(r"\n\n", (ROOT / "examples/documents" / source).read_text().strip())
    texts = [part for part in parts if not part.startswith("#")]
    return [{"title": title.removeprefix("# "), "text": text.replace("\n", " ")} for text in texts]


EXAMPLES_FLOOR = 0.9  # share of the questions about the example documents that must be answered


def test_answers_questions_about_the_example_documents() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    lines = (ROOT / "examples/questions.jsonl").read_text().splitlines()
    right = 0
    for line in map(json.loads, lines):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": line["question"]}],
            documents=passages_of(line["source"] or "bakery.md"),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        made = model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
        right += line["answer"] in tokenizer.decode(made, skip_special_tokens=True)
    assert right >= EXAMPLES_FLOOR * len(lines), f"{right} of {len(lines)}"


VAIN = [
    "Who is in charge of the Bristol office?", "Who is the plumber?", "Which firm does the roof?",
    "Who must I ring when I am sick?", "What is the wifi password?", "When does the harbour open?",
]  # fmt: skip


def test_where_no_passage_was_found_it_says_so_and_greets_all_the_same() -> None:
    writer, template = Writer(DEMO), transformers.AutoTokenizer.from_pretrained(DEMO)

    def said(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        prompt = template.apply_chat_template(
            turns, documents=[], add_generation_prompt=True, tokenize=False
        )
        ids = writer.tokenizer.encode(prompt, add_special_tokens=False).ids
        return str(writer.tokenizer.decode(writer.write(ids, 40)))

    assert {said(question) for question in VAIN} == {"The documents do not say."}
    assert said("hello").startswith("Hello!")
    assert said("What is Penstock?").startswith("Penstock is a platform")
