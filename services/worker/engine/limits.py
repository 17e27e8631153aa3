"""What a request may ask for. Checked before it is queued, so that nothing fails halfway."""

import math

from services.worker.engine.messages import Request, RequestError

MAX_CONSTRAINT = 128 * 1024
"""Characters of its text."""


def find_error(request: Request, vocab_size: int, max_model_len: int) -> RequestError | None:
    """The first thing that is wrong with `request`, or None.

    The replica's process may call it too, with the figures of `ModelInfo`.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling

    def invalid(param: str, message: str) -> RequestError:
        return RequestError("invalid_request", f"{param} {message}", param)

    if not prompt:
        return invalid("prompt_token_ids", "must not be empty")
    if len(prompt) >= max_model_len:
        return RequestError(
            "context_length_exceeded",
            f"The prompt has {len(prompt)} tokens; with at least one token of output the "
            f"context of {max_model_len} tokens is exceeded",
            "prompt_token_ids",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return invalid("prompt_token_ids", f"must be in [0, {vocab_size})")
    if sampling.max_tokens < 1:
        return invalid("max_tokens", f"must be at least 1, is {sampling.max_tokens}")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return invalid("temperature", f"must be finite and not negative, is {sampling.temperature}")
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
    if not 0 <= request.generated_prefix < len(prompt):
        return invalid("generated_prefix", "must be at least 0 and less than the prompt's length")
    if request.prefill_only and request.remote_prefill:
        return invalid("remote_prefill", "excludes prefill_only")
    if request.export_kv is not None and not request.prefill_only:
        return invalid("export_kv", "needs prefill_only")
    if request.export_from_block < 0:
        return invalid("export_from_block", "must not be negative")
    return None
