"""Tokens of a real OIDC issuer, and a collection of hostile ones."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, get_args

import jwt as pyjwt
import pytest
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from joserfc.jwk import KeySet

from services.common.config import GatewaySettings, IdentitySettings
from services.common.config.identity import Algorithm
from services.common.errors import PenstockError
from services.gateway.identity import issuer_keys
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.issuer_keys import IssuerKeys
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.principal import Permission, Principal, Refused, Role
from services.gateway.identity.revoked_tokens import TokenRevocations
from services.gateway.identity.standing import Grantee, Standing
from services.gateway.identity.tenants import TenantRecord, TenantStore
from services.gateway.identity.tokens import TokenVerifier
from tests.support.issuer import AUDIENCE, Issuer, issuing
from tests.support.tenants import put
from tests.support.waiting import until

_ROLES = {"ml": "member", "boss": "admin", "auditors": "read-only"}


@pytest.fixture(scope="module")
def served() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


@pytest.fixture
def issuer(served: Issuer) -> Issuer:
    """With one key and no clients."""
    served.keys = [served.first]
    served.clients.clear()
    served.asked.clear()
    served.away, served.jwks, served.cache_control = False, None, "max-age=300"
    return served


class Door:
    def __init__(self, redis: Any, namespace: str, issuer: Issuer, **settings: Any) -> None:
        own = IdentitySettings(
            **{
                "oidc_issuer": issuer.url,
                "oidc_audience": AUDIENCE,
                "oidc_roles": _ROLES,
                "oidc_skew_s": 5,
                **settings,
            }
        )
        self.keys = IssuerKeys(own)
        self.tenants = TenantStore(redis, namespace)
        self.revoked = TokenRevocations(redis, namespace, own)
        self.cache = GatewaySettings(key_cache_s=0)
        verifier = TokenVerifier(own, self.keys, self.revoked, self.tenants)
        self.auth = Authenticator([verifier], KeyStore(redis, namespace), self.cache)

    async def lets_in(self, token: str) -> Principal:
        return await self.auth.identify(f"Bearer {token}")

    async def refuses(self, token: str, reason: str = "invalid_api_key") -> str:
        with pytest.raises(PenstockError) as refused:
            await self.lets_in(token)
        assert refused.value.reason == reason
        return refused.value.message


@pytest.fixture
async def door(redis, namespace, issuer) -> AsyncIterator[Door]:
    made = Door(redis, namespace, issuer)
    await put(made.tenants, TenantRecord(name="acme", priority="low", weight=2))
    yield made
    await made.keys.stop()


def b64(data: bytes | dict[str, Any]) -> str:
    raw = json.dumps(data).encode() if isinstance(data, dict) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def parts(token: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    head, body, signature = token.split(".")
    unpack = [json.loads(base64.urlsafe_b64decode(part + "==")) for part in (head, body)]
    return unpack[0], unpack[1], signature


def raw_signed(issuer: Issuer, head: bytes, body: bytes) -> str:
    """Under the issuer's own key, whatever is signed."""
    key = issuer.keys[0].private_key
    signed = f"{b64(head)}.{b64(body)}"
    return f"{signed}.{b64(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


# ---- true ones ----------------------------------------------------------------------------------


async def test_a_token_of_the_issuer_lets_its_owner_in(door, issuer):
    issuer.register("app", tenant="acme", roles=["ml", "unheard-of"])
    principal = await door.lets_in(issuer.token("app"))
    assert (principal.tenant, principal.user) == ("acme", "oidc:app")
    assert (principal.priority, principal.weight) == ("low", 2), "its tenant's"
    assert principal.roles == {Role.MEMBER}
    assert Permission.INFERENCE in principal.permissions
    assert not principal.expired


