"""What must hold for every pod: it may do little, and what is written about it fits together."""

import json
import re
from pathlib import Path

import pytest

from services.common.config import unknown_names
from services.common.discovery import SERVICES
from services.common.policy import load_rules
from tests.deploy.environment import settings_of
from tests.deploy.manifests import Pod, Release, Thing, render

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"
_OF_SERVE = ("gateway", "services", "prefill", "decode")


def test_every_container_is_restricted(release: Release) -> None:
    """As the `restricted` pod security standard wants it, and a read-only root besides."""
    for pod in release.pods:
        of_pod = pod.spec["securityContext"]
        assert of_pod["runAsNonRoot"] is True, pod.owner
        assert of_pod["runAsUser"] > 0, pod.owner
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), pod.owner
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, (pod.owner, container["name"])
            assert own["readOnlyRootFilesystem"] is True, (pod.owner, container["name"])
            assert own["capabilities"] == {"drop": ["ALL"]}, (pod.owner, container["name"])
            assert not own.get("privileged")
        for volume in pod.spec.get("volumes", ()):
            assert "hostPath" not in volume, pod.owner


def test_no_pod_has_a_token_of_kubernetes(release: Release) -> None:
    for pod in release.pods:
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner


def test_every_container_says_what_it_needs_and_may_take(release: Release) -> None:
    for pod in release.pods:
        for container in pod.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), (pod.owner, container["name"])
            assert "memory" in resources["limits"], (pod.owner, container["name"])


def test_mounts_have_their_volumes_and_volumes_their_mounts(release: Release) -> None:
    for pod in release.pods:
        volumes = {volume["name"] for volume in pod.spec.get("volumes", ())}
        claims = {c["metadata"]["name"] for c in _claim_templates(release, pod.owner)}
        mounted = {m["name"] for c in pod.containers for m in c.get("volumeMounts", ())}
        assert mounted - volumes - claims == set(), pod.owner
        assert volumes - mounted == set(), pod.owner


def test_names_of_ports_fit_and_differ(release: Release) -> None:
    for pod in release.pods:
        ports = [port for c in pod.containers for port in c.get("ports", ())]
        names = [port["name"] for port in ports if "name" in port]
        assert len(set(names)) == len(names), pod.owner
        assert len({port["containerPort"] for port in ports}) == len(ports), pod.owner
        for name in names:
            assert re.fullmatch(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", name), pod.owner


def test_probes_ask_ports_that_the_services_serve(release: Release) -> None:
    settings = settings_of(release)
    health = {settings.of_service(name).health_port for name in SERVICES}
    for pod in release.pods:
        for container in pod.containers:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {})
                if "grpc" in probe and pod.component in _OF_SERVE:
                    assert probe["grpc"]["port"] in health, (pod.owner, kind)
                    assert probe["grpc"]["port"] in pod.ports.values(), (pod.owner, kind)
                if isinstance(named := probe.get("httpGet", {}).get("port"), str):
                    assert named in pod.ports, (pod.owner, kind)


