"""The set of follow-up questions: what it says it is."""

from bench.retrieval.followups import HALVES, documents, follow_ups, question_set
from bench.retrieval.sets import holds


def test_each_question_has_its_passage_and_the_halves_have_nothing_in_common() -> None:
    kept = [{one.id: one.text for one in documents(half)} for half in HALVES]
    assert not kept[0].keys() & kept[1].keys()
    for half, texts in zip(HALVES, kept, strict=True):
        asked = follow_ups(half)
        assert len(asked) >= 40
        assert len({one.style for one in asked}) == 9
        assert all(one.finds in texts and one.turns for one in asked)


def test_a_question_is_the_same_rewritten_but_for_its_words() -> None:
    plain, rewritten = (question_set("development", how) for how in (False, True))
    texts = {one.id: one.text for one in plain.documents}
    changed = 0
    for one, other in zip(plain.questions, rewritten.questions, strict=True):
        assert one._replace(text="") == other._replace(text="")
        assert holds(texts[one.document], one.told)
        assert other.text.endswith(one.text)
        changed += one.text != other.text
    assert changed > 20
