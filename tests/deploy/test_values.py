"""values.schema.json: every value of the chart is in it, and what is in it alone is taken."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmValuesError, parse_set_string

from deploy.helm import settings_schema
from services.common.config import Settings
from tests.deploy.manifests import CHART, Thing, profiles

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES: Thing = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as chart:
        yield chart


def test_every_default_stands_in_the_schema() -> None:
    missing = [path for path, own in objects(VALUES, SCHEMA) if path_missing(path, own)]
    assert not missing


def test_the_schema_has_nothing_without_a_default() -> None:
    """A key that templates may read has its default, so that values.yaml shows all there are."""
    for path, schema in sections(SCHEMA):
        found: Any = VALUES
        for name in path:
            found = found[name]
        optional = {"global"} if not path else PLACEMENT
        assert set(schema["properties"]) - optional <= set(found), ".".join(path)


# Those of `scheduling`, which any part may set of its own; and of `workers`, which a pool may.
PLACEMENT = {
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
    "extraEnv",
}


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("gatway.replicas=2", "gatway"),
        ("gateway.replica=2", "/gateway"),
        ("gateway.replicas=0", "/gateway/replicas"),
        ("gateway.replicas=two", "/gateway/replicas"),
        ("gateway.sharedMemory=1Gi", "/gateway"),
        ("gateway.autoscaling.cpu=much", "/gateway/autoscaling/cpu"),
        ("gateway.service.type=Loadbalancer", "/gateway/service/type"),
        ("gateway.resources.request.cpu=1", "/gateway/resources"),
        ("gateway.extraEnv[0].nam=X", "/gateway/extraEnv/0"),
        ("services.gpus=1", "/services"),
        ("image.flavor=rocm", "/image/flavor"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("models[0].name=,models[0].enabled=true", "/models/0/name"),
        ("models={}", "/models"),
        ("models[0].worker.kv_cach_bytes=5", "kv_cach_bytes"),
        ("models[0].worker.kv_cache_bytes=1GB", "/models/0/worker/kv_cache_bytes"),
        ("models[0].worker.role=both", "role"),
        ("models[0].decode.worker.max_running=0", "/models/0/decode/worker/max_running"),
        ("models[0].decode.worker.dtype=bfloat16", "dtype"),  # of both pools
        ("models[0].prefill.worker.quantization=int8", "quantization"),  # so, too
        ("models[0].prefill.worker.kv_format=int8", "kv_format"),
        ("models[0].prefill.worker.health_port=1", "health_port"),  # the probes' own
        ("models[0].replicas=2", "/models/0"),
        ("models[0].enabled=maybe", "/models/0/enabled"),
        ("models[0].decode.gpu=1", "/models/0/decode"),
        ("models[0].download.repo=a/b", "/models/0/download"),
        ("workers.gpus=-1", "/workers/gpus"),
        ("modelCache.size=big", "/modelCache/size"),
        ("kvDisk.sizeLimit=big", "/kvDisk/sizeLimit"),
        ("kvDisk.claim=x", "/kvDisk"),
        ("modelCache.accessModes[0]=ReadWriteSometimes", "/modelCache/accessModes"),
        ("settings.log_level=DEBUG", "log_level"),
        ("settings.PENSTOCK_LOG_LEVEL=DEBUG", "PENSTOCK_LOG_LEVEL"),
        ("settings.LOG_LEVEL=LOUD", "/settings/LOG_LEVEL"),
        ("settings.GATEWAY__MAX_REQUEST=7", "GATEWAY__MAX_REQUEST"),
        ("settings.WORKER__THREADS=-1", "/settings/WORKER__THREADS"),
        ("settings.ROUTER__QUEUE_LIMIT=many", "/settings/ROUTER__QUEUE_LIMIT"),
        ("settings.GATEWAY__CORS_ORIGINS={app.example}", "/settings/GATEWAY__CORS_ORIGINS/0"),
        ("settings.POLICY__LOOK_EVERY_S=0", "/settings/POLICY__LOOK_EVERY_S"),
        ("policy.rules[0].nam=x", "/policy/rules/0"),
        ("requestTimeoutSeconds=10m", "/requestTimeoutSeconds"),
        ("redis.external.uri=redis://x", "/redis/external"),
        ("redis.persistence.enabled=yes please", "/redis/persistence/enabled"),
        ("qdrant.image.digest=x", "/qdrant/image"),
        ("certificates.certManager.duration=90d", "/certificates/certManager/duration"),
        ("certificates.door.dnsName=x", "/certificates/door"),
        ("networkPolicy.clients[0].cidr=10.0.0.0/8", "/networkPolicy/clients/0"),
        ("networkPolicy.dns=none", "/networkPolicy/dns"),
        ("networkPolicy.dns=null", "'dns'"),  # a rule without peers would be for all
        ("networkPolicy.dns.cidrs[0]=10.0.0.10", "/networkPolicy/dns/cidrs/0"),
        ("networkPolicy.kuberayOperator.namespace=", "/networkPolicy/kuberayOperator/namespace"),
        ("networkPolicy.prometheus.namespace=null", "'namespace'"),  # it would be any
        ("networkPolicy.prometheus[0].podSelector.x=y", "/networkPolicy/prometheus"),
        ("networkPolicy.kuberayOperator=null", "'kuberayOperator'"),
        ("networkPolicy.prometheus=null", "'prometheus'"),
        ("gatewayApi.parentRefs[0].nam=x", "/gatewayApi/parentRefs/0"),
        ("ingress.hosts[0]=x", "/ingress"),
        ("monitoring.podMonitor.interval=15", "/monitoring/podMonitor/interval"),
        ("collector.autoscaling.cpuUtilization=120", "/collector/autoscaling/cpuUtilization"),
        ("otlp.endpoint=tempo:4317", "/otlp/endpoint"),
        ("tests.waitSeconds=0", "/tests/waitSeconds"),
        ("ray.version=2", "/ray/version"),
    ],
)
def test_what_is_misspelt_or_cannot_be_is_refused_by_name(
    chart: Chart, expression: str, named: str
) -> None:
    with pytest.raises(HelmValuesError) as refused:
        chart.validate_schema(parse_set_string(expression))
    assert named in str(refused.value)


def test_profiles_and_defaults_are_taken(chart: Chart) -> None:
    chart.validate_schema({})
    for profile in profiles():
        chart.validate_schema(yaml.safe_load((CHART / f"values-{profile}.yaml").read_text()))


def test_the_schema_of_settings_is_that_of_the_services() -> None:
    text = settings_schema.DOCUMENT.read_text()
    assert settings_schema.document(text) == text, "`make docs` makes it anew"


def test_every_setting_is_taken_with_its_default(chart: Chart) -> None:
    """A schema that knew too little would refuse what services take."""
    defaults = Settings().model_dump(mode="json", exclude={"models"})
    for name, value in defaults.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, own in inner:
            variable = f"{name}__{key}".strip("_").upper()
            if own is not None:
                chart.validate_schema({"settings": {variable: own}})
            assert variable in SCHEMA["$defs"]["settings"]["properties"]


def objects(values: Thing, schema: Thing, path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Each key of nested values, with the schema of the object that it is in."""
    schema = resolved(schema)
    for key, own in values.items():
        yield (*path, key), schema
        inner = resolved(schema.get("properties", {}).get(key, {}))
        if isinstance(own, dict) and "properties" in inner:
            yield from objects(own, inner, (*path, key))


def path_missing(path: tuple[str, ...], schema: Thing) -> bool:
    return "properties" in schema and path[-1] not in schema["properties"]


def sections(schema: Thing, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Thing]]:
    """The objects with named keys that values.yaml spells out."""
    yield path, schema
    for name, inner in schema["properties"].items():
        own = resolved(inner)
        if "properties" in own and "$ref" not in inner:
            yield from sections(own, (*path, name))


def resolved(schema: Thing) -> Thing:
    if "$ref" in schema:
        found: Thing = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return found
    return schema
