"""The policy file: what may stand in it (docs/policy.md). Everything else is refused by name."""

from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_BYTES = 2**20
MAX_RULES = 256
MAX_PATTERN = 1024
_MAX_DEPTH = 12

Place = Literal["input", "retrieved", "uploads", "output", "tool_arguments"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Action = Literal["refuse", "redact", "flag", "route"]
Kind = Literal["card", "iban", "email", "phone", "ssn", "ip", "secret"]
Delivery = Literal["stream", "hold"]
ANSWER: tuple[Place, ...] = ("output", "tool_arguments")

# What stands in for a match must leave a JSON string whole.
Replacement = Annotated[str, Field(max_length=64, pattern=r'^[^"\\\x00-\x1f]*$')]
Text = Annotated[str, Field(min_length=1, max_length=8192)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tests(_Part):
    """What a rule's author expects of it: `penstock policy test`."""

    match: list[Text] = Field(default_factory=list, max_length=64)
    passes: list[Text] = Field(default_factory=list, max_length=64, alias="pass")


class Like(_Part):
    """Prototypes: texts of the same meaning match."""

    examples: list[Text] = Field(min_length=1, max_length=64)
    at_least: float = Field(0.5, gt=0, le=1)  # cosine of the two embeddings
    away: Literal["pass", "refuse"] = "pass"  # while the embedding model is away


CATEGORY = r"^[a-z0-9][a-z0-9._/-]{0,63}$"


class RuleSpec(_Part):
    """One rule as it is written."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    pattern: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN)] | None = None
    pii: Annotated[list[Kind], Field(min_length=1)] | None = None
    like: Like | None = None
    jailbreak: Annotated[float, Field(gt=0, le=10)] | None = None
    where: Annotated[list[Place], Field(min_length=1)] = ["input"]
    roles: Annotated[list[Role], Field(min_length=1)] | None = None
    action: Action = "refuse"
    model: str | None = None
    category: Annotated[str, Field(pattern=CATEGORY)] | None = None  # of moderations
    replacement: Replacement | None = None
    fold: bool = True
    disguises: bool = False
    tests: Tests = Tests.model_validate({})

    @model_validator(mode="after")
    def _consistent(self) -> "RuleSpec":
        for wrong in self._faults():
            raise ValueError(wrong)
        return self

    def _faults(self) -> list[str]:
        kinds = [k for k in ("pattern", "pii", "like", "jailbreak") if getattr(self, k) is not None]
        answered = [place for place in self.where if place in ANSWER]
        by_meaning = self.like is not None or self.jailbreak is not None
        routes, redacts = self.action == "route", self.action == "redact"
        for_answers = f"is not for {', '.join(answered)}"
        checks = (
            (len(kinds) != 1, "it has exactly one of pattern, pii, like and jailbreak"),
            (self.roles is not None and "input" not in self.where, "roles are of input"),
            (routes != (self.model is not None), "model is for route, which needs it"),
            (
                self.category is not None and "input" not in self.where,
                "a category is of what moderations judge: input",
            ),
            (routes and self.where != ["input"], "route is for input alone"),
            (self.replacement is not None and not redacts, "replacement is for redact"),
            (redacts and by_meaning, "what like and jailbreak find has no place to redact"),
            (by_meaning and bool(answered), f"like or jailbreak {for_answers}"),
            (self.like is not None and "retrieved" in self.where, "like is for input and uploads"),
            (self.disguises and bool(answered), f"disguises {for_answers}"),
            (self.disguises and redacts, "what is disguised cannot be redacted"),
            (self.disguises and self.like is not None, "disguises are not for like"),
        )
        return [told for wrong, told in checks if wrong]


class PolicySpec(_Part):
    """The whole file."""

    version: str = Field("", max_length=64)
    delivery: Delivery = "stream"
    rules: list[RuleSpec] = Field(default_factory=list, max_length=MAX_RULES)

    @model_validator(mode="after")
    def _names_differ(self) -> "PolicySpec":
        names = [rule.name for rule in self.rules]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two rules are called {name!r}")
        return self


def read(content: bytes) -> PolicySpec:
    """Raises ValueError that says what is wrong and where, the rule by its name."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has over {MAX_BYTES} bytes")
    try:
        _refuse_tricks(content)
        told = yaml.load(content, yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())[:200]}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(told, dict):
        raise ValueError("it is not a mapping with `rules`")
    try:
        return PolicySpec.model_validate(told)
    except ValidationError as error:
        raise ValueError(_words(error, told)) from None


def _refuse_tricks(content: bytes) -> None:
    """Aliases make a page of text a forest, depth is no rule's, and of a name that is there twice
    YAML forgets the first."""
    depth = 0
    for event in yaml.parse(content, yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("anchors and aliases are not taken")
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")
    _refuse_twice(yaml.compose(content, yaml.CSafeLoader))


def _refuse_twice(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _refuse_twice(one)
    elif isinstance(node, yaml.MappingNode):
        names = set()
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value in names:
                line = name.start_mark.line + 1
                raise ValueError(f"{name.value!r} is there twice, again on line {line}")
            if isinstance(name, yaml.ScalarNode):
                names.add(name.value)
            _refuse_twice(value)


def _words(error: ValidationError, told: dict[str, object]) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = list(first["loc"])
    where = ""
    rules = told.get("rules")
    if len(place) > 1 and place[0] == "rules" and isinstance(rules, list):
        rule = rules[int(place[1])]
        name = rule.get("name") if isinstance(rule, dict) else None
        where = f"rule {name!r}: " if isinstance(name, str) else f"rule {int(place[1]) + 1}: "
        place = place[2:]
    field = ".".join(map(str, place))
    said = first["msg"].removeprefix("Value error, ")
    return where + (f"{field}: " if field else "") + said
