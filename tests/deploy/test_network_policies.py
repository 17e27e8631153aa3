"""Network policies let through what a request's way, Ray and operation need, and nothing else.

What is needed is not written down here a second time where the code says it: who calls which
service is `CALLERS` of services/common/locks/callers.py.
"""

from dataclasses import replace
from itertools import product

import pytest

from services.common.config import Settings
from services.common.discovery import SERVICES
from services.common.locks.callers import CALLERS
from tests.deploy.conftest import ELSEWHERE
from tests.deploy.environment import settings_of
from tests.deploy.manifests import NAMESPACE, Release, render
from tests.deploy.network import End, Network

COMPONENT_OF = {
    "gateway": ("gateway",),
    "retrieval": ("services",),
    "tokenizer": ("services",),
    "router": ("services",),
    "worker": ("prefill", "decode"),
    "cli": ("cli",),
}
SERVE = ("gateway", "services", "prefill", "decode")
RAY = ("head", "services", "prefill", "decode")
GRAPH = ("gateway", *RAY)
STORES = ("redis", "qdrant")

STRANGER = End({"app": "stranger"}, "elsewhere")
NEIGHBOUR = End({"app": "neighbour"}, NAMESPACE)
OPERATOR = End({"app.kubernetes.io/name": "kuberay-operator"}, "kuberay-system")
PROMETHEUS = End({"app.kubernetes.io/name": "prometheus"}, "monitoring")
DNS = End({"k8s-app": "kube-dns"}, "kube-system")
INTERNET = End(None, ip="203.0.113.9")

Path = tuple[str, str, int]


@pytest.fixture(scope="module")
def network(everything: Release) -> Network:
    return Network.of(everything)


@pytest.fixture(scope="module")
def ends(everything: Release) -> dict[str, End]:
    return {pod.component: End(pod.labels) for pod in everything.pods}


def calls_between_services(settings: Settings) -> set[Path]:
    """By the allowlist of methods: (caller's pods, callee's pods, port)."""
    paths = set()
    for method, callers in CALLERS.items():
        service = method.strip("/").split("/")[0].rpartition(".")[2].lower()
        of_all = service not in SERVICES  # Host and Health: nobody but the command line asks
        for called in SERVICES if of_all else [service]:
            port = settings.of_service(called).internal_port
            for caller in callers & {"cli"} if of_all else callers:
                paths |= set(product(COMPONENT_OF[caller], COMPONENT_OF[called], [port]))
    return paths


def metrics(settings: Settings) -> set[tuple[str, int]]:
    """Pods and ports where services tell their metrics."""
    return {
        (component, settings.of_service(name).metrics_port)
        for name in SERVICES
        for component in COMPONENT_OF[name]
    }


def needed(settings: Settings) -> set[Path]:
    own_ports = [6380, 6381, 6382, 6383, 10002, 10999]
    return {
        *calls_between_services(settings),
        *product(RAY, RAY, own_ports),
        *product(RAY, ["head"], [6379, 8265]),
        *product((*GRAPH, "cli", "test"), ["redis"], [6379]),
        *product(("services", "cli"), ["qdrant"], [6333]),
        ("cli", "gateway", 8002),  # the admin listener
        *(("cli", *path) for path in metrics(settings)),
        *product(SERVE, ["collector"], [4317]),
    }


def test_between_pods_of_the_release_what_is_needed_and_no_more(
    network: Network, ends: dict[str, End], everything: Release
) -> None:
    door = {8000, 8001}
    ports = {port for pod in everything.pods for port in pod.ports.values()} - door
    ports |= {6380, 6381, 6382, 6383, 10001, 10002, 10999, 11000, 22, 443}
    offered = {(p.component, port) for p in everything.pods for port in p.ports.values()}
    paths = set(product(ends, ends, ports))
    found = {p for p in paths if network.lets(ends[p[0]], ends[p[1]], p[2])}
    of_ray = {6380, 6381, 6382, 6383, 10001, 10002, 10999, 11000}

    def listened_to(path: Path) -> bool:
        """A port that nothing listens on may stand open: a rule is for several kinds of pods."""
        return path[1:] in offered or path[2] in of_ray

    wanted = needed(settings_of(everything))
    assert {path for path in found if listened_to(path)} == wanted
    assert not {path for path in found if path[2] in (22, 443)}
    # And what no target takes needs no source that is kept from calling.
    taken = {p for p in paths if listened_to(p) and network.takes(ends[p[0]], ends[p[1]], p[2])}
    assert taken == wanted


