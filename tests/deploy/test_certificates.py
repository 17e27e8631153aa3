"""Certificates: of the names that the services check, from the issuer that was asked for."""

import base64
import re
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID
from helm_python import HelmError

from services.common.locks.certificates import dns_name
from tests.deploy.manifests import Release, Thing, notes, render
from tests.deploy.validation import errors

IDENTITIES = ("gateway", "retrieval", "tokenizer", "router", "worker", "cli")


def managed(**more: Any) -> Release:
    """With cert-manager, and TLS at the door."""
    door = {"enabled": True, "dnsNames": ["llm.example.com"], **more.pop("door", {})}
    return render(
        None,
        {"certificates": {"certManager": {"enabled": True, **more}, "door": door}},
    )


def certificates(release: Release) -> dict[str, Thing]:
    """Specs by the Secret that they fill."""
    return {c["spec"]["secretName"]: c["spec"] for c in release.of("Certificate")}


def test_each_identity_has_its_own_name() -> None:
    made = certificates(managed())
    for identity in IDENTITIES:
        spec = made[f"demo-penstock-tls-{identity}"]
        assert spec["dnsNames"] == [dns_name(identity)]
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert spec["privateKey"]["rotationPolicy"] == "Always"


def test_what_is_reached_by_a_service_is_called_by_its_name() -> None:
    release = managed()
    for store in ("redis", "qdrant"):
        spec = certificates(release)[f"demo-penstock-tls-{store}"]
        host = f"demo-penstock-{store}.llm.svc"
        assert host in spec["dnsNames"]
        assert "client auth" not in spec["usages"]
        [services] = release.pods_of("services")
        told = str(services.spec["containers"][0]["env"])
        assert host in told
    assert "demo-penstock" in certificates(release)["demo-penstock-tls-door"]["dnsNames"]


def test_they_are_renewed_in_time() -> None:
    for spec in certificates(managed()).values():
        if not spec.get("isCA"):
            assert _hours(spec["renewBefore"]) * 3 >= _hours(spec["duration"])


def test_an_authority_of_the_releases_own_unless_one_is_given() -> None:
    own = managed()
    assert {i["metadata"]["name"] for i in own.of("Issuer")} == {
        "demo-penstock-self-signed",
        "demo-penstock-ca",
    }
    for name, spec in certificates(own).items():
        wanted = "self-signed" if name == "demo-penstock-ca" else "ca"
        assert spec["issuerRef"]["name"] == f"demo-penstock-{wanted}"
    given = managed(issuerRef={"name": "corporate", "kind": "ClusterIssuer"})
    assert given.of("Issuer") == []
    for spec in certificates(given).values():
        assert spec["issuerRef"]["name"] == "corporate"
        assert spec["issuerRef"]["kind"] == "ClusterIssuer"


def test_a_public_authority_signs_the_doors_public_names_alone() -> None:
    public = {"name": "letsencrypt", "kind": "ClusterIssuer"}
    made = certificates(managed(door={"issuerRef": public}))
    door = made.pop("demo-penstock-tls-door")
    assert door["dnsNames"] == ["llm.example.com"]
    assert door["issuerRef"]["name"] == "letsencrypt"
    assert all(spec["issuerRef"]["name"] != "letsencrypt" for spec in made.values())


def test_without_cert_manager_helm_makes_the_same() -> None:
    """By the same names, and really signed for them."""
    generated, asked = render(), certificates(managed(door={"enabled": False}))
    made = {secret["metadata"]["name"]: secret["data"] for secret in generated.of("Secret")}
    for name, spec in asked.items():
        assert name in made
        if spec.get("isCA"):
            continue
        leaf = _certificate(made[name]["tls.crt"])
        names = leaf.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
        assert set(names.get_values_for_type(x509.DNSName)) == set(spec["dnsNames"])
        leaf.verify_directly_issued_by(_certificate(made[name]["ca.crt"]))


