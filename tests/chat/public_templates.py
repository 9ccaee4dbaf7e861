"""Chat templates of models in use, as TRL ships them, each with a small tokenizer that has its control tokens."""

import importlib.util
import re
from pathlib import Path

from chat_families import _byte_level
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

_CONTROL = re.compile(
    r"<[|][^<>\s'\"{}]{1,40}[|]?>|<[a-z_:]+[|]>|<[|]\"[|]>|</?(?:think|tool_call|tool_response)>|<sop>"
)
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_ENDS = ("<|im_end|>", "<turn|>", "<|return|>", "<|eot_id|>", "<|user|>")


def template_names() -> list[str]:
    """Of all that models come with; those that TRL made for training are left out."""
    return sorted(path.stem for path in _folder().glob("*.jinja") if not path.stem.endswith("_training"))


def template_source(name: str) -> str:
    """The template of this name."""
    return (_folder() / f"{name}.jinja").read_text(encoding="utf-8")


def save_tokenizer(name: str, folder: Path) -> Path:
    """The tokenizer with the template of this name."""
    text, backend = template_source(name), _byte_level()
    end = next((token for token in _ENDS if token in text), "</s>")
    for token in sorted({*_CONTROL.findall(text), end}):
        backend.add_tokens([AddedToken(token, special=token not in _PLAIN, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token=None)
    wrapped.chat_template = text
    wrapped.save_pretrained(folder)
    return folder


def _folder() -> Path:
    found = importlib.util.find_spec("trl")  # not imported: that takes seconds
    assert found is not None and found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / "chat_templates"
