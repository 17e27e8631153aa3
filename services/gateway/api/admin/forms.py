"""What the admin listener's bodies share: lists of models and limits, and what is wrong in them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from services.common.errors import PenstockError
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.rest.http import Exchange
from services.gateway.api.schema import Body, bad_value, field_path
from services.gateway.faults import words_of
from services.gateway.identity.audit import Actor
from services.gateway.identity.limits import MOST_RULES, Limit
from services.gateway.identity.principal import Permission, Principal
from services.gateway.identity.tenants import MOST_MODELS, TENANT_NAME, ModelName, Priority
from services.gateway.ids import not_found
from services.gateway.parts import Gateway

T = TypeVar("T")

LimitForms = Annotated[list[dict[str, Any]], Field(max_length=MOST_RULES)]


class ChangeGrants(Body):
    """What tenants and keys are both granted. What is given is changed; null gives back the
    default."""

    models: Annotated[list[ModelName], Field(max_length=MOST_MODELS)] | None = None
    priority: Priority | None = None
    weight: float | None = None


def actor(exchange: Exchange, principal: Principal) -> Actor:
    """For the audit log."""
    return Actor(principal.user, exchange.peer)


async def known_tenant(gateway: Gateway, tenant: str | None, admin: bool) -> None:
    """Raises INVALID_ARGUMENT where it is not said whose it is, NOT_FOUND for nobody's."""
    if admin == (tenant is not None):
        raise bad_value("tenant", "give a tenant, or `admin: true`, and not both")
    if tenant is None:
        return
    known = TENANT_NAME.fullmatch(tenant)
    if not known or await gateway.identity.tenants.find(tenant) is None:
        raise not_found("tenant", tenant, "tenant")


def changed(body: Body, record: type[BaseModel], but: set[str]) -> dict[str, Any]:
    """The record's fields that the body gives; null is the record's default."""
    return {
        name: record.model_fields[name].default if value is None else value
        for name in body.model_fields_set - but
        for value in [getattr(body, name)]
    }


def listed(
    records: Iterable[T],
    id: Callable[[T], str],
    told: Callable[[T], dict[str, Any]],
    query: PageQuery,
) -> dict[str, Any]:
    """One page of the records, by their ids; those of other pages are not told in full."""
    by_id = {id(record): record for record in records}
    shown = page(({"id": one} for one in by_id), query)
    return {**shown, "data": [told(by_id[one["id"]]) for one in shown["data"]]}


def new_limits(principal: Principal, body: Body, *fields: str) -> dict[str, tuple[Limit, ...]]:
    """Those that the body gives, under the names of `fields`. Raises INVALID_ARGUMENT that names
    the one at fault, PERMISSION_DENIED to who may give none."""
    given = [name for name in fields if getattr(body, name)]
    if given:
        principal.require(Permission.LIMITS_WRITE)
    return {name: limits_of(getattr(body, name), name) for name in given}


def limits_of(forms: Any, field: str) -> tuple[Limit, ...]:
    """Raises INVALID_ARGUMENT that names the one at fault."""
    found = []
    for index, form in enumerate(forms):
        try:
            found.append(Limit.model_validate(form))
        except ValidationError as error:
            raise _explained(error, f"{field}[{index}]") from None
    return tuple(found)


@contextmanager
def named_wrong() -> Iterator[None]:
    """What a record does not take is the request's fault."""
    try:
        yield
    except ValidationError as error:
        raise _explained(error, "") from None
    except ValueError as error:
        raise bad_value("key", str(error)) from None


def _explained(error: ValidationError, within: str) -> PenstockError:
    problem = error.errors(include_url=False, include_input=False)[0]
    inside = field_path(problem["loc"])
    path = ".".join(filter(None, (within, inside)))
    return bad_value(path, words_of(problem))
