"""What a stack stands on: Ray under its graph, and the stores and ports that its services share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from services.common.config import Settings

Report = Callable[[str], None]


class Ground(Protocol):
    """Made by the stack, or there before it. Its methods are called in this order."""

    lasts: bool
    """Whether what is deployed there can outlive this process."""

    def checked(self, settings: Settings) -> Settings:
        """As they hold here. Nothing is started yet: raises ValueError, RuntimeError or OSError
        that says what could not work."""

    def stores(self, settings: Settings) -> AbstractContextManager[Settings]:
        """Redis, vectors, the gateways' ports: where they are. Raises RuntimeError."""

    def ray(self, settings: Settings) -> AbstractContextManager[None]:
        """This process is a driver of Ray, and Serve runs. Raises RuntimeError."""

    def resources(self) -> dict[str, float]:
        """What all nodes of Ray have together, by Ray's names ("CPU", "GPU", ...)."""

    def tend(self) -> bool:
        """To be called often: starts again what ended and is this ground's to start. False: what
        was deployed is there no more."""

    @property
    def logs(self) -> Path | None:
        """Folder of the logs of all processes; None before there are any, and where each node has
        its own."""
