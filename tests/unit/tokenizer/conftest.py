"""Served models made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.common_pb2 import Message, Passage
from services.common.text.content import said
from services.tokenizer.checkpoints.models import ServedModel, load
from tests.support.served import checkpoint_of
from tests.support.tokenizers import CHAT_TEMPLATE, write_tokenizer

MakeModel = Callable[..., ServedModel]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a model from a window and a chat template."""

    def make(window: int = 512, chat_template: str | None = CHAT_TEMPLATE) -> ServedModel:
        folder: Path = tmp_path_factory.mktemp("model")
        write_tokenizer(folder, chat_template=chat_template)
        config = {"max_position_embeddings": window, "vocab_size": 320}
        (folder / "config.json").write_text(json.dumps(config))
        return load(checkpoint_of(folder, "tiny"))

    return make


@pytest.fixture(scope="session")
def model(make_model: MakeModel) -> ServedModel:
    return make_model()


def messages(*turns: tuple[str, str]) -> list[Message]:
    return [said(role, content) for role, content in turns]


def passages(*texts: str) -> list[Passage]:
    return [Passage(title=f"Title {n}", text=text) for n, text in enumerate(texts, 1)]
