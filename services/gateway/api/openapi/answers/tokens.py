"""Answers about tokens."""

from typing import Literal

from typing_extensions import TypedDict


class Tokenized(TypedDict):
    """`max_model_len`: the model's window."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(TypedDict):
    prompt: str


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenCount(TypedDict):
    input_tokens: int
