"""Who computes guesses in a step, and how many: as many as pay.

A guess is computed behind the last token that is known, in the same step. What the model samples
there is compared with the guess that follows: up to the first that differs all of it is the output,
the same as without guesses, since what is sampled depends on tokens, seed and position alone
(decision 0033).

A step of n sequences makes n tokens. A guess makes one more if it and those before it are right,
and makes the step longer by what the cost model says. It is worth that where it brings more tokens
a second than the step has without it. So a guess needs little where a step waits for its weights,
much where many sequences share them, and nobody guesses where none can win.
"""

from collections.abc import Sequence as Seq
from time import perf_counter

from services.worker.engine.acceptance import Acceptance
from services.worker.engine.cost_model import CostModel, StepShape
from services.worker.engine.proposer import Proposer, Wanted
from services.worker.engine.sequence import Sequence
from services.worker.engine.settling import Settling

_HOPE = 0.9
"""Of a guess, before any was seen: how likely it is right. Too low it would stay so, unseen."""
_FORCED = 0.95
"""Of one that a grammar leaves no other for; but it may be put into tokens in another way."""
_WAGER = 2.0
"""Times what it takes to begin must have been won by then, had it begun before."""
_FORGETS = 0.999
"""By so much less what guesses cost is believed with each step that has none."""
_MARGIN = 1.15
"""By so much it must be better, for what the cost model does not see."""


class Speculation:
    def __init__(self, proposer: Proposer, cost: CostModel, depth: int, rows: int) -> None:
        """`depth`: guesses of a sequence, `rows`: of a step, at most."""
        self._proposer, self._cost = proposer, cost
        self._depth, self._rows = depth, rows
        self._all = Acceptance(fades=0.99, rests=0.999)
        self._tokens = 0
        self._host = Settling(1e-4)
        """Besides what its device takes, and guessing, a step."""
        self._guessed_s = 0.0
        self._idle = 0
        """Steps since somebody guessed."""
        self._forced: dict[str, list[int]] = {}
        """Those of this step that a grammar says, by the sequence's id."""

    def wanted(self, decodes: Seq[Sequence], shape: StepShape, room: int) -> dict[str, int]:
        """How many guesses each of them should have, by its id; those with none are left out.
        `shape`: of the step without guesses; `room`: tokens that may come to it."""
        self._tokens += len(decodes)
        self._forced = {}
        room = min(room, self._rows)
        step_s = self._cost.step_s(shape) + self._host.value
        token_s = step_s / len(decodes)
        prior = self._all.expected(self._tokens, _HOPE)
        # Costs that nobody sees may be wrong for ever: they are believed less and less.
        margin = _MARGIN * _FORGETS**self._idle
        self._idle += 1
        own_s = self._proposer.depth_s(len(decodes), shape.decode_context) / len(decodes)
        costs = margin * (self._cost.draft_s + own_s)
        if token_s <= costs or not room:
            return {}
        likely = [self._offer(sequence, prior, token_s, costs) for sequence in decodes]
        likely = [one for one in likely if one[1]]
        return self._deepen(likely, shape, step_s, margin, room) if likely else {}

    def propose(self, wanted: Wanted) -> dict[str, tuple[int, ...]]:
        """The guesses of those that should have some, by the sequence's id: as far as they can be
        of use."""
        self._idle = 0
        others = [one for one in wanted if one[0].id not in self._forced]
        began = perf_counter()
        guessed = zip(others, self._proposer.propose(others) if others else (), strict=True)
        self._guessed_s = perf_counter() - began
        found = {sequence.id: guesses for (sequence, _), guesses in guessed}
        return {
            sequence.id: _of_use(sequence, (self._forced | found)[sequence.id][:count])
            for sequence, count in wanted
        }

    def settle(self, host_s: float) -> None:
        """A step took so long besides what its device did, guessing included."""
        self._host.add(max(0.0, host_s - self._guessed_s))
        self._guessed_s = 0.0

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's guesses, whose step has run; its tokens are not added yet."""
        sequence.acceptance.learn(len(sequence.tokens), drafted, accepted)
        self._all.learn(self._tokens, drafted, accepted)

    def _offer(
        self, sequence: Sequence, prior: float, token_s: float, costs: float
    ) -> tuple[float, int, Sequence]:
        """How likely its guesses are right, and how many there are: none, if already the first
        does not pay. `token_s`: of a token without guesses; `costs`: of a guess."""
        most = min(self._depth, sequence.num_left - 1)
        if most < 1:
            return 0.0, 0, sequence
        if sequence.matcher and (forced := sequence.matcher.forced()):
            self._forced[sequence.id] = forced
            return _FORCED, min(most, len(forced)), sequence
        right = sequence.acceptance.expected(len(sequence.tokens), prior)
        # What it takes to begin has to be won back. How much is still to come nobody knows: about
        # as much as has come, by the rule for who rents or buys skis (R. Karp, 1992).
        made = len(sequence.tokens) - sequence.num_prompt + sequence.request.generated_prefix
        costs += _WAGER * self._proposer.begin_s(sequence) / max(1, made)
        costs += _MARGIN * self._proposer.look_s(sequence)
        if right * token_s <= costs:
            return right, 0, sequence
        return right, self._proposer.offers(sequence, most), sequence

    def _deepen(
        self,
        likely: list[tuple[float, int, Sequence]],
        shape: StepShape,
        seconds: float,
        margin: float,
        room: int,
    ) -> dict[str, int]:
        """From depth to depth, as long as it pays: guesses of all sequences that are worth it.
        `seconds`: of the step without."""
        counts: dict[str, int] = {}
        tokens = float(shape.decodes)
        each_s, context = self._cost.draft_s, shape.decode_context // shape.decodes
        depth = 0
        while likely:
            depth += 1
            least = margin * each_s * tokens
            likely = [
                one for one in likely if one[1] >= depth and one[0] ** depth * seconds > least
            ]
            if len(likely) > room:
                likely = sorted(likely, key=lambda one: -one[0])[:room]
            gain = sum(right**depth for right, _, _ in likely)
            rows = len(likely)
            costs = rows * each_s + self._proposer.depth_s(rows, rows * context)
            if gain * seconds <= margin * costs * tokens:
                break
            counts.update((sequence.id, depth) for _, _, sequence in likely)
            tokens, seconds, room = tokens + gain, seconds + costs, room - rows
        return counts


def _of_use(sequence: Sequence, guesses: Seq[int]) -> tuple[int, ...]:
    """Not those behind one that ends the sequence, nor what its grammar does not allow."""
    ends = [index for index, token in enumerate(guesses) if sequence.ends_with(token)]
    end = ends[0] + 1 if ends else len(guesses)
    if sequence.matcher:
        end = min(end, sequence.matcher.leading(guesses[:end]))
    return tuple(guesses[:end])
