"""What a checkpoint's config.json says, as far as families say it alike; what one of them says in
its own way is read in its file (models/)."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.common.checkpoints.sentence_modules import UnsupportedModules, read_modules
from services.worker.engine.formats.scheme import (
    NOT_QUANTIZED,
    Scheme,
    UnsupportedScheme,
    parse_scheme,
)
from services.worker.engine.models.rope_config import (
    RopeConfig,
    UnsupportedRope,
    is_number,
    object_in,
    parse_rope,
)

MOST_LAYERS = 10_000
MOST_CLASSES = 1024
MOST_EXPERTS = 1024
MOST_EXPERTS_IN_ALL = 2**16
"""Of all layers: each has tensors of its own, which are counted one by one."""
MOST = 2**31 - 1
"""Of any size: kernels count in 32 bits."""


Head = Literal["tokens", "classes", "none"]


class UnsupportedModel(Exception):
    """The checkpoint is broken, or asks for something that is not implemented. The message names
    the file and the field."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    window: int = 0
    """Tokens that one sees, itself included; 0: all before it."""
    rope: int = 0
    """Which of the model's `ropes` turns its queries and keys."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Of the layers that have experts in the place of an MLP."""

    count: int
    chosen: int
    """By each token."""
    inner: int
    """Features within one."""
    normed: bool
    """The shares of the chosen ones sum up to 1."""
    layers: frozenset[int]
    shared: int = 0
    """Features within one that is every token's; 0: there is none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Sizes in features, `context` in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rms_norm_epsilon: float
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    tie_word_embeddings: bool
    checkpoint_dtype: str
    """float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]
    """Of config.json and generation_config.json together."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    """Whether queries and keys are normed: each head, or all heads as one."""
    score_cap: float = 0.0
    """c > 0: of a score s in attention comes c tanh(s / c)."""
    logit_cap: float = 0.0
    """So, too, of a logit."""
    experts: ExpertsConfig | None = None
    head: Head = "tokens"
    """What it makes logits of; none: it gives states alone."""
    num_classes: int = 0
    scheme: Scheme = NOT_QUANTIZED
    """How its matrices are quantized in a checkpoint of Hugging Face form."""


class Fields:
    """config.json, field by field, and the generation_config.json beside it."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedModel."""
        self.folder = folder
        self._path = folder / "config.json"
        self.raw = _read_json(self._path)

    def refusal(self, words: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path}: {words}")

    @property
    def architecture(self) -> str:
        """The first one; "" where there is none."""
        named = self.raw.get("architectures") or [""]
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise self.refusal(f"architectures {named!r} is no list of names")
        return named[0]

    def only(self, name: str, *values: object) -> None:
        """Other values would silently change what the model computes. None: or none at all."""
        value = self.raw.get(name)
        if value not in values:
            raise self.refusal(f"{name} {value!r} is not supported")

    def number(self, name: str, usual: float | None = None) -> float:
        """Above 0. `usual`: where there is none."""
        value = self.raw.get(name)
        if value is None and usual is not None:
            return usual
        if value is None:
            raise self.refusal(f"{name} is missing")
        if not is_number(value):
            raise self.refusal(f"{name} {value!r} is not a number above 0")
        return float(value)

    def size(self, name: str, usual: int | None = None) -> int:
        found = self.number(name, usual)
        if found != int(found):
            raise self.refusal(f"{name} {found!r} is not a whole number")
        if found > MOST:
            raise self.refusal(f"{name} {found!r} is above {MOST}")
        return int(found)

    def flag(self, name: str, usual: bool = False) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"{name} {value!r} is neither true nor false")
        return usual if value is None else value

    def num_layers(self) -> int:
        found = self.size("num_hidden_layers")
        if found > MOST_LAYERS:
            raise self.refusal(f"num_hidden_layers {found} is above {MOST_LAYERS}")
        return found

    def optional(self, name: str, usual: float) -> float:
        """Above 0, or 0 where it is null. `usual`: where there is none."""
        return self.number(name, 0.0) if name in self.raw else usual

    def optional_size(self, name: str, usual: int) -> int:
        null = name in self.raw and self.raw[name] is None
        return 0 if null else self.size(name, usual)

    def layers(
        self, window: int, slides: Callable[[int], bool], of_sliding: int = 0
    ) -> tuple[LayerConfig, ...]:
        """Those that slide have the window and the rope `of_sliding`, the others see all and have
        the first rope. Which do `layer_types` says, and `slides` where there is none."""
        count = self.num_layers()
        usual = [("full_attention", "sliding_attention")[slides(i)] for i in range(count)]
        types = self.raw.get("layer_types") or usual
        if not isinstance(types, list) or len(types) != count:
            raise self.refusal(f"layer_types does not name each of {count} layers")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.refusal(f"layer_types {kind!r} is not supported")
        sliding, full = LayerConfig(window, of_sliding), LayerConfig()
        return tuple(sliding if kind == "sliding_attention" else full for kind in types)

    def experts(self, count: str, inner: str, normed: bool, layers: Iterable[int]) -> ExpertsConfig:
        """`count`, `inner`: the fields of their number, and of features within one."""
        found, chosen = self.size(count), self.size("num_experts_per_tok")
        if found > MOST_EXPERTS:
            raise self.refusal(f"{count} {found} is above {MOST_EXPERTS}")
        if chosen > found:
            raise self.refusal(f"num_experts_per_tok {chosen} is above {count} {found}")
        of = frozenset(layers)
        if found * len(of) > MOST_EXPERTS_IN_ALL:
            raise self.refusal(
                f"{count} {found}, of {len(of)} layers, is above {MOST_EXPERTS_IN_ALL} in all"
            )
        return ExpertsConfig(found, chosen, self.size(inner), normed, of)

    def head_dim(self, usual: int | None) -> int:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        found = self.size("head_dim", usual or hidden // heads)
        if not found:
            raise self.refusal(f"hidden_size {hidden} is less than num_attention_heads {heads}")
        return found

    def rope(self, head_dim: int, of: str = "", **instead: Any) -> RopeConfig:
        """What the fields say of it (see `parse_rope`), those of `instead` replaced. `of`: layers
        by whose type its parameters lie in `rope_parameters`."""
        context = self.size("max_position_embeddings")
        try:
            if of:
                instead["rope_parameters"] = object_in(object_in(self.raw, "rope_parameters"), of)
            return parse_rope(self.raw | instead, head_dim, context)
        except UnsupportedRope as error:
            raise self.refusal(str(error)) from error

    def num_labels(self) -> int:
        """As transformers counts them."""
        names = self.raw.get("id2label")
        if names is not None and not (isinstance(names, dict) and names):
            raise self.refusal(f"id2label {names!r} names no classes")
        found = len(names) if names else self.size("num_labels", 2)
        if found > MOST_CLASSES:
            raise self.refusal(f"id2label or num_labels: {found} classes are above {MOST_CLASSES}")
        return found

    def eos_token_ids(self) -> tuple[int, ...]:
        """Those that the model has: no other can be drawn, or banned."""
        found: list[Any] = [self.raw.get("eos_token_id")]
        generation = self.folder / "generation_config.json"
        if generation.exists():
            found.append(_read_json(generation).get("eos_token_id"))
        ids: set[int] = set()
        for value in found:
            of_file = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(one) is int for one in of_file):
                raise self.refusal(f"eos_token_id {value!r}, here or beside it, is no token")
            ids.update(of_file)
        return tuple(sorted(id for id in ids if 0 <= id < self.size("vocab_size")))


