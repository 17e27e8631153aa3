import subprocess
import sys

import pytest
from pydantic import SecretStr, ValidationError

from services.common.config import (
    GatewaySettings,
    ModelSpec,
    RetrievalSettings,
    Settings,
    WorkerSettings,
    is_loopback,
    unknown_names,
)
from services.common.config.complaints import complaints


def test_sections_and_lists_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMIT", "7")
    monkeypatch.setenv("PENSTOCK_MODELS", '[{"name": "m", "path": "/models/m"}]')
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1/0")
    settings = Settings()
    assert settings.router.queue_limit == 7
    assert settings.models[0].path == "/models/m"
    assert settings.redis_dsn == "redis://elsewhere:1/0"


def test_a_misspelt_setting_of_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMITS", "7")
    with pytest.raises(ValidationError, match="queue_limits"):
        Settings()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (
            "PENSTOCK_GATEWAY__PROT",
            "8000",
            "PENSTOCK_GATEWAY__PROT: unknown setting; PENSTOCK_GATEWAY__PORT is the nearest",
        ),
        ("PENSTOCK_GATEWAY__XYZZY", "1", "PENSTOCK_GATEWAY__XYZZY: unknown setting"),
        (
            "PENSTOCK_MODELS",
            '[{"name": "m", "path": "/m", "decode": {"replcas": 2}}]',
            "PENSTOCK_MODELS (0.decode.replcas): unknown setting; replicas is the nearest",
        ),
        (
            "PENSTOCK_ROUTER__RAY",
            '{"num_cpu": 2}',
            "PENSTOCK_ROUTER__RAY (num_cpu): unknown setting; num_cpus is the nearest",
        ),
    ],
)
def test_of_a_misspelt_setting_the_nearest_is_named(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError) as raised:
        Settings()
    assert complaints(raised.value) == [f"setting {told}"]


def test_a_misspelt_section_or_name_is_told() -> None:
    environment = {
        "PENSTOCK_ROUTER__QUEUE_LIMIT": "7",
        "PENSTOCK_ROUTR__QUEUE_LIMIT": "7",
        "PENSTOCK_DATADIR": "x",
        "PENSTOCK_DATA_DIR": "x",
        "PENSTOCK_API_KEY": "psk-",
        "PATH": "/bin",
    }
    assert unknown_names(environment) == ["PENSTOCK_DATADIR", "PENSTOCK_ROUTR__QUEUE_LIMIT"]


def test_an_origin_that_no_browser_would_send_is_refused() -> None:
    good = ["https://app.example", "http://127.0.0.1:3000", "*", "chrome-extension://abc"]
    assert GatewaySettings(cors_origins=good).cors_origins == good
    for odd in ("https://app.example/", "app.example", "https://", "https://a b", ""):
        with pytest.raises(ValidationError, match="cors_origins"):
            GatewaySettings(cors_origins=[odd])


def test_two_replicas_of_retrieval_need_a_store_that_both_reach() -> None:
    two = RetrievalSettings(replicas=2)
    with pytest.raises(ValidationError, match="QDRANT_URL"):
        Settings(retrieval=two)
    assert Settings(retrieval=two, qdrant_url="http://qdrant:6333").retrieval.replicas == 2


def test_a_chunk_repeats_less_than_it_has() -> None:
    for overlap in (96, 97):
        with pytest.raises(ValidationError, match=f"overlap_tokens {overlap} must be below"):
            RetrievalSettings(chunk_tokens=96, chunk_overlap_tokens=overlap)
    assert RetrievalSettings(chunk_tokens=96, chunk_overlap_tokens=95)


@pytest.mark.parametrize("set_too", [False, True])
def test_a_wrong_setting_is_named_as_it_was_set(
    set_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "nonsense")
    if set_too:
        monkeypatch.setenv("PENSTOCK_REDIS_URL", "more nonsense")
    with pytest.raises(ValidationError) as told:
        Settings()
    (said,) = complaints(told.value)
    assert said.startswith(f"setting {'PENSTOCK_' if set_too else ''}REDIS_URL: ")


