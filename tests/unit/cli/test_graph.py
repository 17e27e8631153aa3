"""What `penstock up` deploys is what it waits for."""

from collections import Counter
from typing import Any

import pytest
from ray.serve.deployment import Application

from services.app import build
from services.cli.stack import _wanted
from services.common.config import (
    ModelSpec,
    RetrievalSettings,
    RouterSettings,
    Settings,
    TokenizerSettings,
)


def deployed(application: Application) -> dict[str, Any]:
    """All deployments of the graph, by name."""
    own = application._bound_deployment
    found = {own.name: own}
    for argument in own.init_args:
        if isinstance(argument, Application):
            found.update(deployed(argument))
    return found


@pytest.mark.parametrize(
    ("cores", "given", "replicas"),
    [(1, 0, 1), (3, 0, 1), (4, 0, 2), (64, 0, 2), (2, 3, 3), (8, 1, 1)],
)
@pytest.mark.parametrize("prefill", [0, 2])
def test_routers_and_tokenizers_have_a_spare_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: int, replicas: int, prefill: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    settings = Settings(
        models=[ModelSpec(name="tiny", path="/nowhere")],
        router=RouterSettings(replicas=given),
        tokenizer=TokenizerSettings(replicas=given),
        retrieval=RetrievalSettings(replicas=2),
        qdrant_url="http://127.0.0.1:6333",
    )
    graph = deployed(build(settings, prefill=prefill, decode=3))
    services: Counter[str] = Counter()
    for deployment in graph.values():
        services[deployment.init_args[0]] += deployment.num_replicas
    assert services["router"] == services["tokenizer"] == replicas
    assert services["retrieval"] == 2
    wanted: Counter[str] = Counter()
    for (service, _), count in _wanted(settings, prefill, 3).items():
        wanted[service] += count
    assert services == wanted
