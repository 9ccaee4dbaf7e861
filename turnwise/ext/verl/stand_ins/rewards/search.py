"""Stand-in for verl.utils.reward_score.search_r1_like_qa_em: the last <answer> equals one of the truths."""

import re
import string
from collections.abc import Sequence
from typing import Any

MOST_TAGS = 10
"""An answer among more of them is worth a quarter."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation, articles and extra space."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def extract_solution(solution_str: str) -> str | None:
    """The last answer in <answer> tags; None without one."""
    answers = _ANSWER.findall(solution_str)
    return answers[-1].strip() if answers else None


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """1 when one of the truths is the prediction."""
    return int(normalize_answer(prediction) in _truths(golden_answers))


def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """1 when one of the truths stands in the prediction."""
    normalized = normalize_answer(prediction)
    return int(any(truth in normalized for truth in _truths(golden_answers)))


def _truths(answers: str | Sequence[str]) -> list[str]:
    return [normalize_answer(answer) for answer in ([answers] if isinstance(answers, str) else answers)]


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for a truth, `format_score` for another answer, 0 for none."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    return score / 4 if max(map(solution_str.count, ("<answer>", "</answer>"))) > MOST_TAGS else score


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """The same where the truth need only stand in the answer."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    return score if subem_check(answer, ground_truth["target"]) else format_score