def test_the_door_is_open_to_all_that_may_leave_their_own(
    network: Network, ends: dict[str, End]
) -> None:
    for port in (8000, 8001):
        for caller in (STRANGER, NEIGHBOUR, INTERNET, ends["test"], ends["cli"]):
            assert network.lets(caller, ends["gateway"], port)
        for component in set(ends) - {"test", "cli"}:
            assert not network.lets(ends[component], ends["gateway"], port), component


def test_the_door_can_be_open_to_some() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
    release = render(None, {"networkPolicy": {"clients": clients}})
    network = Network.of(release)
    gateway = End(release.pods_of("gateway")[0].labels)
    assert network.lets(End({}, "ingress"), gateway, 8000)
    assert network.lets(End(release.pods_of("test")[0].labels), gateway, 8001)
    assert not network.lets(STRANGER, gateway, 8000)


def test_who_administers_is_named_and_the_issuer_is_reached_by_gateways_alone(
    network: Network, ends: dict[str, End], everything: Release
) -> None:
    assert not network.lets(STRANGER, ends["gateway"], 8002)
    for component, end in ends.items():
        assert network.lets(end, INTERNET, 8444) == (component == "gateway"), component
    office = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "office"}}}]
    values = {"gateway": {"admin": {"enabled": True, "existingSecret": "t", "clients": office}}}
    release = render(None, values)
    gateway = End(release.pods_of("gateway")[0].labels)
    assert Network.of(release).lets(End({}, "office"), gateway, 8002)
    assert not Network.of(release).lets(STRANGER, gateway, 8002)
    plain = render(None, {})
    gateway = End(plain.pods_of("gateway")[0].labels)
    assert not Network.of(plain).takes(End(plain.pods_of("cli")[0].labels), gateway, 8002)


def test_a_gateway_and_ray_do_not_reach_each_other(everything: Release) -> None:
    """Not even where nothing listens as yet: who takes over a gateway may make a token up."""
    network = Network.of(everything)
    of_ray = [6379, 8265, 6380, 6381, 6382, 6383, 8080, 52365, 10001, 10002, 10500, 10999]
    [gateway] = [End(pod.labels) for pod in everything.pods_of("gateway")]
    for pod in everything.pods:
        if pod.component not in RAY:
            continue
        other = End(pod.labels)
        for port in of_ray:
            assert not network.leaves(gateway, other, port), pod.owner
            assert not network.takes(gateway, other, port), pod.owner
            assert not network.takes(other, gateway, port), pod.owner


def test_strangers_reach_nothing_else(
    network: Network, ends: dict[str, End], everything: Release
) -> None:
    ports = {port for pod in everything.pods for port in pod.ports.values()} | {6380, 10002, 52365}
    for stranger, (component, end), port in product(
        (STRANGER, NEIGHBOUR, INTERNET), ends.items(), ports
    ):
        if component == "gateway" and port in (8000, 8001):
            continue
        assert not network.lets(stranger, end, port), (stranger, component, port)


def test_kuberay_reaches_the_heads_dashboard_alone(network: Network, ends: dict[str, End]) -> None:
    assert network.lets(OPERATOR, ends["head"], 8265)
    assert not network.lets(OPERATOR, ends["head"], 6379)
    assert not network.lets(OPERATOR, ends["decode"], 6380)


def test_prometheus_reaches_every_port_of_metrics_alone(
    network: Network, everything: Release
) -> None:
    settings = settings_of(everything)
    metrics = {settings.of_service(name).metrics_port for name in SERVICES} | {8080, 8888}
    for pod in everything.pods:
        for port in pod.ports.values():
            if port in (8000, 8001) and pod.component == "gateway":
                continue
            reached = network.lets(PROMETHEUS, End(pod.labels), port)
            assert reached == (port in metrics), (pod.owner, port)


