"""What the policy says of a search: of its question, of what is found, and by which version."""

import pytest

from protos import retrieval_pb2 as pb
from protos.common_pb2 import Passage
from services.common.errors import PenstockError
from services.common.policy import Policy, PolicyFile, load_rules
from services.retrieval.documents.chunkers import CutDocument, Loaded
from services.retrieval.documents.chunks import Chunk
from services.retrieval.pipeline import judging
from tests.unit.retrieval.test_whose import ME, Parts, told

FILE = """
rules:
  - {name: card, pii: [card], where: [input, retrieved], action: redact}
  - {name: plan, pattern: secret plan, where: [input, retrieved, uploads]}
"""
CARD = "4111 1111 1111 1111"


@pytest.fixture
def parts() -> Parts:
    made = Parts()
    file = PolicyFile(None, 1.0)
    file.current = Policy.of(load_rules(FILE.encode()))
    made.policy = file  # type: ignore[assignment]
    return made


def search(query: str, **more: object) -> pb.SearchRequest:
    return pb.SearchRequest(caller=ME, collections=["a"], query=query, limit=5, **more)  # type: ignore[arg-type]


async def test_what_a_client_gets_is_as_the_policy_lets_it_be(parts: Parts) -> None:
    def found() -> list[Passage]:
        return [Passage(title="T"), Passage(title=f"no. {CARD}", text=f"It is {CARD}.")]

    parts.found = found()
    reply = await parts.run("search", search("x", judged=True))
    (_, second) = reply.passages
    assert (second.title, second.text) == ("no. [CARD]", "It is [CARD].")
    assert [one.collection for one in reply.stretches] == ["a", ""], (
        "characters stand elsewhere now"
    )
    parts.found = found()
    reply = await parts.run("search", search("x"))
    as_found = [(one.title, one.text, 0) for one in found()]
    assert told(reply) == as_found, "a chat's own"
    await parts.run("search", search(f"mine {CARD}", judged=True))
    assert parts.embedded[-1] == [[len("mine [CARD]")] * 9]
    parts.found[0].text = "the secret plan"
    for request, param in ((search("x", judged=True), "data[0]"),
                           (search("the secret plan", judged=True), "query")):  # fmt: skip
        with pytest.raises(PenstockError) as refused:
            await parts.run("search", request)
        assert (refused.value.reason, refused.value.param) == ("content_policy", param)


async def test_what_no_window_holds_is_not_looked_at(parts: Parts) -> None:
    request = pb.EmbedRequest(caller=ME, texts=["the secret plan", "x" * 901])
    with pytest.raises(PenstockError) as refused:
        await parts.run("embed", request)
    assert (refused.value.reason, refused.value.param) == ("context_length_exceeded", "texts[1]")
    assert parts.tenants == []


REQUESTS = {
    "embed": pb.EmbedRequest(caller=ME, texts=["a"]),
    "search": search("a", judged=True),
    "index": pb.IndexRequest(caller=ME, collection="c", source_id="s", title="T", blob="ns/acme/s"),
    "judge": pb.JudgeRequest(caller=ME, texts=[pb.JudgedText(text="a", role="user")]),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_nothing_is_done_by_another_version_than_the_caller_s(
    parts: Parts, name: str
) -> None:
    request = type(REQUESTS[name])()
    request.CopyFrom(REQUESTS[name])
    request.policy = "newer"
    with pytest.raises(PenstockError) as refused:
        await parts.run(name, request)
    assert refused.value.reason == "other_policy"
    assert parts.tenants == []


async def test_an_earlier_version_is_known_for_a_while(parts: Parts) -> None:
    file = parts.policy
    earlier = file.current.digest
    file._take(Policy.of(load_rules(b"rules: []")))  # type: ignore[attr-defined]
    parts.found = [Passage(text="the secret plan")]
    assert (await parts.run("search", search("x", judged=True))).passages
    with pytest.raises(PenstockError) as refused:
        await parts.run("search", search("x", judged=True, policy=earlier))
    assert refused.value.reason == "content_policy"


async def test_of_an_upload_each_section_is_as_the_policy_lets_it_be(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PolicyFile(None, 1.0)
    file.current = Policy.of(
        load_rules(b"rules: [{name: card, pii: [card], where: [uploads], action: redact}]")
    )
    parts.policy = file  # type: ignore[assignment]
    parts.document = CutDocument([Chunk("T", "x", 0, 1, 1)], [[1]], 0)
    monkeypatch.setattr(judging, "_CHECKED_CHARS", 30)
    texts = [f"one {CARD}", "two", f"three {CARD} four", "five"]

    async def load(*_: object) -> Loaded:
        sections = [
            pb.Section(headings=[f"H {CARD}", "I"], text=text, page=3, row=4) for text in texts
        ]
        return Loaded(sections, "")

    parts.chunkers.load = load
    await parts.index(title=f"T {CARD}")
    ((title, sections),) = parts.cut
    assert title == "T [CARD]"
    assert [section.text for section in sections] == [t.replace(CARD, "[CARD]") for t in texts]
    assert all(list(section.headings) == ["H [CARD]", "I"] for section in sections)
    assert {(section.page, section.row) for section in sections} == {(3, 4)}
    parts.told.clear()
    assert await parts.read(b"x") == "\n\n".join(section.text for section in sections)
