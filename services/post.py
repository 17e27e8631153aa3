"""What a replica under Serve is told: which one it is, and by which settings.

It travels as data, not as an object: whoever deploys may be of another version than the image that
a replica runs in, as in each rolling upgrade.
"""

from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError

from services.common.config import ModelSpec, Role, Section, Settings
from services.common.config.elsewhere import as_data, from_data
from services.common.config.stores import StoreSettings
from services.common.versions import version


class Post(Section):
    """One replica's, as its deployment says."""

    service: str
    # None: those of the replica's own environment. Else `as_data` of those that it shall have.
    settings: dict[str, Any] | None = Field(None, repr=False)
    model: ModelSpec | None = None  # of a worker, as its role
    role: Role = "both"
    version: str  # of whoever deploys

    @classmethod
    def of(
        cls,
        service: str,
        settings: Settings | None,
        model: ModelSpec | None = None,
        role: Role = "both",
    ) -> Self:
        data = None if settings is None else as_data(settings)
        return cls(service=service, settings=data, model=model, role=role, version=version())

    def sealed(self) -> SecretStr:
        """As JSON, with the install's secrets. What shows a deployment's arguments, or logs them,
        shows asterisks."""
        return SecretStr(self.model_dump_json(exclude_unset=True))

    @classmethod
    def read(cls, sealed: SecretStr) -> Self:
        """Raises ValueError that names what this version does not know, and no value."""
        try:
            return cls.model_validate_json(sealed.get_secret_value())
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
            raise ValueError(f"what a replica of Penstock {version()} is told: {told}") from None

    def own_settings(self) -> Settings:
        """Raises ValueError that names the settings which this version does not know or take."""
        settings = Settings() if self.settings is None else self._sent(self.settings)
        return settings if self.model is None else settings.of_worker(self.model, self.role)

    def _sent(self, data: dict[str, Any]) -> Settings:
        try:
            return from_data(data)
        except ValueError as error:
            versions = f"sent by Penstock {self.version} to {version()}"
            raise ValueError(f"{error} ({versions})") from None

    def stores(self) -> StoreSettings:
        """Where Redis is; known also where other settings are not understood."""
        if self.settings is None:
            return Settings()
        return StoreSettings.model_validate(self.settings, by_name=True)

    def __str__(self) -> str:
        return self.service if self.model is None else f"{self.role} worker of {self.model.name}"
