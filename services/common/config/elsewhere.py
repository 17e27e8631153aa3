"""Settings of another process, which may be of another version: they travel as data."""

import json
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic_settings import PydanticBaseSettingsSource, SettingsConfigDict

from services.common.config.complaints import complaints
from services.common.config.settings import Settings


def as_data(settings: Settings) -> dict[str, Any]:
    """What is set in them, as JSON has it, secrets in plain words. What is not set stays out:
    the other process has the defaults of its own version."""
    data: dict[str, Any] = json.loads(
        json.dumps(settings.model_dump(exclude_unset=True), default=_plain)
    )
    return data


def from_data(data: dict[str, Any]) -> Settings:
    """Those of `as_data`, and nothing of the environment here.

    Raises ValueError that names what this version does not know or take, and no value.
    """
    try:
        return _Sent(**data)
    except ValidationError as error:
        raise ValueError("; ".join(complaints(error))) from None


class _Sent(Settings):
    model_config = SettingsConfigDict(extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: Any, init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _plain(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} in settings is no JSON")