async def test_what_is_claimed_beyond_what_is_known_grants_nothing(door, issuer):
    for roles in (None, [], ["admin"], ["root"], "ml2", {"ml": True}, [["ml"]], 1, ["ml"] * 300):
        principal = await door.lets_in(issuer.signed(roles=roles))
        assert principal.permissions == frozenset(), roles
    claims = {"priority": "high", "weight": 100, "permissions": ["inference"], "limits": []}
    principal = await door.lets_in(issuer.signed(roles=["auditors"], **claims))
    assert Permission.INFERENCE not in principal.permissions
    assert (principal.priority, principal.weight) == ("low", 2)


@pytest.mark.parametrize("tenant", [None, "rival", "", "a b", 7, ["acme"], {"acme": 1}, "a" * 99])
async def test_a_tenant_without_a_record_is_none(door, issuer, tenant):
    assert "tenant is not known" in await door.refuses(issuer.signed(tenant=tenant))


async def test_a_suspended_tenants_tokens_are_refused(door, issuer):
    await put(door.tenants, TenantRecord(name="acme", suspended=1))
    assert "suspended" in await door.refuses(issuer.signed())


async def test_models_may_be_claimed_and_are_the_tenants_at_most(redis, namespace, issuer, door):
    claiming = Door(redis, namespace, issuer, oidc_models_claim="models")
    await put(door.tenants, TenantRecord(name="acme", models=("tiny", "large")))
    for models, usable in ((["tiny", "other"], {"tiny"}), (None, set()), ("large", {"large"})):
        assert (await claiming.lets_in(issuer.signed(models=models))).models == usable
    assert (await door.lets_in(issuer.signed(models=["x"]))).models == {"tiny", "large"}
    await claiming.keys.stop()


async def test_roles_may_lie_deeper_and_a_name_with_dots_comes_first(redis, namespace, issuer):
    deep = Door(redis, namespace, issuer, oidc_roles_claim="realm_access.roles")
    await deep.tenants.add("acme")
    for claims in (
        {"realm_access": {"roles": ["ml"]}, "roles": None},
        {"realm_access.roles": ["ml"], "realm_access": {"roles": []}},
    ):
        assert (await deep.lets_in(issuer.signed(**claims))).roles == {Role.MEMBER}
    nothing = await deep.lets_in(issuer.signed(realm_access="roles"))
    assert nothing.roles == frozenset()
    await deep.keys.stop()


async def test_one_subject_is_never_anothers(door, issuer):
    subjects = ["a", "a{b}", "a b", "oidc:a", "#x", "x" * 129, "\u00e4", "a\n", "a\u0000b"]
    users = [(await door.lets_in(issuer.signed(sub=subject))).user for subject in subjects]
    assert len(set(users)) == len(subjects)
    assert all(user.isascii() and " " not in user and "{" not in user for user in users)


async def test_a_key_of_another_kind_and_a_new_one_are_found(door, issuer, monkeypatch):
    monkeypatch.setattr(issuer_keys, "_LOOK_EVERY_S", 0.0)
    await door.lets_in(issuer.signed())
    issuer.use_curve("curve")
    await door.lets_in(issuer.signed({"alg": "ES256"}))
    issuer.rotate("next")
    for header in ({}, {"kid": "next"}):
        await door.lets_in(issuer.signed(header))
    issuer.keys = issuer.keys[1:]
    issuer.use_curve("newest")
    await door.lets_in(issuer.signed({"alg": "ES256"}))  # which has the keys looked at again
    assert door.keys._known("first", "RS256") is None, "what the issuer has taken back is gone"


@pytest.mark.parametrize("algorithm", sorted(get_args(Algorithm)))
async def test_each_algorithm_that_can_be_set_is_understood(redis, namespace, issuer, algorithm):
    made = {
        "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
        "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "ES512": lambda: ec.generate_private_key(ec.SECP521R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate,
    }
    key = made[algorithm]() if algorithm in made else issuer.first.private_key
    of_it = pyjwt.get_algorithm_by_name(algorithm)
    shown = of_it.to_jwk(key.public_key(), as_dict=True)
    shown.pop("key_ops", None)
    issuer.jwks = {"keys": [{**shown, "kid": "own", "use": "sig"}]}
    own = Door(redis, namespace, issuer, oidc_algorithms=[algorithm])
    await own.tenants.add("acme")
    _, body, _ = parts(issuer.signed())
    token = pyjwt.encode(body, key, algorithm, {"kid": "own"})
    assert (await own.lets_in(token)).tenant == "acme"
    head, claims, signature = token.split(".")
    changed = signature[:-10] + ("A" if signature[-10] != "A" else "B") + signature[-9:]
    await own.refuses(f"{head}.{claims}.{changed}")
    await own.keys.stop()


