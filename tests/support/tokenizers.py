"""Tiny tokenizers of the kinds that checkpoints bring, made on the spot."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"  # ids 0, 1, 2
_MARKERS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|documents|>"]

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages if message.role == 'system' or message.role == 'developer' -%}
  <|system|>{{ message.content }}{{ eos_token }}
{%- endfor -%}
{%- if tools -%}
  <|system|>{{ tools | tojson }}<tool_call>{"name", "arguments"}</tool_call>{{ eos_token }}
{%- endif -%}
{%- if documents -%}
  <|documents|>
  {%- for passage in documents -%}
    {{- '' if loop.first else '\\n' }}[{{ loop.index }}] {{ passage.title + '\\n' + passage.text }}
  {%- endfor -%}
  {{- eos_token -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role in ('user', 'assistant', 'tool') -%}
    <|{{ message.role }}|>{{ message.content }}
    {%- for call in message.tool_calls or [] -%}
      <tool_call>{{ call.function | tojson }}</tool_call>
    {%- endfor -%}
    {{ eos_token }}
  {%- elif message.role not in ('system', 'developer') -%}
    {{ raise_exception('unknown role ' + message.role) }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
"""Renders every role, puts tools and `documents` after the system text, calls behind what is said
with them, and raises on unknown roles."""

_TEXT = [
    "Penstock takes a prompt to streamed tokens, and every stage is on one trace.",
    "The gateway, the tokenizer, the router and the workers are joined by links.",
    "What is the pressure of the water at the end of the penstock? It is 12 bar.",
    "Grüße aus Köln, naïve café, 東京の水, 🚰🌊 and some more words for the merges.",
]


def byte_level(vocab_size: int = 320) -> Tokenizer:
    """Byte-level BPE with byte-exact round trips; at least 256 plus eight special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, *_MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2: BPE over "▁" for spaces, unknown characters as bytes, no pre-tokenizer."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_TEXT[:3], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    vocab = {t: i for i, t in enumerate(dict.fromkeys([PAD, BOS, EOS, *bytes_, *learned["vocab"]]))}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's: SentencePiece Unigram, with the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=[PAD, BOS, EOS, "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT's: continuation pieces begin with "##", spaces and punctuation are not kept."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=[PAD, BOS, EOS, "[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def write_tokenizer(
    folder: Path, vocab_size: int = 320, chat_template: str | None = CHAT_TEMPLATE
) -> None:
    """Writes `byte_level` in Hugging Face's form into `folder` (made if missing): tokenizer.json
    and tokenizer_config.json. Ids: pad 0, bos 1, eos 2. No config.json: that is the model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(vocab_size).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
