"""GGUF files: what their header says, what transformers would leave unread in it, and their tokenizer as files."""

import functools
import importlib.metadata
import importlib.util
import json
import math
import mmap
import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import EngineError, one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

READER = (5, 22)
"""The first transformers whose reading of tokenizers in GGUF files was compared with the originals here."""
MAGIC = b"GGUF"
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""How the numbers of a header are stored, by the number of their kind."""
STRING, ARRAY = 8, 9
LONG = 256
"""Longer lists, such as the vocabulary, are counted and not kept."""
MOST_ENTRIES, MOST_BYTES = 1 << 16, 1 << 28
"""More is no header of a model: weights, or nothing at all, would be read as one for hours."""
LOST_TENSORS = ("rope_freqs", "rope_factors")
"""Tensors that change the numbers and have no place in a transformers model, which leaves them out without a word."""
READ_ELSEWHERE = {"gpt-oss": ("rope.scaling.",)}
"""Keys that transformers reads outside its table."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its weights: its keys and values, and the names of its tensors."""

    values: dict[str, Any]
    """A list longer than LONG is only counted, in `lengths`."""
    lengths: dict[str, int]
    tensors: tuple[str, ...]
    numbers: int
    """Of all tensors together."""

    @property
    def architecture(self) -> str:
        """The model's architecture as the file names it: `llama`, `qwen2`, ..."""
        return str(self.values.get("general.architecture"))

    def own(self) -> dict[str, Any]:
        """The keys of its architecture, such as `block_count`, without their prefix."""
        prefix = self.architecture + "."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}


