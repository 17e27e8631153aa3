"""GGUF files: what their headers say becomes a checkpoint's files, or is refused by name; a hostile
one takes no more time or memory than its size."""

import json
import struct
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer

from services.common.checkpoints.checkpoint import digest, is_hub_id, locate, text_digest
from services.common.checkpoints.gguf import unfolded as unfolding
from services.common.checkpoints.gguf.header import Header, UnsupportedGguf, read_header
from services.common.checkpoints.gguf.hub_config import config_of, generation_config_of
from services.common.checkpoints.gguf.unfolded import unfolded
from services.common.checkpoints.gguf.vocabulary import tokenizer_config_of, tokenizer_of
from services.common.config import ModelSpec
from tests.support import gguf
from tests.support.tokenizers import BOS, EOS, PAD, byte_level, metaspace

TEXTS = [
    "The penstock's water: 12345 bar, isn't it?",
    " leading and  double   spaces\n\n\tand a tab",
    "Grüße aus Köln, naïve café, 東京の水, 🚰🌊 é",
    f"{BOS}a special one{EOS} and [PAD3]",
    "",
]
LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING: dict[str, gguf.Raw] = {"token_embd.weight": ("Q8_0", (400, 64), bytes(400 * 68))}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def vocabulary(**changes: Any) -> dict[str, Any]:
    found = gguf.vocabulary(json.loads(byte_level().to_str()), 400) | {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    told = found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in told.items() if value is not None}


def file(folder: Path, metadata: dict[str, Any] | None = None, **tensors: gguf.Raw) -> Path:
    told = LLAMA | vocabulary() if metadata is None else metadata
    return gguf.write(folder / "a-model.gguf", told, EMBEDDING | tensors)


