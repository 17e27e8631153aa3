"""Answers that are stored once they are whole, before their clients hear of the end."""

import time

from protos.runs_pb2 import RunEvent, StoredCaller, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.gateway import metrics
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.delivery import joined
from services.gateway.runs.front import LastingFront
from services.gateway.runs.lasting.stored import whole, without_tokens
from services.gateway.runs.prompt import Answer

NOT_KEPT = "this answer could not be stored"


class KeptAnswers:
    """Of one request that nothing lasting answers."""

    def __init__(self, tenant: str, model: str) -> None:
        """`model`: as asked for."""
        self._tenant = tenant
        self._model = model
        self._deltas: dict[int, list[TextDelta]] = {}  # by the answer's index

    def add(self, answer: Answer, deltas: list[TextDelta]) -> None:
        self._deltas.setdefault(answer.index, []).extend(deltas)

    async def keep(
        self, gateway: Gateway, front: LastingFront, answers: list[Answer], cost: Cost | None
    ) -> bool:
        """Whether it is stored; else the answers say that it is not."""
        stored = StoredRun(
            request_id=front.request_id,
            route=front.route,
            endpoint=front.endpoint,
            created=time.time(),
            caller=StoredCaller(tenant=self._tenant),
            told=front.told,
            digest=front.digest,
            model=self._model,
        )
        deltas = [
            RunEvent(delta=RunEvent.Delta(index=index, delta=without_tokens(delta)))
            for index, said in self._deltas.items()
            for delta in joined(said)
        ]
        if await gateway.runs.keep(stored, whole(answers, deltas, cost), front.about):
            metrics.runs.labels("kept").inc()
            return True
        answers[0].warnings.append(NOT_KEPT)
        return False