async def test_a_key_is_trusted_for_its_own_algorithm_alone(door, issuer, monkeypatch):
    monkeypatch.setattr(issuer_keys, "_LOOK_EVERY_S", 0.0)
    shown = KeySet(issuer.keys).as_dict(private=False)
    shown["keys"][0]["alg"] = "RS512"
    issuer.jwks = shown
    await door.refuses(issuer.signed(), "keys_unavailable")
    issuer.jwks = {"keys": [{**shown["keys"][0], "alg": "RS256", "use": "enc"}]}
    await door.refuses(issuer.signed(), "keys_unavailable")
    issuer.jwks = None
    await door.lets_in(issuer.signed())
    assert "Incorrect" in await door.refuses(issuer.signed({"alg": "PS256"}))


# ---- times --------------------------------------------------------------------------------------


async def test_the_clocks_may_differ_by_so_much(door, issuer):
    now = time.time()
    for claims in ({"exp": int(now) - 3}, {"nbf": int(now) + 3}, {"iat": int(now) + 3}):
        await door.lets_in(issuer.signed(**claims))
    assert "has expired" in await door.refuses(issuer.signed(exp=int(now) - 6))
    for claims in ({"nbf": int(now) + 60}, {"iat": int(now) + 60}):
        await door.refuses(issuer.signed(**claims))


async def test_a_known_token_ends_at_its_time(door, issuer, monkeypatch):
    door.cache.key_cache_s = 3600
    token = issuer.signed(exp=int(time.time()) + 100)
    principal = await door.lets_in(token)
    later = time.time() + 106
    monkeypatch.setattr("services.gateway.identity.principal.time.time", lambda: later)
    assert principal.expired
    assert "expired" in await door.refuses(token)


# ---- revoked ones -------------------------------------------------------------------------------


async def test_a_users_tokens_end_and_newer_ones_hold(door, issuer):
    door.cache.key_cache_s = 3600
    now = int(time.time())
    before = [issuer.signed(iat=now - 60), issuer.signed(iat=now + 4)]
    other = issuer.signed(sub="u2", iat=now - 60)
    for token in (*before, other):
        await door.lets_in(token)
    record = await door.revoked.revoke("acme", user="oidc:u1")
    await door.revoked.revoke("rival", user="oidc:u2")
    door.auth.told("tenant acme")  # as the news are (test_revoked_tokens.py)
    for token in before:
        assert "revoked" in await door.refuses(token)
    await door.lets_in(other)
    stored = record.model_copy(update={"revoked": record.revoked - 60}).model_dump_json()
    await door.revoked._redis.hset(door.revoked._records, record.name, stored)
    await door.lets_in(issuer.signed(iat=record.revoked))  # a minute after it, as it were
    assert "revoked" in await door.refuses(issuer.signed(iat=record.revoked - 55)), "within skew"
    await door.refuses(before[0])  # it is remembered


async def test_one_token_ends_by_its_id(door, issuer):
    await door.revoked.revoke("acme", token="t-1")
    assert "revoked" in await door.refuses(issuer.signed(jti="t-1"))
    for jti in ("t-2", "", None):
        await door.lets_in(issuer.signed(jti=jti))


