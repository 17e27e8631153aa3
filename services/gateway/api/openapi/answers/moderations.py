"""Answers of moderations."""

from typing import Literal

from typing_extensions import TypedDict

from services.gateway.api.openapi.answers.common import Priced


class Moderation(TypedDict):
    """By category: OpenAI's, and those of the operator's rules. One that no rule is for is false,
    and has no input types."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class ModerationExtension(Priced):
    """`policy`: the version of the rules. `judged`: the categories that there are rules of."""

    request_id: str
    policy: str
    judged: list[str]


class Moderations(TypedDict):
    """A result for each text."""

    id: str
    model: Literal["policy"]
    results: list[Moderation]
    penstock: ModerationExtension