def test_every_port_of_a_service_is_a_pods(release: Release) -> None:
    for service in release.of("Service"):
        selector = service["spec"]["selector"]
        chosen = [pod for pod in release.pods if selector.items() <= pod.labels.items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                assert target in (pod.ports if isinstance(target, str) else pod.ports.values()), (
                    service["metadata"]["name"],
                    port,
                    pod.owner,
                )


def test_environment_is_of_settings_that_exist_and_are_valid(release: Release) -> None:
    for pod in release.pods:
        for container in pod.containers:
            names = [entry["name"] for entry in container.get("env", ())]
            assert len(set(names)) == len(names), (pod.owner, container["name"])
            assert unknown_names(dict.fromkeys(names, "")) == [], pod.owner
    settings_of(release)  # raises where a value is none, or a name within a section


def test_a_pod_may_end_after_its_longest_stream(release: Release) -> None:
    settings = settings_of(release)
    longest = settings.gateway.leaves_after_s + settings.drain_grace_s
    for pod in release.pods:
        if pod.component in _OF_SERVE:
            assert pod.spec["terminationGracePeriodSeconds"] >= longest + 30, pod.owner
            [main] = pod.spec["containers"]
            command = " ".join(main["lifecycle"]["preStop"]["exec"]["command"])
            assert re.search(r"penstock drain .*--wait", command), pod.owner


def test_a_gateway_has_nothing_of_rays(release: Release) -> None:
    """The one pod that strangers speak to. KubeRay gives the token to pods of its groups alone."""
    assert all("gateway" not in pod.owner for pod in release.pods if pod.owner.startswith("Ray"))
    [gateway] = release.pods_of("gateway")
    [main] = gateway.spec["containers"]
    assert gateway.owner == "Deployment/demo-penstock-gateway"
    assert main["command"] == ["tini", "--", "python", "-m", "services.gateway"]
    for entry in main["env"]:
        assert not entry["name"].startswith("RAY"), "also RAY_AUTH_TOKEN"
        assert "QDRANT" not in entry["name"], "it asks retrieval"
    assert not any("ray" in key for key in (*gateway.labels, *gateway.annotations))
    own = json.dumps(gateway.spec)
    assert "ray-token" not in own
    assert "6379" not in own.replace("-redis.llm.svc:6379", "")


def test_a_flood_at_the_door_has_no_gateway_killed(release: Release) -> None:
    """Liveness is asked where strangers do not come, and of what holds while it drains, too."""
    settings = settings_of(release)
    [gateway] = release.pods_of("gateway")
    [main] = gateway.spec["containers"]
    [metrics] = [p for p in main["ports"] if p["name"] == main["livenessProbe"]["httpGet"]["port"]]
    assert metrics["containerPort"] == settings.gateway.metrics_port
    assert main["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert main["startupProbe"]["grpc"] == {"port": settings.gateway.health_port}
    assert main["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_certificates_lie_where_the_settings_look_for_them(release: Release) -> None:
    """Each identity's folder, in the pods that are this identity and in no other."""
    of_component = {
        "gateway": {"gateway"},
        "services": {"retrieval", "tokenizer", "router"},
        "prefill": {"worker"},
        "decode": {"worker"},
        "head": set(),
        "cli": {"cli"},
    }
    settings = settings_of(release)
    for pod in release.pods:
        if pod.component not in of_component:
            continue
        [main] = pod.spec["containers"]
        folder = f"{settings.tls_dir}/"
        secrets = {v["name"]: v.get("secret", {}).get("secretName") for v in pod.spec["volumes"]}
        found = {
            mount["mountPath"].removeprefix(folder): secrets[mount["name"]]
            for mount in main["volumeMounts"]
            if mount["mountPath"].startswith(folder)
        }
        identities = of_component[pod.component] if settings.tls_dir else set()
        assert found == {name: f"demo-penstock-tls-{name}" for name in identities}, pod.owner


def test_who_asks_qdrant_has_its_key_and_nobody_else(release: Release) -> None:
    key = {"demo-penstock-qdrant", "penstock-qdrant", "qdrant-key"}  # made, or given
    for pod in release.pods:
        asks = pod.component in ("services", "cli", "qdrant")
        assert bool(pod.secrets & key) == asks, pod.owner


def test_a_pod_drains_at_its_own_address_by_its_own_certificates(release: Release) -> None:
    """What the key of the command line opens, a pod that is called from outside does not have."""
    for pod in release.pods:
        assert ("demo-penstock-tls-cli" in pod.secrets) <= (pod.component == "cli"), pod.owner
        if pod.component in _OF_SERVE:
            [main] = pod.spec["containers"]
            assert (
                '--node "$PENSTOCK_BIND_HOST"'
                in main["lifecycle"]["preStop"]["exec"]["command"][-1]
            )


def test_the_page_says_what_lies_in_which_pod(everything: Release) -> None:
    """What somebody has who takes one over."""
    secrets = {"the install's secret": "internal", "Redis": "redis", "Qdrant's key": "qdrant"}
    told = ["| pod | certificates | " + " | ".join(secrets) + " | Ray's state | Ray's token |"]
    told.append("| --- |" + " --- |" * (len(secrets) + 3))
    of_kind = {pod.component: pod for pod in everything.pods}
    for component in ("gateway", "services", "prefill", "decode", "head", "cli", "test"):
        pod = of_kind[component]
        own = sorted(name.rpartition("-")[2] for name in _whole(pod) if "-tls-" in name)
        has = (f"demo-penstock-{name}" in pod.secrets for name in secrets.values())
        of_ray = pod.owner.endswith("/head"), pod.owner.startswith("RayService/")  # by KubeRay
        cells = ["yes" if it else "no" for it in (*has, *of_ray)]
        told.append(f"| {component} | {', '.join(own) or 'none'} | {' | '.join(cells)} |")
    assert "\n".join(told) in OPERATIONS.read_text(), "\n".join(told)


def _whole(pod: Pod) -> set[str]:
    """Secrets that it mounts with all of their keys; of others it has the authority alone."""
    volumes = pod.spec.get("volumes", ())
    for volume in volumes:
        for source in volume.get("projected", {}).get("sources", ()):
            assert [item["key"] for item in source["secret"]["items"]] == ["ca.crt"], pod.owner
    mounted = [volume["secret"] for volume in volumes if "secret" in volume]
    return {secret["secretName"] for secret in mounted if "items" not in secret}


def test_files_may_have_half_of_redis(release: Release) -> None:
    """The rest is admission's, the registry's and Ray's, which a full Redis would end."""
    for config in release.of("ConfigMap"):
        if "redis.conf" in config["data"]:
            found = re.search(r"^ *maxmemory (\d+)([gm])b$", config["data"]["redis.conf"], re.M)
            assert found is not None
            room = int(found[1]) * {"m": 2**20, "g": 2**30}[found[2]]
            assert 2 * settings_of(release).gateway.max_file_bytes <= room


@pytest.mark.parametrize("claim", ["", "shared-kv"])
def test_blocks_on_disk_lie_in_a_volume_of_the_workers_alone(claim: str) -> None:
    """From them prompts can be told."""
    disk = {"enabled": True, "existingClaim": claim, "sizeLimit": "3Gi"}
    release = render(None, {"kvDisk": disk})
    own, shared = (
        {"emptyDir": {"sizeLimit": "3Gi"}},
        {"persistentVolumeClaim": {"claimName": claim}},
    )
    workers = [pod for pod in release.pods if pod.spec["containers"][0]["name"] == "worker"]
    assert workers
    for pod in workers:
        [main] = pod.spec["containers"]
        [mount] = [one for one in main["volumeMounts"] if one["name"] == "kv"]
        folder = Path(settings_of(release, pod).worker.kv_disk_dir)
        assert str(folder.parent) == mount["mountPath"], (
            "the worker makes a folder of its own there"
        )
        [volume] = [one for one in pod.spec["volumes"] if one["name"] == "kv"]
        assert volume == {"name": "kv", **(shared if claim else own)}
    others = [volume for pod in release.pods if pod not in workers for volume in _volumes(pod)]
    assert "kv" not in [volume["name"] for volume in others]


def test_no_blocks_go_to_disk_unless_that_is_asked_for() -> None:
    release = render()
    assert not any(
        settings_of(release, pod).worker.kv_disk_dir for pod in release.pods_of("decode")
    )


def _volumes(pod: Pod) -> list[Thing]:
    found: list[Thing] = pod.spec.get("volumes", [])
    return found


def _claim_templates(release: Release, owner: str) -> list[dict[str, dict[str, str]]]:
    kind, name = owner.split("/")[:2]
    if kind != "StatefulSet":
        return []
    found: list[dict[str, dict[str, str]]] = release.one(kind, name)["spec"].get(
        "volumeClaimTemplates", []
    )
    return found


def test_the_policy_is_a_file_in_every_pod_that_asks_it(everything: Release) -> None:
    """Mounted as a folder: a file by itself would never change."""
    (config,) = [c for c in everything.of("ConfigMap") if c["metadata"]["name"].endswith("-policy")]
    rules = load_rules(config["data"]["policy.yaml"].encode())
    assert [rule.name for rule in rules.spec.rules] == ["card"]
    for name in ("gateway", "services", "cli"):
        (pod,) = everything.pods_of(name)
        (container,) = [c for c in pod.containers if c["name"] == name]
        path = settings_of(everything, pod).policy.file
        assert path is not None, name
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "policy"]
        assert (mount["mountPath"], "subPath" in mount) == (str(path.parent), False)
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "policy"]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
    without = render().of("ConfigMap")
    assert not [c for c in without if c["metadata"]["name"].endswith("-policy")]
