"""Articles to search in: the shipped ones, or a user's own in jsonl files, with their index.

The index is Okapi BM25 over texts in memory, with Lucene's idf, which is never negative:
score(query, text) = sum over the query's words w of
    ln(1 + (N - n(w) + 0.5) / (n(w) + 0.5)) * f(w) * (k1 + 1) / (f(w) + k1 * (1 - b + b * length / mean length))
with N texts, n(w) of them holding w, f(w) times in this one; a word that the query repeats counts as often.
"""

import functools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
                raise DataError(f"{where}: the id {article.id!r} appears twice")
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
    fields: dict[str, str] = {}
    for name in ("id", "title", "text"):
        value = values.get(name)
        if name == "id" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise DataError(f"{where}: needs the text {name!r}; it has {', '.join(map(str, values))[:200]}")
        fields[name] = value
    if not fields["id"].strip() or len(fields["id"]) > MOST_ID or set(fields["id"]) & set("[]\n"):
        raise DataError(f"{where}: an id has 1 to {MOST_ID} characters and no brackets: it is cited as [id]")
    return Article(fields["id"], fields["title"], fields["text"])


K1, B = 1.2, 0.75
MOST_WORDS = 256
"""Of a query; the rest is not looked for."""
_WORD = re.compile(r"\w+")


def tokenise(text: str) -> list[str]:
    """Words and numbers in small letters, accents and full-width forms made plain."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return _WORD.findall("".join(letter for letter in plain if not unicodedata.combining(letter)))


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that was found: its place in the list, and its score."""

    index: int
    score: float


class Bm25:
    """The index: for each word the texts that hold it, with what the word adds to each one's score."""

    def __init__(self, texts: Iterable[str]) -> None:
        postings: dict[str, list[tuple[int, int]]] = {}
        lengths: list[int] = []
        for number, text in enumerate(texts):
            words = tokenise(text)
            lengths.append(len(words))
            for word, times in Counter(words).items():
                postings.setdefault(word, []).append((number, times))
        self.size = len(lengths)
        length = np.array(lengths, dtype=np.float64)
        mean = float(length.mean()) if lengths else 0.0
        dampening = K1 * (1 - B + B * length / mean) if mean else np.zeros(self.size)
        self._postings: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        for word, entries in postings.items():
            where, times = np.array(entries, dtype=np.int64).T
            idf = np.log(1 + (self.size - len(entries) + 0.5) / (len(entries) + 0.5))
            self._postings[word] = (where, idf * times * (K1 + 1) / (times + dampening[where]))

    def search(self, query: str, k: int) -> list[Hit]:
        """The best `k` texts that hold a word of the query, best first; equals in the order they were given."""
        scores = np.zeros(self.size)
        for word, times in Counter(tokenise(query)[:MOST_WORDS]).items():
            if word in self._postings:
                where, weights = self._postings[word]
                scores[where] += times * weights
        matches = np.flatnonzero(scores)
        best = matches[np.argsort(-scores[matches], kind="stable")][: max(k, 0)]
        return [Hit(int(index), float(scores[index])) for index in best]
