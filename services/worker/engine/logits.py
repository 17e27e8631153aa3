"""What a request's parameters do to its logits before a token is drawn: plain arrays, no tensors.

    logit of a token in prompt or output    repetition_penalty: divided by it if above 0, else
                                            multiplied (Keskar et al., arXiv 1909.05858)
    then added                              logit_bias of the token
                                            - frequency_penalty * times that it is in the output
                                            - presence_penalty if it is in there
    then -inf                               end-of-text and stop tokens, before `min_tokens`;
                                            the last token of a bad word behind its others

All of it touches single tokens: a row has a list of edits (kernels/sampling.py), as long as what it
asks for and not as the vocabulary. A token's counts are kept with its sequence and brought up to
date token by token, so that a step only copies them. Whatever was computed elsewhere before, the
list follows from the tokens alone, and from where the output begins.

Logprobs are of the logits as the model gives them, before all this.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import EDIT, NO_EDITS
from services.worker.engine.messages import MAX_WORD, Sampling

Edits = NDArray[np.void]
_NEVER = -np.inf


class LogitEdits:
    """Of one sequence."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], ends: Iterable[int]
    ) -> None:
        """`output`: generated before, elsewhere. `ends`: tokens that would end the request."""
        self._sampling = sampling
        self._prompt = len(prompt)
        self._output = list(output)
        self._counts: Counter[int] = Counter()
        self._bias = dict(sampling.logit_bias)
        self._bias.update((word[0], _NEVER) for word in sampling.bad_words if len(word) == 1)
        self._words = [word for word in sampling.bad_words if len(word) > 1]
        self._ends = _banned(ends)
        seen = np.unique(np.asarray(prompt if self._repeats else (), np.int32))
        self._edits = np.zeros(len(seen) + len(self._bias) + 16, EDIT)
        self._edits["token"][: len(seen)] = seen
        self._edits["factor"][: len(seen)] = sampling.repetition_penalty
        self._places: dict[int, int] = dict(zip(seen.tolist(), range(len(seen)), strict=True))
        for token, bias in self._bias.items():
            self._edits["add"][self._place(token)] = bias
        for token in self._output:
            self._count(token)

    @staticmethod
    def of(
        sampling: Sampling, prompt: Sequence[int], output: Sequence[int], ends: Iterable[int]
    ) -> "LogitEdits | None":
        """None: the parameters change no logit."""
        asked = (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.logit_bias
            or sampling.bad_words
            or sampling.min_tokens
        )
        return LogitEdits(sampling, prompt, output, ends) if asked else None

    def append(self, token: int) -> None:
        """The output goes on with `token`."""
        self._output.append(token)
        self._count(token)

    @property
    def waits(self) -> bool:
        """What becomes of the next token depends on which one the last was."""
        return bool(self._penalizes or self._words)

    def at(self, position: int, guesses: Sequence[int] = ()) -> list[Edits]:
        """Those of the token at `position`, to be put together; as they would be with `guesses`
        behind the output. They may change when `append` is called."""
        found = self._behind(guesses) if guesses and self.waits else [self._own]
        if position - self._prompt < self._sampling.min_tokens:
            found.append(self._ends)
        if self._words:
            output = [*self._output[-MAX_WORD:], *guesses]
            found.append(_banned({word[-1] for word in self._words if _completes(output, word)}))
        return found

    @property
    def _own(self) -> Edits:
        return self._edits[: len(self._places)]

    def _behind(self, guesses: Sequence[int]) -> list[Edits]:
        """Its own, those of the guesses in their places: it costs what changes."""
        if not self._penalizes:
            return [self._own]
        changed = {
            token: self._edit(token, self._counts[token] + more)
            for token, more in Counter(guesses).items()
        }
        places = {self._places[token]: token for token in changed if token in self._places}
        found: list[Edits] = []
        end = 0
        for place in sorted(places):
            found += [self._own[end:place], np.array([changed.pop(places[place])], EDIT)]
            end = place + 1
        return [*found, self._own[end:], np.array([*changed.values()], EDIT)]

    @property
    def _repeats(self) -> bool:
        return self._sampling.repetition_penalty != 1

    @property
    def _penalizes(self) -> bool:
        s = self._sampling
        return bool(self._repeats or s.frequency_penalty or s.presence_penalty)

    def _count(self, token: int) -> None:
        """One more of it in the output."""
        self._counts[token] += 1
        if self._penalizes:
            place = self._place(token)
            self._edits[place] = self._edit(token, self._counts[token])

    def _edit(self, token: int, count: int) -> tuple[int, float, float]:
        """Of a token that is in the output so many times."""
        s = self._sampling
        penalty = s.frequency_penalty * count + s.presence_penalty
        return token, s.repetition_penalty, self._bias.get(token, 0.0) - penalty

    def _place(self, token: int) -> int:
        """Of the token's edit, made if there is none."""
        if token not in self._places:
            place = len(self._places)
            if place == len(self._edits):
                self._edits = np.resize(self._edits, 2 * place)
            self._edits[place] = (token, 1.0, 0.0)
            self._places[token] = place
        return self._places[token]


def _completes(output: Sequence[int], word: Sequence[int]) -> bool:
    """Whether the word is whole with its last token behind the output."""
    return list(output[1 - len(word) :]) == list(word[:-1])


Row = tuple["LogitEdits | None", Sequence[int]]
"""Of logits: whose edits they have, and behind which guesses."""


def gathered(rows: Sequence[Row], samplings: NDArray[np.void]) -> Edits:
    """The edits of a step's rows, each of which is told where its own are."""
    pieces: list[Edits] = []
    first = 0
    for row, (edits, guesses) in enumerate(rows):
        if edits is None or samplings["given"][row]:
            continue
        own = edits.at(int(samplings["position"][row]), guesses)
        count = sum(map(len, own))
        samplings["first_edit"][row], samplings["num_edits"][row] = first, count
        pieces += own
        first += count
    return np.concatenate(pieces) if pieces else NO_EDITS


def _banned(tokens: Iterable[int]) -> Edits:
    return np.array([(token, 1.0, _NEVER) for token in tokens], EDIT)
