"""Where the model is computed: in this process, or by ranks in processes of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.engine.config import EngineConfig
from services.worker.engine.runners.making import make_runner
from services.worker.engine.runners.runner import Runner


class Executor(Protocol):
    @property
    def runner(self) -> Runner: ...

    @property
    def alarms(self) -> Sequence[int]:
        """Descriptors that can be read, while no step runs, when `check` has something to say."""

    def check(self) -> None:
        """While no step runs: raises RunnerLost if none can any more."""

    def close(self) -> None:
        """Ends what was started; the runner is of no use then."""


@dataclass(frozen=True, slots=True)
class Local:
    runner: Runner
    alarms: Sequence[int] = ()

    def check(self) -> None: ...

    def close(self) -> None: ...


def make_executor(config: EngineConfig) -> Executor:
    """Loads the model. Raises UnsupportedModel, and ValueError on settings that do not fit."""
    if config.tensor_parallel == 1:
        return Local(make_runner(config))
    from services.worker.engine.parallel.ranks import Ranks

    return Ranks(config)
