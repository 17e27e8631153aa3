"""All services over mutual TLS, and their authority replaced while they answer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.common.config import ModelSpec
from services.common.discovery import SERVICES
from services.common.locks.certificates import dns_name
from tests.support.authority import Authority
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster
from tests.support.streams import Stream, complete, lasting

STREAMS = 6
WINDOW, LASTS_S = 16_384, 3.0  # a stream is under way while the certificates change
# Long enough to be computed by the prefill worker, whose blocks go to the decode worker by gRPC.
PROMPTS = ["the water " * 60 + f"{n} " for n in range(STREAMS)]


def asked(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


@pytest.mark.asyncio(loop_scope="session")
async def test_the_authority_is_replaced_under_load_and_no_stream_fails(
    tmp_path: Path,
) -> None:
    old, new = Authority(), Authority("the next authority")
    folder = old.identities(tmp_path / "tls", *SERVICES)
    own = {
        "PENSTOCK_ROUTER__SPLIT": "always",
        "PENSTOCK_TLS_DIR": str(folder),
        "PENSTOCK_WORKER__TRANSFER": "grpc",
    }
    checkpoint = write_checkpoint(tmp_path / "tiny", window=WINDOW)
    models = [ModelSpec(name="tiny", path=str(checkpoint))]
    async with Cluster(tmp_path, models, environment=own) as cluster:
        await cluster.start(workers=["prefill", "decode"])
        async with cluster.api() as api:
            tokens = await lasting(api, asked(PROMPTS[0], 500), LASTS_S, 1000, WINDOW - 1000)
            undisturbed = await asyncio.gather(*(complete(api, asked(p, tokens)) for p in PROMPTS))
            streams = [Stream(api, asked(prompt, tokens)) for prompt in PROMPTS]
            await asyncio.gather(*(stream.reached(2) for stream in streams))
            steps = ((old, old.pem + new.pem), (new, old.pem + new.pem), (new, new.pem))
            for signer, trusted in steps:
                for service in SERVICES:
                    signer.issue(folder / service, dns_name(service), authorities=trusted)
                # Who is started now shows what lies there now to all that are running.
                await cluster.up(late := cluster.spawn("worker", WORKER__ROLE="decode"))
                again = await asyncio.gather(*(complete(api, asked(p, 20)) for p in PROMPTS))
                assert all(u.startswith(a) for u, a in zip(undisturbed, again, strict=True))
                late.kill()
            assert await asyncio.gather(*(s.finished() for s in streams)) == undisturbed
