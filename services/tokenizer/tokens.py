"""A prompt's tokens, for a client that counts them or wants to see them. Nothing is generated, so
no rule of the policy looks at it."""

from dataclasses import replace
from functools import partial

from protos.common_pb2 import FINISH_STOP, Record
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.errors import PenstockError
from services.common.link import LinkCall
from services.common.packed_ids import as_field, pack
from services.common.telemetry.spans import Span
from services.tokenizer.parts import Pipeline, model_of, threaded
from services.tokenizer.prompts.context import TOO_LONG, assemble, check_length


async def tokens(
    pipeline: Pipeline, call: LinkCall, request: PromptRequest, span: Span, record: Record
) -> None:
    """Sends one delta: the ids, and of ids their text. A prompt may be longer than the window: who
    counts wants to know by how much. Raises PenstockError."""
    model = await model_of(pipeline, request, (), span)
    most = max(model.window, pipeline.max_pooled_tokens)
    model = replace(model, window=most)
    try:
        check_length(model, request)
        work = partial(assemble, model, request)
        prompt = await threaded(pipeline, request.caller.tenant, span, "assemble", work)
    except PenstockError as error:
        if error.reason == TOO_LONG:
            error.message = f"fewer than {most} tokens are counted at once, here there are more"
        raise
    ids = as_field(pack(prompt.token_ids))
    delta = TextDelta(token_ids=ids, finish=FINISH_STOP, checkpoint=model.checkpoint)
    delta.usage.prompt_tokens = len(ids)
    if request.HasField("token_ids"):
        delta.text = model.decode(prompt.token_ids.tolist())
    call.send(delta.SerializeToString())
