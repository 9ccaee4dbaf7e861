"""A policy as others load it: weights, config, tokenizer, the chat template in use and the tokens that end a turn."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.chat.tokenizer import Tokenizer
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.errors import EngineError
from turnwise.files import replacing

TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece", "sentencepiece")
"""How the names of a tokenizer's files begin."""
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """What a saved policy holds besides its weights, read once, so that a source that goes away later is no loss."""

    files: dict[str, bytes]

    @classmethod
    def of(cls, source: Path, tokenizer: Tokenizer, end_ids: Iterable[int]) -> "PolicyFolder":
        """The companions of a model trained from `source` with this tokenizer's template; `end_ids` end its turns."""
        found = [path for path in source.iterdir() if path.name.startswith(TOKENIZER_FILES) and path.is_file()]
        try:
            files = {path.name: path.read_bytes() for path in sorted(found)}
        except OSError as error:
            raise EngineError(f"the tokenizer of {source} cannot be read: {error}") from error
        if "tokenizer_config.json" in files:
            # Where a template stands twice, readers differ in which one they believe.
            settings = _table(source / "tokenizer_config.json")
            settings.pop("chat_template", None)
            files["tokenizer_config.json"] = _json(settings)
        for name, text in tokenizer.templates.items():
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise EngineError(f"{source}: {name!r} is no name for a chat template, it must be one of a file")
            files[TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"] = text.encode()
        generation = _table(source / GENERATION) if (source / GENERATION).is_file() else {}
        ends = sorted(end_ids)
        files[GENERATION] = _json({**generation, "eos_token_id": ends[0] if len(ends) == 1 else ends or None})
        return cls(files)

    def save(self, folder: Path, model: PolicyModel) -> None:
        """Write a plain Hugging Face folder, an adapter merged."""
        model.save(folder)
        for name, content in self.files.items():
            with replacing(folder / name) as file:
                file.write(content)


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise EngineError(f"{path} must hold a JSON object, found {type(found).__name__}")
    return found


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
