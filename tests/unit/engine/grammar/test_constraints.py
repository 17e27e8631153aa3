"""Structured output: what is sampled matches, whatever the logits, the loop and the way there."""

import itertools
import json
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from kernels.sampling import Top
from services.worker.engine import FinishReason, KvBlocks, Request
from services.worker.engine.engine import Engine
from services.worker.engine.grammar import matcher
from services.worker.engine.grammar.compiler import Compiler, grammar_of
from services.worker.engine.grammar.matcher import ConstraintError, Matcher
from services.worker.engine.grammar.trial import _walk
from services.worker.engine.grammar.turns import Turns
from services.worker.engine.messages import Constraint
from services.worker.engine.plan import _logprobs
from tests.support.checkpoint import write_checkpoint
from tests.unit.engine.constraining import EOS, HOSTILE, PROMPT, VOCAB, sampling, schema
from tests.unit.engine.driving import Run, drive, make_engine

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "y": {"type": "null"}},
    "required": ["x"],
    "additionalProperties": False,
}
# A schema, what fits it, what does not.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "const": ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, None]),
    "enum": ({"enum": ["on", "off", 3, None]}, ["on", 3, None], ["o", 4, ["on"]]),
    "boolean": ({"type": "boolean"}, [True, False], [0, "true"]),
    "range": ({"type": "integer", "minimum": 7, "maximum": 1234}, [7, 99, 1234], [6, 1235, 7.5]),
    "step": ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 40}, [0, 35], [7, 45]),
    "types": ({"type": ["integer", "null"], "maximum": 9, "minimum": 0}, [None, 4], ["4", 10]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "äöüß"], ["a", "abcde"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"}, ["ab-123"], ["ad-123", "ab"]),
    "date": ({"type": "string", "format": "date"}, ["2026-11-22"], ["2026-13-22", "today"]),
    "items": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        [[True], [False] * 3],
        [[], [True] * 4, [1]],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["b"]}], "items": False},
        [[1, "b"]],
        [["b", 1], [1, "b", 2]],
    ),
    "object": (POINT, [{"x": 1}, {"x": -9, "y": None}], [{}, {"y": None}, {"x": 1, "z": 2}]),
    "any": (
        {"anyOf": [POINT, {"type": "array", "items": POINT, "maxItems": 2}]},
        [{"x": 1}, [], [{"x": 1}, {"x": 2}]],
        [[{}], 5],
    ),
    "refs": (
        {
            "$defs": {"leaf": {"enum": ["l"]}, "pair": {"$ref": "#/$defs/leaf"}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/pair"}, "b": {"$ref": "#/$defs/leaf"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        [{"a": "l", "b": "l"}],
        [{"a": "l"}, {"a": "l", "b": "m"}],
    ),
}
POINTS = {"type": "array", "items": POINT, "minItems": 2, "maxItems": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("constrained"), window=2048)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Compiler:
    return Compiler(str(folder), VOCAB, [EOS])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder, overlap=True)


