"""What a gateway knows of an answer that was begun."""

from collections.abc import Sequence

from protos.tokenizer_pb2 import Resume, TextDelta


def resume_of(deltas: Sequence[TextDelta]) -> Resume:
    first = deltas[0]
    resume = Resume(plan=first.plan, prompt_digest=first.prompt_digest, checkpoint=first.checkpoint)
    for choice in dict.fromkeys(delta.choice for delta in deltas):
        own = [delta for delta in deltas if delta.choice == choice]
        resume.choices.add(
            choice=choice,
            token_ids=[id for delta in own for id in delta.token_ids],
            cached_tokens=own[0].usage.cached_tokens,
            draft_tokens=own[-1].usage.draft_tokens,
            accepted_tokens=own[-1].usage.accepted_tokens,
            characters=sum(len(delta.text) for delta in own),
            finished=bool(own[-1].finish),
        )
    return resume
