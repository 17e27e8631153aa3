"""Ids are told from other text by their shape, before anything is made of them."""

from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from services.common.config import GatewaySettings, Settings
from services.common.errors import PenstockError
from services.common.telemetry.telemetry import Telemetry
from services.gateway.identity.keys import KeyStore
from services.gateway.ids import FILE, FILE_BATCH, KEY, REQUEST, STORE, IdKind
from services.gateway.stores.files.files import Files
from services.gateway.stores.indexing.indexing import Indexing
from services.gateway.stores.indexing.reindexing import Reindexing
from services.gateway.stores.retrieval.client import RetrievalClient
from services.gateway.stores.vector_stores.store_records import StoreRecords
from services.gateway.stores.vector_stores.vector_stores import VectorStores
from tests.support.blob_folder import memory_blobs
from tests.support.gateway_parts import meter

KINDS = (FILE, STORE, REQUEST, KEY)


def odd_ids(kind: IdKind) -> list[str]:
    good = kind.new()
    return [
        "",
        kind.prefix,
        good + ":stores",
        good + "\n",
        good[:-1],
        good + "0",
        good.upper(),
        good[:-1] + "g",
        good[:-1] + "٣",
        "x" + good,
        "{" + good + "}",
        "*",
        "../" + good,
        good.replace(kind.prefix, "other-"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_is_known_by_its_shape(kind):
    assert kind.fits(kind.new())
    assert kind.new() != kind.new()
    for odd in odd_ids(kind):
        assert not kind.fits(odd), odd
        with pytest.raises(PenstockError) as refused:
            kind.checked(odd, "somewhere")
        assert (refused.value.code, refused.value.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "not_found",
        )
        assert refused.value.param == "somewhere"
    assert not any(other.fits(kind.new()) for other in KINDS if other is not kind)


def test_an_error_repeats_only_the_beginning_of_an_odd_id():
    with pytest.raises(PenstockError) as refused:
        FILE.checked("x" * 10_000)
    assert len(refused.value.message) < 200


class NoRedis:
    """Fails the test at any command; scripts may be made."""

    connection_pool = Mock()

    def register_script(self, source: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        def command(*_: Any, **__: Any) -> None:
            raise AssertionError(f"Redis was asked: {name}")

        return command


def stores(files: Files) -> VectorStores:
    redis, settings = NoRedis(), Settings()
    telemetry = Telemetry("gateway", "test")
    records = StoreRecords(redis, "ns", 9, 9)
    retrieval = RetrievalClient(redis, settings)
    nobody: Any = None  # carries it out
    indexing = Indexing(files, records, retrieval, meter(), telemetry, nobody, nobody, nobody, 100)
    on_the_way = indexing.searchable, indexing.on_the_way
    reindexing = Reindexing(records, *on_the_way, retrieval, meter(), nobody, nobody, 100)
    return VectorStores(files, records, indexing, reindexing, nobody, 9)


async def test_an_odd_id_never_reaches_redis():
    files = Files(NoRedis(), "ns", GatewaySettings(), memory_blobs())
    held = stores(files)
    asked = {
        FILE: (
            lambda odd: files.get("acme", odd),
            lambda odd: files.content("acme", odd),
            lambda odd: files.delete("acme", odd),
            lambda odd: files.stores_of("acme", odd),
            lambda odd: files.some("acme", [(odd, "file_id")]),
            lambda odd: files.note_store("acme", [odd], STORE.new(), held=True),
            lambda odd: held.records.file("acme", STORE.new(), odd),
            lambda odd: held.records.revise("acme", STORE.new(), odd),
            lambda odd: held.records.drop("acme", STORE.new(), odd, "a"),
        ),
        STORE: (
            lambda odd: held.records.store("acme", odd),
            lambda odd: held.records.all_files("acme", odd),
            lambda odd: held.records.begin_reindexing("acme", odd, "e", "t", 9.0, asked=True),
            lambda odd: held.reindexing.begin("acme", odd, asked=True),
            lambda odd: held.records.stop_reindexing("acme", odd, "e"),
            lambda odd: held.records.file_ids("acme", odd),
            lambda odd: held.records.file("acme", odd, FILE.new()),
            lambda odd: held.records.batch("acme", odd, FILE_BATCH.new()),
            lambda odd: held.records.delete("acme", odd),
            lambda odd: held.records.clear("acme", odd),
            lambda odd: held.require("acme", (odd,)),
        ),
    }
    for kind, calls in asked.items():
        for call in calls:
            for odd in odd_ids(kind):
                with pytest.raises(PenstockError) as refused:
                    await call(odd)
                assert refused.value.reason == "not_found"
    for odd in odd_ids(KEY):
        assert not await KeyStore(NoRedis(), "ns").revoke(odd)
        assert await KeyStore(NoRedis(), "ns").find_id(odd) is None
