"""Who shows a token of the OIDC issuer (a JWT, RFC 7519; what is refused follows RFC 8725)."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import jwt

from services.common.config import IdentitySettings
from services.gateway.identity.issuer_keys import IssuerKeys
from services.gateway.identity.principal import Principal, Refused, Role, administrator, granted
from services.gateway.identity.revoked_tokens import TokenRevocations
from services.gateway.identity.tenants import TENANT_NAME, TenantStore

_MAX_BYTES = 16 * 1024
_MAX_LIST = 200  # of roles or models
_MAX_NAME = 256
_FORM = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", re.ASCII)
_TYPES = ("jwt", "at+jwt", "application/at+jwt")
_SAFE_SUBJECT = re.compile(r"[A-Za-z0-9_.@|+-]{1,128}", re.ASCII)
_NEEDED = ["exp", "iss", "aud", "sub", "iat"]
_WRONG = "Incorrect token provided."


class Tokens:
    """Tells true tokens from others, and what they claim."""

    def __init__(
        self,
        settings: IdentitySettings,
        audience: str,
        keys: IssuerKeys,
        revoked: TokenRevocations,
    ) -> None:
        self._settings = settings
        self._audience = audience
        self._keys = keys
        self._revoked = revoked

    def takes(self, shown: str) -> bool:
        return len(shown) <= _MAX_BYTES and _FORM.fullmatch(shown) is not None

    async def claims(self, shown: str) -> dict[str, Any]:
        """Of one that has not expired, is for us and of our issuer. Raises Refused, IssuerAway."""
        own = self._settings
        header = _object(shown.partition(".")[0])
        algorithm, id = header.get("alg"), header.get("kid")
        if algorithm not in own.oidc_algorithms or "crit" in header:
            raise Refused("wrong", _WRONG)
        if id is not None and not (isinstance(id, str) and len(id) <= _MAX_NAME):
            raise Refused("wrong", _WRONG)
        if str(header.get("typ", "jwt")).lower() not in _TYPES:
            raise Refused("wrong", "This is no token for access.")
        key = await self._keys.find(id, str(algorithm))
        if key is None:
            raise Refused("wrong", _WRONG)
        try:
            jwt.decode(
                shown,
                key,
                algorithms=[str(algorithm)],
                audience=self._audience,
                issuer=own.oidc_issuer,
                leeway=own.oidc_skew_s,
                options={"require": _NEEDED},
            )
        except jwt.ExpiredSignatureError:
            raise Refused("expired", "This token has expired.") from None
        except jwt.InvalidAudienceError:
            raise Refused("audience", "This token is for something else.") from None
        except jwt.MissingRequiredClaimError as missing:
            raise Refused("claim_missing", f"This token has no '{missing.claim}'.") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise Refused("wrong", _WRONG) from None
        claims = _object(shown.split(".")[1])
        if not (_is_time(claims["exp"]) and _is_time(claims["iat"]) and claims["sub"]):
            raise Refused("wrong", _WRONG)
        # From when it was issued: what is left of a longer one may outlive its revocation.
        if claims["exp"] > claims["iat"] + own.oidc_longest_s:
            told = f"This token holds for longer than {own.oidc_longest_s:.0f} seconds."
            raise Refused("too_long", told)
        return claims

    async def check_revoked(self, tenant: str | None, claims: dict[str, Any]) -> None:
        """Raises Refused where it is."""
        if await self._revoked.hold(tenant, user_of(claims), claims):
            raise Refused("revoked", "This token was revoked.")

    def roles(self, claims: dict[str, Any]) -> frozenset[Role]:
        """Those that are ours; whatever else is claimed grants nothing."""
        claimed = _names(_claim(claims, self._settings.oidc_roles_claim))
        ours = self._settings.oidc_roles
        return frozenset(Role(ours[name]) for name in claimed if name in ours)

    def expires(self, claims: dict[str, Any]) -> float:
        return float(claims["exp"]) + self._settings.oidc_skew_s


class TokenVerifier(Tokens):
    """Of tenants' users."""

    def __init__(
        self,
        settings: IdentitySettings,
        keys: IssuerKeys,
        revoked: TokenRevocations,
        tenants: TenantStore,
    ) -> None:
        super().__init__(settings, settings.oidc_audience, keys, revoked)
        self._tenants = tenants

    async def verify(self, shown: str) -> Principal:
        claims = await self.claims(shown)
        own = self._settings
        name = _claim(claims, own.oidc_tenant_claim)
        known = isinstance(name, str) and TENANT_NAME.fullmatch(name)
        tenant = await self._tenants.find(name) if known else None
        if tenant is None:
            raise Refused("tenant", "This token's tenant is not known here.")
        await self.check_revoked(tenant.name, claims)
        models = None
        if own.oidc_models_claim:  # without it in the token: none
            models = _names(_claim(claims, own.oidc_models_claim))
        who = granted(
            tenant,
            user_of(claims),
            roles=self.roles(claims),
            models=models,
            expires=self.expires(claims),
        )
        return replace(who, token=token_of(claims))


class AdminTokenVerifier(Tokens):
    """Of administrators: tokens that are for the admin listener."""

    def __init__(
        self, settings: IdentitySettings, keys: IssuerKeys, revoked: TokenRevocations
    ) -> None:
        super().__init__(settings, settings.oidc_admin_audience, keys, revoked)

    async def verify(self, shown: str) -> Principal:
        claims = await self.claims(shown)
        await self.check_revoked(None, claims)
        return administrator(
            user_of(claims), roles=self.roles(claims), expires=self.expires(claims)
        )


def token_of(claims: dict[str, Any]) -> str | None:
    """By which it may be revoked. A longer one cannot be, and is not worth the memory."""
    id = claims.get("jti")
    return id if isinstance(id, str) and 0 < len(id) <= _MAX_NAME else None


def user_of(claims: dict[str, Any]) -> str:
    """Fit for a Redis key; one's subject is not another's."""
    subject = claims["sub"]
    if _SAFE_SUBJECT.fullmatch(subject):
        return f"oidc:{subject}"
    return f"oidc:#{hashlib.sha256(subject.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _claim(claims: dict[str, Any], name: str) -> Any:
    """The one of this name; where there is none and it has dots, what they lead to."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        if not isinstance(found, dict):
            return None
        found = found.get(part)
    return found


def _names(claimed: Any) -> list[str]:
    """A list of names, or one; of what has another form none."""
    listed = [claimed] if isinstance(claimed, str) else claimed
    if not isinstance(listed, list) or len(listed) > _MAX_LIST:
        return []
    return [one for one in listed if isinstance(one, str) and len(one) <= _MAX_NAME]


def _object(part: str) -> dict[str, Any]:
    """A token's part. Raises Refused: also where a name is there twice, as readers differ in which
    of them counts."""
    try:
        found = json.loads(
            base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)),
            object_pairs_hook=_once,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError):
        raise Refused("wrong", _WRONG) from None
    if not isinstance(found, dict):
        raise Refused("wrong", _WRONG)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _is_time(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < 1e11
