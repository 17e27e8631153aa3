"""What a request may ask for. Checked before it is queued, so that nothing fails halfway."""

from collections.abc import Iterable, Sized

from services.worker.engine.messages import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_POOLED_LOGITS,
    MAX_STOP_IDS,
    MAX_WORD,
    Pooling,
    Request,
    Sampling,
)
from services.worker.engine.outputs import ModelInfo, RequestError

MAX_TEMPERATURE = 100
"""Far above which a float32 of a logit, divided by it, tells nothing."""
MAX_CONSTRAINT = 128 * 1024
"""Characters of its text."""


def find_error(request: Request, info: ModelInfo) -> RequestError | None:
    """The first thing that is wrong with `request`, or None. The replica's process may call it,
    too."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    vocab_size, max_model_len = info.vocab_size, info.max_model_len

    def invalid(param: str, message: str) -> RequestError:
        return RequestError("invalid_request", f"{param} {message}", param)

    if not prompt:
        return invalid("prompt_token_ids", "must not be empty")
    if len(prompt) > max_model_len and request.pooling is not None:
        return RequestError(
            "context_length_exceeded",
            f"The input has {len(prompt)} tokens, the context is of {max_model_len}",
            "prompt_token_ids",
        )
    if len(prompt) >= max_model_len and request.pooling is None:
        return RequestError(
            "context_length_exceeded",
            f"The prompt has {len(prompt)} tokens; with at least one token of output the "
            f"context of {max_model_len} tokens is exceeded",
            "prompt_token_ids",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return invalid("prompt_token_ids", f"must be in [0, {vocab_size})")
    if request.pooling is not None:
        excluded = _excluded(request)
        return invalid(excluded, "excludes pooling") if excluded else _wrong(request.pooling, info)
    if not info.generates:
        return invalid("pooling", f"is all that {info.architecture} can be asked for")
    if sampling.max_tokens < 1:
        return invalid("max_tokens", f"must be at least 1, is {sampling.max_tokens}")
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        limits = f"must be in [0, {MAX_TEMPERATURE}]"
        return invalid("temperature", f"{limits}, is {sampling.temperature}")
    if not 0 <= sampling.top_k < 2**31:
        return invalid("top_k", f"must be in [0, 2**31), is {sampling.top_k}")
    if not 0 < sampling.top_p <= 1:
        return invalid("top_p", f"must be in (0, 1], is {sampling.top_p}")
    if not 0 <= sampling.seed < 2**64:
        return invalid("seed", f"must be in [0, 2**64), is {sampling.seed}")
    if constraint := sampling.constraint:
        if len(constraint.text) > MAX_CONSTRAINT:
            return invalid("constraint", f"must have at most {MAX_CONSTRAINT} characters")
        if sampling.ignore_eos:
            return invalid("ignore_eos", "excludes a constraint, which says where the output ends")
    for param, wrong in _found_wrong(sampling, vocab_size).items():
        if wrong:
            return invalid(param, wrong)
    if not 0 <= request.generated_prefix < len(prompt):
        return invalid("generated_prefix", "must be at least 0 and less than the prompt's length")
    if request.prefill_only and request.remote_prefill:
        return invalid("remote_prefill", "excludes prefill_only")
    if request.export_kv is not None and not request.prefill_only:
        return invalid("export_kv", "needs prefill_only")
    if request.export_from_block < 0:
        return invalid("export_from_block", "must not be negative")
    return None


def _excluded(request: Request) -> str:
    """What does not go with pooling: the first field that asks for it."""
    asked = {
        "constraint": request.sampling.constraint,
        "prompt_logprobs": request.sampling.prompt_logprobs is not None,
        "generated_prefix": request.generated_prefix,
        "prefill_only": request.prefill_only,
        "remote_prefill": request.remote_prefill,
        "export_kv": request.export_kv,
    }
    return next((name for name, wanted in asked.items() if wanted), "")


def _wrong(pooling: Pooling, info: ModelInfo) -> RequestError | None:
    found = {"": ""}
    if pooling.kind == "logits":
        found["dimensions"] = "are of states" if pooling.dimensions else ""
        found["logits_of"] = f"must be 1 to {MAX_POOLED_LOGITS} in [0, {info.num_logits})"
        ids = pooling.logits_of
        few = 0 < len(ids) <= MAX_POOLED_LOGITS
        if few and 0 <= min(ids) <= max(ids) < info.num_logits:
            found["logits_of"] = ""
    else:
        found["logits_of"] = "are no state" if pooling.logits_of else ""
        if not 0 <= pooling.dimensions <= info.hidden_size:
            found["dimensions"] = f"must be at most {info.hidden_size}, is {pooling.dimensions}"
    for param, wrong in found.items():
        if wrong:
            return RequestError("invalid_request", f"{param} {wrong}", param)
    return None


def _found_wrong(sampling: Sampling, vocab_size: int) -> dict[str, str]:
    """Of what changes logits and tells of them, by parameter: what is wrong with it, or nothing."""
    s = sampling
    ids = f"must be token ids in [0, {vocab_size})"

    def strange(tokens: Iterable[int]) -> bool:
        return any(not 0 <= token < vocab_size for token in tokens)

    def number(value: float, low: float, high: float) -> str:
        return "" if low <= value <= high else f"must be in [{low:g}, {high:g}], is {value}"

    def top(wanted: int | None) -> str:
        fits = wanted is None or 0 <= wanted <= MAX_LOGPROBS
        return "" if fits else f"must be in [0, {MAX_LOGPROBS}], is {wanted}"

    def few(what: Sized, most: int) -> str:
        return "" if len(what) <= most else f"may have at most {most} entries, has {len(what)}"

    biased = [token for token, _ in s.logit_bias]
    return {
        "min_p": number(s.min_p, 0, 1),
        "repetition_penalty": number(s.repetition_penalty, 0.01, 100),
        "frequency_penalty": number(s.frequency_penalty, -2, 2),
        "presence_penalty": number(s.presence_penalty, -2, 2),
        "logit_bias": few(biased, MAX_BIAS)
        or (ids if strange(biased) else "")
        or next(filter(None, (number(bias, -100, 100) for _, bias in s.logit_bias)), "")
        or ("" if len({*biased}) == len(biased) else "names a token twice"),
        "bad_words": few(s.bad_words, MAX_BAD_WORDS)
        or ("" if all(0 < len(w) <= MAX_WORD for w in s.bad_words) else _WORDS)
        or (ids if any(map(strange, s.bad_words)) else ""),
        "stop_token_ids": few(s.stop_token_ids, MAX_STOP_IDS)
        or (ids if strange(s.stop_token_ids) else ""),
        "min_tokens": number(s.min_tokens, 0, 2**31 - 1),
        "logprobs": top(s.logprobs),
        "prompt_logprobs": top(s.prompt_logprobs),
    }


_WORDS = f"must be of 1 to {MAX_WORD} tokens each"
