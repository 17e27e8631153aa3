"""Models in the registry without workers, as a worker lists its own."""

from pathlib import Path

from services.common.checkpoints.checkpoint import digest, text_digest
from services.common.config import Settings
from services.common.discovery import Registration
from services.common.redis import Redis
from services.common.served_models import Checkpoint, entry


def checkpoint_of(folder: Path, name: str) -> Checkpoint:
    return Checkpoint(name, digest(folder), text_digest(folder), str(folder))


async def listing(redis: Redis, settings: Settings, served: Checkpoint) -> Registration:
    """Lists it until it is stopped, and for the model's memory after that."""
    registration = entry(redis, settings, served)
    await registration.start()
    return registration
