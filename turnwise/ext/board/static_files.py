"""The page itself: our static files and the installed plotly, read from disk and sent with a tag to cache them by."""

import base64
import functools
import gzip
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.ext.board.runs import NotFound

STATIC = Path(__file__).parent / "static"
INSTALL = 'pip install "turnwise[board]"'
_NAME = re.compile(r"(?:[A-Za-z0-9_-]+/){0,4}[A-Za-z0-9_-]+\.(js|css|svg|png|woff2|html)", re.ASCII)
_TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
    "html": "text/html; charset=utf-8",
}
_INLINE = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file to send: its bytes, their media type, and a tag that changes with them."""

    content: bytes
    media_type: str
    tag: str
    gzipped: bool = False


def static_file(name: str) -> Asset:
    """A file of the page; NotFound for every name that is not one."""
    match = _NAME.fullmatch(name)
    path = STATIC / name
    if match is None or not path.is_file():
        raise NotFound(f"there is no {name[:200]!r} here")
    content = path.read_bytes()
    return Asset(content, _TYPES[match[1]], _tag(content))


def inline_hashes() -> list[str]:
    """The sha256 of the inline scripts of index.html, for the content security policy."""
    text = static_file("index.html").content.decode("utf-8")
    bodies = [body for attributes, body in _INLINE.findall(text) if "src=" not in attributes.lower()]
    return [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]


def plotly_path() -> Path:
    """The installed plotly.min.js; the package is found, not imported, which would take a while."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise ConfigError(f"the board needs plotly: {INSTALL}")


@functools.cache
def plotly(zipped: bool) -> Asset:
    """plotly.min.js, zipped once for all."""
    content = plotly_path().read_bytes()
    tag = _tag(content)
    if zipped:
        return Asset(gzip.compress(content, 6, mtime=0), _TYPES["js"], tag[:-1] + '-gzip"', gzipped=True)
    return Asset(content, _TYPES["js"], tag)


def _tag(content: bytes) -> str:
    return f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
