"""What requests cost."""

from collections.abc import Mapping
from typing import NamedTuple

from protos.common_pb2 import Usage
from services.common.config import MeteringSettings, ModelPrice, Price
from services.gateway.metering.run import Used

NANO = 10**9  # parts of the currency in which costs are kept
_PER_MILLION = 10**6  # places of a price: of one token, whole millionths of a millionth


class Cost(NamedTuple):
    nanos: int
    currency: str

    @property
    def amount(self) -> float:
        return self.nanos / NANO


class Prices:
    """Costs are whole billionths of the currency, rounded once for each request."""

    def __init__(self, settings: MeteringSettings) -> None:
        self._prices: Mapping[str, ModelPrice] = settings.prices
        self.currency = settings.currency

    def known(self, model: str) -> bool:
        return self._of(model, "") is not None

    def used(self, model: str, tier: str, usage: Usage) -> Used:
        """What the tokens cost: prompt tokens that the prefix cache had at their own price. Of
        speculation nothing shows: `completion_tokens` are those of the answer."""
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        price = self._of(model, tier)
        if price is None:
            return Used(prompt, cached, output)
        of_cached = price.prompt if price.cached is None else price.cached
        parts = ((prompt - cached, price.prompt), (cached, of_cached), (output, price.output))
        return Used(prompt, cached, output, _nanos(parts))

    def most(self, model: str, tier: str, prompt: int, output: int) -> int:
        """The cost of so many tokens when nothing is cached, in billionths."""
        usage = Usage(prompt_tokens=prompt, completion_tokens=output)
        return self.used(model, tier, usage).cost

    def cost(self, model: str, used: Used) -> Cost | None:
        """None: the model has no price."""
        return Cost(used.cost, self.currency) if self.known(model) else None

    def _of(self, model: str, tier: str) -> Price | None:
        found = self._prices.get(model) or self._prices.get("*")
        if found is None:
            return None
        return {str(name): price for name, price in found.tiers.items()}.get(tier, found)


def _nanos(parts: tuple[tuple[int, float], ...]) -> int:
    """Rounded to the nearest, a half upwards."""
    pico = sum(tokens * round(price * _PER_MILLION) for tokens, price in parts)
    return (pico + 500) // 1000
