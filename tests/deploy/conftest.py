"""Renderings of the chart, each made once."""

import pytest

from tests.deploy.manifests import Release, profiles, render

# Beside the profiles: every part that is off by default, and stores that are not the chart's own.
EVERYTHING = {
    "gateway": {
        "autoscaling": {"enabled": True},
        "admin": {"enabled": True},
        "oidcCaSecret": {"name": "issuer-ca"},
    },
    "policy": {"version": "1", "rules": [{"name": "card", "pii": ["card"], "action": "redact"}]},
    "settings": {
        "IDENTITY__OIDC_ISSUER": "https://id.example.com:8444/realms/ai",
        "IDENTITY__OIDC_AUDIENCE": "penstock",
        "IDENTITY__OIDC_ROLES": {"ml": "member"},
    },
    "models": [
        {
            "name": "Org/Model-8B",
            "enabled": True,
            "download": {"repo": "org/model-8b", "revision": "0123abc"},
            "prefill": {"replicas": 3, "gpus": 1},
            "decode": {"replicas": 2, "gpus": 1},
        }
    ],
    "modelCache": {"enabled": True, "download": {"tokenSecret": {"name": "huggingface-token"}}},
    "kvDisk": {"enabled": True},
    "certificates": {"enabled": True, "door": {"enabled": True, "dnsNames": ["llm.example.com"]}},
    "gatewayApi": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
        "grpcHostnames": ["grpc.llm.example.com"],
    },
    "ingress": {"enabled": True, "host": "llm.example.com", "grpcHost": "grpc.llm.example.com"},
    "monitoring": {
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "collector": {
        "enabled": True,
        "replicas": 2,
        "autoscaling": {"enabled": True},
        "exporters": {"otlp": {"endpoint": "tempo.observability:4317"}},
    },
}
ELSEWHERE = {
    "redis": {
        "enabled": False,
        "external": {
            "url": "rediss://redis.example.com:6380/2",
            "existingSecret": "redis-password",
            "ray": {"username": "ray", "existingSecret": "redis-ray-password"},
        },
    },
    "qdrant": {
        "enabled": False,
        "external": {"url": "https://qdrant.example.com", "existingSecret": "qdrant-key"},
    },
    "otlp": {"endpoint": "https://spans.example.com:4320"},
}
RENDERINGS = {
    "defaults": (None, {}),
    **{profile: (profile, {}) for profile in profiles()},
    "gpu+production": ("gpu+production", {}),
    "everything": (None, EVERYTHING),
    "elsewhere": (None, ELSEWHERE),
    "bare": (
        None,
        {
            "networkPolicy": {"enabled": False},
            "certificates": {"enabled": False},
            "tests": {"enabled": False},
            "podDisruptionBudget": {"enabled": False},
        },
    ),
}


@pytest.fixture(scope="session", params=RENDERINGS)
def release(request: pytest.FixtureRequest) -> Release:
    """Each of the renderings."""
    profile, values = RENDERINGS[request.param]
    return render(profile, values)


@pytest.fixture(scope="session")
def everything() -> Release:
    return render(None, EVERYTHING)
