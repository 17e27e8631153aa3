"""Files that were to last so long and no longer: out of the stores that hold them, and gone
(decision 0060). One gateway at a time looks for them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protos.common_pb2 import Caller
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway
from services.gateway.stores.files.files import Files
from services.gateway.stores.lookout import Lookout

log = logging.getLogger(__name__)

_EVERY_S = 10
_AGAIN_S = 60.0  # one that a batch reads, or whose removal failed
_AT_ONCE = 16

Delete = Callable[[Caller, str], Awaitable[None]]


class FileExpiry(Lookout):
    def __init__(self, redis: Redis, namespace: str, files: Files, delete: Delete) -> None:
        """`delete`: as a client would. What it has begun and not ended is begun again."""
        turn = f"{namespace}:{{files}}:expiring:turn"
        super().__init__(redis, turn, _EVERY_S, self.look, "files that expired")
        self._files = files
        self._delete = delete

    async def look(self) -> None:
        """Each goes, or is put off, so that none stands in the way of others."""
        while some := await self._files.expired(_AT_ONCE):
            ends = (self._end(tenant, id) for tenant, id in some)
            for outcome in await asyncio.gather(*ends, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _end(self, tenant: str, id: str) -> None:
        try:
            return await self._delete(Caller(tenant=tenant), id)
        except RedisAway:
            raise
        except PenstockError as error:  # a batch reads it, retrieval is away, a client was faster
            log.info("a file that expired was not deleted: %s: %s", id, error.message)
        except Exception:
            log.exception("deleting a file that expired failed: %s", id)
        await self._files.put_off(tenant, id, _AGAIN_S)