def test_what_a_podmonitor_scrapes_prometheus_reaches(everything: Release) -> None:
    network = Network.of(everything)
    scraped = {e["portNumber"] for e in everything.one("PodMonitor")["spec"]["podMetricsEndpoints"]}
    for port in scraped:
        pods = [pod for pod in everything.pods if port in pod.ports.values()]
        assert pods, f"no pod has port {port}"
        assert all(network.lets(PROMETHEUS, End(pod.labels), port) for pod in pods)


def test_names_are_resolved_and_nothing_outside_is_called(
    network: Network, everything: Release
) -> None:
    for pod in everything.pods:
        end = End(pod.labels)
        assert network.lets(end, DNS, 53, "UDP"), pod.owner
        assert network.lets(end, DNS, 53), pod.owner
        assert network.lets(end, INTERNET, 443) == (pod.component in ("download", "collector"))
        assert network.lets(end, INTERNET, 4317) == (pod.component == "collector"), pod.owner
        assert not network.lets(end, INTERNET, 80), pod.owner
        assert not network.lets(end, STRANGER, 8000), pod.owner


def test_a_bucket_is_reached_by_those_who_keep_files_in_it_alone() -> None:
    release = render(None, {"blobs": {"url": "s3://files/penstock"}})
    for pod in release.pods:
        reached = Network.of(release).lets(End(pod.labels), INTERNET, 443)
        assert reached == (pod.component in ("gateway", "services")), pod.owner


@pytest.mark.parametrize("named", [OPERATOR, PROMETHEUS, DNS])
def test_their_labels_are_worth_nothing_in_another_namespace(
    network: Network, ends: dict[str, End], everything: Release, named: End
) -> None:
    """Who may make pods in any namespace may label them as he likes."""
    ports = {port for pod in everything.pods for port in pod.ports.values()} - {8000, 8001}
    for impostor in (replace(named, namespace="elsewhere"), replace(named, namespace=NAMESPACE)):
        for end in ends.values():
            assert not any(network.takes(impostor, end, port) for port in ports), impostor
            assert not network.lets(end, impostor, 53), impostor
            assert not network.lets(end, impostor, 53, "UDP"), impostor


def test_their_namespaces_are_values() -> None:
    elsewhere = {"namespace": "ours", "podLabels": {"app.kubernetes.io/name": "agent"}}
    changed = {"dns": {"namespace": "ours", "cidrs": []}, "prometheus": elsewhere}
    values = {
        "networkPolicy": {**changed, "kuberayOperator": {"namespace": "ours"}},
        "monitoring": {"podMonitor": {"enabled": True}},
    }
    release = render(None, values)
    network = Network.of(release)
    head, decode = (End(release.pods_of(name)[0].labels) for name in ("head", "decode"))
    assert network.lets(replace(OPERATOR, namespace="ours"), head, 8265)
    assert not network.lets(OPERATOR, head, 8265)
    assert network.lets(End(elsewhere["podLabels"], "ours"), decode, 9104)
    assert not network.lets(PROMETHEUS, decode, 9104)
    assert network.lets(decode, replace(DNS, namespace="ours"), 53, "UDP")
    assert not network.lets(decode, DNS, 53, "UDP")
    assert not network.lets(decode, End(None, ip="169.254.20.10"), 53, "UDP")


def test_stores_and_spans_elsewhere_are_reached() -> None:
    """By their URL's port: no selector knows where they are."""
    release = render(None, ELSEWHERE)
    network = Network.of(release)
    for pod in release.pods:
        end = End(pod.labels)
        allowed = {
            port for port in (443, 4320, 6333, 6379, 6380) if network.lets(end, INTERNET, port)
        }
        wanted = {6380} if pod.component in (*GRAPH, "cli", "test") else set()
        wanted |= {443} if pod.component in ("services", "cli") else set()
        wanted |= {4320} if pod.component in GRAPH else set()
        assert allowed == wanted, pod.owner


def test_rays_ports_are_those_of_its_start_parameters(everything: Release) -> None:
    cluster = everything.ray["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        told = group["rayStartParams"]
        assert told["node-manager-port"] == "6380"
        assert told["object-manager-port"] == "6381"
        assert told["runtime-env-agent-port"] == "6382"
        assert told["dashboard-agent-grpc-port"] == "6383"
        assert told["metrics-export-port"] == "8080"
        assert (told["min-worker-port"], told["max-worker-port"]) == ("10002", "10999")
    assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-port"] == "8265"
