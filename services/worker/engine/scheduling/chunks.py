"""What the scheduler decided of a step."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.worker.engine.scheduling.cost_model import StepShape, looked_back
from services.worker.engine.sequence import Sequence

_NOTHING = StepShape()


class Chunk:
    """Tokens [start, end) of a sequence, to be computed in this step.

    samples     it ended with the sequence's last token when it was made: the next one is sampled
    scores      logprobs of the prompt's tokens behind its own are wanted
    is_decode   its sequence was decoding (sequence.py) when it was made: all others are prompts
    drafts      guesses of the tokens behind its last, and the last of [start, end). After each of
                them one is sampled, too, which counts if those before it were guessed right
    known       where its guesses begin, or else its end
    count       of its tokens
    is_single   it is one token, after which one is sampled, and nothing else
    """

    __slots__ = (
        *("sequence", "start", "end", "samples", "scores", "is_decode", "drafts"),
        *("known", "count", "is_single"),
    )

    def __init__(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        samples: bool,
        scores: bool = False,
        is_decode: bool = False,
        drafts: tuple[int, ...] = (),
    ) -> None:
        self.sequence = sequence
        self.start, self.end = start, end
        self.samples, self.scores = samples, scores
        self.is_decode = is_decode
        self.drafts = drafts
        self.known = end - len(drafts)
        self.count = end - start
        self.is_single = samples and not scores and self.count == 1

    @classmethod
    def of(cls, sequence: Sequence, count: int, drafts: tuple[int, ...] = ()) -> "Chunk":
        """The next `count` tokens of those not launched yet, and guesses behind them."""
        start = sequence.num_launched
        end = start + count
        samples = end == sequence.length and sequence.pool is None
        scores = sequence.scores is not None
        decodes = sequence.is_decoding
        return cls(sequence, start, end + len(drafts), samples, scores, decodes, drafts)

    @classmethod
    def decode(cls, sequence: Sequence, drafts: tuple[int, ...] = ()) -> "Chunk":
        """The last token of one that is decoding, and guesses behind it."""
        end = sequence.length
        return cls(sequence, end - 1, end + len(drafts), True, False, True, drafts)

    @property
    def rows(self) -> int:
        """Of logits that are computed for it."""
        return self.count if self.scores else int(self.samples) + len(self.drafts)

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
    shape: StepShape = _NOTHING


def shape_of(chunks: Iterable[Chunk]) -> StepShape:
    tokens = prompt_context = decodes = decode_context = drafts = 0
    for chunk in chunks:
        if chunk.is_decode:
            decodes += 1
            decode_context += chunk.known
            drafts += len(chunk.drafts)
        else:
            tokens += chunk.count
            prompt_context += looked_back(chunk.start, chunk.count)
    return StepShape(tokens, prompt_context, decodes, decode_context, drafts)
