"""Names and passwords in the addresses of a text, which no message shows."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "(secret)"
_USERINFO = re.compile(r"https?:[/\\]+[^/\\?#\s]*@|[a-z][a-z0-9+.-]*://[^/?#\s@:]*:[^/?#\s]*@", re.IGNORECASE)
"""Of HTTP any name before the host, of other schemes (ssh://git@host) one with a password."""
_IN_A_LINE = re.compile(r"(:[/\\]{1,3})(?:[^\s/@:]*:\S*|[^\s/]*)@")
"""As much of a message as may be one: a password may have slashes in it, and then nothing is where it belongs."""
_ALONE = re.compile(r"(:[/\\]{1,3}).*@", re.DOTALL)


def has_userinfo(text: str) -> bool:
    """Whether an address in this text has a name or a password before its host."""
    try:
        return _USERINFO.search(text) is not None or ("@" in urlsplit(text).netloc and text[:4].lower() == "http")
    except ValueError:  # no address
        return False


def without_userinfo(text: str, *, alone: bool = False) -> str:
    """A message as it may be shown: `http://(secret)@host`; `alone`: an address and nothing else."""
    return (_ALONE if alone else _IN_A_LINE).sub(rf"\1{HIDDEN}@", text)


def texts_with_userinfo(value: Any, key: str) -> Iterator[str]:
    """The keys of such texts in a value, however deep they lie."""
    if isinstance(value, str):
        if has_userinfo(value):
            yield key
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_with_userinfo(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_with_userinfo(inner, key)
