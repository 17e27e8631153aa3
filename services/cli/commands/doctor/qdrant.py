"""The vector store."""

import ssl
from urllib.parse import urlsplit

import httpx

from services.cli.commands.doctor.findings import Finding, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.common.config import is_loopback

_ANSWER_S = 3.0


async def check(it: Installation) -> list[Finding]:
    own, about = it.settings, "qdrant"
    if not own.qdrant_url:
        return [
            ok(about, f"none: vectors lie in {own.data_dir / 'qdrant'}, for one retrieval alone")
        ]
    key = own.qdrant_api_key.get_secret_value()
    trusted = ssl.create_default_context(cafile=own.qdrant_ca) if own.qdrant_ca else True
    async with httpx.AsyncClient(timeout=_ANSWER_S, verify=trusted, trust_env=False) as http:
        base, with_key = own.qdrant_url.rstrip("/"), {"api-key": key} if key else {}
        try:
            answer = await http.get(f"{base}/", headers=with_key)
            listed = await http.get(f"{base}/collections", headers=with_key)
            stranger = await http.get(f"{base}/collections")
        except (httpx.HTTPError, OSError) as error:
            told = f"{base} does not answer: {error or type(error).__name__}"
            advice = "start it, or correct QDRANT_URL, PENSTOCK_QDRANT_CA and the way there"
            return [failed(about, told, advice)]
    if listed.status_code in (401, 403):
        return [failed(about, f"{base} refuses our API key", "correct QDRANT_API_KEY")]
    if listed.status_code != 200:
        return [failed(about, f"{base}/collections says {listed.status_code}", "see its log")]
    version = answer.json().get("version", "unknown") if answer.is_success else "unknown"
    found = [ok(about, f"{version} at {base}")]
    host = urlsplit(base).hostname or ""
    if is_loopback(host):
        return found
    if stranger.is_success:
        told = "whoever reaches it may read and write everything"
        found.append(warning("qdrant key", told, "set an API key there and as QDRANT_API_KEY"))
    if base.startswith("http:"):
        told = "the API key and all vectors travel in the clear"
        found.append(warning("qdrant TLS", told, "use https:// and PENSTOCK_QDRANT_CA"))
    return found
