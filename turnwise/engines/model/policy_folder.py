"""A policy as others load it: weights, config, tokenizer, the chat template in use and the tokens that end a turn."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.chat.tokenizer import Tokenizer
from turnwise.engines.model import gguf_file
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.sources import ModelSource
from turnwise.errors import EngineError
from turnwise.system.files import replacing

TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece", "sentencepiece")
"""How the names of a tokenizer's files begin."""
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
GENERATION = "generation_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""How a model that sees prepares images."""


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """What a saved policy holds besides its weights, read once, so that a source that goes away later is no loss."""

    files: dict[str, bytes]

    @classmethod
    def of(cls, source: ModelSource, tokenizer: Tokenizer, end_ids: Iterable[int]) -> "PolicyFolder":
        """The companions of a model trained from `source` with this tokenizer's template; `end_ids` end its turns."""
        files = _tokenizer_files(source)
        if "tokenizer_config.json" in files:
            # Where a template stands twice, readers differ in which one they believe.
            settings = _table(files["tokenizer_config.json"], f"{source.path}: tokenizer_config.json")
            settings.pop("chat_template", None)
            files["tokenizer_config.json"] = _json(settings)
        for name, text in tokenizer.templates.items():
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise EngineError(f"{source.path}: {name!r} is not a name for a chat template; it must be a file name")
            files[TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"] = text.encode()
        generation: dict[str, Any] = {}
        if source.gguf_file is None and (source.folder / GENERATION).is_file():
            generation = _table(_content(source.folder / GENERATION), str(source.folder / GENERATION))
        ends = sorted(end_ids)
        files[GENERATION] = _json({**generation, "eos_token_id": ends[0] if len(ends) == 1 else ends or None})
        return cls(files)

    def save(self, folder: Path, model: PolicyModel) -> None:
        """Write a plain Hugging Face folder, an adapter merged."""
        model.save(folder)
        self.save_files(folder)

    def save_files(self, folder: Path) -> None:
        """What goes beside the weights."""
        for name, content in self.files.items():
            with replacing(folder / name) as file:
                file.write(content)


def _tokenizer_files(source: ModelSource) -> dict[str, bytes]:
    """The tokenizer as files, and the image processor; with them the Python files that a model we trust brings."""
    if source.gguf_file is not None:
        # Templates are written from the tokenizer in use.
        files = gguf_file.tokenizer_files(source.path)
        return {name: content for name, content in files.items() if not name.endswith(".jinja")}
    try:
        paths = [
            path for path in sorted(source.folder.iterdir())
            if path.is_file()
            and (path.name.startswith(TOKENIZER_FILES) or path.name in PROCESSOR_FILES or _is_own_code(source, path))
        ]  # fmt: skip
    except OSError as error:
        raise EngineError(f"the tokenizer of {source.folder} cannot be read: {error}") from error
    return {path.name: _content(path) for path in paths}


def _is_own_code(source: ModelSource, path: Path) -> bool:
    return source.trust_remote_code and path.suffix == ".py" and not path.name.startswith("_")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}") from error


def _table(content: bytes, where: str) -> dict[str, Any]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise EngineError(f"{where} must hold a JSON object, found {type(table).__name__}")
    return table


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
