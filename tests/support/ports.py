"""A tenant's vector store about a port, by OpenAI's own client."""

from typing import Any

import openai
import pytest

from tests.support.gateway_rig import Rig

QUESTION = "When does the harbour open?"


class Port:
    """A tenant's files about a port, in a store."""

    def __init__(self, rig: Rig, client: openai.AsyncOpenAI, store: str) -> None:
        self.rig = rig
        self.client = client
        self.stores: Any = client.vector_stores
        self.id = store

    @classmethod
    async def of(cls, rig: Rig, key: str | None = None, **about: Any) -> "Port":
        client = await rig.openai(key)
        return cls(rig, client, (await client.vector_stores.create(name="s", **about)).id)

    async def file(self, name: str, text: str = "The harbour opens.") -> str:
        content = (name, text.encode())
        return (await self.client.files.create(file=content, purpose="assistants")).id

    async def add(self, name: str, **about: Any) -> str:
        file = await self.file(name)
        await self.stores.files.create_and_poll(file, vector_store_id=self.id, **about)
        return file

    async def found(self, query: Any = QUESTION, **about: Any) -> list[str]:
        page = await self.stores.search(self.id, query=query, **about)
        return sorted(one.filename for one in page.data)

    async def age(self, seconds: int) -> None:
        """Nobody has used the store for so long."""
        facts = f"{self.rig.settings.namespace}:{{acme}}:store:{self.id}:facts"
        await self.rig.redis.hincrby(facts, "active", -seconds)


async def refusal(call: Any) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.param, refused.value.code  # type: ignore[attr-defined]
