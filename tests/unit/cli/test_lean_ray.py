"""What is replaced of Ray's inside, and what is said where a newer Ray has it no more."""

import pytest

from services.cli.failures import told
from services.cli.ground.lean_ray import _replace


class Node:
    def start_monitor(self) -> None: ...


def test_what_is_there_is_replaced_and_what_is_not_is_told() -> None:
    def by(_: Node) -> None: ...

    _replace(Node, "start_monitor", by)
    assert Node.start_monitor is by
    with pytest.raises(RuntimeError) as raised:
        _replace(Node, "start_log_monitor", by)
    (line,), code = told(raised.value)
    assert "has no Node.start_log_monitor" in line
    assert "constraints.txt" in line
    assert code == 1
