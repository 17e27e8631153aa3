"""Each model's window follows what its registered workers have room for."""

from services.common.config import Settings
from services.common.discovery import Replica
from services.common.redis import connect
from services.tokenizer.models import Models, ServedModel
from services.tokenizer.windows import Windows


def worker(id: str, model: str = "tiny", **facts: str) -> Replica:
    return Replica("worker", id, "127.0.0.1:1", "host", 1, facts={"model": model, **facts})


async def test_the_smallest_worker_counts_and_the_last_known_stands(
    model: ServedModel, redis_url: str, namespace: str
) -> None:
    redis = connect(redis_url)
    models = Models([model])
    windows = Windows(redis, Settings(namespace=namespace, lease_s=0.3), models)

    def view(*workers: Replica) -> int:
        windows._workers.replicas = {replica.id: replica for replica in workers}
        windows._changed([], [])
        return models["tiny"].window

    large, small = worker("w1", max_model_len="300"), worker("w2", max_model_len="64")
    assert view(large) == 300
    assert view(large, small, worker("w3", "other", max_model_len="8")) == 64
    assert view(large) == 300
    assert view(small, large) == 64
    assert view() == 64
    assert view(worker("w4", max_model_len="100000")) == 512
    assert view(worker("w5"), worker("w6", max_model_len="many"), small) == 64
    await redis.aclose()
