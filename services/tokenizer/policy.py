"""The policy on what goes in: rules of patterns, checked before anything reaches the router.

Rules come from the settings (`tokenizer.policy_rules` and `tokenizer.policy_file`); docs/policy.md
shows how. Patterns are RE2's, so that a check takes time linear in the text, whatever the pattern
and the text are; Python's `re` can take exponential time, which a thread cannot be stopped from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import re2
from pydantic import TypeAdapter, ValidationError

from protos.tokenizer_pb2 import Pool, PromptRequest
from services.common.config import PolicyRule, TokenizerSettings
from services.common.content import text_of
from services.common.errors import PenstockError, invalid


class PolicyRefusalError(PenstockError):
    """INVALID_ARGUMENT, reason "content_policy"; names the rule and the field, not the text."""

    def __init__(self, rule: str, param: str) -> None:
        base = invalid(f"refused by the content policy, rule {rule!r}", param)
        super().__init__(base.code, base.message, param=param, reason="content_policy")
        self.rule = rule


@dataclass(frozen=True)
class _Rule:
    name: str
    roles: frozenset[str]
    pattern: Any  # a compiled RE2 pattern


class Policy:
    """Compiled rules. Safe to use from several threads."""

    def __init__(self, rules: Sequence[PolicyRule]) -> None:
        """Raises ValueError that names the rule at fault."""
        self.rules = [_compile(rule) for rule in rules]
        names = [rule.name for rule in rules]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"policy rule {name!r} is there twice")

    def check(self, request: PromptRequest, decode: Callable[[Sequence[int]], str]) -> None:
        """Raises PolicyRefusalError for the first text that a rule matches. Blocking.

        `decode` turns a completion's token ids into text: ids are no way around the policy.
        """
        if not self.rules:
            return
        for param, role, text in _texts(request, decode):
            encoded = text.encode()
            for rule in self.rules:
                if role in rule.roles and rule.pattern.search(encoded):
                    raise PolicyRefusalError(rule.name, param)


def load_policy(settings: TokenizerSettings) -> Policy:
    """The rules of the settings, then those of the file. Raises ValueError that says which
    rule or file is wrong.
    """
    rules = list(settings.policy_rules)
    if settings.policy_file is not None:
        rules += _read(settings.policy_file)
    return Policy(rules)


def _read(path: Path) -> list[PolicyRule]:
    try:
        return TypeAdapter(list[PolicyRule]).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"policy file {path}: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"policy file {path}: {error}") from None


def _compile(rule: PolicyRule) -> _Rule:
    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    try:
        pattern = re2.compile(rule.pattern, options)
    except re2.error as error:
        raise ValueError(f"policy rule {rule.name!r}: {_words(error)}") from None
    if pattern.search(b""):
        raise ValueError(f"policy rule {rule.name!r} matches the empty text, so every request")
    return _Rule(rule.name, frozenset(rule.roles), pattern)


def _words(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode() if isinstance(said, bytes) else str(said)


def _texts(
    request: PromptRequest, decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, str, str]]:
    """Each text that the prompt may hold: the request's field, the role, the text."""
    match request.WhichOneof("input"):
        case "chat":
            for index, message in enumerate(request.chat.messages):
                yield f"messages[{index}].content", message.role, text_of(message)
                if message.reasoning:
                    yield f"messages[{index}].reasoning_content", message.role, message.reasoning
                for number, call in enumerate(message.tool_calls):
                    yield f"messages[{index}].tool_calls[{number}]", message.role, call.arguments
            for index, tool in enumerate(request.chat.tools):
                yield f"tools[{index}]", "system", f"{tool.description}\n{tool.parameters}"
            for index, passage in enumerate(request.chat.passages):
                yield f"documents[{index}]", "document", f"{passage.title}\n{passage.text}"
        case "text":
            yield "prompt", "user", request.text
        case "token_ids":
            yield "prompt", "user", decode(request.token_ids.ids)
        case "pool":
            of_documents = "document" if request.pool.task == Pool.SCORE else "user"
            for index, one in enumerate(request.pool.queries):
                yield f"queries[{index}]", "user", one.text or decode(one.token_ids.ids)
            for index, one in enumerate(request.pool.inputs):
                yield f"inputs[{index}]", of_documents, one.text or decode(one.token_ids.ids)
