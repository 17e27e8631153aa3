"""PENSTOCK_METERING__…, and the price table."""

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer

from services.common.config.base import Section

# Of a million tokens. With six places a token costs whole millionths of a millionth.
Amount = Annotated[
    Decimal,
    Field(ge=0, le=1_000_000, decimal_places=6),
    PlainSerializer(float, return_type=float, when_used="json"),
]


class Price(Section):
    """What a million tokens cost."""

    prompt: Amount = Field(Decimal(0), description="of a million prompt tokens")
    cached: Amount | None = Field(
        None, description="of a million of them that the prefix cache had; unset: as `prompt`"
    )
    output: Amount = Field(
        Decimal(0), description="of a million answer tokens: those that the answer has, however "
        "many a draft model guessed"
    )  # fmt: skip


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
        description="of the ledger at most, some 150 bytes of Redis each; the oldest go first",
    )
