"""Renders a conversation with the model's own chat template, as Hugging Face's tokenizers do."""

import json
from functools import cache
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.recipe.conversation import Conversation

SOURCE = Path(__file__).with_name("chat_template.jinja")


@cache
def template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(SOURCE.read_text())


def render(conversation: Conversation, prompt: bool = False) -> str:
    """The text of a whole conversation, or of its prompt up to the graded answer."""
    return template().render(
        messages=conversation.prompt() if prompt else conversation.messages,
        tools=conversation.tools or None,
        documents=conversation.documents or ([] if conversation.searched else None),
        add_generation_prompt=prompt,
    )
