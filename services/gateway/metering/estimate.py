"""What a request may use at most, before anybody has tokenized it."""

from collections.abc import Sequence

from protos.tokenizer_pb2 import PromptRequest
from services.gateway.runs.prompt import Prompt

BYTES_PER_TOKEN = 4  # of English; what an estimate misses is settled at the end


def expected(prompts: Sequence[Prompt], window: int, open_output: int) -> tuple[int, int]:
    """(prompt tokens, output tokens) over all prompts and choices. Ids are counted; of text, four
    bytes are a token, and a prompt is no longer than the model's `window`. An answer is as long as
    `max_tokens` says, or `open_output`, within what the window leaves."""
    prompt_tokens = output_tokens = 0
    for prompt in prompts:
        request = prompt.request
        size = len(request.token_ids.ids) or of_bytes(_bytes(request))
        own = min(size, window)
        answer = min(request.sampling.max_tokens or open_output, window - own)
        prompt_tokens += own
        output_tokens += answer * max(1, request.choices)
    return prompt_tokens, output_tokens


def of_texts(texts: Sequence[str]) -> int:
    """Tokens of texts to be embedded."""
    return sum(of_bytes(len(text.encode())) for text in texts)


def of_bytes(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


def _bytes(request: PromptRequest) -> int:
    """Of what the prompt is made of, and of no option beside it."""
    if request.HasField("chat"):
        return request.chat.ByteSize()
    return len(request.text.encode())
