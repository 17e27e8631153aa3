"""Who computes guesses in a step, and how many: as many as pay.

A guess is computed behind the last token that is known, in the same step. What the model samples
there is compared with the guess that follows: up to the first that differs all of it is the output,
the same as without guesses, since what is sampled depends on tokens, seed and position alone
(decision 0033).

A step of n sequences makes n tokens. A guess makes one more if it and those before it are right,
and makes the step longer by what the cost model says. It is worth that where it brings more tokens
a second than the step has without it. So a guess needs little where a step waits for its weights,
much where many sequences share them, and more where prompts have the steps made anyway; and nobody
guesses where none can win.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import NamedTuple

from services.worker.engine.scheduling.cost_model import CostModel, StepShape
from services.worker.engine.scheduling.host_cost import HostCost
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation import guess_rules as rules
from services.worker.engine.speculation.acceptance import Acceptance
from services.worker.engine.speculation.proposer import Proposer, Wanted


class _Source:
    """A proposer, and what is known of its guesses."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.acceptance = Acceptance(rules.ALL_FADE, rules.ALL_REST)
        """Of all sequences."""
        self.prior = rules.HOPE
        """How likely a guess is right in a sequence of which nothing is known."""
        self.each_s = 0.0
        """What a guess must win in this step, if all that decode have one."""


class _Offer(NamedTuple):
    sequence: Sequence
    source: int | None
    """None: its grammar."""
    right: float
    """How likely a guess is right, behind right ones."""
    most: int
    """Guesses."""


