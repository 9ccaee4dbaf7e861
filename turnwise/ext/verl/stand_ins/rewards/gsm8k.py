"""Stand-in for verl.utils.reward_score.gsm8k."""

from typing import Any

from turnwise.scoring.rules.gsm8k import extract_flexible, extract_strict


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number that verl's rule finds."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be strict or flexible, not {method!r}")
    return extract_strict(solution_str) if method == "strict" else extract_flexible(solution_str)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the ground truth, `format_score` for another number, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
