"""PENSTOCK_METERING__…, and the price table."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from services.common.config.base import Section

_PLACES = 6


def _in_millionths(amount: float) -> float:
    if abs(round(amount, _PLACES) - amount) > 1e-12 * amount:
        raise ValueError(f"has at most {_PLACES} decimal places")
    return amount


Amount = Annotated[float, Field(ge=0, le=1e6), AfterValidator(_in_millionths)]
"""Of a million tokens. With six places one token costs whole millionths of a millionth."""


class Price(Section):
    """What a million tokens cost."""

    prompt: Amount = Field(0.0, description="of a million prompt tokens")
    cached: Amount | None = Field(
        None, description="of a million of them that the prefix cache had; unset: as `prompt`"
    )
    output: Amount = Field(
        0.0, description="of a million answer tokens, however many more a draft model guessed"
    )


class ModelPrice(Price):
    """The price of one model; a tier is the priority that the caller has."""

    tiers: dict[Literal["high", "normal", "low"], Price] = Field(
        default_factory=dict, description="other prices for a priority"
    )


class MeteringSettings(Section):
    prices: dict[str, ModelPrice] = Field(
        default_factory=dict,
        description="JSON; by model, `*` for all others; a model without a price costs nothing",
    )
    currency: str = Field(
        "USD", pattern=r"^[A-Za-z]{1,8}$", description="of all prices and budgets"
    )
    open_output_tokens: int = Field(
        512,
        ge=0,
        description="what limits keep free for the answer of a request that leaves max_tokens open",
    )
    lease_s: float = Field(
        15.0,
        ge=1,
        le=3600,
        description="what a killed gateway's requests hold of limits is back after this",
    )
    redis_patience_s: float = Field(
        1.0,
        gt=0,
        le=5,
        description="a request waits no longer for its limits' answer; then Redis is away, and "
        "nobody waits for it until it answers again",
    )
    unsettled: int = Field(
        10_000,
        gt=0,
        description="ended requests that a gateway remembers while Redis is away; of further ones "
        "the oldest are lost, and counted",
    )
    ledger_days: float = Field(35.0, gt=0, description="how long the ledger's entries are kept")
    ledger_entries: int = Field(
        1_000_000,
        gt=0,
        description="of the ledger at most, some 170 bytes of Redis each; the oldest go first",
    )