class Speculation:
    def __init__(self, proposers: Seq[Proposer], cost: CostModel, depth: int, rows: int) -> None:
        """`proposers`: in the order in which they are asked; `depth`: guesses of a sequence at
        most, `rows`: of a step."""
        self._sources = [_Source(proposer) for proposer in proposers]
        self._cost, self._depth, self._rows = cost, depth, rows
        self._tokens = 0
        self._host = HostCost(1e-4)
        """Besides what its device takes, and finding guesses."""
        self._guessed_s = 0.0
        self._idle = 0
        """Steps since somebody guessed."""
        self._offers: dict[str, _Offer] = {}
        """Of this step, by the sequence's id."""

    def wanted(
        self, decodes: Seq[Sequence], shape: StepShape, room: int, prompts: bool = False
    ) -> dict[str, int]:
        """How many guesses each of them should have, by its id; those with none are left out.
        `shape`: of the step without guesses; `room`: tokens that may come to it; `prompts`: there
        are some to compute, which need steps whatever is guessed: a right guess saves no step then,
        but what a decode adds to one."""
        self._tokens += len(decodes)
        room = min(room, self._rows)
        step_s = self._cost.step_s(shape)
        step_s += -self._cost.fixed_s if prompts else self._host.step_s
        token_s = step_s / len(decodes)
        # Costs that nobody sees may be wrong for ever: they are believed less and less.
        margin = rules.MARGIN * rules.FORGETS**self._idle
        self._idle += 1
        for source in self._sources:
            source.prior = source.acceptance.expected(self._tokens, rules.HOPE)
            own_s = source.proposer.depth_s(len(decodes), shape.decode_context) / len(decodes)
            source.each_s = margin * (self._draft_s + own_s)
        if room < 1 or token_s <= min(source.each_s for source in self._sources):
            return {}
        offers = [self._offer(sequence, token_s) for sequence in decodes]
        self._offers = {offer.sequence.id: offer for offer in offers if offer}
        return self._deepen(shape, step_s, margin, room)

    def propose(self, wanted: Wanted, seconds: float) -> dict[str, tuple[int, ...]]:
        """The guesses of those that should have some, by the sequence's id: as far as they can be
        of use. `seconds`: of this step, that it may take to begin to guess."""
        self._idle = 0
        began = perf_counter()
        found: dict[str, tuple[int, ...]] = {}
        for number in (None, *range(len(self._sources))):
            asked = [one for one in wanted if self._offers[one[0].id].source == number]
            for (sequence, count), guesses in zip(
                asked, self._ask(number, asked, seconds), strict=True
            ):
                found[sequence.id] = _of_use(sequence, guesses[:count])
        self._guessed_s = perf_counter() - began
        return found

    def settle(self, shape: StepShape, host_s: float) -> None:
        """A step took so long besides what its device did, guessing included."""
        if shape.decodes and not shape.prompt_tokens:
            self._host.learn(shape.drafts, host_s - self._guessed_s)
        self._guessed_s = 0.0

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's guesses, whose step has run; its tokens are not added yet."""
        number = self._offers[sequence.id].source
        if number is not None:
            sequence.acceptances[number].learn(len(sequence.tokens), drafted, accepted)
            self._sources[number].acceptance.learn(self._tokens, drafted, accepted)

    @property
    def _draft_s(self) -> float:
        """By how much a guess lengthens a step."""
        return self._cost.draft_s + self._host.guess_s

    def _ask(self, number: int | None, asked: Wanted, seconds: float) -> Seq[list[int]]:
        if number is None:
            return [sequence.matcher.forced for sequence, _ in asked if sequence.matcher]
        return self._sources[number].proposer.propose(asked, seconds) if asked else []

    def _offer(self, sequence: Sequence, token_s: float) -> _Offer | None:
        """The first that may pay: where a guess takes less than is likely won. `token_s`: of a
        token without guesses."""
        most = min(self._depth, sequence.num_left - 1)
        if most < 1:
            return None
        if sequence.matcher and (forced := sequence.matcher.forced):
            return _Offer(sequence, None, 1.0, min(most, len(forced)))  # its mask allows no other
        if not sequence.acceptances:
            sequence.acceptances = [Acceptance() for _ in self._sources]
        made = len(sequence.tokens) - sequence.num_prompt + sequence.request.generated_prefix
        for number, source in enumerate(self._sources):
            proposer = source.proposer
            right = sequence.acceptances[number].expected(len(sequence.tokens), source.prior)
            # What it takes to begin has to be won back. How much is still to come nobody knows:
            # about as much as has come, by the rule for who rents or buys skis (R. Karp, 1992).
            costs = source.each_s + rules.MARGIN * proposer.look_s(sequence)
            costs += rules.WAGER * proposer.begin_s(sequence) / max(1, made)
            if right * token_s > costs and (offered := proposer.offers(sequence, most)):
                return _Offer(sequence, number, right, offered)
        return None

    def _deepen(self, shape: StepShape, seconds: float, margin: float, room: int) -> dict[str, int]:
        """From depth to depth, as long as it pays: guesses of all sequences that are worth it.
        `seconds`: of the step without."""
        counts: dict[str, int] = {}
        likely = [*self._offers.values()]
        tokens, each_s = float(shape.decodes), self._draft_s
        depth = 0
        while likely:
            depth += 1
            least = margin * each_s * tokens
            likely = [
                one for one in likely if one.most >= depth and one.right**depth * seconds > least
            ]
            if len(likely) > room:
                likely = sorted(likely, key=lambda one: -one.right)[:room]
            gain = sum(one.right**depth for one in likely)
            costs = len(likely) * each_s + self._depth_s(likely, shape)
            if gain * seconds <= margin * costs * tokens:
                break
            counts.update((one.sequence.id, depth) for one in likely)
            tokens, seconds, room = tokens + gain, seconds + costs, room - len(likely)
        return counts

    def _depth_s(self, offers: Seq[_Offer], shape: StepShape) -> float:
        """Seconds in which those who offer make a guess more each."""
        context = shape.decode_context // shape.decodes
        rows = Counter(offer.source for offer in offers if offer.source is not None)
        return sum(
            self._sources[number].proposer.depth_s(count, count * context)
            for number, count in rows.items()
        )


def _of_use(sequence: Sequence, guesses: Seq[int]) -> tuple[int, ...]:
    """Not those behind one that ends the sequence."""
    ends = [index for index, token in enumerate(guesses) if sequence.ends_with(token)]
    return tuple(guesses[: ends[0] + 1] if ends else guesses)
