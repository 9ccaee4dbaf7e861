"""Comparing text with a ground truth: `exact_match` by character, `text_match` by words, `search_qa` as the
searchR1 data sources want it."""

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from turnwise.errors import ConfigError, DataError
from turnwise.scoring.client_options import client_options
from turnwise.scoring.rules.boxes_and_tags import tagged
from turnwise.scoring.scorer import Score
from turnwise.types import Sample, Trajectory

MAX_CHARS = 1000
"""A longer answer is no answer: it could hold every word there is."""
TRUTHS = ("target", "answers", "aliases")
"""Keys under which a ground truth that is a mapping holds its texts."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "“”‘’«»–—…¿¡", ""))


async def exact_match(trajectory: Trajectory) -> float:
    """1 when the last assistant message, reasoning and calls left out, equals the ground truth; outer space is free."""
    truth = text_of(trajectory.sample)
    return float(bool(trajectory.answers) and trajectory.answers[-1].visible.strip() == truth.strip())


@client_options("how", "tag", "ignore_case", "ignore_punctuation", "ignore_articles", "max_chars", "no_answer")
async def text_match(
    trajectory: Trajectory,
    *,
    how: Literal["exact", "inclusion", "f1"] = "exact",
    tag: str | None = None,
    ignore_case: bool = True,
    ignore_punctuation: bool = True,
    ignore_articles: bool = True,
    max_chars: int = MAX_CHARS,
    no_answer: float = 0.0,
) -> Score:
    """Compares the last assistant message, reasoning and calls left out, with the ground truth or the best of several.

    `exact`: all words are the same; `inclusion`: the truth's words stand in the answer in a row; `f1`: the share of
    common words. With `tag` only the last <tag>...</tag> is the answer. Parts: `acc` is 1 for a full match, `match`
    what was measured, `format` is 1 when there is an answer of at most `max_chars` characters.
    """
    if how not in MEASURES:
        raise ConfigError(f"scoring.options, scorer text_match: how must be one of {', '.join(MEASURES)}, not {how!r}")
    clean = functools.partial(
        words, ignore_case=ignore_case, ignore_punctuation=ignore_punctuation, ignore_articles=ignore_articles
    )
    truths = [clean(truth) for truth in texts_of(trajectory.sample)]
    answer = find_answer(trajectory.turns[-1].message.visible if trajectory.turns else "", tag, max_chars)
    if answer is None:
        return Score(no_answer, {"acc": 0.0, "match": 0.0, "format": 0.0})
    answer_words = clean(answer)
    score = max(MEASURES[how](answer_words, truth) for truth in truths)
    return Score(score, {"acc": float(score == 1.0), "match": score, "format": 1.0})


@client_options("max_chars")
async def search_qa(trajectory: Trajectory, *, max_chars: int = MAX_CHARS) -> Score:
    """1 when the last <answer> of the last assistant message equals one of the truths, word by word."""
    return await text_match(trajectory, tag="answer", max_chars=max_chars)


def find_answer(text: str, tag: str | None, max_chars: int) -> str | None:
    """The answer; None when there is none, or too much of it."""
    if tag is not None:
        inside = tagged(text, tag)
        text = inside[-1] if inside else ""
    text = text.strip()
    return text if 0 < len(text) <= max_chars else None


def words(text: str, *, ignore_case: bool, ignore_punctuation: bool, ignore_articles: bool) -> list[str]:
    """The words that are compared. Full-width letters and the like become plain ones."""
    text = unicodedata.normalize("NFKC", text)
    if ignore_case:
        text = text.casefold()
    if ignore_punctuation:
        text = text.translate(_PUNCTUATION)
    if ignore_articles:
        text = _ARTICLES.sub(" ", text)
    return text.split()


def exact(answer: list[str], truth: list[str]) -> float:
    """1 when all words are the same."""
    return float(answer == truth)


def inclusion(answer: list[str], truth: list[str]) -> float:
    """1 when the truth's words stand in the answer in a row."""
    size = len(truth)
    return float(size > 0 and any(answer[start : start + size] == truth for start in range(len(answer) - size + 1)))


def f1(answer: list[str], truth: list[str]) -> float:
    """The harmonic mean of precision and recall of the words, each counted as often as it occurs."""
    if not answer or not truth:
        return float(answer == truth)
    common = sum((Counter(answer) & Counter(truth)).values())
    return 2 * common / (len(answer) + len(truth))


MEASURES = {"exact": exact, "inclusion": inclusion, "f1": f1}


def text_of(sample: Sample) -> str:
    """The ground truth, a text or a whole number."""
    truth = sample.ground_truth
    if not isinstance(truth, str | int) or isinstance(truth, bool):
        raise DataError(f"sample {sample.id!r}: exact_match needs a text as ground truth, not {truth!r:.80}")
    return str(truth)


def texts_of(sample: Sample) -> list[str]:
    """The ground truth's texts: a text, a number, a list of these, or a mapping with them under `target`."""
    truth: Any = sample.ground_truth
    if isinstance(truth, Mapping):
        truth = next((truth[key] for key in TRUTHS if key in truth), None)
    entries = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not entries or not all(
        isinstance(entry, str | int | float) and not isinstance(entry, bool) for entry in entries
    ):
        excerpt = repr(sample.ground_truth)[:80]
        wanted = "a text, a list of texts, or a mapping with them under 'target'"
        raise DataError(
            f"sample {sample.id!r}: the ground truth of {sample.data_source!r} must be {wanted}, not {excerpt}"
        )
    return [str(entry) for entry in entries]
