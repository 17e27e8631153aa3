"""compose.yaml: by its specification, and what its parts promise each other."""

import json
import os
import re
import shutil
import stat
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.cli.command_line import parser
from services.common.config import GatewaySettings, Settings, unknown_names
from tests.deploy.dockerfile import stages
from tests.support.prometheus import promtool

FOLDER = Path(__file__).parents[2] / "deploy/docker"
SCHEMA = Path(__file__).parent / "schemas/compose-spec.json"
OURS = ("gateway", "retrieval", "tokenizer", "router", "prefill", "decode")
Service = dict[str, Any]
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?])((?:[^{}]|\{[^{}]*\})*))?\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = compose["services"]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What make-secrets makes."""
    folder = tmp_path_factory.mktemp("secrets")
    script = shutil.copy(FOLDER / "make-secrets", folder)
    subprocess.run([script], check=True)
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def _filled(text: str, made: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda m: made.get(m[1]) or (m[3] if m[2] == "-" else ""), text)


def _environment(service: Service, made: dict[str, str]) -> dict[str, str]:
    return {name: _filled(str(value), made) for name, value in service["environment"].items()}


def test_it_is_as_the_specification_says(compose: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(compose)


def test_the_specification_would_tell_a_wrong_name(compose: dict[str, Any]) -> None:
    wrong = {**compose, "services": {"gateway": {"imagee": "x"}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(wrong)


@pytest.mark.parametrize("name", OURS)
def test_the_environment_of_a_service_is_settings(
    name: str, services: dict[str, Service], made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _environment(services[name], made)
    assert unknown_names(environment) == []
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    settings = Settings()
    url = settings.redis_url.get_secret_value()
    assert url == f"redis://:{made['REDIS_PASSWORD']}@redis:6379/0"
    assert settings.qdrant_api_key.get_secret_value() == made["QDRANT_API_KEY"]
    assert settings.internal_secret.get_secret_value() == made["PENSTOCK_INTERNAL_SECRET"]
    assert [model.name for model in settings.models] == ["demo"]
    assert settings.bind_host == "0.0.0.0"
    assert not settings.reflects


def test_files_may_have_half_of_redis() -> None:
    found = re.search(r"maxmemory (\d+)mb", (FOLDER / "compose.yaml").read_text())
    assert found is not None
    assert 2 * GatewaySettings().max_file_bytes <= int(found[1]) * 2**20


def test_each_secret_is_made_by_the_script_and_none_has_a_default(made: dict[str, str]) -> None:
    text = (FOLDER / "compose.yaml").read_text()
    needed = {name for name, kind, _ in _VARIABLE.findall(text) if kind == "?"}
    assert needed == set(made)
    assert all(re.fullmatch(r"[0-9a-f]{48}", secret) for secret in made.values())
    assert len(set(made.values())) == len(made)
    plain = {name for name, kind, _ in _VARIABLE.findall(text) if kind != "?"}
    assert plain == {"PENSTOCK_IMAGE", "PENSTOCK_MODELS", "PENSTOCK_LOG_LEVEL"}


def test_secrets_are_their_owner_s_and_are_never_written_over(tmp_path: Path) -> None:
    script = shutil.copy(FOLDER / "make-secrets", tmp_path)
    subprocess.run([script], check=True, cwd="/")
    file = tmp_path / ".env"
    before = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    subprocess.run([script], check=True)  # as at each later start
    assert file.read_text() == before
    lost, *kept = before.splitlines(keepends=True)
    file.write_text("".join(kept))
    subprocess.run([script], check=True)
    *stay, anew = file.read_text().splitlines(keepends=True)
    assert stay == kept
    assert anew.split("=")[0] == lost.split("=")[0]
    assert anew != lost


def test_git_does_not_take_the_secrets() -> None:
    ignored = (FOLDER.parents[1] / ".gitignore").read_text().splitlines()
    assert "/deploy/docker/.env" in ignored


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_its_module_and_is_asked_whether_it_is_well(
    name: str, services: dict[str, Service], made: dict[str, str]
) -> None:
    service = services[name]
    *started, module = service["entrypoint"]
    assert started == ["tini", "--", "python", "-m"]
    assert find_spec(f"{module}.__main__")
    test = service["healthcheck"]["test"]
    assert test[:2] == ["CMD", "penstock"]
    probed = parser().parse_args(test[2:])
    assert probed.module == "services.cli.commands.probe"
    assert module == f"services.{probed.service}"
    if probed.service != "gateway":  # that one is asked at its door
        assert f"PENSTOCK_{probed.service.upper()}__HEALTH_PORT" in service["environment"]


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_locked_up(name: str, services: dict[str, Service]) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    stages_known = stages((FOLDER / "Dockerfile").read_text())
    assert service["build"]["target"] in stages_known
    context = FOLDER / service["build"]["context"]
    assert (context / service["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")


def test_only_the_door_and_what_shows_metrics_are_published_and_to_this_host(
    services: dict[str, Service],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"gateway", "prometheus", "grafana"}
    for ports in published.values():
        assert all(port.startswith("127.0.0.1:") for port in ports)


def test_all_are_bounded_and_all_are_asked(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert "mem_limit" in service, name
        assert "test" in service["healthcheck"], name
        assert service["restart"] == "unless-stopped", name
        assert "/" in service["image"] or ":" in service["image"], name
        assert not service["image"].endswith(":latest"), name


def test_the_gateway_waits_for_all_that_it_needs(services: dict[str, Service]) -> None:
    def below(name: str) -> set[str]:
        needed = services[name].get("depends_on", {})
        assert all(own == {"condition": "service_healthy"} for own in needed.values())
        return set(needed).union(*map(below, needed)) if needed else set()

    assert below("gateway") == {*OURS, "redis", "qdrant"} - {"gateway"}


def test_the_workers_have_the_two_roles_and_one_memory(services: dict[str, Service]) -> None:
    prefill, decode = services["prefill"], services["decode"]
    assert prefill["environment"]["PENSTOCK_WORKER__ROLE"] == "prefill"
    assert decode["environment"]["PENSTOCK_WORKER__ROLE"] == "decode"
    assert (prefill["ipc"], decode["ipc"]) == ("shareable", "service:prefill")
    assert "shm_size" in prefill


def test_running_streams_have_their_time_when_it_stops(services: dict[str, Service]) -> None:
    for name in OURS:
        seconds = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert seconds >= Settings().drain_grace_s + 15


def test_passwords_are_in_no_command(services: dict[str, Service]) -> None:
    for service in services.values():
        words = json.dumps([service.get("command"), service.get("entrypoint")])
        assert not _VARIABLE.search(words)
        assert "--requirepass" not in words


def test_what_is_mounted_exists(compose: dict[str, Any]) -> None:
    mounts = [m.split(":") for s in compose["services"].values() for m in s.get("volumes", [])]
    assert mounts
    for source, *_ in mounts:
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
        else:
            assert source in compose["volumes"]


def test_prometheus_asks_the_gateway_where_all_the_others_are(
    services: dict[str, Service],
) -> None:
    mounts = services["prometheus"]["volumes"]
    assert "./prometheus.yaml:/etc/prometheus/prometheus.yml:ro" in mounts
    assert "../observability/prometheus/rules:/etc/prometheus/rules:ro" in mounts
    configuration = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert configuration["rule_files"] == ["rules/*.yaml"]
    port = services["gateway"]["environment"]["PENSTOCK_GATEWAY__METRICS_PORT"]
    urls = [
        discovery["url"]
        for job in configuration["scrape_configs"]
        for discovery in job.get("http_sd_configs", ())
    ]
    assert urls == [f"http://gateway:{port}/targets"]


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "prometheus.yaml", tmp_path / "prometheus.yml")
    shutil.copytree(FOLDER.parent / "observability/prometheus/rules", tmp_path / "rules")
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_grafana_has_the_data_source_that_the_dashboards_name(
    services: dict[str, Service],
) -> None:
    text = (FOLDER / "grafana/datasources.yaml").read_text()
    [source] = yaml.safe_load(text)["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"]
    [mounted] = [m for m in services["grafana"]["volumes"] if "observability" in m]
    assert mounted.split(":")[1] == provider["options"]["path"]
    dashboards = list((FOLDER / mounted.split(":")[0]).glob("*.json"))
    assert dashboards
    for dashboard in dashboards:
        uids = set(re.findall(r'"uid": "([^"]+)",?\s*"type"', dashboard.read_text()))
        uids |= set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]+)"', dashboard.read_text()))
        assert {uid for uid in uids if not uid.startswith("$")} <= {source["uid"]}, dashboard
    assert os.access(FOLDER / "make-secrets", os.X_OK)