@pytest.mark.parametrize(
    ("certificates", "named"),
    [
        ({"enabled": False, "door": {"enabled": True}}, "certificates.door.enabled"),
        ({"door": {"enabled": True, "issuerRef": {"name": "x"}}}, "certificates.door.issuerRef"),
        (
            {
                "certManager": {"enabled": True},
                "door": {"enabled": True, "issuerRef": {"name": "x"}},
            },
            "certificates.door.dnsNames",
        ),
        (
            {"certManager": {"enabled": True, "duration": "1h30m", "renewBefore": "91m"}},
            "certificates.certManager.renewBefore",
        ),
        (
            {"certManager": {"enabled": True, "authorityDuration": "2160h"}},
            "certificates.certManager.authorityDuration",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(certificates: Thing, named: str) -> None:
    with pytest.raises(HelmError, match=re.escape(named)):
        render(None, {"certificates": certificates})


def test_rays_own_traffic_is_encrypted_where_it_is_asked_for() -> None:
    """By KubeRay and cert-manager, as certificates for this must name the addresses of pods."""
    assert "tlsOptions" not in render().ray["rayClusterConfig"]
    told = render(None, {"ray": {"tls": True}})
    assert told.ray["rayClusterConfig"]["tlsOptions"] == {"enabled": True}
    assert errors(told.one("RayService")) == []


@pytest.mark.parametrize(
    "door",
    [
        {"enabled": True},
        {"enabled": True, "dnsNames": ["llm.example.com"]},
        {
            "enabled": True,
            "issuerRef": {"name": "letsencrypt", "kind": "ClusterIssuer"},
            "dnsNames": ["llm.example.com"],
        },
    ],
)
def test_the_first_request_after_an_install_is_one_that_works(door: Thing) -> None:
    """By a name in the door's certificate, after what is needed to check that was fetched."""
    values = {"certificates": {"certManager": {"enabled": True}, "door": door}}
    said = notes(values)
    spec = certificates(render(None, values))["demo-penstock-tls-door"]
    [name] = re.findall(r"https://([^:/]+):8000/v1/chat/completions", said)
    assert name in spec["dnsNames"]
    assert f"--resolve {name}:8000:127.0.0.1" in said
    public = spec["issuerRef"]["name"] == "letsencrypt"
    assert ("--cacert ca.crt" in said) is not public
    if not public:
        assert said.index("> ca.crt") < said.index("--cacert ca.crt")
        assert f"get secret {spec['secretName']} " in said


@pytest.mark.parametrize(
    ("names", "asked"), [(["llm.example.com"], "llm.example.com"), ([], "DOOR-NAME")]
)
def test_a_certificate_of_yours_is_asked_by_its_own_name(names: list[str], asked: str) -> None:
    door = {"existingSecret": "public", "dnsNames": names}
    said = notes({"certificates": {"door": door}})
    assert f"--resolve {asked}:8000:127.0.0.1 https://{asked}:8000/" in said
    assert ("a name in the certificate of Secret public" in said) is (not names)


def test_without_tls_at_the_door_the_first_request_is_in_the_clear() -> None:
    said = notes({})
    assert "curl http://localhost:8000/v1/chat/completions" in said
    assert "ca.crt" not in said


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, {"what Ray's own processes say", "The door has no TLS"}),
        ({"ray": {"tls": True}}, {"The door has no TLS"}),
        (
            {"certificates": {"enabled": False}},
            {
                "what Ray's own processes say",
                "certificates.enabled is false",
                "The door has no TLS",
            },
        ),
        ({"ray": {"tls": True}, "certificates": {"door": {"enabled": True}}}, set()),
    ],
)
def test_what_travels_in_the_clear_is_said_after_the_install(values: Thing, told: set[str]) -> None:
    said = notes(values)
    every = {"what Ray's own processes say", "certificates.enabled is false", "The door has no TLS"}
    assert {line for line in every if line in said} == told


def _hours(duration: str) -> int:
    return int(duration.removesuffix("h"))


def _certificate(encoded: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(encoded))
