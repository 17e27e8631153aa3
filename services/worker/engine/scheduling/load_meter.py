"""How fast the engine is, for a router to predict from: what its cost model says of pure steps."""

from services.worker.engine.scheduling.cost_model import CostModel, StepShape, looked_back
from services.worker.engine.settling import Settling


class LoadMeter:
    """A rate moves only with steps of its kind: who reads it may judge by that how old it is.
    0: none ran yet."""

    def __init__(self, cost: CostModel, chunk: int) -> None:
        """`chunk`: tokens of a prompt that one step computes at most."""
        self._cost = cost
        self._chunk = StepShape(prompt_tokens=chunk, prompt_context=looked_back(0, chunk))
        self.prefill_tokens_per_s = 0.0
        """Of whole chunks, without decodes beside them."""
        self.decode_step_ms = 0.0
        """Of a token of each of the last decodes, without prompts beside them."""
        self._tokens = Settling(1.0)
        """That a decode makes in a step."""

    def add(self, shape: StepShape, seconds: float, tokens: int) -> None:
        """Takes in a step that ran, and how many tokens its decodes made."""
        if shape.prompt_tokens or shape.decodes:
            self._cost.learn(shape, seconds)
        if shape.prompt_tokens and (chunk_s := self._cost.step_s(self._chunk)):
            self.prefill_tokens_per_s = self._chunk.prompt_tokens / chunk_s
        if shape.decodes:
            self._tokens.add(max(1.0, tokens / shape.decodes))
            alone = shape._replace(prompt_tokens=0, prompt_context=0)
            self.decode_step_ms = 1000 * self._cost.step_s(alone) / self._tokens.value
