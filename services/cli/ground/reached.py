"""Whether what a stack needs, and does not start, answers."""

import ssl

from services.common.config import Settings
from services.common.locks.secrets import redacted
from services.common.redis import RedisAway, RedisError, connect

_TIMEOUT_S = 5.0


async def check_redis(settings: Settings) -> None:
    """Raises RuntimeError when it does not answer, or not to us."""
    redis = connect(settings.redis_dsn)
    try:
        await redis.ping()
    except (*RedisAway, RedisError) as error:
        raise RuntimeError(f"Redis at {redacted(settings.redis_dsn)}: {error}") from error
    finally:
        await redis.aclose()


async def check_qdrant(settings: Settings) -> None:
    """Raises RuntimeError when it does not answer, or not to us."""
    import httpx

    url, key = settings.qdrant_url.rstrip("/"), settings.qdrant_api_key.get_secret_value()
    try:
        verify = ssl.create_default_context(cafile=settings.qdrant_ca)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=verify) as http:
            answer = await http.get(f"{url}/collections", headers={"api-key": key} if key else {})
    except (httpx.HTTPError, OSError) as error:
        raise RuntimeError(f"Qdrant at {redacted(url)}: {error or type(error).__name__}") from error
    if not answer.is_success:
        raise RuntimeError(f"Qdrant at {redacted(url)}: {answer.status_code} {answer.text[:200]}")
