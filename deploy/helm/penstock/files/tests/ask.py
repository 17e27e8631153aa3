"""What `helm test` runs in the cluster: one chat, over REST or gRPC, with a key that lives as long.

    python ask.py rest https://demo-penstock:8000 --authority ca.crt --server-name llm.example.com
    python ask.py grpc demo-penstock:8001

Waits for the gateway to be ready first: after an install, models load for some minutes.
"""

import argparse
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx

from protos import gateway_pb2, gateway_pb2_grpc

QUESTION = "Say hello in one word."
EVERY_S = 3.0
ASKS_S = 300  # at most, once it is ready: the pod has no longer
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def main() -> int:
    arguments = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and revoke the key
    deadline = time.monotonic() + arguments.wait
    with api_key(arguments.wait) as key:
        ask = over_rest if arguments.way == "rest" else over_grpc
        model, text, tokens = ask(arguments, key, deadline)
    if not tokens:
        print(f"{model} ended without a token", file=sys.stderr)
        return 1
    print(f"{arguments.way}: {model} answered {text!r}, {tokens} tokens")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("rest", "grpc"))
    parser.add_argument("address", help="URL of the REST API, or host:port of the gRPC one")
    parser.add_argument("--authority", type=Path, help="CA file; absent: the system's authorities")
    parser.add_argument("--server-name", help="in the door's certificate, if not the address' own")
    parser.add_argument("--tls", action="store_true", help="of the gRPC door")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds, until it is ready")
    return parser.parse_args(words)


@contextmanager
def api_key(wait_s: float) -> Iterator[str]:
    """A key of a tenant of its own, revoked afterwards; and if this is killed, it expires.

    While it is made or revoked a SIGTERM waits.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    create = ["penstock", "keys", "create", "--tenant", "helm-test", "--name", "helm test"]
    made = subprocess.run(
        [*create, f"--expires={int(wait_s) + ASKS_S}s"],
        check=True,
        capture_output=True,
        text=True,
    )
    told = made.stderr.splitlines()
    identifier = next(line for line in told if line.startswith("key_")).split(",")[0]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield made.stdout.strip()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        subprocess.run(["penstock", "keys", "revoke", identifier], check=True)


def over_rest(arguments: argparse.Namespace, key: str, deadline: float) -> tuple[str, str, int]:
    """A streamed chat: the model, its text, the tokens that its usage tells."""
    authority = arguments.authority if is_there(arguments.authority) else None
    trusted = ssl.create_default_context(cafile=authority)
    named = {"sni_hostname": arguments.server_name} if arguments.server_name else {}
    with httpx.Client(
        base_url=arguments.address,
        headers={"Authorization": f"Bearer {key}"},
        verify=trusted,
        timeout=httpx.Timeout(10.0, read=120.0),
    ) as client:
        wait_ready(client, named, deadline)
        listed = client.get("/v1/models", extensions=named)
        model = listed.raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 16,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, tokens = "", 0
        with client.stream("POST", "/v1/chat/completions", json=body, extensions=named) as answer:
            if not answer.is_success:
                raise SystemExit(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise SystemExit(chunk["error"]["message"])
                text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return model, text, tokens


def wait_ready(client: httpx.Client, named: dict[str, str], deadline: float) -> None:
    while True:
        try:
            answer = client.get("/readyz", extensions=named)
            told = f"{answer.status_code} {answer.text}"
            if answer.is_success:
                return
        except httpx.TransportError as error:
            told = str(error)
        if time.monotonic() + EVERY_S > deadline:
            raise SystemExit(f"not ready in time: {told}")
        time.sleep(EVERY_S)


def over_grpc(arguments: argparse.Namespace, key: str, deadline: float) -> tuple[str, str, int]:
    """The same as an event stream of Inference/Chat."""
    with channel_of(arguments) as channel:
        api = gateway_pb2_grpc.InferenceStub(channel)
        metadata = [("authorization", f"Bearer {key}")]
        model = first_model(api, metadata, deadline)
        request = gateway_pb2.ChatRequest(
            model=model,
            messages=[{"role": "user", "content": [{"text": QUESTION}]}],
            sampling=gateway_pb2.SamplingOptions(max_tokens=16),
        )
        text, tokens = "", 0
        for event in api.Chat(request, metadata=metadata, timeout=120):
            text += event.text
            tokens = event.usage.completion_tokens or tokens
    return model, text, tokens


def channel_of(arguments: argparse.Namespace) -> grpc.Channel:
    if not arguments.tls:
        return grpc.insecure_channel(arguments.address)
    authority = arguments.authority
    trusted = authority.read_bytes() if is_there(authority) else None
    name = arguments.server_name
    options = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.secure_channel(arguments.address, grpc.ssl_channel_credentials(trusted), options)


def first_model(
    api: gateway_pb2_grpc.InferenceStub, metadata: list[tuple[str, str]], deadline: float
) -> str:
    while True:
        try:
            listed = api.ListModels(
                gateway_pb2.PublicListModelsRequest(), metadata=metadata, timeout=10
            )
            if listed.models:
                return str(listed.models[0].name)
            told = "no model is served"
        except grpc.RpcError as error:
            if error.code() not in RETRIED:
                raise
            told = error.details()
        if time.monotonic() + EVERY_S > deadline:
            raise SystemExit(f"not ready in time: {told}")
        time.sleep(EVERY_S)


def is_there(authority: Path | None) -> bool:
    return authority is not None and authority.exists() and authority.stat().st_size > 0


if __name__ == "__main__":
    sys.exit(main())
