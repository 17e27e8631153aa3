"""Whether a gateway serves, as its clients see it. What asks it is imported while it starts."""

import ssl
from pathlib import Path

_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_PEM_END = "-----END CERTIFICATE-----"


def not_ready(url: str) -> list[str]:
    import httpx

    try:
        # Whatever its certificate is: only whether it answers is asked. No proxy is asked instead.
        answer = httpx.get(f"{url}/readyz", timeout=2.0, verify=False, trust_env=False)
    except httpx.HTTPError:
        return ["the gateway's port"]
    return [] if answer.status_code == 200 else ["the gateway's links"]


def not_served(url: str, key: str, models: list[str], cert: Path | None) -> list[str]:
    """`cert` is the door's own. The key goes to nobody else: where another answers (a node of a
    cluster may have one of its own), the models are not asked for."""
    import httpx

    try:
        verify = True if cert is None else _trusting(cert)
    except OSError:  # what is wrong with it, the gateway says
        return []
    headers = {"Authorization": f"Bearer {key}"}
    found = []
    with httpx.Client(headers=headers, timeout=10.0, verify=verify, trust_env=False) as http:
        for name in models:
            try:
                answer = http.get(f"{url}/v1/models/{name}")
            except httpx.HTTPError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    return []
                return ["the gateway's port"]
            if answer.status_code != 200:
                found.append(f"model {name}")
    return found


def _trusting(cert: Path) -> ssl.SSLContext:
    """Exactly the first certificate of the file, by whatever name or address it is reached; not who
    else its authority, which may be in the file as well, has issued for. Raises OSError."""
    own, end, _ = cert.read_bytes().decode("ascii", "replace").partition(_PEM_END)
    context = ssl.create_default_context(cadata=own[max(own.find(_PEM_BEGIN), 0) :] + end)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
