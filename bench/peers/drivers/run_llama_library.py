"""llama.cpp's library in-process: run_llama_library LIBRARIES GGUF THREADS.

LIBRARIES: the folder of the npm package (bench/peers/formats.py), whose structures these are. All
requests come at once; a call of the library has the next token of each that generates, and of
prompts what room is left, as llama.cpp's server has it. The likeliest token is taken.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.peers.drivers.line import Answer, Request, Run, Stamps, serve

FOLDER, MODEL, THREADS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
MOST = 32
"""Sequences at once."""
BATCH = 2048
"""Tokens of a call at most, as the library has it by itself."""
CONTEXT = 1024
"""Tokens of a sequence."""

c_int, c_uint, c_float, c_void, c_bool = (
    ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p, ctypes.c_bool,
)  # fmt: skip


class ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", c_void), ("tensor_buft_overrides", c_void),
        *((name, c_int) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode")),
        ("main_gpu", c_int), ("tensor_split", c_void), ("progress_callback", c_void),
        ("progress_callback_user_data", c_void), ("kv_overrides", c_void),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    ]  # fmt: skip


class ContextParams(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int) for name in ("n_threads", "n_threads_batch", "ctx_type")),
        *((name, c_int) for name in ("rope_scaling_type", "pooling_type", "attention_type")),
        ("flash_attn_type", c_int),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint), ("defrag_thold", c_float), ("cb_eval", c_void),
        ("cb_eval_user_data", c_void), ("type_k", c_int), ("type_v", c_int),
        ("abort_callback", c_void), ("abort_callback_data", c_void),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload")),
        *((name, c_bool) for name in ("swa_full", "kv_unified")),
        ("samplers", c_void), ("n_samplers", ctypes.c_size_t), ("ctx_other", c_void),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int), ("token", ctypes.POINTER(c_int)), ("embd", c_void),
        ("pos", ctypes.POINTER(c_int)), ("n_seq_id", ctypes.POINTER(c_int)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(c_int))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


@dataclass
class Sequenced:
    """A request: tokens that the library has not seen yet, and how many it has."""

    request: Request
    place: int
    pending: list[int]
    seen: int = 0
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.request["max_tokens"]


class Library:
    def __init__(self) -> None:
        (path,) = FOLDER.glob("libllama.v*.so")
        (base,) = FOLDER.glob("libggml.v*.so")
        backends = ctypes.CDLL(str(base)).ggml_backend_load_all_from_path
        backends.argtypes = [ctypes.c_char_p]
        backends(str(FOLDER).encode())
        self._library = library = ctypes.CDLL(str(path))
        library.llama_backend_init()
        library.llama_model_default_params.restype = ModelParams
        library.llama_context_default_params.restype = ContextParams
        load, make = library.llama_model_load_from_file, library.llama_init_from_model
        load.argtypes, load.restype = [ctypes.c_char_p, ModelParams], c_void
        make.argtypes, make.restype = [c_void, ContextParams], c_void
        library.llama_get_model.argtypes, library.llama_get_model.restype = [c_void], c_void
        library.llama_get_memory.argtypes, library.llama_get_memory.restype = [c_void], c_void
        library.llama_memory_clear.argtypes = [c_void, c_bool]
        library.llama_decode.argtypes = [c_void, Batch]
        logits = library.llama_get_logits_ith
        logits.argtypes, logits.restype = [c_void, c_int], ctypes.POINTER(c_float)
        model = load(MODEL.encode(), library.llama_model_default_params())
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MOST * CONTEXT, MOST
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = THREADS
        params.flash_attn_type = 1
        self._context = make(model, params)
        if not model or not self._context:
            raise RuntimeError(f"llama.cpp could not load {MODEL}")
        vocab_of, size_of = library.llama_model_get_vocab, library.llama_vocab_n_tokens
        vocab_of.argtypes, vocab_of.restype = [c_void], c_void
        size_of.argtypes = [c_void]
        self._vocabulary = size_of(vocab_of(model))
        self._ids = [(c_int * 1)(place) for place in range(MOST)]

    def forget(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Rows: token, position, sequence, and whether a token is wanted behind it. Gives those."""
        count, pointer = len(rows), ctypes.POINTER(c_int)
        tokens, positions, places, wanted = zip(*rows, strict=True)
        ids = (pointer * count)(*(ctypes.cast(self._ids[place], pointer) for place in places))
        batch = Batch(
            count, (c_int * count)(*tokens), None, (c_int * count)(*positions),
            (c_int * count)(*[1] * count), ids, (ctypes.c_int8 * count)(*wanted),
        )  # fmt: skip
        if self._library.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")
        logits = self._library.llama_get_logits_ith
        return [
            int(np.ctypeslib.as_array(logits(self._context, row), (self._vocabulary,)).argmax())
            for row, one in enumerate(wanted)
            if one
        ]


def load() -> Run:
    library = Library()

    def run(requests: list[Request]) -> Answer:
        library.forget()
        stamps = Stamps(requests)
        running = [
            Sequenced(one, place, one["prompt_token_ids"]) for place, one in enumerate(requests)
        ]
        while running:
            rows: list[tuple[int, int, int, bool]] = []
            ready: list[Sequenced] = []
            # Those that generate have one token pending: they come first.
            for one in sorted(running, key=lambda one: len(one.pending) > 1):
                taken = one.pending[: BATCH - len(rows)]
                del one.pending[: len(taken)]
                rows += [(id, one.seen + i, one.place, False) for i, id in enumerate(taken)]
                one.seen += len(taken)
                if taken and not one.pending:
                    rows[-1] = (*rows[-1][:3], True)
                    ready.append(one)
            for one, token in zip(ready, library.decode(rows), strict=True):
                stamps.add(one.request["id"], 1)
                one.left -= 1
                one.pending = [token]
            running = [one for one in running if one.left]
        return stamps.answer()

    return run


if __name__ == "__main__":
    serve(load)