def texts(run: Run, tokenizer: Tokenizer) -> Iterator[str]:
    for name, tokens in run.tokens.items():
        assert run.last[name].error is None, run.last[name].error
        assert run.last[name].finish_reason is FinishReason.STOP
        yield tokenizer.decode(tokens)


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_taken_just_if_it_fits(
    name: str, compiler: Compiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to tell."""
    for bound in ("TOKEN_S", "_SAVED_S"):
        monkeypatch.setattr(matcher, bound, inf)
    of, fitting, others = CASES[name]
    start = compiler.matcher(grammar_of(schema(of)))

    def whole(text: str) -> bool:
        """Each token is allowed behind those before it, and then the end is."""
        matcher = start.copy()
        for token in [*tokenizer.encode(text).ids, EOS]:
            matcher.go_on()
            if matcher.ended:
                return token == EOS
            if not matcher.allows(token):
                return False
            matcher.give([token])
        return True

    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for instance, fits in [*((i, True) for i in fitting), *((i, False) for i in others)]:
        judge = jsonschema.Draft202012Validator(of, format_checker=checker)
        assert judge.is_valid(instance) is fits, "the case itself"
        for text in (
            json.dumps(instance, ensure_ascii=False),
            json.dumps(instance, ensure_ascii=False, indent=1),
        ):
            assert whole(text) is fits, text
        assert not whole(json.dumps(instance)[:-1] + "~")


def test_whatever_is_sampled_validates(engine: Engine, tokenizer: Tokenizer) -> None:
    """With weights that know nothing, and half of the requests beside them free."""
    schemas = [of for of, _, _ in CASES.values()]
    requests = [Request(str(i), PROMPT, sampling(schema(of), i)) for i, of in enumerate(schemas)]
    free = [Request(f"free {i}", PROMPT, sampling(None, i, max_tokens=20)) for i in range(8)]
    run = drive(engine, [*requests, *free])
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for index, of in enumerate(schemas):
        text = tokenizer.decode(run.tokens[str(index)])
        assert run.last[str(index)].finish_reason is FinishReason.STOP, text
        jsonschema.validate(json.loads(text), of, format_checker=checker)
    alone = drive(engine, free)
    for request in free:  # who is free is as free as ever
        assert run.tokens[request.request_id] == alone.tokens[request.request_id]


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", r"[A-F]{3}-\d{2,4}"), r"[A-F]{3}-\d{2,4}"),
        (Constraint("choice", json.dumps(["yes", 'a "b"\n', "no\\"])), r'yes|a "b"\n|no\\'),
        (Constraint("choice", json.dumps(["a<|eos|>"])), r"a<\|eos\|>"),
        (Constraint("choice", json.dumps(["\x7f<|user|>"])), r"\x7f<\|user\|>"),
        (schema({"const": "<|eos|>"}), r'"<\|eos\|>"'),
        (Constraint("grammar", 'start: "x" tail\ntail: "," "y" | "." tail?'), r"x(,y|\.+(,y)?)"),
        (Constraint("grammar", 'root ::= "x" [0-9]{2} ("!" | "?")'), r"x\d\d[!?]"),
    ],
    ids=["regex", "choice", "end", "marker", "json", "lark", "gbnf"],
)
def test_other_notations(
    engine: Engine, tokenizer: Tokenizer, constraint: Constraint, pattern: str
) -> None:
    requests = [Request(str(i), PROMPT, sampling(constraint, i)) for i in range(4)]
    run = drive(engine, requests)
    found = list(texts(run, tokenizer))
    assert all(re.fullmatch(pattern, text) for text in found), found
    if constraint.kind != "grammar":  # what can only end, ends without a step for the end token
        assert all(tokens[-1] != EOS for tokens in run.tokens.values())


def test_json_mode_gives_an_object(engine: Engine, tokenizer: Tokenizer) -> None:
    """Weights that know nothing do not come to its end: what came may be one's beginning."""
    run = drive(engine, [Request("a", PROMPT, sampling(Constraint("json_object"), max_tokens=60))])
    assert run.last["a"].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert tokenizer.decode(run.tokens["a"]).lstrip().startswith("{")


@pytest.mark.usefixtures("both_loops")
def test_the_same_whichever_the_way(folder: Path) -> None:
    """Alone, preempted beside others, handed over, and gone on with elsewhere."""
    of = [
        schema(POINT),
        Constraint("choice", '["on and on and on", "off"]'),
        Constraint("regex", "([a-d]{9} ){7}"),
    ]
    requests = [Request(str(i), PROMPT, sampling(of[i % 3], i)) for i in range(6)]
    alone = make_engine(folder, prefix_caching=False)
    wanted = {r.request_id: drive(alone, [r]).tokens[r.request_id] for r in requests}

    crowded = make_engine(folder, num_blocks=9, prefix_caching=False)
    run = drive(crowded, requests)
    assert run.num_preempted
    assert run.tokens == wanted

    other = make_engine(folder)
    for request in requests[:3]:
        tokens = wanted[request.request_id]
        assert handed_over(alone, other, request) == tokens
        for so_far in (1, len(tokens) // 2, len(tokens) - 1, len(tokens)):
            rest = Request(
                "rest", PROMPT + tokens[:so_far], request.sampling, generated_prefix=so_far
            )
            run = drive(other, [rest])
            assert run.tokens["rest"] == tokens[so_far:]
            assert run.last["rest"].finish_reason is FinishReason.STOP


def handed_over(first: Engine, then: Engine, request: Request) -> list[int]:
    """Its tokens, the prompt computed by one and the rest by the other."""
    then.add(Request("d", request.prompt_token_ids, request.sampling, remote_prefill=True))
    while not (reserved := then.step().kv_reserved):
        pass
    (held,) = reserved
    exports = Request(
        "p", request.prompt_token_ids, request.sampling, prefill_only=True, export_kv="inline",
        export_from_block=held.cached_blocks,
    )  # fmt: skip
    run = drive(first, [exports])
    for step in run.steps:
        for blocks in step.kv_exports:
            then.write_kv(KvBlocks("d", blocks.first_block, blocks.num_blocks, blocks.data))
    (token,) = run.tokens["p"]
    then.start_decode("d", token)
    return [token, *drive(then, []).tokens["d"]]


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("at", ["masks", "sample"])
def test_a_step_that_fails_before_it_samples_comes_back(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Its layers run, with blocks that are others' soon: nothing is launched before they have come
    to their end. Those of the step are computed again, singly."""
    requests = [Request(str(i), PROMPT, sampling(schema(POINT), i)) for i in range(3)]
    requests += [Request(f"free {i}", PROMPT, sampling(None, i, max_tokens=30)) for i in range(2)]
    wanted = drive(engine, requests)
    failing = make_engine(folder)
    drive(failing, requests[:1])  # its grammar is there
    runner, launched, calls = failing._runner, [], itertools.count()
    real_launch, real_collect = runner.launch, runner.collect
    of, name = (failing._steps, "_allowed") if at == "masks" else (runner, "sample")
    real = getattr(of, name)

    def fails(*arguments: Any) -> Any:
        if next(calls) % 7 == 3:
            raise MemoryError
        return real(*arguments)

    def launch(plan: Any) -> Any:
        launched.append(real_launch(plan))
        return launched[-1]

    def collect(ticket: Any) -> Any:
        assert ticket is launched.pop(0), "each once, in the order of launches"
        return real_collect(ticket)

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(runner, "collect", collect)
    monkeypatch.setattr(of, name, fails)
    assert drive(failing, requests).tokens == wanted.tokens
    assert next(calls) > 20
    assert not launched
    failing.add(requests[-1])
    failing.step()
    failing.close()
    assert not launched, "what runs when it is closed is waited for, too"


def test_a_hostile_one_costs_its_own_request(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its grammar is being made others overtake it, another tenant's new grammars, too; who
    cancels is not waited for."""
    monkeypatch.setattr("services.worker.engine.grammar.trial._CPU_S", 1.0)
    monkeypatch.setattr("services.worker.engine.grammar.trial._MEMORY", 2**29)
    engine = make_engine(folder)
    bad = [Request(name, PROMPT, sampling(c)) for name, c in HOSTILE.items()]
    gone = Request("gone", PROMPT, sampling(Constraint("regex", "gone")))
    good = Request("good", PROMPT, sampling(schema(POINT), 1), salt=b"another tenant")
    free = Request("free", PROMPT, sampling(None, max_tokens=5))
    for request in (*bad, gone):
        engine.add(request)
    assert engine.load().waiting == len(bad) + 1
    engine.step()  # their grammars are wanted now
    engine.cancel("gone")
    run = drive(engine, [good, free])
    order = list(run.last)
    assert order.index("free") < order.index("memory"), "it overtook those that wait"
    assert order.index("good") < order.index("unknown"), "tenants take turns"
    assert run.last["gone"].finish_reason is FinishReason.CANCELLED
    for name in HOSTILE:
        error = run.last[name].error
        assert error is not None, name
        assert (error.code, error.param) == ("invalid_request", "constraint")
        assert error.message
    assert "uniqueItems" in run.last["unknown"].error.message  # type: ignore[union-attr]
    jsonschema.validate(json.loads(tokenizer.decode(run.tokens["good"])), POINT)
    assert gone.sampling.constraint not in engine.aside._grammars._made


def test_tenants_take_turns() -> None:
    turns = Turns()
    one, two, three, other = (Constraint("regex", text) for text in "abcd")
    for constraint in (one, two, three):
        turns.add(constraint, b"many")
    assert turns.take() == one
    assert turns.take() is None, "one of a tenant at a time"
    turns.add(other, b"few")
    turns.add(one, b"few")
    assert turns.take() == other
    assert turns.done(one, 5.0) == b"many"
    turns.add(three, b"late")
    assert turns.take() == three, "who has had least"
    assert turns.take() == two
    turns.done(three, 0.1)
    turns.done(two, 5.0)
    turns.done(other, 0.1)
    assert turns.take() is None, "nobody is left to wait"


def test_who_keeps_many_grammars_gives_his_own_up(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    monkeypatch.setattr("services.worker.engine.grammar.grammars._KEPT", 4)
    few = Request("few", PROMPT, sampling(Constraint("choice", '["few"]')), salt=b"few")
    drive(engine, [few])
    flood = [Constraint("choice", f'["{i}"]') for i in range(6)]
    drive(engine, [Request(str(i), PROMPT, sampling(c)) for i, c in enumerate(flood)])
    monkeypatch.setattr(engine.aside, "wait", lambda: pytest.fail("waited"))
    drive(engine, [few])


class PanicException(BaseException):
    """As pyo3 has it of Rust's panics."""


def test_a_panic_in_making_a_grammar_costs_its_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    real = Compiler.matcher

    def matcher(self: Compiler, grammar: str) -> Matcher:
        if "bad" in grammar:
            raise PanicException("index out of bounds")
        return real(self, grammar)

    monkeypatch.setattr(Compiler, "matcher", matcher)
    bad, good = (Request(w, PROMPT, sampling(Constraint("choice", f'["{w}"]'))) for w in BAD_GOOD)
    run = drive(engine, [bad, good])
    error = run.last["bad"].error
    assert error is not None
    assert (error.code, error.param) == ("invalid_request", "constraint")
    assert run.last["good"].finish_reason is FinishReason.STOP


BAD_GOOD = "bad", "good"


@pytest.mark.parametrize(
    "constraint",
    [Constraint("regex", r"a[^\s\S]"), Constraint("grammar", "start: a\na: a")],
    ids=["regex", "grammar"],
)
def test_a_language_without_a_text_is_told_as_such(engine: Engine, constraint: Constraint) -> None:
    error = drive(engine, [Request("a", PROMPT, sampling(constraint))]).last["a"].error
    assert error is not None
    assert "no text matches it" in error.message


@pytest.mark.parametrize("text", ["\\", "a\\", "a" + "\\" * 3])
def test_an_expression_that_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(ConstraintError, match="within an escape"):
        grammar_of(Constraint("regex", text))


def test_a_lexer_of_very_many_states_is_refused() -> None:
    """With the library's bounds each request that has this one holds 600 MB, and up every step."""
    alike = "\n".join(
        f"X{n}: /[a-z ]*{chr(97 + n % 26)}[a-z ]{{{n % 20}}}[a-z]/" for n in range(300)
    )
    grammar = f"start: ({' | '.join(f'X{n}' for n in range(300))})*\n{alike}"
    demo = Path(__file__).parents[4] / "models" / "demo"
    with pytest.raises(ConstraintError, match="too many"):
        _walk(Compiler(str(demo), 20480, [1]), grammar_of(Constraint("grammar", grammar)))


def test_a_grammar_that_is_there_is_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Request("a", PROMPT, sampling(Constraint("choice", '["known"]')))
    drive(engine, [wanted])
    monkeypatch.setattr(engine.aside, "wait", lambda: pytest.fail("waited"))
    assert drive(engine, [wanted]).last["a"].finish_reason is FinishReason.STOP


def test_what_does_not_go_together_is_refused(engine: Engine, tmp_path: Path) -> None:
    both = sampling(schema(POINT), ignore_eos=True)
    long = sampling(Constraint("regex", "a" * 200_000))
    run = drive(engine, [Request("both", PROMPT, both), Request("long", PROMPT, long)])
    assert [run.last[n].error.param for n in ("both", "long")] == ["ignore_eos", "constraint"]  # type: ignore[union-attr]
    with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        Compiler(str(tmp_path), VOCAB, [EOS])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_other_ways_of_sampling_go_with_it(
    folder: Path, tokenizer: Tokenizer, kernels: str
) -> None:
    """They move what is allowed, and allow nothing more."""
    engine = make_engine(folder, kernels=kernels, overlap=True)
    tilde, x = tokenizer.encode("~").ids[0], tokenizer.encode("x").ids[0]
    ways: list[dict[str, Any]] = [
        {"logit_bias": ((tilde, 100.0), (EOS, 100.0)), "min_p": 0.01},
        {"frequency_penalty": 1.5, "repetition_penalty": 2.0, "presence_penalty": -1.0},
        {"min_tokens": 30, "logprobs": 3, "top_k": 5, "top_p": 0.9},
    ]
    requests = [
        Request(str(i), PROMPT, sampling(schema(POINT), i, **w)) for i, w in enumerate(ways)
    ]
    run = drive(engine, requests)
    for text in texts(run, tokenizer):
        jsonschema.validate(json.loads(text), POINT)
    told = [
        one for step in run.steps for o in step.outputs if o.request_id == "2" for one in o.logprobs
    ]
    assert len(told) == len(run.tokens["2"])
    either = Constraint("choice", '["x", "y"]')
    (one,) = texts(
        drive(engine, [Request("b", PROMPT, sampling(either, bad_words=((x,),)))]), tokenizer
    )
    assert one == "y"


def test_what_leaves_nothing_to_sample_ends_no_engine(engine: Engine, tokenizer: Tokenizer) -> None:
    """However many in a row, with nobody beside them."""
    x = tokenizer.encode("x").ids[0]
    empty = sampling(Constraint("regex", "x"), bad_words=((x,),))
    for number in range(5):
        run = drive(engine, [Request(str(number), PROMPT, empty)])
        error = run.last[str(number)].error
        assert error is not None
        assert (error.code, error.param) == ("invalid_request", "constraint")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logprobs_beside_a_logit_that_is_no_number_fail_their_request(
    tmp_path: Path, kernels: str
) -> None:
    """Though the grammar hides that one: the others' probabilities are measured by it."""
    folder = write_checkpoint(tmp_path, window=64, vocab_size=VOCAB, layers=1)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][VOCAB - 1] = np.nan
    save_file(weights, folder / "model.safetensors")
    yes = Constraint("choice", '["yes", "no"]')
    asked = [
        Request("told", PROMPT, sampling(yes, logprobs=2)),
        Request("not", PROMPT, sampling(yes)),
    ]
    run = drive(make_engine(folder, kernels=kernels), asked)
    error = run.last["told"].error
    assert error is not None
    assert "not finite" in error.message
    assert not run.tokens["told"]
    assert run.last["not"].error is None


def test_what_cannot_come_has_a_logprob_that_json_has_a_number_for() -> None:
    top = Top(np.array([[4, 4, 7]], np.int32), np.array([[-0.5, -0.5, -np.inf]], np.float32))
    assert _logprobs(top, 0, 3) == (-0.5, (4, 7), (-0.5, -9999.0))
