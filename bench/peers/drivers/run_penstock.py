"""Penstock's engine in-process: run_penstock CHECKPOINT THREADS PACKED_DIR [SPECULATION]."""

import sys

from bench.peers.drivers.line import Answer, Request, Run, Stamps, serve

MODEL, THREADS, PACKED_DIR = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SPECULATION = next(iter(sys.argv[4:]), "off")


def load() -> Run:
    from services.worker.engine import EngineConfig, Sampling
    from services.worker.engine import Request as Asked
    from services.worker.engine.engine import Engine

    config = EngineConfig(
        MODEL,
        kv_cache_bytes=2**31,
        max_running=32,
        threads=THREADS,
        packed_dir=PACKED_DIR,
        speculation=SPECULATION,  # type: ignore[arg-type]  # it says itself what it takes
    )
    engine = Engine(config)

    def run(requests: list[Request]) -> Answer:
        stamps = Stamps(requests)
        for request in requests:
            sampling = Sampling(request["max_tokens"], temperature=0, ignore_eos=True)
            engine.add(Asked(request["id"], request["prompt_token_ids"], sampling))
        while engine.has_work:
            for output in engine.step().outputs:
                stamps.add(output.request_id, len(output.new_token_ids))
        return stamps.answer()

    return run


if __name__ == "__main__":
    serve(load)
