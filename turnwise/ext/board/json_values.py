"""Whatever a run recorded, as JSON that a browser reads."""

import math
from typing import Any

from turnwise.storage.json_values import clean

DEEPEST = 40
LONGEST = 100_000
"""Characters of a text inside info or artifacts; the words of a conversation are never cut."""


def plain(value: Any, depth: int = 0) -> Any:
    """Any recorded value as JSON that a browser reads: no nan, no bytes, no lone surrogates, not without end."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        text = clean_text(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if depth >= DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {clean_text(str(key)): plain(entry, depth + 1) for key, entry in value.items()}
    return [plain(entry, depth + 1) for entry in value]


def plain_text(text: str | None) -> str | None:
    """A text of any length, or None."""
    return None if text is None else clean_text(text)


def clean_text(value: str) -> str:
    """A text that UTF-8 can hold; half of a surrogate pair, which a model can write as an escape, is replaced."""
    return value if value.isascii() else str(clean(value))
