"""A run's answer, told to a client by its events: the same whoever tells it, and how often."""

from collections.abc import Sequence
from contextlib import ExitStack, aclosing

from services.gateway.identity.principal import Principal
from services.gateway.ids import not_found
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.runs.front import LastingFront, Teller
from services.gateway.runs.lasting.runs import Begun
from services.gateway.runs.lasting.stored import answer_of, cost_of, error_of
from services.gateway.runs.pipeline import generate
from services.gateway.runs.prompt import Answer, Prompt
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal


async def serve_lasting(
    gateway: Gateway, front: LastingFront, job_of: Principal | None = None
) -> None:
    """`pipeline.serve` of a request whose answer may go on without its client: then it is a run's,
    which has a place and a record of its own. `job_of`: whose durable job it is, if it is one, so
    that nobody waits for its first words."""
    begun: tuple[Principal, Sequence[Prompt], Begun] | None = None
    with ExitStack() as following:

        async def work(principal: Principal, place: Place, journal: Journal) -> None:
            nonlocal begun
            journal.is_watched = job_of is None
            with gateway.telemetry.span("read"):
                prompts = await front.read(principal, place)
            if not front.lasts:
                return await generate(gateway, front, principal, place, journal)
            if front.says_begun is None:
                following.enter_context(gateway.runs.follower(principal.tenant))
            begun = principal, prompts, await gateway.runs.begin(front, principal, prompts)
            journal.goes_on = True

        await recorded(gateway, front, work, job_of)
        if begun is not None:
            await _answer_by_run(gateway, front, *begun)


async def _answer_by_run(
    gateway: Gateway,
    front: LastingFront,
    principal: Principal,
    prompts: Sequence[Prompt],
    begun: Begun,
) -> None:
    """Where a retry finds that the run was never let in, because its gateway was lost before, it
    begins it anew."""
    while True:
        if begun.own is not None:
            await gateway.runs.let_in(begun.own, principal, asked_to_last=bool(front.key))
        front.joins(begun.id)
        with gateway.intake.attended():
            says_begun = front.says_begun
            if await _tell(gateway, principal, begun.id, front, to_the_end=says_begun is None):
                return None if says_begun is None else await says_begun(principal)
        if begun.own is not None:
            raise not_found("run", begun.id)
        begun = await gateway.runs.begin(front, principal, prompts)


async def follow(gateway: Gateway, principal: Principal, id: str, front: Teller) -> None:
    """Raises what ended the run; RESOURCE_EXHAUSTED ("too_many_followers"); and UNAVAILABLE
    ("draining") where this gateway ends before."""
    with gateway.runs.follower(principal.tenant), gateway.intake.attended():
        if not await _tell(gateway, principal, id, front):
            raise not_found("run", id)


async def _tell(
    gateway: Gateway, principal: Principal, id: str, front: Teller, *, to_the_end: bool = True
) -> bool:
    """Whether there was anything to tell: else the run is gone, or was never there."""
    answers: dict[int, Answer] = {}
    async with aclosing(gateway.runs.events(principal, id)) as events:
        async for event in events:
            if event.HasField("admitted"):
                if not to_the_end:
                    return True
                front.admitted(event.admitted.headers)
            elif event.HasField("begun"):
                answers[event.begun.index] = answer_of(id, event.begun)
            elif event.HasField("delta"):
                answer = answers[event.delta.index]
                answer.add([event.delta.delta])
                answer.echo = answers[answer.index - answer.choice].echo
                await front.write(answer, [event.delta.delta])
            elif event.HasField("finished"):
                ordered = [answers[index] for index in sorted(answers)]
                ordered[0].warnings.extend(event.finished.warnings)
                await front.finish(ordered, cost_of(event.finished))
                return True
            elif event.HasField("failed"):
                raise error_of(event.failed)
    if answers:
        raise not_found("run", id)
    return False
