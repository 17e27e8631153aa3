"""A real OIDC issuer in a thread: Authlib's authorization server, whose tokens another library
makes than the one that checks them."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2.rfc6749 import ClientMixin, grants
from authlib.oauth2.rfc9068 import JWTBearerTokenGenerator
from flask import Flask, Response, jsonify
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, RSAKey
from werkzeug.serving import WSGIRequestHandler, make_server

AUDIENCE = "penstock"


class _Client(ClientMixin):
    """A program that asks for tokens in its own name; `claims` are what the issuer says of it."""

    def __init__(self, id: str, claims: dict[str, Any]) -> None:
        self.id = self.client_id = id
        self.claims = claims

    def get_client_id(self) -> str:
        return self.id

    def get_allowed_scope(self, scope: str) -> str:
        return scope or ""

    def check_client_secret(self, secret: str) -> bool:
        return secret == "secret"

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return True

    def check_grant_type(self, grant: str) -> bool:
        return grant == "client_credentials"


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        pass


class _Machine(grants.ClientCredentialsGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_post",)


class Issuer:
    def __init__(self) -> None:
        self.first = RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})
        self.keys: list[RSAKey | ECKey] = [self.first]
        self.clients: dict[str, _Client] = {}
        self.asked: list[str] = []  # paths
        self.away = False
        self.jwks: dict[str, Any] | None = None  # in place of the true ones
        self.cache_control = "max-age=300"
        self.url = ""

    def register(self, id: str, **claims: Any) -> None:
        self.clients[id] = _Client(id, claims)

    def token(self, id: str) -> str:
        """As a client gets one."""
        asked = {"grant_type": "client_credentials", "client_id": id, "client_secret": "secret"}
        answer = httpx.post(f"{self.url}/token", data=asked, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["access_token"])

    def signed(self, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token with whatever claims, under the issuer's latest key; None: without that one."""
        key = self.keys[-1]
        now = int(time.time())
        told = {"iss": self.url, "aud": AUDIENCE, "sub": "u1", "iat": now, "exp": now + 600}
        told |= {"tenant": "acme", "roles": ["ml"], **claims}
        told = {name: value for name, value in told.items() if value is not None}
        head = {"alg": "RS256", "kid": key.kid, "typ": "at+jwt", **(header or {})}
        algorithms = ["RS256", "RS512", "PS256", "ES256"]
        return jwt.encode(head, told, key, algorithms=algorithms)

    def rotate(self, id: str) -> None:
        """Signs with a new key from now on; the old one still counts."""
        self.keys.append(RSAKey.generate_key(2048, {"kid": id, "use": "sig"}))

    def use_curve(self, id: str) -> None:
        self.keys.append(ECKey.generate_key("P-256", {"kid": id, "use": "sig"}))

    def application(self) -> Flask:
        app = Flask("issuer")
        server = AuthorizationServer(
            app,
            query_client=lambda id: self.clients.get(id),
            save_token=lambda token, request: None,
        )
        server.register_grant(_Machine)
        issuer = self

        class Generator(JWTBearerTokenGenerator):
            def get_jwks(self) -> KeySet:
                return KeySet([issuer.keys[-1]])

            def get_audiences(self, client: _Client, user: Any, scope: Any) -> str:
                return AUDIENCE

            def get_extra_claims(
                self, client: _Client, grant_type: Any, user: Any, scope: Any
            ) -> dict[str, Any]:
                return client.claims

        server.register_token_generator("default", Generator(issuer=self.url))

        @app.before_request
        def before() -> Any:
            from flask import request

            self.asked.append(request.path)
            if self.away and request.path != "/token":
                return Response("", 503)
            return None

        @app.post("/token")
        def token() -> Any:
            return server.create_token_response()

        @app.get("/.well-known/openid-configuration")
        def discovery() -> Any:
            return jsonify(
                issuer=self.url,
                jwks_uri=f"{self.url}/jwks",
                token_endpoint=f"{self.url}/token",
                response_types_supported=["code"],
                subject_types_supported=["public"],
                id_token_signing_alg_values_supported=["RS256"],
            )

        @app.get("/jwks")
        def jwks() -> Any:
            shown = self.jwks or KeySet(self.keys).as_dict(private=False)
            answer = jsonify(shown)
            answer.headers["cache-control"] = self.cache_control
            return answer

        return app


@contextmanager
def issuing() -> Iterator[Issuer]:
    """A running one, on a free port of the loopback."""
    os.environ["AUTHLIB_INSECURE_TRANSPORT"] = "1"  # plain HTTP
    issuer = Issuer()
    listening = make_server("127.0.0.1", 0, lambda *_: [], threaded=True, request_handler=_Quiet)
    issuer.url = f"http://127.0.0.1:{listening.server_port}"
    listening.app = issuer.application()
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
