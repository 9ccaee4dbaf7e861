"""The tokenizer behind the renderer: a Hugging Face fast tokenizer with what the ledger needs and nothing else."""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import TemplateError, one_line
from turnwise.errors.nearest_name import unknown

LONG = 16_384
"""Characters of a text that takes a while to encode."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids with the characters each one covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """Encodes with offsets, decodes verbatim, renders chat templates."""

    def __init__(
        self, folder: Path, template: str | None = None, *, trust_remote_code: bool = False, name: str | None = None
    ) -> None:
        """The tokenizer of a folder; errors call it `name`."""
        from transformers import (
            AutoTokenizer,
            PreTrainedTokenizerFast,
        )  # imports torch: only when a tokenizer is really needed

        from turnwise.chat.template.bounded_jinja import install

        install()
        name = name or str(folder)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of its own would only warn at every fork
        try:
            # Said aloud: where nothing is said, the library asks on the terminal whether it may run a model's code.
            self._hf: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, config=_plain_config(folder)
            )
        except Exception as error:  # the library raises whatever the first broken file makes it stumble over
            raise TemplateError(f"{name}: its tokenizer cannot be read: {one_line(error)[:300]}") from error
        if not getattr(self._hf, "is_fast", False):
            raise TemplateError(f"{name} has no fast tokenizer (tokenizer.json); token offsets need one")
        if template is not None:
            self._hf.chat_template = self._showing_images(load_template(template), folder)
        elif not self._hf.chat_template:
            self._hf.chat_template = _processor_template(folder)
        if not self._hf.chat_template:
            raise TemplateError(f"{name} has no chat template; name one with chat.template=FILE or chatml_hermes")
        self._backend: Any = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = None  # adds tokens of its own and hides white space from the offsets
        added = self._hf.added_tokens_decoder
        self.special_ids = frozenset(self._hf.all_special_ids) | {i for i, token in added.items() if token.special}
        # A token of one character could not be cut in two, and is hardly there to control anything.
        self.added_ids = {token.content: i for i, token in added.items() if len(token.content) > 1}
        self.special_texts = tuple(text for text, i in self.added_ids.items() if i in self.special_ids)
        self.end_ids = frozenset({self._hf.eos_token_id} - {None})
        self.vocab_size = len(self._hf)
        # A control token that takes nothing from its neighbours: what follows it is encoded as inside a longer text.
        hard = [token.content for token in added.values() if token.special and not (token.rstrip or token.single_word)]
        self._border = hard[0] if hard else ""
        changes = self._backend.normalizer is not None  # else a token that is looked for in normal text is as good
        plain = [t for t in added.values() if not (t.lstrip or t.rstrip or t.single_word or (t.normalized and changes))]
        self.hard_texts = tuple(token.content for token in plain if len(token.content) > 1)
        """Added tokens on either side of which text is encoded as if there were no other."""
        wrapped = type(self._hf)._decode is not PreTrainedTokenizerFast._decode
        self._decodes_itself = wrapped or type(self._hf).decode is not PreTrainedTokenizerFast.decode

    def _showing_images(self, template: str, folder: Path) -> str:
        """A template for any model, told what this model's own one writes for an image, as `shown_image`."""
        own = self._hf.chat_template or _processor_template(folder)
        if "shown_image" not in template or not own:
            return template
        picture, words = {"type": "image"}, [{"type": "text", "text": text} for text in ("hello", "there")]
        try:
            with_image, unseen = (
                self._hf.apply_chat_template([{"role": "user", "content": parts}], chat_template=own, tokenize=False)
                for parts in ([words[0], picture, words[1]], words)
            )
        except Exception:  # a template is a program of the model's authors, and may show no parts at all
            return template
        at = next(
            (i for i, (left, other) in enumerate(zip(with_image, unseen, strict=False)) if left != other), len(unseen)
        )
        added = with_image[at : at + len(with_image) - len(unseen)]
        has_token = any(token.content in added for token in self._hf.added_tokens_decoder.values())
        if not has_token or with_image != unseen[:at] + added + unseen[at:]:
            return template
        return f"{{%- set shown_image = {json.dumps(added)} -%}}{template}"

    def encode(self, text: str, *, cuts: Sequence[int] = (), after: str | None = None) -> Encoding:
        """Ids of a text in which control tokens mean what they say, except where a cut goes through them.

        `after` is the control token the text follows; "" when it follows anything else, None when it opens a sequence.
        """
        if not cuts and not after and (after is None or not self._border):
            encoded = self._encoded(text)
            return Encoding(encoded.ids, encoded.offsets)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in pairwise((0, *cuts, len(text))):
            left = self.left_of("" if start else after)
            encoded = self._encoded(left + text[start:end])
            skip, shift = (1 if left else 0), start - len(left)
            ids += encoded.ids[skip:]
            offsets += [(first + shift, last + shift) for first, last in encoded.offsets[skip:]]
        return Encoding(ids, offsets)

    def _encoded(self, text: str) -> Any:
        """As the library does it. Of a long text as of a batch, for which it lets go of the interpreter: then a thread
        that encodes keeps nobody waiting."""
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=False)
        return self._backend.encode_batch([text], add_special_tokens=False)[0]

    @functools.cached_property
    def most_characters(self) -> int | None:
        """That one token stands for at most; None for a tokenizer that leaves out white space."""
        longest = max(len(token) for token in self._backend.get_vocab())
        count = len(self._backend.encode(" " * (8 * longest), add_special_tokens=False).ids)
        composed = 1 if self._backend.normalizer is None else 4  # signs that a normaliser may make one of
        return longest * composed if count >= 8 else None

    def left_of(self, after: str | None) -> str:
        """The one token before a text that has it encoded as if it followed `after`; nothing where none is needed."""
        return self._border if after == "" else after or ""

    @property
    def hf(self) -> Any:
        """The library's own tokenizer, for code of the user's that expects one."""
        return self._hf

    @property
    def templates(self) -> dict[str, str]:
        """The chat templates in use by name; most models have the `default` one only."""
        template = self._hf.chat_template
        return {"default": template} if isinstance(template, str) else dict(template)

    def as_json(self) -> str:
        """What a tokenizer.json says, for those who only want to show tokens."""
        text: str = self._backend.to_str()
        return text

    def decode(self, ids: Sequence[int] | NDArray[np.int64]) -> str:
        """The text of ids, control tokens included, nothing cleaned up."""
        plain = ids if isinstance(ids, list) else ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._decodes_itself:
            text: str = self._hf.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        else:  # the same without looking at every id first
            text = self._backend.decode(plain, skip_special_tokens=False)
        return text

    def apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], reply: bool, kwargs: dict[str, Any]
    ) -> str:
        """The text that the chat template makes of these messages and tools."""
        text: str = self._hf.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=reply, tokenize=False, **kwargs
        )
        return text


