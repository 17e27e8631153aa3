"""What the doctor examines: the settings, and the Penstock that runs with them, if one does.

It changes nothing: no folder, no secret and no key is made, and no mode is mended.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from services.cli.registry import Registry, point_to_running
from services.common.config import Settings
from services.common.discovery import Replica
from services.common.locks.certificates import CertificateError, CertificateFiles
from services.common.redis import Redis
from services.common.transport import Transport

_REGISTRY_S = 3.0


@dataclass
class Installation:
    """One installation, as far as it can be seen from here."""

    settings: Settings
    redis: Redis | None = None  # None: it is to be started by `penstock up`
    replicas: list[Replica] = field(default_factory=list)  # that serve
    draining: list[Replica] = field(default_factory=list)
    registry_read: bool = False

    @classmethod
    async def find(cls, settings: Settings) -> "Installation":
        named = "redis_url" in settings.model_fields_set
        if point_to_running(settings) is None and not named:
            return cls(settings)
        registry = Registry(settings)
        read = await registry.look(_REGISTRY_S)
        return cls(settings, registry.redis, registry.serving, registry.draining, read)

    def of_service(self, service: str) -> list[Replica]:
        """Its registered replicas."""
        return [replica for replica in self.replicas if replica.service == service]

    @cached_property
    def transport(self) -> Transport | None:
        """As this command dials the services; None where secret or certificate are missing, which
        their own checks tell."""
        secret = self.settings.internal_secret.get_secret_value() or kept(self.secret_file)
        if not secret:
            return None
        folder = self.settings.tls_dir
        try:
            files = CertificateFiles.of_identity(folder, "cli") if folder else None
        except CertificateError:
            return None
        return Transport(secret, files)

    @property
    def secret_file(self) -> Path:
        return self.settings.data_dir / "internal-secret"

    async def close(self) -> None:
        if self.redis is not None:
            await self.redis.aclose()


def kept(path: Path) -> str:
    """What the file holds; empty when it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
