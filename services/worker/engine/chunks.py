"""What the scheduler decided of a step."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.worker.engine.cost_model import StepShape, looked_back
from services.worker.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    end: int
    samples: bool
    """It ended with the sequence's last token when it was made: the next one is sampled."""
    scores: bool = False
    """Logprobs of the prompt's tokens behind its own are wanted."""
    is_decode: bool = False
    """Its sequence was decoding (sequence.py) when it was made: all others are prompts."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens behind its last, and the last of [start, end). After each of them one
    is sampled, too, which counts if those before it were guessed right."""

    @classmethod
    def of(cls, sequence: Sequence, count: int, drafts: tuple[int, ...] = ()) -> "Chunk":
        """The next `count` tokens of those not launched yet, and guesses behind them."""
        start = sequence.num_launched
        end = start + count
        samples = end == sequence.length and sequence.pool is None
        scores = sequence.scores is not None
        decodes = sequence.is_decoding
        return cls(sequence, start, end + len(drafts), samples, scores, decodes, drafts)

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Of logits that are computed for it."""
        return self.count if self.scores else int(self.samples) + len(self.drafts)

    @property
    def known(self) -> int:
        """Where its guesses begin, or else its end."""
        return self.end - len(self.drafts)

    @property
    def pooled(self) -> int:
        """Its last tokens of which states are pooled."""
        pool = self.sequence.pool
        if pool is None:
            return 0
        return self.count if pool.of_all else int(self.end == self.sequence.length)


@dataclass(slots=True)
class Step:
    """The decision. Chunks of one token come first."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Got room, those reserved among them."""
    reserved: list[Sequence] = field(default_factory=list)
    """Got room for a prompt that another engine computes."""
    preempted: list[Sequence] = field(default_factory=list)
    shape: StepShape = field(default_factory=StepShape)


def shape_of(chunks: Iterable[Chunk]) -> StepShape:
    decodes: list[Chunk] = []
    prompts: list[Chunk] = []
    for chunk in chunks:
        (decodes if chunk.is_decode else prompts).append(chunk)
    return StepShape(
        prompt_tokens=sum(chunk.count for chunk in prompts),
        prompt_context=sum(looked_back(chunk.start, chunk.count) for chunk in prompts),
        decodes=len(decodes),
        decode_context=sum(chunk.known for chunk in decodes),
        drafts=sum(len(chunk.drafts) for chunk in decodes),
    )