def read_header(path: Path) -> GgufHeader:
    """The header of a file; its weights are not touched."""
    try:
        stat = path.stat()
        return _read_header(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error


@functools.lru_cache(maxsize=4)
def _read_header(path: Path, changed: int, size: int) -> GgufHeader:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except (struct.error, UnicodeDecodeError, ValueError, MemoryError) as error:
        raise EngineError(f"{path} is not a readable GGUF file: {one_line(error)}") from error


class _Cursor:
    """A place in a header that moves on as it is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3 in this machine's byte order")
        count, entries = self._unpack("QQ")
        if max(count, entries) > MOST_ENTRIES:
            raise ValueError(f"it says it holds {entries} keys and {count} tensors")
        values: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for _ in range(entries):
            key = self._string()
            value, length = self._value(*self._unpack("I"))
            if length is not None:
                lengths[key] = length
            if value is not None:
                values[key] = value
        names, numbers = [], 0
        for _ in range(count):
            names.append(self._string())
            (axes,) = self._unpack("I")
            *shape, _, _ = self._unpack(f"{axes}QIQ")
            numbers += math.prod(shape)
        return GgufHeader(values, lengths, tuple(names), numbers)

    def _value(self, kind: int) -> tuple[Any, int | None]:
        """(a value, its length when it is a list); a long list has no value."""
        if kind == STRING:
            return self._string(), None
        if kind != ARRAY:
            return self._unpack(_format(kind))[0], None
        kind, length = self._unpack("IQ")
        if length <= LONG:
            texts = kind == STRING
            return [self._string() if texts else self._unpack(_format(kind))[0] for _ in range(length)], length
        if kind == STRING:
            for _ in range(length):
                self._skip_string()
        else:
            self._skip(length * struct.calcsize("<" + _format(kind)))
        return None, length

    def _unpack(self, kinds: str) -> tuple[Any, ...]:
        start = self.at
        self._skip(struct.calcsize("<" + kinds))
        return struct.unpack_from("<" + kinds, self.data, start)

    def _string(self) -> str:
        start = self.at + 8
        self._skip_string()
        return self.data[start : self.at].decode()

    def _skip_string(self) -> None:
        (length,) = self._unpack("Q")
        self._skip(length)

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > min(len(self.data), MOST_BYTES):
            raise ValueError("it ends within its header, or has no valid one")


def _format(kind: int) -> str:
    if kind not in FORMATS:
        raise ValueError(f"it holds a value of the unknown kind {kind}")
    return FORMATS[kind]


def check_reader() -> None:
    """Refuse where what reads such files is not installed, or is too old to split text as the file's model does."""
    installed = importlib.metadata.version("transformers")
    if importlib.util.find_spec("gguf") is None or tuple(map(int, installed.split(".")[:2])) < READER:
        least = ".".join(map(str, READER))
        raise EngineError(
            f"GGUF files need the extra `gguf` (with transformers {least} or newer, here is {installed}): "
            "pip install 'turnwise[gguf]'"
        )


def config_of(path: Path) -> dict[str, Any]:
    """The config.json that transformers makes of a header by its table; the bare architecture where it has no table.

    Whatever changes the numbers and is not in the table is refused, because transformers goes on without it.
    """
    from transformers.integrations import GGUF_CONFIG_MAPPING

    header = read_header(path)
    # `qwen3moe` and `gpt-oss` there are `qwen3_moe` and `gpt_oss` here.
    names = {re.sub(r"[-_]", "", name): name for name in GGUF_CONFIG_MAPPING}
    model_type = names.get(re.sub(r"[-_]", "", header.architecture))
    lost = [name for name in header.tensors if name.startswith(LOST_TENSORS)]
    if lost:
        raise EngineError(
            f"{path} holds {lost[0]}, scaled rotary positions that transformers loses when it reads a GGUF file; "
            "take the model's safetensors"
        )
    if model_type is None:
        return {"model_type": header.architecture}
    own, table = header.own(), GGUF_CONFIG_MAPPING[model_type]
    _refuse_unread(path, own, table, READ_ELSEWHERE.get(header.architecture, ()))
    raw: dict[str, Any] = {name: own[key] for key, name in table.items() if name and name != -1 and key in own}
    for token in ("bos", "eos"):
        raw[f"{token}_token_id"] = header.values.get(f"tokenizer.ggml.{token}_token_id")
    raw["pad_token_id"] = header.values.get("tokenizer.ggml.padding_token_id")
    raw.setdefault("vocab_size", header.lengths.get("tokenizer.ggml.tokens"))
    tied = "output.weight" not in header.tensors
    return {"model_type": model_type, "tie_word_embeddings": tied, **raw}


def _refuse_unread(path: Path, own: dict[str, Any], table: dict[str, Any], elsewhere: tuple[str, ...]) -> None:
    heads, hidden = own.get("attention.head_count"), own.get("embedding_length")
    width = hidden // heads if isinstance(heads, int) and heads and isinstance(hidden, int) else None
    head_dim = own.get("rope.dimension_count", width)
    said_already = {
        "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "attention.causal": True,
        "attention.key_length": head_dim, "attention.value_length": own.get("attention.key_length", head_dim),
        "rope.dimension_count": own.get("attention.key_length", width), "rope.scaling.attn_factor": 1.0,
    }  # fmt: skip
    unread = [
        f"{key}={value}" for key, value in own.items()
        if key not in table and value and said_already.get(key) != value and not key.startswith(elsewhere or ("\0",))
    ]  # fmt: skip
    if unread:
        raise EngineError(
            f"{path} says {', '.join(sorted(unread)[:4])}, which transformers does not read from a GGUF file and which "
            "may change the model's numbers; take the model's safetensors"
        )


def notices(path: Path) -> tuple[str, ...]:
    """What a person should know of how the file is read."""
    split = read_header(path).values.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = json.loads(tokenizer_files(path)["tokenizer.json"])["pre_tokenizer"] or {}
    if split in ("default", "gpt-2") or pre_tokenizer.get("type") != "ByteLevel":
        return ()
    return (
        f"{path.name} has the pre-tokenizer {split!r}, which transformers does not know: text is split as for GPT-2",
    )


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer and the chat template of a file as those of a Hugging Face folder, by name."""
    check_reader()
    stat = path.stat()
    return _tokenizer_files(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)
def _tokenizer_files(path: Path, changed: int, size: int) -> dict[str, bytes]:
    """Made once: the whole vocabulary goes through Python word by word, which takes seconds."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        try:
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False).save_pretrained(
                folder
            )
        except Exception as error:  # the library raises whatever the first broken entry makes it stumble over
            raise EngineError(f"{path}: its tokenizer cannot be read: {one_line(error)[:300]}") from error
        files = [file for file in sorted(Path(folder).rglob("*")) if file.is_file()]
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def dequantised(path: Path, dtype: "torch.dtype", **options: Any) -> "PreTrainedModel":
    """The transformers model of a file as if it had been read from plain weights: trained and saved like any other."""
    import transformers

    check_reader()
    if packed := getattr(transformers, "GgufConfig", None):  # newer ones may leave weights as they are in the file
        options["quantization_config"] = packed(dequantize=True)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True, trust_remote_code=False,
            output_loading_info=True, **options,
        )  # fmt: skip
    except Exception as error:  # the library raises whatever the first broken entry makes it stumble over
        raise EngineError(f"{path} cannot be read: {one_line(error)[:300]}") from error
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    if lacking := sorted(set(info["missing_keys"]) - tied):
        raise EngineError(f"{path} lacks the tensors {', '.join(lacking[:5])}")
    model.hf_quantizer = None
    model.is_quantized = False
    model._weight_conversions = None  # of the names in the file, which are not those to be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain: PreTrainedModel = model
    return plain