async def test_what_waits_for_its_turn_ends_with_the_token_that_it_was_asked_with(door, issuer):
    """A batch, a file to be indexed: nothing else of that user's."""
    keys = KeyStore(door.revoked._redis, "none")
    standing = Standing(keys, door.tenants, door.revoked)
    now = int(time.time())
    asked, other, longest = [
        Grantee.of(await door.lets_in(issuer.signed(jti=jti)), now)
        for jti in ("t-1", "t-2", "t" * 257)
    ]
    assert longest.token is None, "none so long can be revoked, nor is it kept"
    await door.revoked.revoke("acme", token="t-1")
    with pytest.raises(Refused, match="revoked"):
        await standing.of(Grantee.model_validate_json(asked.model_dump_json()))
    for one in (other, longest):
        assert (await standing.of(one)).user == "oidc:u1"


async def test_what_nobody_asked_for_is_within_what_is_the_tenants(door, issuer):
    standing = Standing(KeyStore(door.revoked._redis, "none"), door.tenants, door.revoked)
    await door.tenants.change("acme", "tenant.update", lambda _: {"models": ("tiny",)})
    who = await standing.of_tenant("acme", "vs_1", "low")
    assert (who.tenant, who.user, who.priority, who.models) == ("acme", "vs_1", "low", {"tiny"})
    assert not who.permissions
    assert (await standing.of_tenant("unheard", "vs_1", "low")).models is None
    await door.tenants.change("acme", "tenant.suspend", lambda _: {"suspended": 1})
    with pytest.raises(Refused, match="suspended"):
        await standing.of_tenant("acme", "vs_1", "low")


async def test_no_token_outlives_its_revocation(redis, namespace, issuer, door):
    brief = Door(redis, namespace, issuer, oidc_longest_s=1000)
    now = int(time.time())
    await brief.lets_in(issuer.signed(exp=now + 1000))
    assert "longer than 1000 seconds" in await brief.refuses(issuer.signed(exp=now + 1020))
    old = issuer.signed(iat=now - 500, exp=now + 600)  # refused before, and no revocation knew it
    assert "longer than 1000 seconds" in await brief.refuses(old)
    assert "no 'iat'" in await brief.refuses(issuer.signed(iat=None)), "nobody knows how old it is"
    record = await brief.revoked.revoke("acme", user="oidc:u1")
    assert record.until >= record.revoked + 1010, "and the skew of both ends"
    await brief.keys.stop()


# ---- hostile ones -------------------------------------------------------------------------------


