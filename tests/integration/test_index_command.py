"""`penstock index` against a gateway: what the API says of files is what the command reads."""

import asyncio
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from services.common.embedded_redis import EmbeddedRedis
from tests.support.gateway_rig import Rig, gateway_rig


async def index(folder: Path, rig: Rig, key: str, *options: str) -> tuple[int, Any]:
    """Its exit code, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "index", str(folder), "--store", "guides"),
        *("--url", rig.url, "--key", key, "--json", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PENSTOCK_DATA_DIR": str(folder / ".none")},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out, err.decode()
    assert process.returncode is not None
    return process.returncode, json.loads(out)


async def test_a_folder_in_a_real_store(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "tea.md").write_text("water for tea")
    (tmp_path / "deep" / "soup.txt").write_text("water for soup")
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as rig:
        key, _ = await rig.keys.create(f"tenant-{uuid.uuid4().hex[:8]}")
        http = await rig.http(key)

        async def searched() -> dict[str, str]:
            body = {"query": "water", "max_num_results": 10}
            answer = await http.post(f"/v1/vector_stores/{store}/search", json=body)
            return {one["filename"]: one["content"][0]["text"] for one in answer.json()["data"]}

        status, told = await index(tmp_path, rig, key)
        store = told["store"]
        assert (status, told["added"]) == (0, ["deep/soup.txt", "tea.md"])
        both = {"tea.md": "water for tea", "deep/soup.txt": "water for soup"}
        assert await searched() == both

        (tmp_path / "tea.md").write_text("water for two")
        (tmp_path / "deep" / "soup.txt").unlink()
        status, told = await index(tmp_path, rig, key)
        assert (status, told["store"]) == (0, store)
        assert (told["changed"], told["gone"]) == (["tea.md"], ["deep/soup.txt"])
        assert await searched() == both | {"tea.md": "water for two"}

        status, told = await index(tmp_path, rig, key, "--prune")
        assert (told["unchanged"], told["removed"]) == (["tea.md"], ["deep/soup.txt"])
        assert await searched() == {"tea.md": "water for two"}
        listed = (await http.get("/v1/files")).json()["data"]
        assert [one["filename"] for one in listed] == ["tea.md"], "earlier versions are gone"

        (tmp_path / "torn.md").write_bytes(b"\xff\xfe\x00broken\x00")
        status, told = await index(tmp_path, rig, key)
        assert status == 1
        assert list(told["failed"]) == ["torn.md"]
        assert told["failed"]["torn.md"]


@pytest.mark.parametrize("key", ["", "pk-nobody"])
async def test_a_key_that_is_none_is_told(
    redis_server: EmbeddedRedis, tmp_path: Path, key: str
) -> None:
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as rig:
        with pytest.raises(AssertionError, match="401"):
            await index(tmp_path, rig, key)
