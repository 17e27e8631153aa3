"""What may be used: named rules, as tenants and keys have them. metering/ enforces them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from services.gateway.faults import spelt

MOST_RULES = 32  # of one list
_Name = Annotated[
    str,
    spelt(
        r"^[a-z0-9][a-z0-9_-]{0,31}$",
        "1 to 32 small letters, digits, hyphens and underscores, with a letter or digit first",
    ),
]


class Limit(BaseModel):
    """One rule. Its counter is known by its name: other figures go on with what was counted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name = Field(description="tells it from the others")
    of: Literal["requests", "tokens", "concurrent", "cost"] = Field(
        description="what is counted; cost: in the currency of the price table"
    )
    most: float = Field(ge=0, le=1e15, allow_inf_nan=False, description="so much; 0: none at all")
    per: Literal["minute", "hour", "day", "month"] | None = Field(
        None, description="in so long (day and month are calendar's, UTC); of concurrent: none"
    )
    model: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="for this model alone; None: for all together",
    )
    without_redis: Literal["open", "closed"] = Field(
        "open", description="while it cannot be counted: open lets through, closed refuses"
    )

    @model_validator(mode="after")
    def _has_its_time(self) -> "Limit":
        if (self.of == "concurrent") != (self.per is None):
            raise ValueError(
                f"limit {self.name!r}: {self.of} is counted "
                + ("at once: leave `per` out" if self.per else "per minute, hour, day or month")
            )
        if self.of != "cost" and not self.most.is_integer():
            raise ValueError(f"limit {self.name!r}: most must be a whole number of {self.of}")
        return self


def _named_once(rules: Sequence[Limit]) -> Sequence[Limit]:
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two limits are called {', '.join(twice)}")
    return rules


Limits = Annotated[tuple[Limit, ...], Field(max_length=MOST_RULES), AfterValidator(_named_once)]


@dataclass(frozen=True, slots=True)
class Bound:
    """A rule, and whose use it counts."""

    owner: str
    """"tenant:acme": of all of the tenant together; "user:acme:key_12ab…": of one caller, by a rule
    of his own; the same and ":each": by one of his tenant's for each. With the rule's name it is
    whose counter it is. Fit for a Redis key: no braces, no spaces."""
    limit: Limit
