"""Rules are checked at start and applied to every text that the prompt may hold."""

import json
import time
from pathlib import Path

import grpc
import pytest

from protos.common_pb2 import Passage, TokenIds
from protos.tokenizer_pb2 import Chat, PromptRequest
from services.common.config import PolicyRule, TokenizerSettings
from services.tokenizer.policy import Policy, PolicyRefusalError, load_policy
from tests.support.tokenizers import byte_level
from tests.unit.tokenizer.conftest import messages, passages

TOKENIZER = byte_level()
CARD = PolicyRule(name="card-number", pattern=r"\b(?:\d[ -]?){15}\d\b")
SECRET = PolicyRule(name="secret", pattern="top secret", roles=["user", "document"])


def check(policy: Policy, request: PromptRequest) -> None:
    policy.check(request, lambda ids: TOKENIZER.decode(ids, skip_special_tokens=False))


def refused(policy: Policy, request: PromptRequest) -> PolicyRefusalError:
    with pytest.raises(PolicyRefusalError) as error:
        check(policy, request)
    return error.value


def chat(*turns: tuple[str, str]) -> PromptRequest:
    return PromptRequest(chat=Chat(messages=messages(*turns)))


def test_a_refusal_names_rule_and_field_but_not_the_text() -> None:
    request = chat(("system", "Be brief."), ("user", "my card is 4111 1111 1111 1111, ok?"))
    error = refused(Policy([SECRET, CARD]), request)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.param, error.reason) == ("messages[1].content", "content_policy")
    assert error.rule == "card-number"
    assert "card-number" in error.message
    assert "4111" not in error.message


def test_rules_hold_for_their_roles_and_in_any_case() -> None:
    policy = Policy([SECRET])
    check(policy, chat(("assistant", "it is top secret")))
    assert refused(policy, chat(("user", "It is TOP\u0020Secret"))).rule == "secret"
    found = PromptRequest(
        chat=Chat(messages=messages(("user", "?")), passages=passages("a", "Top secret"))
    )
    assert refused(policy, found).param == "documents[1]"
    check(Policy([CARD]), PromptRequest(chat=Chat(passages=passages("4111111111111111"))))


def test_a_passage_is_checked_title_and_text() -> None:
    policy = Policy([SECRET])
    for title, text in (("Top secret", "harmless"), ("harmless", "Top secret")):
        found = [Passage(title="Title", text="text"), Passage(title=title, text=text)]
        request = PromptRequest(chat=Chat(messages=messages(("user", "?")), passages=found))
        assert refused(policy, request).param == "documents[1]"
    apart = [Passage(title="It is top", text="secret is this not")]
    check(policy, PromptRequest(chat=Chat(messages=messages(("user", "?")), passages=apart)))


def test_completions_are_checked_as_text_and_as_ids() -> None:
    policy = Policy([SECRET])
    assert refused(policy, PromptRequest(text="a top secret")).param == "prompt"
    ids = TOKENIZER.encode("a top secret").ids
    assert refused(policy, PromptRequest(token_ids=TokenIds(ids=ids))).param == "prompt"
    check(policy, PromptRequest(token_ids=TokenIds(ids=ids[:-1])))


def test_unicode_is_matched_by_characters() -> None:
    policy = Policy([PolicyRule(name="r", pattern="stra(ß|ss)e|^東.京$")])
    assert refused(policy, chat(("user", "Die STRASSE"))).rule == "r"
    assert refused(policy, chat(("user", "東🚰京"))).rule == "r"
    check(policy, chat(("user", "東京")))


@pytest.mark.parametrize("pattern", [r"(x+x+)+y", r"(a|a)*$b", r"(.*)*\d\d\d[^ ]{5}@"])
def test_no_pattern_takes_more_than_linear_time(pattern: str) -> None:
    policy = Policy([PolicyRule(name="r", pattern=pattern)])
    request = chat(("user", "xa " * 70_000 + "x" * 30_000))
    started = time.process_time()
    check(policy, request)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("pattern", ["(", r"(?=x)", r"\1", "a{100000}", "x*"])
def test_a_bad_rule_is_named_at_start(pattern: str) -> None:
    with pytest.raises(ValueError, match="policy rule 'bad'"):
        Policy([CARD, PolicyRule(name="bad", pattern=pattern)])


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="policy rule 'card-number' is there twice"):
        Policy([CARD, CARD])


def test_rules_of_the_file_follow_those_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps([{"name": "secret", "pattern": "top secret"}]))
    policy = load_policy(TokenizerSettings(policy_rules=[CARD], policy_file=file))
    assert [rule.name for rule in policy.rules] == ["card-number", "secret"]
    file.write_text('[{"name": "secret", "patern": "top secret"}]')
    with pytest.raises(ValueError, match=r"policy.json(.|\n)*patern"):
        load_policy(TokenizerSettings(policy_file=file))


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=f"policy file {file}: {why}"):
            load_policy(TokenizerSettings(policy_file=file))


def test_the_example_file_is_valid() -> None:
    path = Path(__file__).parents[3] / "examples" / "policy.json"
    policy = load_policy(TokenizerSettings(policy_file=path))
    assert refused(policy, chat(("user", "pay with 4111 1111 1111 1111"))).rule == "payment-card"
    check(policy, chat(("user", "How much water flows in 2026, and at 12.5 bar?")))