def hostile(issuer: Issuer) -> Iterator[tuple[str, str]]:
    """Each by its name."""
    head, body, signature = parts(issuer.signed())
    yield "unsigned", f"{b64({**head, 'alg': 'none'})}.{b64(body)}."
    for none in ("none", "None", "NONE", "nOnE", ""):
        yield (
            f"alg {none!r} with a signature",
            f"{b64({**head, 'alg': none})}.{b64(body)}.{signature}",
        )
    pem = issuer.keys[0].as_pem(private=False)
    for secret in (pem, pem.strip(), json.dumps(issuer.keys[0].as_dict(private=False)).encode()):
        signed = f"{b64({**head, 'alg': 'HS256'})}.{b64(body)}"
        mac = hmac.HMAC(secret, hashes.SHA256())
        mac.update(signed.encode())
        yield "the public key as a secret", f"{signed}.{b64(mac.finalize())}"
    own = rsa.generate_private_key(65537, 2048)
    stranger = pyjwt.algorithms.RSAAlgorithm.to_jwk(own.public_key(), as_dict=True)
    for more in (
        {},
        {"jwk": stranger},
        {"jku": f"{issuer.url}/jwks"},
        {"jku": "http://127.0.0.1:1/jwks"},
        {"x5u": "http://127.0.0.1:1/cert"},
        {"x5c": ["MIIB"]},
    ):
        yield (
            f"a stranger's key {list(more)}",
            pyjwt.encode(body, own, "RS256", {"kid": "first", **more}),
        )
    for kid in ("../../../../dev/null", "first' OR '1'='1", "x" * 300, "", 1, None, ["first"], {}):
        changed = f"{b64({**head, 'kid': kid, 'x': 1})}.{b64(body)}.{signature}"
        yield f"kid {kid!r}", changed
    yield "another body", f"{b64(head)}.{b64({**body, 'tenant': 'rival'})}.{signature}"
    yield "no signature", f"{b64(head)}.{b64(body)}."
    yield "half a signature", f"{b64(head)}.{b64(body)}.{signature[:50]}"
    yield "an empty part", f"{b64(head)}..{signature}"
    yield "two parts", f"{b64(head)}.{b64(body)}"
    yield "four parts", f"{b64(head)}.{b64(body)}.{signature}.{signature}"
    yield "a part encrypted", f"{b64({'alg': 'RSA-OAEP', 'enc': 'A256GCM'})}.a.b.c.d"
    yield (
        "critical",
        raw_signed(
            issuer, json.dumps({**head, "crit": ["exp"]}).encode(), json.dumps(body).encode()
        ),
    )
    yield (
        "a part unencoded",
        raw_signed(issuer, json.dumps({**head, "b64": False}).encode(), json.dumps(body).encode()),
    )
    for typ in ("logout+jwt", "dpop+jwt", "secevent+jwt"):
        yield f"typ {typ}", issuer.signed({"typ": typ})
    yield (
        "an odd type",
        raw_signed(
            issuer, json.dumps({**head, "typ": ["at+jwt"]}).encode(), json.dumps(body).encode()
        ),
    )
    for audience in ("penstock-admin", "Penstock", "", [], ["other"], None, "penstock "):
        yield f"aud {audience!r}", issuer.signed(aud=audience)
    for whose in (issuer.url + "/", "http://127.0.0.1", "", None, issuer.url.upper()):
        yield f"iss {whose!r}", issuer.signed(iss=whose)
    for subject in (None, ""):
        yield f"sub {subject!r}", issuer.signed(sub=subject)
    now = int(time.time())
    for exp in (None, now - 3600, 0, -1):
        yield f"exp {exp!r}", issuer.signed(exp=exp)
    yield "without iat", issuer.signed(iat=None)
    top = json.dumps(head).encode()

    def with_body(**claims: Any) -> str:
        return raw_signed(issuer, top, json.dumps({**body, **claims}).encode())

    for exp in (str(now + 600), True, [now + 600], {}, 1e300, 10**400, "x", now + 10**12):
        yield f"exp {str(exp)[:20]!r}", with_body(exp=exp)
    yield (
        "exp without bound",
        raw_signed(issuer, top, json.dumps({**body, "exp": float("inf")}).encode()),
    )
    for claims in ({"iss": [issuer.url]}, {"aud": {"penstock": 1}}, {"aud": 5}, {"sub": 5}):
        yield f"{claims}", with_body(**claims)
    for claims in (
        {"sub": ["u"]},
        {"nbf": "soon"},
        {"iat": "x"},
        {"nbf": [1]},
        {"jti": 5},
        {"iat": str(now)},
        {"iat": None},
        {"iat": True},
        {"iat": 0},
        {"iat": [now]},
    ):
        yield f"{claims}", with_body(**claims)
    twice = json.dumps(body)[:-1] + ', "tenant": "rival"}'
    yield "a claim twice", raw_signed(issuer, top, twice.encode())
    deeper = json.dumps(body)[:-1] + ', "a": {"b": 1, "b": 2}}'
    yield "twice, deeper", raw_signed(issuer, top, deeper.encode())
    double = json.dumps(head)[:-1] + ', "alg": "none"}'
    yield "a header's name twice", raw_signed(issuer, double.encode(), json.dumps(body).encode())
    nested = b"[" * 4000 + b"]" * 4000
    yield "deep header", f"{b64(nested)}.{b64(body)}.{signature}"
    yield "deep body", raw_signed(issuer, top, b'{"a":' + nested + b"}")
    yield "deep, without an end", f"{b64(b'[' * 9000)}.{b64(body)}.{signature}"
    for junk in (b"", b"null", b"[]", b"7", b'"x"', b"{", b"\xff\xfe", b"{}", b'{"alg": 7}'):
        yield f"header {junk!r}", f"{b64(junk) or 'e30'}.{b64(body)}.{signature}"
        yield f"body {junk!r}", raw_signed(issuer, top, junk)
    yield "huge", issuer.signed(padding="x" * 20_000)
    yield "a token in a token", raw_signed(issuer, top, issuer.signed().encode())


