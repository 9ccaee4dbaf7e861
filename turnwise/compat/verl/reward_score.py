"""Stand-in for verl.utils.reward_score: scoring by data source, for the sources whose rules are ours too."""

from typing import Any

from turnwise.compat.verl.reward_gsm8k import compute_score as gsm8k_score
from turnwise.scoring.boxed import boxes
from turnwise.scoring.text_match import MAX_CHARS, find_answer, texts_of, words
from turnwise.types import Sample

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_WORDS = {"ignore_case": True, "ignore_punctuation": True, "ignore_articles": True}


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float:
    """What a solution is worth by the rule of its source; NotImplementedError where we have none, as in verl."""
    if data_source == "openai/gsm8k":
        return gsm8k_score(solution_str, ground_truth)
    if data_source in MATH:
        found = boxes(solution_str)
        return float(bool(found) and "".join(found[-1].split()) == "".join(str(ground_truth).split()))
    if data_source.startswith("searchR1_"):
        answer = find_answer(solution_str, "answer", MAX_CHARS)
        truths = texts_of(Sample("", (), data_source, ground_truth))
        return float(answer is not None and any(words(answer, **_WORDS) == words(one, **_WORDS) for one in truths))
    raise NotImplementedError(f"no reward function for the data source {data_source!r}: name one in scoring.scorers")
