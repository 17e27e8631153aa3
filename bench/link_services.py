"""The real router, tokenizer and gateway around the fake worker of bench/link_hops.py.

They run as `python -m services.<name>`, with a Redis of their own. The checkpoint is a tokenizer
made on the spot: no weights are needed, the worker makes up its tokens.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.link_hops import TEXT, key_to_ids
from services.common.checkpoint import digest, text_digest
from services.common.children import dying_with_parent
from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import connect
from services.common.served_models import Checkpoint, entry
from services.gateway.identity.keys import KeyStore

MODEL = "bench"
NAMESPACE = "bench-links"
SERVICES = ("router", "tokenizer", "gateway")
START_TIMEOUT_S = 180.0


def make_checkpoint(folder: Path) -> int:
    """Writes what a tokenizer needs of a checkpoint; gives the id of the token that says `TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f"salt{TEXT} pepper{TEXT} oil"] * 10, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": 8192, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    [token_id] = tokenizer.encode(TEXT).ids
    return token_id


@contextmanager
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Settings of all services as environment variables, with a Redis that lives as long."""
    with EmbeddedRedis() as redis:
        asyncio.run(_list_model(redis.url, folder))
        yield {
            **os.environ,
            "PENSTOCK_REDIS_URL": redis.url,
            "PENSTOCK_NAMESPACE": NAMESPACE,
            "PENSTOCK_MODELS": json.dumps([{"name": MODEL, "path": str(folder)}]),
            "PENSTOCK_GATEWAY__PORT": "0",
            "PENSTOCK_LOG_LEVEL": "WARNING",
            "PENSTOCK_DRAIN_GRACE_S": "0",
        }


def start(stack: ExitStack, variables: dict[str, str]) -> dict[str, Replica]:
    """Starts the three services and waits until they are registered."""
    for service in SERVICES:
        command = [*dying_with_parent(), sys.executable, "-m", f"services.{service}"]
        process = stack.enter_context(subprocess.Popen(command, env=variables))
        stack.callback(process.terminate)
    return asyncio.run(_registered(_settings(variables)))


def make_key(variables: dict[str, str]) -> str:
    return asyncio.run(_make_key(_settings(variables)))


def fields() -> dict[str, Any]:
    """What a request's body has beside the prompt and its length."""
    return {"model": MODEL, "ignore_eos": True}


def wait_until_answering(url: str, key: str) -> None:
    """Asks for one token until it comes; raises RuntimeError with the last answer."""
    body = {"prompt": key_to_ids(0), "max_tokens": 1, **fields()}
    deadline = time.monotonic() + START_TIMEOUT_S
    said = ""
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(
                f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
        except httpx.HTTPError as error:
            said = repr(error)
        else:
            if answer.status_code == 200:
                return
            said = answer.text
        time.sleep(0.2)
    raise RuntimeError(f"the services do not answer: {said}")


async def _list_model(redis_url: str, folder: Path) -> None:
    """As a worker would: the one of the measurement knows nothing of models."""
    redis = connect(redis_url)
    listed = Checkpoint(MODEL, digest(folder), text_digest(folder), str(folder))
    await entry(redis, Settings(namespace=NAMESPACE), listed).start()
    await redis.aclose()


def _settings(variables: dict[str, str]) -> Settings:
    return Settings(redis_url=variables["PENSTOCK_REDIS_URL"], namespace=NAMESPACE)


async def _registered(settings: Settings) -> dict[str, Replica]:
    redis = connect(settings.redis_dsn)
    found: dict[str, Replica] = {}
    async with asyncio.timeout(START_TIMEOUT_S):
        for service in SERVICES:
            view = Directory(redis, settings.namespace, service, settings.lease_s)
            while not view.replicas:
                await view.refresh()
                await asyncio.sleep(0.1)
            [found[service]] = view.replicas.values()
    await redis.aclose()
    return found


async def _make_key(settings: Settings) -> str:
    redis = connect(settings.redis_dsn)
    key, _ = await KeyStore(redis, settings.namespace).create("bench")
    await redis.aclose()
    return key