async def test_hostile_tokens_are_refused_each_and_none_stops_anything(door, issuer):
    await door.lets_in(issuer.signed())
    seen = {}
    for name, token in hostile(issuer):
        try:
            seen[name] = repr(await door.lets_in(token))
        except PenstockError as refused:
            if refused.reason != "invalid_api_key":
                seen[name] = refused.reason
    assert seen == {}
    assert set(issuer.asked) == {"/.well-known/openid-configuration", "/jwks"}
    await door.lets_in(issuer.signed())


async def test_the_true_form_of_what_was_made_hostile_is_let_in(door, issuer):
    """Else the collection would prove nothing."""
    head, body, _ = parts(issuer.signed())
    await door.lets_in(raw_signed(issuer, json.dumps(head).encode(), json.dumps(body).encode()))
    nested = b'{"a":' + b"[" * 50 + b"]" * 50 + b"," + json.dumps(body).encode()[1:]
    await door.lets_in(raw_signed(issuer, json.dumps(head).encode(), nested))
    await door.lets_in(issuer.signed(aud=["other", AUDIENCE], padding="x" * 1000))
    del head["kid"]
    await door.lets_in(raw_signed(issuer, json.dumps(head).encode(), json.dumps(body).encode()))
    for typ in ("JWT", "application/at+jwt", None):
        own = {name: value for name, value in {**head, "typ": typ}.items() if value}
        await door.lets_in(raw_signed(issuer, json.dumps(own).encode(), json.dumps(body).encode()))


# ---- the issuer's keys --------------------------------------------------------------------------


async def test_a_flood_of_unknown_keys_has_them_looked_for_once(door, issuer):
    await door.lets_in(issuer.signed())
    looks = issuer.asked.count("/jwks")
    head, body, signature = parts(issuer.signed())
    flood = [f"{b64({**head, 'kid': f'k{n}'})}.{b64(body)}.{signature}" for n in range(300)]
    door.keys._began = float("-inf")  # the last look was long ago
    await asyncio.gather(*(door.refuses(token) for token in flood))
    assert issuer.asked.count("/jwks") == looks + 1
    for token in flood[:5]:  # also one after the other
        await door.refuses(token)
    assert issuer.asked.count("/jwks") == looks + 1
    await door.lets_in(issuer.signed())


async def test_while_the_issuer_is_away_known_keys_hold(door, issuer):
    issuer.away = True
    told = await door.refuses(issuer.signed(), "keys_unavailable")
    assert "issuer is away" in told
    issuer.away = False
    door.keys._began = float("-inf")
    token = issuer.signed()
    await door.lets_in(token)
    issuer.away = True
    await door.keys.look()
    assert door.keys.failure
    await door.lets_in(issuer.signed(sub="u2"))
    await door.lets_in(token)
    door.keys._seen -= 90_000  # a day without a word of it
    await door.refuses(issuer.signed(sub="u3"), "keys_unavailable")


async def test_keys_are_renewed_before_they_are_old(door, issuer, monkeypatch):
    monkeypatch.setattr(issuer_keys, "_FRESH_S", (0.01, 3600.0))
    issuer.cache_control = "no-store, max-age=0"
    door.keys.start()
    await until(lambda: issuer.asked.count("/jwks") >= 3, 10, "they are asked for again")
    await door.keys.stop()
    issuer.cache_control = "public,max-age=1200"
    await door.keys.look()
    assert door.keys._fresh_s == 1200