def _processor_template(folder: Path) -> str | None:
    """The template of a model that sees, in the file in which older versions of its processor keep it."""
    path = folder / "chat_template.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise TemplateError(f"{path}: the chat template cannot be read: {one_line(error)}") from error
    text = settings.get("chat_template") if isinstance(settings, dict) else None
    return text if isinstance(text, str) else None


def occurrences(words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """(start, end) of every place where one of the words stands in a text, overlapping ones included, in order."""
    spans: set[tuple[int, int]] = set()
    for word in words:
        start = text.find(word)
        while start >= 0:
            spans.add((start, start + len(word)))
            start = text.find(word, start + 1)
    return sorted(spans)


def _plain_config(folder: Path) -> Any:
    """What a tokenizer that names its own class is chosen by, without the model's class of config; else None.

    That class can bring seconds of imports with it.
    """
    from transformers import PreTrainedConfig

    path, model = folder / "tokenizer_config.json", folder / "config.json"
    if not (path.is_file() and model.is_file()):
        return None
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not settings.get("tokenizer_class") or "auto_map" in settings:
        return None
    model_settings = json.loads(model.read_text(encoding="utf-8"))
    config = PreTrainedConfig(name_or_path=str(folder))
    for name in ("model_type", "model_name"):
        if name in model_settings:
            setattr(config, name, model_settings[name])
    return config


def load_template(name: str) -> str:
    """A template's text: a built-in name or the path of a Jinja file."""
    folder = resources.files("turnwise.chat") / "templates"
    builtin = {entry.name.removesuffix(".jinja"): entry for entry in folder.iterdir() if entry.name.endswith(".jinja")}
    if name in builtin:
        return builtin[name].read_text(encoding="utf-8")
    path = Path(name)
    try:
        if not path.is_file():
            raise TemplateError(unknown("chat template (no such file or built-in)", name, builtin))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {name}: {one_line(error)}") from error
