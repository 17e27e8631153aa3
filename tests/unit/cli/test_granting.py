"""`penstock tenants`, `keys`, `limits` and `audit` on a real Redis."""

import asyncio
import json

import pytest

from services.cli.main import main
from services.common.redis import connect
from services.gateway.identity.key_record import ADMIN_KEY_PATTERN, KEY_PATTERN
from services.gateway.jobs.queue import Queue, Queues

LIMIT = '{"name": "rpm", "of": "requests", "per": "minute", "most": 60}'


@pytest.fixture(autouse=True)
def here(redis_url, namespace, tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("services.cli.console._PIPED_WIDTH", 400)


@pytest.fixture
def run(capsys):
    """Runs a command: its exit code, output and errors."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def key_of(run, *more: str) -> tuple[str, str]:
    code, out, err = run("keys", "create", "--tenant", "acme", *more)
    assert code == 0
    return out.strip(), err.split(",")[0]


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_a_tenant_is_added_changed_suspended_and_resumed(run):
    assert run("tenants", "add", "acme", "--note", "Acme Ltd", "--weight", "2")[0] == 0
    assert "there is a tenant 'acme' already" in run("tenants", "add", "acme")[2]
    assert run("tenants", "change", "acme", "--priority", "low", "--model", "tiny")[0] == 0
    key_of(run)
    told = rows(run("tenants", "list")[1])
    assert told == [["acme", "Acme Ltd", "tiny", "low", "2", "", "1", ""]]
    assert "suspended; nobody of it" in run("tenants", "suspend", "acme")[1]
    assert rows(run("tenants", "list")[1])[0][-1].startswith("20")
    assert run("tenants", "resume", "acme")[0] == 0
    assert run("tenants", "change", "acme", "--model", "*")[0] == 0
    told = rows(run("tenants", "list")[1])
    assert (told[0][2], told[0][-1]) == ("all", "")
    for action in (["suspend", "rival"], ["change", "rival", "--weight", "1"]):
        assert "there is no tenant 'rival'" in run("tenants", *action)[2]
    assert "nothing is to be changed" in run("tenants", "change", "acme")[2]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["tenants", "add", "a b"], "the name: "),
        (["tenants", "add", "a", "--weight", "0"], "--weight: "),
        (["keys", "create", "--tenant", "a", "--role", "admin"], "--role: a tenant's key is"),
        (["keys", "create", "--admin", "--role", "member"], "--role: an administrator's key is"),
        (["keys", "create", "--tenant", "a", "--scope", "root"], "--scope: "),
        (["tenants", "add", "a", "--limit", "rpm"], "--limit: Invalid JSON"),
        (["tenants", "add", "a", "--each-limit", LIMIT, "--each-limit", LIMIT], "--each-limit: "),
        (["keys", "create", "--tenant", "a", "--limit", '{"name": "R"}'], "--limit: name: "),
        (["keys", "create", "--admin", "--limit", LIMIT], "--limit: an administrator's"),
        (["usage", "--export", "/nowhere/u.csv"], "--export: /nowhere/u.csv: No such file"),
        (["usage", "--export", "\x1b[2J.txt"], "--export: �[2J.txt ends with neither"),
        (["limits", "set", "rpm", "--tenant", "a", "--of", "tokens", "--most", "1"], "per minute"),
        (["limits", "set", "R", "--tenant", "a", "--of", "concurrent", "--most", "1"], "the name"),
        (["limits", "set", "r", "--tenant", "a", "--of", "cost", "--most", "-1"], "--most: "),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_changed(run, argv, named):
    code, out, err = run(*argv)
    assert (code, out) == (1, "")
    assert named in err
    assert run("audit", "--json")[1] == ""


def test_a_key_is_replaced_and_changed(run):
    key, id = key_of(run, "--scope", "inference")
    code, out, err = run("keys", "rotate", id, "--overlap", "2h")
    assert code == 0
    assert KEY_PATTERN.fullmatch(out.strip())
    assert out.strip() != key
    assert f"{id}, tenant acme; the key before it holds until 20" in err
    [row] = rows(run("keys", "list")[1])
    assert (row[0], row[6]) == (id, "member: inference")
    assert row[9].startswith("old: 20")
    assert "the key before it holds no more" in run("keys", "rotate", id, "--overlap", "0s")[2]
    assert run("keys", "change", id, "--role", "read-only", "--name", "desk")[0] == 0
    [row] = rows(run("keys", "list")[1])
    assert (row[2], row[6]) == ("desk", "read-only: inference")
    assert "nothing is to be changed" in run("keys", "change", id)[2]
    for action in ("rotate", "revoke"):
        assert "there is no key 'key_x'" in run("keys", action, "key_x")[2]
    assert run("keys", "revoke", id)[0] == 0
    assert "holds no more" in run("keys", "rotate", id)[2]


def test_an_administrators_key_looks_by_default_and_is_of_no_tenant(run):
    code, out, err = run("keys", "create", "--admin", "--name", "console")
    assert code == 0
    assert ADMIN_KEY_PATTERN.fullmatch(out.strip())
    assert "an administrator's" in err
    assert run("keys", "create", "--admin", "--role", "admin")[0] == 0
    listed = rows(run("keys", "list")[1])
    assert sorted((row[1], row[6]) for row in listed) == [("", "admin"), ("", "read-only")]
    assert rows(run("tenants", "list")[1]) == []


def test_limits_are_set_changed_listed_and_removed(run):
    _, id = key_of(run)
    rpm = ["limits", "set", "rpm", "--of", "requests", "--per", "minute"]
    assert run(*rpm, "--tenant", "acme", "--most", "60")[0] == 0
    assert run(*rpm, "--each-of", "acme", "--most", "6", "--without-redis", "closed")[0] == 0
    assert run(*rpm, "--key", id, "--most", "3", "--model", "tiny")[0] == 0
    assert run(*rpm, "--tenant", "acme", "--most", "90")[0] == 0
    told = rows(run("limits", "list")[1])
    assert told == [
        ["acme", "rpm", "90", "requests", "minute", "all", "open"],
        ["acme, each", "rpm", "6", "requests", "minute", "all", "closed"],
        [id, "rpm", "3", "requests", "minute", "tiny", "open"],
    ]
    assert rows(run("limits", "list", "--key", id)[1]) == told[2:]
    assert rows(run("limits", "list", "--tenant", "acme")[1]) == told
    assert rows(run("limits", "list", "--tenant", "other")[1]) == []
    assert "there is no limit 'tpm' there" in run("limits", "remove", "tpm", "--key", id)[2]
    assert run("limits", "remove", "rpm", "--tenant", "acme")[0] == 0
    assert rows(run("limits", "list")[1]) == told[1:]
    for whose in (["--tenant", "rival"], ["--each-of", "rival"], ["--key", "key_x"]):
        assert "there is no " in run(*rpm, *whose, "--most", "1")[2]


def test_limits_may_be_given_at_once(run):
    at_once = '{"name": "at-once", "of": "concurrent", "most": 2}'
    both = ["--limit", LIMIT, "--limit", at_once, "--each-limit", at_once]
    assert run("tenants", "add", "acme", *both)[0] == 0
    _, id = key_of(run, "--limit", LIMIT)
    told = [row[:3] for row in rows(run("limits", "list")[1])]
    assert told == [
        ["acme", "rpm", "60"],
        ["acme", "at-once", "2"],
        ["acme, each", "at-once", "2"],
        [id, "rpm", "60"],
    ]
    assert len(run("audit", "--json")[1].splitlines()) == 2


def test_tokens_are_revoked_and_listed(run):
    run("tenants", "add", "acme")
    code, out, _ = run("tokens", "revoke", "--tenant", "acme", "--user", "oidc:ann")
    assert (code, out) == (0, "oidc:ann, tenant acme: tokens issued until now are revoked\n")
    assert run("tokens", "revoke", "--admin", "--token", "t-1")[0] == 0
    told = {tuple(row[:3]) for row in rows(run("tokens", "list")[1])}
    assert told == {("acme", "oidc:ann", ""), ("", "", "t-1")}
    for argv, named in (
        (["--tenant", "rival", "--token", "t"], "there is no tenant 'rival'"),
        (["--tenant", "acme", "--user", "ann"], "--user: "),
        (["--tenant", "acme", "--token", "\x1b[2J"], "--token: "),
    ):
        assert named in run("tokens", "revoke", *argv)[2]


def test_the_log_says_who_did_what_from_where(run):
    key, id = key_of(run)
    assert run("keys", "change", id, "--priority", "high")[0] == 0
    assert run("keys", "revoke", id)[0] == 0
    lines = [json.loads(line) for line in run("audit", "--json")[1].splitlines()]
    assert [line["action"] for line in lines] == [
        "tenant.create",
        "key.create",
        "key.change",
        "key.revoke",
    ]
    assert all(line["who"].startswith("cli:") and line["source"] for line in lines)
    assert (lines[2]["before"], lines[2]["after"]) == ({"priority": None}, {"priority": "high"})
    assert key not in json.dumps(lines)
    assert len(rows(run("audit", "--about", id, "--last", "2")[1])) == 2
    assert [row[4] for row in rows(run("audit", "--about", "tenant:acme")[1])] == ["tenant:acme"]


def test_odd_names_are_shown_as_they_are(run):
    key_of(run, "--name", "[/red] [bold]web")
    assert rows(run("keys", "list")[1])[0][2] == "[/red] [bold]web"
    assert "\\[bold]" not in run("audit")[1]
    for odd in ("\x1b[31m", "invoice \u202egpj"):
        assert run("keys", "create", "--tenant", "acme", "--name", odd)[0] == 1


def test_where_redis_is_away_it_says_so(run, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    for argv in (["tenants", "list"], ["limits", "list"], ["audit"], ["jobs"]):
        code, _, err = run(*argv)
        assert code == 1
        assert "Redis cannot be reached" in err


async def _one_dead_of_two(redis_url, namespace):
    redis = connect(redis_url)
    queues = Queues(redis, namespace, "g1", 60)
    for body in ("one", "two"):
        await queues.add(Queue("line", "acme", "batch_1"), body)
    await queues.bury(await queues.claim("line"), "it broke")
    await redis.aclose()


def test_jobs_that_wait_and_that_are_dead(run, redis_url, namespace):
    asyncio.run(_one_dead_of_two(redis_url, namespace))
    (dead,) = [json.loads(line) for line in run("jobs", "--json")[1].splitlines()]
    assert (dead["tenant"], dead["job"], dead["why"]) == ("acme", "one", "it broke")
    shown = rows(run("jobs")[1])
    assert ["lines of batches", "1", "0"] in shown
    assert shown[-1][1:] == ["line", "acme", "batch_1", "one", "it broke"]