def pieces(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    """Of SentencePiece: scores in the order of merges, and none of those."""
    model = json.loads(tokenizer.to_str())["model"]
    ids = model["vocab"]
    made = ["".join(merge) for merge in model["merges"]]
    tokens = sorted(ids, key=ids.__getitem__)
    scores = [-float(made.index(t)) if t in made else -1e4 for t in tokens]
    types = [3 if id < 3 else 6 if t.startswith("<0x") else 1 for id, t in enumerate(tokens)]
    return vocabulary(
        model="llama",
        pre=None,
        merges=None,
        tokens=tokens,
        token_type=np.array(types, np.int32),
        scores=np.array(scores, np.float32),
        **changes,
    )


def test_a_configuration_is_what_the_header_says(folder: Path) -> None:
    metadata = LLAMA | vocabulary(eot_token_id=5)
    path = file(folder, metadata | {"llama.attention.head_count_kv": 2})
    config = config_of(read_header(path))
    assert config["architectures"] == ["LlamaForCausalLM"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    assert [config[name] for name in sizes] == [400, 64, 96, 1, 16]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["tie_word_embeddings"]
    assert config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    found = generation_config_of(read_header(path))
    assert found == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_a_file_is_a_model_of_its_own(folder: Path, cache: Path) -> None:
    """All services read the folder that it is unfolded to; another content has another."""
    spec = ModelSpec(name="m", path=str(file(folder)))
    found = locate(spec)
    assert found.parent == cache
    assert locate(spec) == locate(spec, weights=False) == found
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in found.iterdir()} == {*names, "model.gguf"}
    assert (found / "model.gguf").samefile(spec.path)
    assert not is_hub_id("models/a-model.gguf")
    before = digest(found), text_digest(found)
    file(folder, other=("F32", (8,), bytes(32)))
    again = locate(spec)
    assert again != found
    assert text_digest(again) == before[1]
    assert digest(again) != before[0]
    assert len(list(cache.iterdir())) == 2  # and nothing that was begun


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_text_is_cut_as_by_its_tokenizer(folder: Path, pre: str) -> None:
    found = tokenizer_of(
        read_header(file(folder, LLAMA | vocabulary(pre=pre, add_bos_token=False)))
    )
    theirs = byte_level()
    for text in TEXTS:
        ids = found.encode(text).ids
        if pre == "gpt-2":
            assert ids == theirs.encode(text).ids
        normal = found.normalizer.normalize_str(text) if found.normalizer else text
        assert found.decode(ids, skip_special_tokens=False) == normal
    words = [text for text, _ in found.pre_tokenizer.pre_tokenize_str("ab 1234 it's")]
    numbers = {"gpt-2": ["Ġ1234"], "smollm": ["Ġ", "1", "2", "3", "4"]}
    numbers |= {"llama-bpe": ["Ġ", "123", "4"], "qwen2": ["Ġ", "1", "2", "3", "4"]}
    assert words == ["ab", *numbers[pre], "Ġit", "'s"]
    assert (found.normalizer is not None) == (pre == "qwen2")


def test_tokens_of_their_own_stay_so(folder: Path) -> None:
    metadata = vocabulary(token_type=None)
    types = np.ones(400, np.int32)
    types[[1, 2]], types[3], types[320:] = 3, 4, 5
    metadata["tokenizer.ggml.token_type"] = types
    found = tokenizer_of(read_header(file(folder, LLAMA | metadata)))
    added = found.get_added_tokens_decoder()
    assert {id: token.special for id, token in added.items()} == {1: True, 2: True, 3: False}
    assert found.token_to_id("[PAD325]") is None


def test_control_tokens_are_such_whatever_their_type(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes a message would write them: a template's turns, and what ends them."""
    names = ["<|im_end|>", "<|turn|>", "<|other|>", "<b>", "<|eot_id|>"]
    metadata = vocabulary() | {"tokenizer.chat_template": "{{ '<|turn|><b>' }}"}
    metadata["tokenizer.ggml.tokens"][390:395] = names
    types = np.array(metadata["tokenizer.ggml.token_type"])
    types[390:395] = [4, 1, 4, 4, 5]
    header = read_header(file(folder, LLAMA | metadata | {"tokenizer.ggml.token_type": types}))
    added = tokenizer_of(header).get_added_tokens_decoder()
    found = {token.content: token.special for token in added.values() if token.content in names}
    assert found == {"<|im_end|>": True, "<|turn|>": True, "<|other|>": False, "<b>": False}
    assert generation_config_of(header)["eos_token_id"] == [2, 390]
    assert "2 taken for control tokens: '<|im_end|>', '<|turn|>'" in caplog.text


def test_sentence_pieces_are_merged_by_their_scores(folder: Path) -> None:
    theirs = metaspace()
    path = file(folder, LLAMA | pieces(theirs, add_bos_token=False, unknown_token_id=0))
    found = tokenizer_of(read_header(path))
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == theirs.encode(text).ids
        assert found.decode(ids) == theirs.decode(ids)
    path = file(folder, LLAMA | pieces(theirs, add_space_prefix=False))
    found = tokenizer_of(read_header(path))
    assert found.decode(found.encode(" two  spaces").ids) == " two  spaces"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(("begins", "ends"), [(True, False), (True, True), (False, False)])
def test_a_text_begins_and_ends_as_the_file_says(
    folder: Path, kind: str, begins: bool, ends: bool
) -> None:
    flags = {"add_bos_token": begins, "add_eos_token": ends}
    own = vocabulary(**flags) if kind == "gpt2" else pieces(metaspace(), **flags)
    found = tokenizer_of(read_header(file(folder, LLAMA | own)))
    plain = found.encode("a", add_special_tokens=False).ids
    assert found.encode("a").ids == [1] * begins + plain + [2] * ends
    two = found.encode("a", "a").ids
    assert two == ([1] * begins + plain + [2] * ends) * 2


def test_special_tokens_and_the_template_are_told(folder: Path) -> None:
    metadata = vocabulary(padding_token_id=0) | {"tokenizer.chat_template": "{{ messages }}"}
    found = tokenizer_config_of(read_header(file(folder, LLAMA | metadata)))
    told = [found.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")]
    assert told == [BOS, EOS, PAD, None]
    assert found["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("beside", [None, '{"padding_side": "left"}'])
def test_the_files_template_holds_where_none_lies_beside_it(
    folder: Path, beside: str | None
) -> None:
    metadata = vocabulary(pre="an unknown one") | {"tokenizer.chat_template": "{{ messages }}"}
    path = file(folder, LLAMA | metadata)
    byte_level().save(str(folder / "tokenizer.json"))
    if beside:
        (folder / "tokenizer_config.json").write_text(beside)
    found = AutoTokenizer.from_pretrained(unfolded(path))
    assert found.chat_template == "{{ messages }}"
    assert beside is None or found.padding_side == "left"


def test_a_tokenizer_beside_the_file_is_taken_if_it_is_the_models(folder: Path) -> None:
    path = file(folder, LLAMA | vocabulary(pre="an unknown one"))
    with pytest.raises(UnsupportedGguf, match=r"tokenizer.ggml.pre 'an unknown one' .* beside"):
        unfolded(path)
    own = byte_level()
    own.add_tokens([AddedToken("<more>")])
    own.post_processor = processors.ByteLevel()
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "beside"}')
    found = unfolded(path)
    assert (found / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert "beside" in (found / "tokenizer_config.json").read_text()
    assert not (found / "chat_template.jinja").exists()
    metaspace().save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedGguf, match=r"of another model: token .* there, .* here"):
        unfolded(path)
    panics = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    told = json.loads(byte_level().to_str()) | {"normalizer": panics}
    for broken in ("{}", json.dumps(told)):
        (folder / "tokenizer.json").write_text(broken)
        with pytest.raises(UnsupportedGguf, match=r"tokenizer\.json cannot be read"):
            unfolded(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported"),
        ({"general.architecture": 5}, "general.architecture 5 is not supported"),
        ({"split.count": 3}, "one of several files"),
        ({"general.architecture": "qwen2", "qwen2.expert_count": 8}, "mixtures of experts"),
        ({"llama.block_count": "many"}, "key llama.block_count is not a number"),
        ({"llama.attention.head_count": np.ones(3, np.int32)}, "head_count has 3 items"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor is not supported"),
        ({"llama.attention.value_length": 8}, "value_length is not that of keys"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not known here"),
        ({"tokenizer.ggml.tokens": 5}, "tokens is no list of texts"),
        ({"tokenizer.ggml.tokens": ["a"] * 400}, "'a' is there twice"),
        ({"tokenizer.ggml.tokens": ["a"] * 401}, "401 tokenizer.ggml.tokens, token_embd.weight"),
        ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, "token_type is no list of 400"),
        ({"tokenizer.ggml.merges": "a b"}, "merges is no list"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges 'a b c' is not of two tokens"),
        ({"tokenizer.ggml.merges": ["a nowhere"]}, "merges 'a nowhere' is not of two tokens"),
        ({"general.architecture": ["llama"]}, "general.architecture has 1 items"),
        ({"split.count": np.ones(2, np.int32)}, "split.count has 2 items, not one"),
        ({"llama.expert_count": np.ones(2, np.int32)}, "expert_count has 2 items"),
        ({"llama.rope.scaling.type": np.ones(2, np.int32)}, "rope.scaling.type has 2 items"),
        ({"llama.attention.head_count": 65}, "head_count 65: heads have 0 features"),
        ({"tokenizer.ggml.eos_token_id": ["a"]}, "eos_token_id has 1 items"),
        ({"tokenizer.ggml.model": np.ones(2, np.int32)}, "tokenizer.ggml.model has 2 items"),
        ({"tokenizer.ggml.pre": np.ones(2, np.int32)}, "tokenizer.ggml.pre has 2 items"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token 1 is neither true nor false"),
    ],
)
def test_what_is_not_supported_is_named(
    folder: Path, metadata: dict[str, Any], words: str, cache: Path
) -> None:
    path = file(folder, LLAMA | vocabulary() | metadata)
    with pytest.raises(FileNotFoundError, match=words) as caught:
        locate(ModelSpec(name="mine", path=str(path)))
    assert str(caught.value).startswith(f"model 'mine': {path}: ")
    assert list(cache.iterdir()) == []


def test_what_is_missing_is_named(folder: Path) -> None:
    for key in ("llama.block_count", "llama.context_length", "llama.attention.head_count"):
        metadata = {name: value for name, value in LLAMA.items() if name != key}
        with pytest.raises(UnsupportedGguf, match=f"key {key} is missing"):
            unfolded(file(folder, metadata | vocabulary()))
    path = gguf.write(folder / "a.gguf", LLAMA | vocabulary(), {})
    with pytest.raises(UnsupportedGguf, match=r"tensor token_embd.weight is missing"):
        unfolded(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        locate(ModelSpec(name="m", path=str(folder / "none.gguf")))


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(content: bytes = b"k", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def array(items: int, count: int, content: bytes = b"") -> bytes:
    return head(keys=1) + text() + struct.pack("<IIQ", 9, items, count) + content


def entry(shape: tuple[int, ...], type_: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", type_, offset)


def tensor(shape: tuple[int, ...], type_: int = 0, offset: int = 0) -> bytes:
    return head(tensors=1) + entry(shape, type_, offset) + bytes(64)


HOSTILE = {
    "empty": (b"", "ends too early"),
    "another file": (b"PK\3\4" + bytes(100), "no GGUF file"),
    "version": (head(version=1), "GGUF version 1 is not supported"),
    "other bytes": (head(version=3 << 24), "bytes lie the other way round"),
    "tensors": (head(tensors=2**60), "are more than it can have"),
    "keys": (head(keys=2**63), "are more than it can have"),
    "no keys": (head(keys=5), "ends too early"),
    "long text": (head(keys=1) + text(length=2**62), "ends too early"),
    "long value": (head(keys=1) + text() + struct.pack("<IQ", 8, 2**40), "ends too early"),
    "many numbers": (array(5, 2**61), "more than it can have"),
    "many texts": (array(8, 2**40), "more than it can have"),
    "empty texts": (array(8, 2**21 + 1, bytes(8 * (2**21 + 1))), "more than it can have"),
    "arrays in arrays": (array(9, 1), "of the type 9, which is not supported"),
    "type": (head(keys=1) + text() + struct.pack("<I", 77), "of the type 77"),
    "twice": (head(keys=2) + (text() + struct.pack("<Ib", 1, 0)) * 2, "'k' is there twice"),
    "dimensions": (tensor((1,) * 5), "'t' has 5 dimensions"),
    "no dimensions": (tensor(()), "'t' has 0 dimensions"),
    "no rows": (tensor((32, 0)), "is no whole blocks"),
    "part of a block": (tensor((33, 2), type_=2), "is no whole blocks of Q4_0"),
    "beyond the end": (tensor((8,), offset=2**40), "cut short"),
    "huge": (tensor((2**60, 2**60, 2**60, 2**60)), "cut short"),
    "unknown type": (tensor((32,), type_=999), "of the unknown type 999"),
    "not supported": (tensor((256,), type_=10), "is Q2_K; supported: F32"),
    "overlapping": (
        head(tensors=2) + entry((8,), name=b"a") + entry((8,), offset=4, name=b"b") + bytes(128),
        "tensor 'b' lies in another one",
    ),
    "alignment": (
        head(keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment 0",
    ),
}


@pytest.mark.parametrize("which", HOSTILE)
def test_hostile_files_are_refused_by_name(folder: Path, which: str) -> None:
    content, words = HOSTILE[which]
    path = folder / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedGguf, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_wherever_a_file_is_cut_it_is_told(folder: Path) -> None:
    whole = file(folder, LLAMA | vocabulary(merges=[])).read_bytes()
    path = folder / "cut.gguf"
    for kept in [*range(0, 3000, 97), len(whole) - 40]:
        path.write_bytes(whole[:kept])
        with pytest.raises(UnsupportedGguf, match=r"early|cut short|more than"):
            read_header(path)


def test_a_long_token_takes_no_long_time(folder: Path) -> None:
    """Each way of cutting it in two would be looked up: 64 MB would take hours."""
    own = pieces(metaspace())
    own["tokenizer.ggml.tokens"][-1] = "x" * 10**6
    with pytest.raises(UnsupportedGguf, match="has 1000000 characters"):
        unfolded(file(folder, LLAMA | own))


def test_a_begin_that_is_no_token_of_its_is_refused(folder: Path) -> None:
    told = vocabulary(add_bos_token=True)
    told["tokenizer.ggml.token_type"][1] = 5
    with pytest.raises(UnsupportedGguf, match="its vocabulary: "):
        unfolded(file(folder, LLAMA | told))


def test_a_text_is_not_put_around_itself(folder: Path) -> None:
    told = vocabulary(add_bos_token=True)
    told["tokenizer.ggml.tokens"][1] = "$B"
    with pytest.raises(UnsupportedGguf, match=r"texts begin or end with '\$B'"):
        unfolded(file(folder, LLAMA | told))


def test_a_vocabulary_takes_memory_of_its_size(folder: Path) -> None:
    """A file of 60 MB would be a tokenizer of gigabytes."""
    own = vocabulary()
    own["tokenizer.ggml.tokens"][1] = "x" * (2**20 + 1)
    with pytest.raises(UnsupportedGguf, match="of type 3 have more than 1048576 characters"):
        unfolded(file(folder, LLAMA | own))
    told = pieces(metaspace())
    made = ["".join(letters) for n in range(1, 17) for letters in product("ab", repeat=n)]
    told |= {
        "tokenizer.ggml.tokens": ["<unk>", *made],
        "tokenizer.ggml.token_type": np.ones(len(made) + 1, np.int32),
        "tokenizer.ggml.scores": np.zeros(len(made) + 1, np.float32),
    }
    rows: gguf.Raw = ("Q4_0", (len(made) + 1, 32), bytes(18 * (len(made) + 1)))
    with pytest.raises(UnsupportedGguf, match="make more than 1048576 merges"):
        unfolded(gguf.write(folder / "m.gguf", LLAMA | told, {"token_embd.weight": rows}))


def test_a_refusal_is_short_whatever_the_file_says(folder: Path) -> None:
    with pytest.raises(UnsupportedGguf) as caught:
        unfolded(file(folder, LLAMA | {"general.architecture": "x" * 10**6}))
    assert len(str(caught.value)) < 1000


def test_a_file_that_changes_while_it_is_read_is_told(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the folder of the one before would have what the one behind says."""
    path, read = file(folder), unfolding.read_header

    def changed(path: Path) -> Header:
        file(folder, LLAMA | vocabulary() | {"llama.block_count": 7})
        return read(path)

    monkeypatch.setattr(unfolding, "read_header", changed)
    with pytest.raises(UnsupportedGguf, match="changed while it was read"):
        unfolded(path)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("which", ["gguf", "penstock"])
def test_a_cache_that_others_may_write_to_is_not_taken(
    folder: Path, cache: Path, which: str
) -> None:
    """Whoever can read the file could have put a folder with another template there."""
    path = file(folder)
    assert unfolded(path).parent == cache
    (cache if which == "gguf" else cache.parent).chmod(0o777)
    with pytest.raises(PermissionError, match="nobody else may write there"):
        unfolded(path)


def test_a_cache_that_cannot_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "no-folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "no-folder"))
    with pytest.raises(FileNotFoundError, match=r"model 'm': .*no-folder"):
        locate(ModelSpec(name="m", path=str(file(folder))))
