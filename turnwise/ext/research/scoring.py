"""The `cited_answer` scorer: the words of an answer compared with the truth, and its citations with the evidence."""

import re
from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.scoring.client_options import client_options
from turnwise.scoring.rules.text_match import MAX_CHARS, exact, f1, find_answer, texts_of, words
from turnwise.scoring.scorer import Score
from turnwise.types import CallStatus, Sample, Trajectory

_CITATION = re.compile(r"\[([^\[\]\n]{1,80})\]")


@client_options("citation_weight", "tag", "max_chars")
async def cited_answer(
    trajectory: Trajectory, *, citation_weight: float = 0.2, tag: str = "answer", max_chars: int = MAX_CHARS
) -> Score:
    """(1 - citation_weight) * F1 of the answer's words + citation_weight * F1 of its citations; nothing without answer.

    The answer is the last <tag>...</tag> of the last assistant message, citations are its [ids]. One is right when it
    is part of the evidence and a tool of this episode has shown it: what was never read cannot be cited. The ground
    truth is {"target": text or texts, "evidence": [ids]}. Parts: `acc` is 1 when all words are the same, `f1`,
    `citation_precision`, `citation_recall`, and `format`, 1 when there is an answer.
    """
    if not 0 <= citation_weight <= 1:
        raise ConfigError(
            f"scoring.options, scorer cited_answer: citation_weight is from 0 to 1, not {citation_weight}"
        )
    evidence = evidence_of(trajectory.sample)
    truths = [_words(truth) for truth in texts_of(trajectory.sample)]
    message = trajectory.turns[-1].message.visible if trajectory.turns else ""
    answer = find_answer(message, tag, max_chars)
    if answer is None:
        nothing = ("acc", "f1", "citation_precision", "citation_recall", "format")
        return Score(0.0, dict.fromkeys(nothing, 0.0))
    words = _words(_CITATION.sub(" ", answer))
    matched = max(f1(words, truth) for truth in truths)
    precision, recall = citation_quality(citations(message), evidence & shown_ids(trajectory), len(evidence))
    both = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    parts = {
        "acc": max(exact(words, truth) for truth in truths),
        "f1": matched,
        "citation_precision": precision,
        "citation_recall": recall,
        "format": 1.0,
    }
    return Score((1 - citation_weight) * matched + citation_weight * both, parts)


def citations(text: str) -> set[str]:
    """The ids that a text cites in square brackets."""
    return {citation.strip() for citation in _CITATION.findall(text)}


def shown_ids(trajectory: Trajectory) -> set[str]:
    """The ids of all that the tools of an episode have shown, by their records."""
    records = (call.info.get("ids") for call in trajectory.calls if call.status is CallStatus.OK)
    return {str(entry) for ids in records if isinstance(ids, list) for entry in ids}


def citation_quality(cited: set[str], right: set[str], wanted: int) -> tuple[float, float]:
    """(share of the citations that are right, share of the `wanted` evidence that is cited)."""
    hits = len(cited & right)
    return hits / len(cited) if cited else 0.0, hits / wanted


def evidence_of(sample: Sample) -> set[str]:
    """The ids that an answer should cite."""
    truth: Any = sample.ground_truth
    evidence = truth.get("evidence") if isinstance(truth, Mapping) else None
    if not isinstance(evidence, list | tuple) or not evidence or not all(isinstance(item, str) for item in evidence):
        raise DataError(
            f"sample {sample.id!r}: cited_answer needs {{'target': ..., 'evidence': [ids]}} as ground truth, "
            f"not {sample.ground_truth!r:.80}"
        )
    return set(evidence)


def _words(text: str) -> list[str]:
    return words(text, ignore_case=True, ignore_punctuation=True, ignore_articles=True)
