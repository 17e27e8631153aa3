"""vLLM's engine, as a server drives it: run_vllm CHECKPOINT bf16|f32 THREADS."""

import os
import sys

from bench.peers.drivers.line import Answer, Request, Run, Stamps, serve

MODEL, ARITHMETIC, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def load() -> Run:
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=MODEL,
            dtype={"bf16": "bfloat16", "f32": "float32"}[ARITHMETIC],
            max_model_len=1024,
            max_num_seqs=32,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
    )
    runs = 0

    def run(requests: list[Request]) -> Answer:
        nonlocal runs
        runs += 1
        stamps = Stamps(requests)
        for request in requests:
            engine.add_request(
                f"{runs}/{request['id']}",
                {"prompt_token_ids": request["prompt_token_ids"]},
                SamplingParams(
                    temperature=0,
                    max_tokens=request["max_tokens"],
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                ),
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                request_id = output.request_id.partition("/")[2]
                stamps.add(request_id, len(output.outputs[0].token_ids))
        return stamps.answer()

    return run


if __name__ == "__main__":
    serve(load)
