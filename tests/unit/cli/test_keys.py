"""`penstock keys` on a real Redis."""

import asyncio
import json
import os
import re
from dataclasses import asdict

import pytest

from services.cli.main import main
from services.cli.running import Running, holding
from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.redis import connect
from services.common.served_models import Checkpoint, entry
from services.gateway.identity.key_record import KEY_PATTERN
from services.gateway.ids import KEY


@pytest.fixture(autouse=True)
def here(redis_url, namespace, tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))


@pytest.fixture
def running(redis_url, namespace):
    """A Penstock that serves "tiny" and "large", and embeds with "small"."""

    async def register():
        redis = connect(redis_url)
        facts = {"embedding_model": "small"}
        replica = Replica("retrieval", "retrieval-1", "h:1", "h", 1, facts=facts)
        await Registration(redis, namespace, replica, 3600)._once()
        settings = Settings(namespace=namespace)
        for name in ("tiny", "large"):
            await entry(redis, settings, Checkpoint(name, "d", "t", f"/{name}"))._once()
        await redis.aclose()

    asyncio.run(register())


def create(capsys, *more: str) -> tuple[str, str]:
    """A new key, and its id."""
    assert main(["keys", "create", "--tenant", "acme", *more]) == 0
    out, err = capsys.readouterr()
    assert KEY_PATTERN.fullmatch(out.rstrip("\n")), "nothing but the key, for scripts"
    id = err.split(",")[0]
    assert KEY.fits(id)
    assert "acme" in err
    return out.strip(), id


def rows(capsys) -> dict[str, list[str]]:
    """What `keys list` shows: of each id the other cells."""
    assert main(["keys", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "key_" in line]
    return {id: rest for id, *rest in cells}


@pytest.mark.usefixtures("running")
def test_a_key_has_what_it_was_made_with(capsys):
    plain = create(capsys)[1]
    asked = ["--priority", "low", "--weight", "2.5", "--name", "a laptop"]
    full = create(capsys, *asked, "--model", "tiny", "--model", "small")[1]
    shown = rows(capsys)
    assert shown[plain][:5] == ["acme", "", "normal", "1", "all"]
    assert shown[full][:5] == ["acme", "a laptop", "low", "2.5", "tiny, small"]
    for role, created, used, expires, revoked in (shown[plain][5:], shown[full][5:]):
        assert (role, used) == ("member", "")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", created)
        assert not expires
        assert not revoked
    assert main(["keys", "revoke", plain]) == 0
    capsys.readouterr()
    shown = rows(capsys)
    assert shown[plain][9].startswith("20"), "when"
    assert not shown[full][9], "of this one alone"


def test_the_keys_are_those_of_the_penstock_that_runs_here(
    redis_url, namespace, tmp_path, monkeypatch, capsys
):
    """Unless the environment names a Redis."""
    own = create(capsys)[1]
    state = Running("u", "g", redis_url, f"{namespace}-runs", "k", os.getpid())
    with holding(Settings()):
        (tmp_path / "running.json").write_text(json.dumps(asdict(state)))
        assert list(rows(capsys)) == [own]
        monkeypatch.delenv("REDIS_URL")
        assert rows(capsys) == {}
        there = create(capsys)[1]
        assert list(rows(capsys)) == [there]


def test_create_prints_the_key_and_apart_from_it_the_id(capsys):
    _, id = create(capsys)
    assert main(["keys", "list"]) == 0
    assert id in capsys.readouterr().out


def test_revoke_says_what_it_did(capsys):
    _, id = create(capsys, "--name", "a laptop")
    assert main(["keys", "revoke", id]) == 0
    said = capsys.readouterr().out
    assert id in said
    assert "acme, a laptop: revoked" in said
    assert main(["keys", "revoke", id]) == 0
    assert "was revoked already, 20" in capsys.readouterr().out
    for unknown in (KEY.new(), "laptop", "key_"):
        assert main(["keys", "revoke", unknown]) == 1
        assert f"no key '{unknown}'" in capsys.readouterr().err


def test_a_key_may_end_by_itself_and_the_list_says_when(capsys, monkeypatch):
    monkeypatch.setattr("services.cli.commands.keys.local", lambda unix_s: f"at {unix_s}")
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["keys", "create", "--tenant", "acme", "--expires", "12h"]) == 0
    until = re.search(r", until (at \d+);", capsys.readouterr().err)
    assert until
    [[*_, created, _, expires, revoked]] = rows(capsys).values()
    assert int(expires[3:]) - int(created[3:]) == 12 * 3600
    assert not revoked
    assert until[1] == expires


@pytest.mark.parametrize(
    "odd", ["", "0d", "12", "h", "-1h", "1.5h", "1y", "1 h", "99999999d", "²d"]
)
def test_an_odd_time_is_no_time_to_end_at(capsys, odd):
    with pytest.raises(SystemExit):
        main(["keys", "create", "--tenant", "acme", f"--expires={odd}"])
    assert "30m, 12h" in capsys.readouterr().err


@pytest.mark.usefixtures("running")
def test_a_key_for_a_model_that_is_not_served_is_refused(capsys):
    create(capsys, "--model", "tiny", "--model", "small")
    assert main(["keys", "create", "--tenant", "a", "--model", "tiny", "--model", "tinny"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "tinny is not served" in err
    assert "large, small, tiny" in err


@pytest.mark.usefixtures("running")
def test_of_a_limit_for_a_model_that_is_not_served_it_warns(capsys):
    """It may be there before its model is."""
    _, id = create(capsys)
    rule = ["--of", "requests", "--most", "1", "--per", "day"]
    for model, code, told in (("tinny", 0, True), ("small", 0, False), ("", 1, False)):
        assert main(["limits", "set", "r", "--key", id, *rule, "--model", model]) == code
        assert (f"not served now: {model}; these are: large" in capsys.readouterr().err) == told
    limit = '{"name": "r", "of": "requests", "most": 1, "per": "day", "model": "tinny"}'
    for made in (["keys", "create", "--tenant", "b"], ["tenants", "add", "c"]):
        assert main([*made, "--limit", limit]) == 0
        assert "not served now: tinny;" in capsys.readouterr().err


def test_where_nothing_runs_models_are_not_checked_and_it_says_so(capsys):
    assert main(["keys", "create", "--tenant", "a", "--model", "any"]) == 0
    assert "not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "named"), [(["--tenant", ""], "--tenant: "), (["--weight", "0"], "--weight: ")]
)
def test_a_wrong_argument_is_named(more, named, capsys):
    assert main(["keys", "create", "--tenant", "a", *more]) == 1
    assert capsys.readouterr().err.startswith(f"penstock: {named}")


def test_a_wrong_id_is_not_told_where_redis_is_away(capsys, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    assert main(["keys", "revoke", "no-such-form"]) == 1
    assert "Redis cannot be reached" in capsys.readouterr().err
