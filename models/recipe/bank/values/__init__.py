"""Values for slots: names, dates, amounts, things, drawn from wide lists and split for tests."""

from models.recipe.bank.values import addresses, amounts, names  # noqa: F401  these name kinds
from models.recipe.bank.values.kinds import KINDS, Value, draw
from models.recipe.bank.values.people import Person, person
from models.recipe.bank.values.split import is_held_out

LITERAL = {"email", "url", "file", "code"}  # kinds whose values are never capitalised

__all__ = ["KINDS", "LITERAL", "Person", "Value", "draw", "is_held_out", "person"]
