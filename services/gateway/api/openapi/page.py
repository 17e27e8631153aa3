"""The document as a page to read and try: Swagger UI, as a wheel carries it, so that it needs no
internet. What it loads is its own; scripts of others do not run in it."""

import asyncio
import functools
import json
from importlib import metadata
from pathlib import Path

from services.gateway.api.openapi.document import document
from services.gateway.api.rest.http import Exchange
from services.gateway.ids import not_found
from services.gateway.parts import Gateway

_WHEEL, _FOLDER = "fastapi-swagger", "fastapi_swagger/resources"
_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock's API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"""
_START = b"""SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#page",
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
});
"""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")


async def get_document(gateway: Gateway, exchange: Exchange) -> None:
    await exchange.reply(await asyncio.to_thread(_document), "application/json")


async def get_page(gateway: Gateway, exchange: Exchange) -> None:
    await exchange.reply(_PAGE, "text/html; charset=utf-8", headers=_HEADERS)


async def get_asset(gateway: Gateway, exchange: Exchange) -> None:
    name = exchange.path["asset"]
    if name == "start.js":
        content = _START
    elif name in _FILES:
        content = await asyncio.to_thread(_asset, name)
    else:
        raise not_found("asset", name)
    kept = {"cache-control": "public, max-age=3600"}
    await exchange.reply(content, _KINDS[Path(name).suffix], headers=_HEADERS | kept)


@functools.cache
def _document() -> bytes:
    return json.dumps(document()).encode()  # some bounds have more than 64 bits


@functools.cache
def _asset(name: str) -> bytes:
    return Path(str(metadata.distribution(_WHEEL).locate_file(f"{_FOLDER}/{name}"))).read_bytes()
