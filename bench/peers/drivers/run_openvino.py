"""OpenVINO GenAI's continuous batching: run_openvino EXPORTED bf16|f32 THREADS."""

import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.drivers.line import Answer, Request, Run, Stamps, serve

MODEL, ARITHMETIC, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])


def load() -> Run:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 32
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": ARITHMETIC}
    if ARITHMETIC == "f32":
        properties["KV_CACHE_PRECISION"] = "f16"
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        MODEL, scheduler_config=scheduler, device="CPU", properties=properties
    )
    asked = 0

    def run(requests: list[Request]) -> Answer:
        nonlocal asked
        stamps, handles = Stamps(requests), {}
        for request in requests:
            asked += 1
            prompt = openvino.Tensor(np.array([request["prompt_token_ids"]], dtype=np.int64))
            handles[request["id"]] = pipeline.add_request(asked, prompt, settings(request))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for request_id, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        stamps.add(request_id, len(output.generated_ids))
        return stamps.answer()

    return run


def settings(request: Request) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


if __name__ == "__main__":
    serve(load)
