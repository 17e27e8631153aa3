"""`penstock down` on a Ray cluster: it joins it, takes down what is there, and leaves it."""

from typing import Any

import pytest

from services import app
from services.cli.commands import down
from services.cli.main import main


@pytest.mark.parametrize(
    ("there", "said"), [(["ours", "ours:m"], "Penstock is down."), ([], "There was no Penstock")]
)
@pytest.mark.parametrize("ends_well", [True, False])
def test_what_is_there_is_taken_down(
    there: list[str],
    said: str,
    ends_well: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done: list[Any] = []

    class Joined:
        def __init__(self, address: str, settings: Any) -> None:
            assert (address, settings.namespace) == ("10.0.0.1:6379", "ours")

        def start(self) -> None:
            done.append("joined")

        def stop(self) -> None:
            done.append("left")

    def delete_all(namespace: str) -> None:
        done.append(namespace)
        if not ends_well:
            raise RuntimeError("Ray went away")

    monkeypatch.setenv("PENSTOCK_NAMESPACE", "ours")
    monkeypatch.setattr(down, "JoinedRay", Joined)
    monkeypatch.setattr(app, "deployed", lambda namespace: there)
    monkeypatch.setattr(app, "delete_all", delete_all)
    fails = bool(there) and not ends_well
    assert main(["down", "--address", "10.0.0.1:6379"]) == (1 if fails else 0)
    assert done == ["joined", *(["ours"] if there else []), "left"]
    out, err = capsys.readouterr()
    assert (said in out) is not fails
    assert ("draining: ours, ours:m" in err) is bool(there)
