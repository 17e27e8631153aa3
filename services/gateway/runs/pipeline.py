"""A generation's way through the gateway, the same for REST and gRPC."""

import time
from collections.abc import Awaitable

from services.common.telemetry.telemetry import traceparent
from services.gateway import metrics
from services.gateway.identity.principal import Permission, Principal
from services.gateway.intake import Place
from services.gateway.metering.estimate import expected
from services.gateway.parts import Gateway
from services.gateway.runs.answering import Way, all_at_once, answer_prompt
from services.gateway.runs.asked_model import asked_model
from services.gateway.runs.front import Front
from services.gateway.runs.judgement import Judgement
from services.gateway.runs.passages import retrieve
from services.gateway.runs.prompt import Answer, total_usage
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal
from services.gateway.runs.routing import Routing


async def generate(
    gateway: Gateway, front: Front, principal: Principal, place: Place, journal: Journal
) -> None:
    """Validation and passages on the way in; text, usage and sources on the way out."""
    span = gateway.telemetry.span
    deadline = time.monotonic() + gateway.settings.gateway.request_timeout_s
    caller = principal.caller(front.request_id)

    with span("validate"):
        prompts = await front.read(principal, place)
        model = journal.model = prompts[0].request.model
        journal.tags = prompts[0].tags
        principal.authorize(model)
        window = (await asked_model(gateway, model)).window
        if any(prompt.stores for prompt in prompts):
            principal.require(Permission.STORES_SEARCH)
        journal.served = model
        unready = [await gateway.stores.require(principal.tenant, p.stores) for p in prompts]

    with span("limits"):
        most = expected(prompts, window, gateway.meter.open_output_tokens)
        metered = journal.metered = await gateway.meter.admit(
            principal, front.request_id, front.route, model, most
        )
        front.admitted(metered.headers)

    of_prompts: list[list[Answer]] = []
    for prompt, files in zip(prompts, unready, strict=True):
        warnings = [warning] if (warning := files.warning()) else []
        if prompt.stores:
            await retrieve(gateway, principal, caller, prompt, files, metered, warnings, journal)
        prompt.request.caller.CopyFrom(caller)
        count = max(1, prompt.request.choices)
        of_prompts.append(
            [
                Answer(
                    front.request_id,
                    model,
                    list(prompt.request.chat.passages),
                    index=len(of_prompts) * count + choice,
                    choice=choice,
                    warnings=warnings,
                    search=prompt.search,
                    wants_logprobs=prompt.request.sampling.HasField("logprobs"),
                )
                for choice in range(count)
            ]
        )
        if (so_far := prompt.so_far) is not None:
            for one in of_prompts[-1]:
                one.created = so_far.created
                if not so_far.anew:
                    one.add(so_far.of(one.choice))
    answers = [answer for of_one in of_prompts for answer in of_one]
    metered.usage, metered.shown = lambda: total_usage(answers), lambda: front.shown

    with span("generate") as generating:
        judgement = Judgement(gateway.policy.current, prompts, journal)
        begun = any(prompt.so_far for prompt in prompts)  # the policy has allowed it
        if not begun:
            judgement.begin(gateway.retrieval, caller, generating)
        del caller  # a message is 0.4 KB, as long as the answer lasts
        routing = Routing(gateway, front, principal, journal, prompts, answers)

        async def answer() -> None:
            start = None if begun else routing.start()
            way = Way(deadline, traceparent(generating), journal, judgement, start)
            await all_at_once(
                answer_prompt(gateway, front, way, prompt, of_one)
                for prompt, of_one in zip(prompts, of_prompts, strict=True)
            )

        try:
            if not begun and (routed := await judgement.route()) is not None:
                await routing.go_to(routed)
            await routing.follow(answer)
        finally:
            judgement.cancel()
        if gateway.settings.log_prompts:
            generating.set_attribute("prompt", "\n".join(prompt.text for prompt in prompts))
            generating.set_attribute("answer", "\n".join(answer.text for answer in answers))
        journal.usage = total_usage(answers)
        for one in answers:
            _count_citations(one)
        await gateway.meter.settle(metered)
        await front.finish(answers, metered.cost)


def _count_citations(answer: Answer) -> None:
    if (checked := answer.citations) is None:
        return
    metrics.citations.labels("known").inc(checked.cited)
    metrics.citations.labels("unknown").inc(len(checked.unknown))
    metrics.quotations.labels("found").inc(checked.quoted - len(checked.unfounded))
    metrics.quotations.labels("unfounded").inc(len(checked.unfounded))


def serve(
    gateway: Gateway, front: Front, principal: Principal | None = None, *, watched: bool = True
) -> Awaitable[None]:
    """`generate`, recorded. `principal`: who asks, where that is known. `watched`:
    somebody waits for its first words."""

    async def work(principal: Principal, place: Place, journal: Journal) -> None:
        journal.is_watched = watched
        await generate(gateway, front, principal, place, journal)

    return recorded(gateway, front, work, principal)
