"""How weights lie in checkpoints, one file each; models ask for tensors and learn of none of it.

stored.py              what a tensor gives: rows of floats, or of what it is held in to the bit
safetensors.py         files of Hugging Face checkpoints, and their tensors by name
scheme.py              what config.json says of quantized ones
quantized.py           compressed-tensors, GPTQ, AWQ, FP8 (packed.py: numbers in words; fp8.py)
writing.py             `penstock quantize`
gguf.py                llama.cpp's files (gguf_blocks.py: its types)
"""

from hashlib import sha256
from pathlib import Path

SOURCES = sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()[:12]
"""Another one for each way of reading: what one has packed is no other's."""
