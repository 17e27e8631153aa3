"""`penstock up` that deploys its graph anew at each SIGUSR1, as it is after a change of the code:
Serve replaces all replicas, step by step.

    python -m tests.support.upgrading up ...
"""

import signal
import sys
import threading
from typing import Any

from services.cli import main
from services.cli.stack import stack


class Upgrading(stack.Stack):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._asked = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._asked.set())

    def tend(self) -> bool:
        if self._asked.is_set():
            from services.app import deploy

            self._asked.clear()
            deploy(self._settings)
        return super().tend()


if __name__ == "__main__":
    stack.Stack = Upgrading  # type: ignore[misc]
    sys.exit(main.main())
