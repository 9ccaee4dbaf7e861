"""The tokenizer behind the renderer: a Hugging Face fast tokenizer with what the ledger needs and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from turnwise.errors import TemplateError, unknown


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids with the characters each one covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """Encodes with offsets, decodes verbatim, renders chat templates."""

    def __init__(self, folder: Path, template: str | None = None) -> None:
        from transformers import AutoTokenizer  # imports torch: only when a tokenizer is really needed

        self._hf: Any = AutoTokenizer.from_pretrained(folder)
        if not getattr(self._hf, "is_fast", False):
            raise TemplateError(f"{folder} has no fast tokenizer (tokenizer.json); token offsets need one")
        if template is not None:
            self._hf.chat_template = load_template(template)
        if not self._hf.chat_template:
            raise TemplateError(f"{folder} has no chat template; name one with chat.template=FILE or chatml_hermes")
        self.special_ids = frozenset(self._hf.all_special_ids) | {
            index for index, token in self._hf.added_tokens_decoder.items() if token.special
        }
        self._special_texts = tuple(self._hf.convert_ids_to_tokens(sorted(self.special_ids)))
        self.end_ids = frozenset({self._hf.eos_token_id} - {None})
        self.vocab_size = len(self._hf)

    def encode(self, text: str) -> Encoding:
        """Ids of a text in which control tokens mean what they say."""
        encoded = self._hf(text, add_special_tokens=False, return_offsets_mapping=True)
        return Encoding(encoded["input_ids"], encoded["offset_mapping"])

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text whose control tokens are mere characters."""
        ids: list[int] = self._hf(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included, nothing cleaned up."""
        text: str = self._hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def has_special(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return any(special in text for special in self._special_texts)

    def apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], reply: bool, kwargs: dict[str, Any]
    ) -> str:
        """The chat template's text."""
        text: str = self._hf.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=reply, tokenize=False, **kwargs
        )
        return text


def load_template(name: str) -> str:
    """A template's text: a built-in name or the path of a Jinja file."""
    folder = resources.files("turnwise.chat") / "templates"
    builtin = {entry.name.removesuffix(".jinja"): entry for entry in folder.iterdir() if entry.name.endswith(".jinja")}
    if name in builtin:
        return builtin[name].read_text(encoding="utf-8")
    path = Path(name)
    if not path.is_file():
        raise TemplateError(unknown("chat template (no such file or built-in)", name, builtin))
    return path.read_text(encoding="utf-8")
