"""The way in from outside, disruption budgets, the collector, and what `helm test` runs."""

import re
import runpy
from pathlib import Path

import pytest
import yaml
from helm_python import HelmError

from services.gateway.api.grpc.calls import SERVICES
from services.gateway.api.rest import routes
from tests.deploy.conftest import EVERYTHING
from tests.deploy.environment import settings_of
from tests.deploy.manifests import CHART, Release, Thing, render


def test_routes_lead_to_the_doors_ports(everything: Release) -> None:
    service = everything.one("Service", "demo-penstock")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for kind, port in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        route = everything.one(kind)["spec"]
        [rule] = route["rules"]
        assert rule["backendRefs"] == [{"name": "demo-penstock", "port": ports[port]}]
        assert route["parentRefs"] == EVERYTHING["gatewayApi"]["parentRefs"]


def test_no_route_bounds_a_stream_before_the_gateway_does(everything: Release) -> None:
    [rule] = everything.one("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}


def test_the_grpc_route_is_of_the_public_services(everything: Release) -> None:
    [rule] = everything.one("GRPCRoute")["spec"]["rules"]
    services = {match["method"]["service"] for match in rule["matches"]}
    assert services == {*SERVICES, "grpc.health.v1.Health"}


def test_ingress_leads_to_the_doors_ports(everything: Release) -> None:
    for name, host in (("http", "llm.example.com"), ("grpc", "grpc.llm.example.com")):
        [rule] = everything.one("Ingress", f"demo-penstock-{name}")["spec"]["rules"]
        assert rule["host"] == host
        for path in rule["http"]["paths"]:
            assert path["backend"]["service"] == {"name": "demo-penstock", "port": {"name": name}}
        if name == "grpc":
            paths = [(path["path"], path["pathType"]) for path in rule["http"]["paths"]]
            assert paths == [(f"/{service}", "Prefix") for service in SERVICES]


def test_a_gateway_that_encrypts_again_checks_whom_it_reached(everything: Release) -> None:
    policy = everything.one("BackendTLSPolicy")["spec"]
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": "demo-penstock"}]
    names = everything.one("Secret", "demo-penstock-tls-door")
    assert "ca.crt" in names["data"]
    assert policy["validation"]["hostname"] == "demo-penstock"
    plain = render(None, {"gatewayApi": EVERYTHING["gatewayApi"]})
    assert plain.of("BackendTLSPolicy") == []


def test_the_admin_listener_has_a_service_of_its_own_that_no_route_leads_to(
    everything: Release,
) -> None:
    service = everything.one("Service", "demo-penstock-admin")["spec"]
    assert service["type"] == "ClusterIP"
    assert [port["targetPort"] for port in service["ports"]] == ["admin"]
    door = everything.one("Service", "demo-penstock")["spec"]
    assert "admin" not in {port["targetPort"] for port in door["ports"]}
    [pod] = everything.pods_of("gateway")
    assert pod.ports["admin"] == 8002
    for kind in ("HTTPRoute", "GRPCRoute", "Ingress"):
        for route in everything.of(kind):
            assert "demo-penstock-admin" not in yaml.dump(route["spec"])
    settings = settings_of(everything).identity
    assert (settings.admin_host, settings.admin_port) == ("0.0.0.0", 8002)
    assert str(settings.admin_tls_cert) == "/etc/penstock/admin/tls.crt"
    assert str(settings.oidc_ca) == "/etc/penstock/stores/oidc-ca.crt"
    assert settings.oidc_roles == {"ml": "member"}


def test_the_admin_listener_without_a_certificate_is_refused() -> None:
    with pytest.raises(HelmError, match=r"gateway\.admin\.existingSecret"):
        render(None, {"gateway": {"admin": {"enabled": True}}})


def test_routes_without_a_gateway_are_refused() -> None:
    with pytest.raises(HelmError, match=r"gatewayApi\.parentRefs"):
        render(None, {"gatewayApi": {"enabled": True}})


def test_a_budget_leaves_one_pod_to_take_and_is_a_number(everything: Release) -> None:
    """The disruption controller cannot count the pods of an owner without a scale subresource:
    of those it takes a whole number that must stay, and nothing else."""
    of_groups = [pod for pod in everything.pods if pod.owner.startswith("RayService/")]
    governed = 0
    for budget in everything.of("PodDisruptionBudget"):
        chosen = [
            pod
            for pod in of_groups
            if budget["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        ]
        if not chosen:  # of a Deployment
            continue
        [pod] = chosen
        governed += 1
        assert budget["spec"]["minAvailable"] == pod.replicas - 1 >= 1, pod.owner
        assert "maxUnavailable" not in budget["spec"]
    assert governed == sum(pod.replicas > 1 for pod in of_groups) == 3


def test_one_pod_has_no_budget_that_could_never_be_met() -> None:
    alone = render(None, {"gateway": {"replicas": 1}, "services": {"replicas": 1}})
    assert alone.of("PodDisruptionBudget") == []


def test_one_of_the_gateways_may_be_taken_however_many_there_are(everything: Release) -> None:
    budget = everything.one("PodDisruptionBudget", "demo-penstock-gateway")["spec"]
    assert budget["maxUnavailable"] == 1
    [gateway] = everything.pods_of("gateway")
    assert budget["selector"]["matchLabels"].items() <= gateway.labels.items()


def test_the_collector_takes_spans_where_they_are_sent(everything: Release) -> None:
    [pod] = everything.pods_of("collector")
    config = collector_config(everything)
    taken = config["receivers"]["otlp"]["protocols"]["grpc"]
    assert taken["endpoint"].endswith(f":{pod.ports['otlp']}")
    folder = Path(taken["tls"]["cert_file"]).parent
    [main] = pod.spec["containers"]
    assert str(folder) in {mount["mountPath"] for mount in main["volumeMounts"]}
    [gateway] = everything.pods_of("gateway")
    told = {e["name"]: e.get("value") for e in gateway.spec["containers"][0]["env"]}
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://demo-penstock-collector.llm.svc:4317"
    authority = Path(told["OTEL_EXPORTER_OTLP_CERTIFICATE"])
    mounts = {m["mountPath"] for m in gateway.spec["containers"][0]["volumeMounts"]}
    assert str(authority.parent) in mounts


def test_the_collectors_configuration_hangs_together(everything: Release) -> None:
    config = collector_config(everything)
    for pipeline in config["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert pipeline[part]
            assert set(pipeline[part]) <= set(config[part])
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    assert config["exporters"] == EVERYTHING["collector"]["exporters"]


def test_a_collector_that_sends_nowhere_is_refused() -> None:
    with pytest.raises(HelmError, match=r"collector\.exporters"):
        render(None, {"collector": {"enabled": True}})


@pytest.mark.parametrize(
    ("exporter", "named"),
    [
        ({"headers": {"Authorization": "Bearer abc"}}, "headers.Authorization"),
        ({"headers": {"x-honeycomb-team": "${env:TEAM}", "X-Api-Key": "abc"}}, "headers.X-Api-Key"),
        ({"auth": {"basic": {"username": "u", "password": "abc"}}}, "auth.basic.password"),
        ({"api": {"token": "abc"}}, "api.token"),
        ({"headers": [{"name": "Authorization", "value": "abc"}]}, r"headers\[0\].value"),
        ({"headers": [{"key": "x-api-key", "value": "abc"}]}, r"headers\[0\].value"),
        ({"queues": [{"name": "a"}, {"password": "abc"}]}, r"queues\[1\].password"),
    ],
)
def test_a_secret_for_the_collector_is_not_in_its_config_map(exporter: Thing, named: str) -> None:
    def told(own: Thing) -> Release:
        return render(None, {"collector": {"enabled": True, "exporters": {"otlp/far": own}}})

    with pytest.raises(
        HelmError, match=rf"collector.exporters.otlp/far.{named}: a secret"
    ) as error:
        told(exporter)
    assert "abc" not in str(error.value)
    right = {"headers": {"authorization": "Bearer ${env:T}"}, "sending_queue": {"enabled": True}}
    listed = {"more": [{"name": "Authorization", "value": "${env:T}"}, {"name": "a", "value": "b"}]}
    files = listed | {"tls": {"ca_file": "/ca"}, "auth": {"token_url": "https://t", "retries": 3}}
    assert collector_config(told(right | files))["exporters"]["otlp/far"] == right | files


@pytest.mark.parametrize("name", ["demo-penstock-collector", "demo-penstock-gateway"])
def test_what_scales_by_itself_says_no_number(everything: Release, name: str) -> None:
    deployment = everything.one("Deployment", name)
    scaler = everything.one("HorizontalPodAutoscaler", name)["spec"]
    assert "replicas" not in deployment["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    assert scaler["minReplicas"] == 2 <= scaler["maxReplicas"]
    [main] = deployment["spec"]["template"]["spec"]["containers"]
    assert "cpu" in main["resources"]["requests"], "its share of nothing is not known"


def test_gateways_scale_by_what_one_loop_can_use(everything: Release) -> None:
    """A share of the request would never be reached where that is two cores."""
    [metric] = everything.one("HorizontalPodAutoscaler", "demo-penstock-gateway")["spec"]["metrics"]
    assert metric["resource"]["target"] == {"type": "AverageValue", "averageValue": "700m"}


def test_gateways_are_replaced_one_by_one_and_never_fewer(everything: Release) -> None:
    for release in (everything, render("laptop")):
        spec = release.one("Deployment", "demo-penstock-gateway")["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        probes = [c.get("startupProbe") for p in release.pods_of("decode") for c in p.containers]
        loading = max(p["periodSeconds"] * p["failureThreshold"] for p in probes if p)
        assert spec["progressDeadlineSeconds"] > loading, "it would be said to have failed"


def test_fewer_gateways_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(HelmError, match=r"gateway\.autoscaling\.maxReplicas"):
        render(
            None, {"gateway": {"replicas": 3, "autoscaling": {"enabled": True, "maxReplicas": 2}}}
        )


def test_helm_test_sends_one_call_each_way(everything: Release) -> None:
    ways = set()
    for pod in everything.of("Pod"):
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        [main] = pod["spec"]["containers"]
        script = Path(main["command"][1])
        maps = {v["name"]: v.get("configMap", {}).get("name") for v in pod["spec"]["volumes"]}
        [held] = [
            maps[m["name"]] for m in main["volumeMounts"] if m["mountPath"] == str(script.parent)
        ]
        assert everything.one("ConfigMap", held)["data"][script.name] == _script().read_text()
        ways.add((main["args"][0], main["args"][1]))
        assert "--authority=/etc/penstock/authority/ca.crt" in main["args"]
    assert ways == {("rest", "https://demo-penstock:8000"), ("grpc", "demo-penstock:8001")}


def test_its_script_takes_the_arguments_that_it_is_given(everything: Release) -> None:
    for pod in everything.of("Pod"):
        [main] = pod["spec"]["containers"]
        taken = runpy.run_path(str(_script()))["parse"](main["args"])
        assert [taken.way, taken.address] == main["args"][:2]
        assert taken.tls == (taken.way == "grpc")
        assert taken.wait < pod["spec"]["activeDeadlineSeconds"]


@pytest.mark.parametrize("kind", ["HTTPRoute", "Ingress"])
def test_the_public_paths_of_the_door_are_routed(everything: Release, kind: str) -> None:
    if kind == "HTTPRoute":
        [rule] = everything.one("HTTPRoute")["spec"]["rules"]
        matches = [(m["path"]["value"], m["path"]["type"]) for m in rule["matches"]]
    else:
        [rule] = everything.one("Ingress", "demo-penstock-http")["spec"]["rules"]
        matches = [(path["path"], path["pathType"]) for path in rule["http"]["paths"]]
    prefix = {"HTTPRoute": "PathPrefix", "Ingress": "Prefix"}[kind]
    assert {type for _, type in matches} == {prefix, "Exact"}

    def routed(path: str) -> bool:
        return any(
            path == value if type == "Exact" else re.match(rf"{value}(/|$)", path)
            for value, type in matches
        )

    inside = {"/healthz", "/health"}  # for probes
    served = re.findall(r'^ +"(/[^"]+)": \{', Path(routes.__file__).read_text(), re.MULTILINE)
    assert len(served) > 10
    for path in served:
        assert routed(path) != (path in inside), path


def collector_config(release: Release) -> Thing:
    found: Thing = yaml.safe_load(
        release.one("ConfigMap", "demo-penstock-collector")["data"]["config.yaml"]
    )
    return found


def _script() -> Path:
    return CHART / "files/tests/ask.py"
