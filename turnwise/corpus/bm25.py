"""Okapi BM25 over texts in memory, with Lucene's idf, which is never negative.

score(query, text) = sum over the query's words w of
    ln(1 + (N - n(w) + 0.5) / (n(w) + 0.5)) * f(w) * (k1 + 1) / (f(w) + k1 * (1 - b + b * length / mean length))
with N texts, n(w) of them holding w, f(w) times in this one; a word that the query repeats counts as often.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
        for word, found in postings.items():
            where, times = np.array(found, dtype=np.int64).T
            idf = np.log(1 + (self.size - len(found) + 0.5) / (len(found) + 0.5))
            self._postings[word] = (where, idf * times * (K1 + 1) / (times + dampening[where]))

    def search(self, query: str, k: int) -> list[Hit]:
        """The best `k` texts that hold a word of the query, best first; equals in the order they were given."""
        scores = np.zeros(self.size)
        for word, times in Counter(tokenise(query)[:MOST_WORDS]).items():
            if word in self._postings:
                where, weights = self._postings[word]
                scores[where] += times * weights
        found = np.flatnonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")][: max(k, 0)]
        return [Hit(int(index), float(scores[index])) for index in best]