@pytest.mark.parametrize(
    "odd",
    [
        {"keys": "x"},
        {"keys": []},
        {"keys": [{"kty": "oct", "kid": "first", "k": "c2VjcmV0"}]},
        {"keys": [None, 7, {}, {"kty": "RSA"}, {"kty": ["RSA"]}, {"kty": "EC", "crv": "P-256"}]},
        {"keys": [{"kty": "RSA", "kid": "first", "n": "AQAB", "e": "AQAB"}]},
        {"keys": [{"kty": "RSA", "kid": "first"}] * 101},
    ],
    ids=["no list", "none", "a secret", "odd ones", "a short one", "too many"],
)
async def test_odd_keys_are_no_keys(door, issuer, odd):
    issuer.jwks = odd
    await door.refuses(issuer.signed(), "keys_unavailable")


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_a_key_that_is_too_short_is_none(door, issuer):
    short = rsa.generate_private_key(65537, 1024)
    shown = pyjwt.algorithms.RSAAlgorithm.to_jwk(short.public_key(), as_dict=True)
    good = KeySet(issuer.keys).as_dict(private=False)["keys"]
    issuer.jwks = {"keys": [{**shown, "kid": "short"}, *good]}
    _, body, _ = parts(issuer.signed())
    await door.refuses(pyjwt.encode(body, short, "RS256", {"kid": "short"}))
    await door.lets_in(issuer.signed())


async def test_an_odd_key_beside_a_good_one_harms_nobody(door, issuer):
    good = KeySet(issuer.keys).as_dict(private=False)["keys"]
    odd = [None, 7, {"kty": ["RSA"], "kid": []}, {"kty": "EC", "crv": "P-256", "x": 1, "y": {}}]
    issuer.jwks = {"keys": [*odd, *good, {**good[0], "kid": 7}, {**good[0], "n": "!"}]}
    await door.lets_in(issuer.signed())


async def test_an_issuer_that_shows_its_private_key_is_not_believed(door, issuer):
    issuer.jwks = KeySet(issuer.keys).as_dict(private=True)
    await door.refuses(issuer.signed(), "keys_unavailable")


async def test_who_calls_himself_otherwise_is_not_the_issuer(redis, namespace, issuer):
    other = Door(redis, namespace, issuer, oidc_issuer=issuer.url + "/")
    await other.refuses(issuer.signed(iss=issuer.url + "/"), "keys_unavailable")
    assert "calls itself" in other.keys.failure
    pinned = Door(
        redis,
        namespace,
        issuer,
        oidc_issuer="https://id.example",
        oidc_jwks_url=f"{issuer.url}/jwks",
    )
    await pinned.tenants.add("acme")
    await pinned.lets_in(issuer.signed(iss="https://id.example"))
    await pinned.refuses(issuer.signed())
    for one in (other, pinned):
        await one.keys.stop()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"oidc_issuer": "http://id.example", "oidc_audience": "a"}, "no https://"),
        ({"oidc_issuer": "id.example", "oidc_audience": "a"}, "no https://"),
        ({"oidc_issuer": "https://u:p@id.example", "oidc_audience": "a"}, "no https://"),
        ({"oidc_issuer": "https://id.example"}, "needs oidc_audience"),
        (
            {
                "oidc_issuer": "https://id.example",
                "oidc_audience": "a",
                "oidc_jwks_url": "file:///k",
            },
            "no https://",
        ),
        (
            {
                "oidc_issuer": "https://id.example",
                "oidc_audience": "a",
                "oidc_admin_audience": "a",
            },
            "must differ",
        ),
        ({"oidc_algorithms": ["HS256"]}, "oidc_algorithms"),
        ({"oidc_algorithms": ["none"]}, "oidc_algorithms"),
        ({"oidc_algorithms": []}, "oidc_algorithms"),
        ({"oidc_roles": {"x": "root"}}, "oidc_roles"),
        ({"admin_port": 1, "admin_host": "0.0.0.0"}, "needs admin_tls_cert"),
        ({"admin_tls_cert": "x.pem"}, "one needs the other"),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        IdentitySettings(**settings)
