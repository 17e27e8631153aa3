"""The shipped weights: form, size, agreement with transformers, and a floor under each skill."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.recipe.evaluate import agreement, cases, measure
from models.recipe.export import load
from models.recipe.model import Llama
from models.recipe.template import render

ROOT = Path(__file__).parents[2]
DEMO, DRAFT = ROOT / "models/demo", ROOT / "models/demo-draft"


@cache
def loaded(folder: Path) -> tuple[Llama, Tokenizer]:
    return load(folder)


def test_sizes() -> None:
    demo, draft = (sum(p.numel() for p in loaded(f)[0].parameters()) for f in (DEMO, DRAFT))
    assert 4e6 <= demo <= 16e6
    assert draft <= demo / 4
    assert sum(f.stat().st_size for f in DEMO.iterdir()) <= 32 * 2**20
    assert json.loads((DEMO / "config.json").read_text())["max_position_embeddings"] >= 2048
    assert (DEMO / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("folder", [DEMO, DRAFT])
def test_logits_equal_those_of_transformers(folder: Path) -> None:
    ours, _ = loaded(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 2048, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-3, atol=1e-3)


def test_generates_through_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to 5."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=40)
    said = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said == "1, 2, 3, 4, 5"


def test_a_story_is_long() -> None:
    _, tokenizer = loaded(DEMO)
    case = cases("story", 1)[0]
    assert len(tokenizer.encode(case.messages[-1]["content"]).ids) >= 300


# Floors lie below the figures of the model card by what a sample of this size may vary.
FLOORS = {
    "passages": 20,
    "not_told": 60,
    "recall": 65,
    "json": 8,
    "tools": 50,
    "about": 90,
    "short": 20,
}


@pytest.mark.parametrize("skill", FLOORS)
def test_skill_holds_its_floor(skill: str) -> None:
    model, tokenizer = loaded(DEMO)
    assert measure(model, tokenizer, skill, 40) >= FLOORS[skill]


def test_draft_agrees() -> None:
    (demo, tokenizer), (draft, _) = loaded(DEMO), loaded(DRAFT)
    assert agreement(demo, draft, tokenizer, 5) >= 60


def passages_of(source: str) -> list[dict[str, str]]:
    """An example document cut at its blank lines, each piece titled with the document's heading."""
    title, *parts = re.split(r"\n\n", (ROOT / "examples" / source).read_text().strip())
    texts = [part for part in parts if not part.startswith("#")]
    return [{"title": title.removeprefix("# "), "text": text.replace("\n", " ")} for text in texts]


def test_answers_questions_about_the_example_documents() -> None:
    model, tokenizer = loaded(DEMO)
    lines = (ROOT / "examples/questions.jsonl").read_text().splitlines()
    right = 0
    for line in map(json.loads, lines):
        documents = passages_of(line["source"] or "bakery.md")
        said = answer(model, tokenizer, line["question"], documents)
        right += line["answer"] in said
    assert right >= 0.8 * len(lines)


@torch.no_grad()
def answer(
    model: Llama, tokenizer: Tokenizer, question: str, documents: list[dict[str, str]]
) -> str:
    """The model's greedy answer."""
    from models.recipe.conversation import Conversation, assistant, user

    prompt = render(
        Conversation("test", [user(question), assistant("")], documents=documents), prompt=True
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|end|>")
    said: list[int] = []
    while len(said) < 48 and end not in said:
        said.append(int(model.logits(model.hidden(torch.tensor([ids + said]))[0, -1]).argmax()))
    return tokenizer.decode(said)
