"""A run of which another gateway told the beginning: its request, and what was told."""

from collections.abc import Sequence

from protos.runs_pb2 import RunEvent, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.gateway.runs.lasting.run import Ending, Run
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import answer_of, prompt_of
from services.gateway.runs.prompt import Answer, Prompt, SoFar


async def taken_over(
    store: RunStore, hold: Hold, stored: StoredRun, *, ending: Ending | None, keeps_ids: bool
) -> Run:
    """It goes on behind its last event. Raises one of `RedisAway`."""
    prompts = [prompt_of(prompt) for prompt in stored.prompts]
    events: list[RunEvent] = []
    after, more = 0, True
    while more:
        page = await store.read(hold.place, after)
        events += page.events
        after, more = page.entries[-1].seq if page.entries else after, page.more
    count = sum(max(1, prompt.request.choices) for prompt in prompts)
    seq, ids = await store.progress(hold.place, count)
    answers = {
        event.begun.index: answer_of(stored.request_id, event.begun)
        for event in events
        if event.HasField("begun")
    }
    deltas: dict[int, list[TextDelta]] = {index: [] for index in answers}
    for event in events:
        if event.HasField("delta"):
            deltas[event.delta.index].append(event.delta.delta)
    _begin(prompts, answers, deltas, ids)
    run = Run(store, hold, stored, prompts, ending=ending, keeps_ids=keeps_ids)
    run.goes_on(seq, list(answers.values()))
    return run


def _begin(
    prompts: Sequence[Prompt],
    answers: dict[int, Answer],
    deltas: dict[int, list[TextDelta]],
    ids: Sequence[Sequence[int]],
) -> None:
    """Each prompt knows what was told of its answers."""
    first = 0
    for prompt in prompts:
        count = max(1, prompt.request.choices)
        own = [index for index in range(first, first + count) if deltas.get(index)]
        known = [index for index in range(first, first + count) if index in answers]
        first += count
        if known:
            one = answers[known[0]]
            prompt.stores = ()
            prompt.request.model = one.model  # to which the policy may have sent it
            if prompt.request.HasField("chat"):  # else it would become one
                del prompt.request.chat.passages[:]
                prompt.request.chat.passages.extend(one.passages)
                prompt.request.chat.searched = one.search is not None
        if own:
            told = [delta for index in own for delta in deltas[index]]
            is_whole = sum(bool(delta.finish) for delta in told) == count  # nothing is to be made
            anew = not (is_whole or all(_known(deltas[index], ids[index]) for index in own))
            for delta in told:
                delta.ClearField("token_ids")
            if not anew:
                for index in own:
                    deltas[index][0].token_ids.extend(ids[index])
            prompt.so_far = SoFar(told, answers[own[0]].created, anew)


def _known(told: Sequence[TextDelta], ids: Sequence[int]) -> bool:
    """Whether these are all of its tokens: an owner whose policy looked at answers stored none."""
    return 0 < len(ids) == sum(len(delta.token_ids) for delta in told)
