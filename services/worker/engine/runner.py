"""Runs what the scheduler decided: inputs, model, sampler, and the KV cache's memory."""

import itertools

import numpy as np
import torch
from torch import Tensor

from kernels import PagedBatch, implementation
from services.worker.engine.config import EngineConfig
from services.worker.engine.kv_cache import KvCache, block_bytes, block_shape
from services.worker.engine.loader import choose_dtype, load_model
from services.worker.engine.messages import ModelInfo, RequestError
from services.worker.engine.model_config import ModelConfig, read_config
from services.worker.engine.sampler import SamplingBatch, sample
from services.worker.engine.scheduler import Chunk

Outcome = int | RequestError | None
"""Of a chunk: the token it sampled, or why it could not, or None if it does not sample."""


class Runner:
    """Holds the model and the cache. Decides nothing, and remembers nothing between steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model. Raises UnsupportedModel, and ValueError on settings that do not fit."""
        self._device = torch.device(config.device)
        self._block_size = config.block_size
        model = read_config(config.model)
        dtype = choose_dtype(config.dtype, model, self._device)
        self._model = load_model(config.model, model, dtype, self._device)
        bytes_of_block = block_bytes(model, config.block_size, dtype)
        num_blocks = config.num_blocks or config.kv_cache_bytes // bytes_of_block
        if num_blocks < 1:
            raise ValueError(
                f"kv_cache_bytes {config.kv_cache_bytes} is less than one block ({bytes_of_block})"
            )
        self.cache = KvCache(model, num_blocks, config.block_size, dtype, self._device)
        parameters = list(self._model.parameters())
        self.info = ModelInfo(
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=_max_model_len(config, model, num_blocks),
            eos_token_ids=model.eos_token_ids,
            dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
            device=str(self._device),
            kernels=implementation(self._device),
            num_parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.nbytes for p in parameters),
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_bytes_per_block=bytes_of_block,
            kv_shape_per_block=block_shape(model, config.block_size),
        )

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> list[Outcome]:
        """Computes the chunks (those of one token first); one outcome for each.

        Running a chunk again writes the same cache slots with the same values.
        """
        states = self._model(self._token_ids(chunks), self.cache, self._batch(chunks))
        ends = list(itertools.accumulate(chunk.count for chunk in chunks))
        rows = [row for row, chunk in enumerate(chunks) if chunk.samples]
        outcomes: list[Outcome] = [None] * len(chunks)
        if not rows:
            return outcomes
        logits = self._model.logits(states[self._tensor([ends[row] - 1 for row in rows])])
        batch = SamplingBatch.of(
            [chunks[row].sequence.request.sampling for row in rows],
            [len(chunks[row].sequence.tokens) for row in rows],
            self._device,
        )
        tokens = sample(logits, batch).tolist()
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        for row, token, good in zip(rows, tokens, finite, strict=True):
            outcomes[row] = (
                token if good else RequestError("internal", "The model's logits are not finite")
            )
        return outcomes

    def _token_ids(self, chunks: list[Chunk]) -> Tensor:
        ids: list[int] = []
        for chunk in chunks:
            ids += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        return self._tensor(ids)

    def _batch(self, chunks: list[Chunk]) -> PagedBatch:
        lengths = [chunk.start + chunk.count for chunk in chunks]
        width = -(-max(lengths) // self._block_size)
        tables = np.empty((len(chunks), width), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            blocks = chunk.sequence.blocks[:width]
            tables[row, : len(blocks)] = blocks
            tables[row, len(blocks) :] = blocks[-1]
        rows = np.repeat(np.arange(len(chunks)), [chunk.count for chunk in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
        blocks_of = tables[rows, positions // self._block_size].astype(np.int64)
        slots = blocks_of * self._block_size + positions % self._block_size
        return PagedBatch(
            positions=torch.from_numpy(positions).to(self._device),
            slots=torch.from_numpy(slots).to(self._device),
            block_tables=torch.from_numpy(tables).to(self._device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self._device),
            num_decodes=sum(chunk.count == 1 for chunk in chunks),
            host_query_lens=[chunk.count for chunk in chunks],
            host_seq_lens=lengths,
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    room = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model.context, room)
    if config.max_model_len > model.context:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's context {model.context}"
        )
    if config.max_model_len > room:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the {room} tokens that {num_blocks} KV "
            "blocks hold"
        )
    return config.max_model_len
