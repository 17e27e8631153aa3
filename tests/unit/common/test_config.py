import pytest
from pydantic import ValidationError

from services.common.config import GatewaySettings, RetrievalSettings, Settings, unknown_names


def test_sections_and_lists_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMIT", "7")
    monkeypatch.setenv("PENSTOCK_MODELS", '[{"name": "m", "path": "/models/m"}]')
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1/0")
    settings = Settings()
    assert settings.router.queue_limit == 7
    assert settings.models[0].path == "/models/m"
    assert settings.redis_url == "redis://elsewhere:1/0"


def test_a_misspelt_setting_of_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMITS", "7")
    with pytest.raises(ValidationError, match="queue_limits"):
        Settings()


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
