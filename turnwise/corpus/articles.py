"""Articles to search in: the shipped ones, or a user's own in jsonl files, with their index."""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.corpus.bm25 import Bm25
from turnwise.errors import DataError

SHIPPED = Path(__file__).with_name("articles.json")
MOST_ID = 80
"""Characters of an id: it is read and cited by the model."""


@dataclass(frozen=True, slots=True)
class Article:
    """One text: `Article("T004", "Klaeskun", "Klaeskun is a town on River Tranaern. ...")`."""

    id: str
    title: str
    text: str
    kind: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    """Of the shipped ones: what each relation leads to."""


class Corpus:
    """Articles by id, and the search over titles and texts."""

    def __init__(self, articles: Sequence[Article]) -> None:
        self.articles = list(articles)
        self.by_id = {article.id: article for article in self.articles}
        self._index = Bm25(f"{article.title}\n{article.text}" for article in self.articles)

    def search(self, query: str, k: int) -> list[tuple[Article, float]]:
        """The best articles with their scores."""
        return [(self.articles[hit.index], hit.score) for hit in self._index.search(query, k)]


@functools.cache
def shipped() -> Corpus:
    """The invented world; made once in a process."""
    return Corpus([Article(**article) for article in json.loads(SHIPPED.read_text("utf-8"))])


def open_corpus(files: Sequence[str | Path] = ()) -> Corpus:
    """The articles of jsonl files, or the shipped ones when none is named."""
    if not files:
        return shipped()
    articles: dict[str, Article] = {}
    for path in map(Path, files):
        for where, article in _read(path):
            if article.id in articles:
                raise DataError(f"{where}: the id {article.id!r} stands twice")
            articles[article.id] = article
    if not articles:
        raise DataError(f"{', '.join(map(str, files))}: no articles")
    return Corpus(list(articles.values()))


def _read(path: Path) -> Iterator[tuple[str, Article]]:
    try:
        with path.expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _article(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _article(line: str, where: str) -> Article:
    """{"id", "title", "text"}, or {"id", "contents"} with the title in its first line, as retrieval corpora have it."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f'{where}: expected {{"id", "title", "text"}}')
    if isinstance(values.get("contents"), str) and "text" not in values:
        title, _, text = values["contents"].partition("\n")
        values = {"title": title.strip().strip('"'), **values, "text": text}
    found: dict[str, str] = {}
    for name in ("id", "title", "text"):
        value = values.get(name)
        if name == "id" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise DataError(f"{where}: needs the text {name!r}; it has {', '.join(map(str, values))[:200]}")
        found[name] = value
    if not found["id"].strip() or len(found["id"]) > MOST_ID or set(found["id"]) & set("[]\n"):
        raise DataError(f"{where}: an id has 1 to {MOST_ID} characters and no brackets: it is cited as [id]")
    return Article(found["id"], found["title"], found["text"])
