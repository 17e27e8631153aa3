"""The settings of a rendered pod, as the services themselves read them."""

import os
from unittest import mock

from services.common.config import Settings
from tests.deploy.manifests import Pod, Release, Thing

_ADDRESS, _SECRET = "10.0.0.7", "s" * 48  # what the cluster fills in


def variables(container: Thing) -> dict[str, str]:
    """A container's environment, with what comes from elsewhere made up."""
    found = {}
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        found[entry["name"]] = entry.get("value", _ADDRESS if "fieldRef" in source else _SECRET)
    return {name: value.replace("$(REDIS_AUTH)", _SECRET) for name, value in found.items()}


def read(environment: dict[str, str]) -> Settings:
    """Settings from these variables alone. Raises ValueError for a wrong one."""
    with mock.patch.dict(os.environ, environment, clear=True):
        return Settings()


def settings_of(release: Release, pod: Pod | None = None) -> Settings:
    """Those of a pod of the graph, a gateway's unless said otherwise."""
    pod = pod or release.pods_of("gateway")[0]
    return read(variables(pod.spec["containers"][0]))
