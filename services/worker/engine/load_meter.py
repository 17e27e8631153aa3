"""How fast the engine is, for a router to predict from: what its cost model says of pure steps."""

from services.worker.engine.cost_model import CostModel, StepShape, looked_back


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
        """Of the last decodes, without prompts beside them."""

    def add(self, shape: StepShape, seconds: float) -> None:
        """Takes in a step that ran."""
        if shape.prompt_tokens or shape.decodes:
            self._cost.learn(shape, seconds)
        if shape.prompt_tokens and (chunk_s := self._cost.step_s(self._chunk)):
            self.prefill_tokens_per_s = self._chunk.prompt_tokens / chunk_s
        if shape.decodes:
            alone = StepShape(decodes=shape.decodes, decode_context=shape.decode_context)
            self.decode_step_ms = 1000 * self._cost.step_s(alone)