def test_urls_and_secrets_are_checked() -> None:
    for good in ("redis://h:1/0", "rediss://:word@[::1]/0", "unix:///run/r?db=0", "unix://:w@/r"):
        assert Settings(redis_url=good).redis_dsn == good
    for odd in (
        *("http://h:1", "redis:///0", "redis://h:0", "redis://h:99999", "h:1", ""),
        *("unix://relative", "unix://host/run/r", "unix:///", "unix:", "unix://[/r"),
    ):
        with pytest.raises(ValidationError, match="must be redis://"):
            Settings(redis_url=odd)
    for url in ("", "http://q:6333", "https://q"):
        assert Settings(qdrant_url=url).qdrant_url == url
    for url in ("redis://q", "http://", "q:6333"):
        with pytest.raises(ValidationError, match="must be http://"):
            Settings(qdrant_url=url)
    assert Settings(internal_secret=SecretStr("x" * 16)).internal_secret
    with pytest.raises(ValidationError, match="16 characters"):
        Settings(internal_secret=SecretStr("x" * 15))
    assert Settings(log_level="warning").log_level == "WARNING"  # type: ignore[arg-type]


def test_a_password_is_not_in_what_is_said_of_an_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "http://:hunter2@h:1")
    with pytest.raises(ValidationError) as error:
        Settings()
    assert "hunter2" not in error.value.errors()[0]["msg"] + str(error.value)


@pytest.mark.parametrize(
    ("given", "leaves_after_s"),
    [
        ({}, 0),
        ({"replicas": 2}, 10),
        ({"replicas": 2, "lame_duck_s": 0}, 0),
        ({"lame_duck_s": 3}, 3),
    ],
)
def test_one_of_several_gateways_waits_until_its_clients_have_seen_that_it_leaves(
    given: dict[str, float], leaves_after_s: float
) -> None:
    settings = Settings.model_validate({"gateway": given, "drain_grace_s": 20})
    assert settings.gateway.leaves_after_s == leaves_after_s
    assert settings.drains_within_s == leaves_after_s + 20


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a:b", "x" * 101])
def test_a_namespace_that_would_not_do_as_a_part_of_names_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="namespace"):
        Settings(namespace=name)
    assert Settings(namespace="Ä_b.c-1" + "x" * 93).namespace


def test_settings_are_small() -> None:
    """They are in every process; a counted repetition of letters in a pattern takes 10 MB."""
    measured = """
import re, pydantic_settings
def dirty():
    return int(re.search(r"Private_Dirty: +(\\d+)", open("/proc/self/smaps_rollup").read())[1])
before = dirty()
from services.common.config import Settings
Settings()
print(dirty() - before)
"""
    run = [sys.executable, "-c", measured]
    kib = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert kib < 6000, "about 3,000 as of this writing"


def test_peers_are_told_a_host_that_they_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    monkeypatch.setattr("socket.gethostbyname", lambda name: {"me": "10.0.0.7"}[name])
    assert Settings().peer_host == "127.0.0.1"
    assert Settings(bind_host="10.0.0.9").peer_host == "10.0.0.9"
    for everywhere in ("0.0.0.0", "::"):
        assert Settings(bind_host=everywhere).peer_host == "10.0.0.7"
    assert Settings(bind_host="0.0.0.0", advertise_host="node-7").peer_host == "node-7"


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("penstock.example", False),  # wherever it leads today
        ("localhost.example", False),
        ("", False),
    ],
)
def test_a_loopback_is_known_by_its_address(host: str, is_one: bool) -> None:
    assert is_loopback(host) == is_one


@pytest.mark.parametrize("target", ["-1", "nan", "inf", "60001", "soon"])
def test_a_target_between_tokens_is_a_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER__TARGET_ITL_MS", target)
    with pytest.raises(ValidationError, match="target_itl_ms"):
        Settings()


def test_a_device_is_the_processor_or_a_gpu_by_its_number() -> None:
    for device in ("cpu", "cuda", "cuda:0", "cuda:12"):
        assert WorkerSettings(device=device).device == device
    for device in ("gpu", "cuda:", "cuda:x", "cuda1", "cpu:0", "mps", ""):
        with pytest.raises(ValidationError, match="device"):
            WorkerSettings(device=device)


@pytest.mark.parametrize(
    ("name", "good"),
    [("Qwen/Qwen3-0.6B", True), ("b@1:x+y", True), ("a/b c", False), ("a\n", False), ("", False)]
    + [(odd, False) for odd in ("a\tb", "a\x1b", "/a", " a", "x" * 101)],
)
def test_names_of_models_and_adapters_are_of_one_kind(name: str, good: bool) -> None:
    for told in (
        {"name": name, "path": "/m"},
        {"name": "m", "path": "/m", "adapters": {name: "/a"}},
    ):
        if good:
            ModelSpec.model_validate(told)
        else:
            with pytest.raises(ValidationError):
                ModelSpec.model_validate(told)