def read_decoder(
    fields: Fields,
    *,
    ropes: tuple[RopeConfig, ...] = (),
    activation: tuple[str, str] = ("hidden_act", "silu"),
    head_dim: int | None = None,
    epsilon: float = 1e-6,
    tied: bool = False,
    partial: bool = False,
) -> ModelConfig:
    """What a Llama is, too. `activation`: in which field the MLP's is, and the only one that is
    built; `head_dim`, `epsilon` and `tied` are what a field that is not there means; no `ropes`:
    that which the fields say; `partial`: it may turn a part of a head alone. Raises
    UnsupportedModel."""
    fields.only(*activation, None)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    dim = fields.head_dim(head_dim)
    ropes = ropes or (fields.rope(dim),)
    if ropes[0].dims != dim and not partial:
        raise fields.refusal(f"partial_rotary_factor {ropes[0].dims / dim} is not supported")
    try:
        scheme = parse_scheme(fields.raw.get("quantization_config"))
    except UnsupportedScheme as error:
        raise fields.refusal(str(error)) from error
    fields.only("is_causal", True, None)
    if heads % kv_heads:
        raise fields.refusal(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    dtype = str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.refusal(f"dtype {dtype!r} is not supported")
    num_layers = fields.num_layers()
    return ModelConfig(
        architecture=fields.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        context=ropes[0].context,
        rms_norm_epsilon=fields.number("rms_norm_eps", epsilon),
        ropes=ropes,
        layers=(LayerConfig(),) * num_layers,
        attention_scale=dim**-0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        checkpoint_dtype=dtype,
        eos_token_ids=fields.eos_token_ids(),
        scheme=scheme,
    )


def check_modules(fields: Fields) -> None:
    """What sentence-transformers is to do with the model's states is what can be done here. Raises
    UnsupportedModel."""
    try:
        read_modules(fields.folder)
    except UnsupportedModules as error:
        raise UnsupportedModel(str(error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        words = f"{path} is missing"
        if (path.parent / "adapter_config.json").is_file():
            words += ": it is an adapter, which is served beside its model (--lora, --adapter-of)"
        raise UnsupportedModel(words) from None
    except OSError as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # of bytes, of text, of too many digits
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return content
