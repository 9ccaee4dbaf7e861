"""Stand-in for verl.utils.reward_score.geo3k: nine tenths for the boxed answer, one for a thought before it."""

import re

from turnwise.ext.verl.stand_ins.rewards.math import is_equiv
from turnwise.scoring.rules.boxes_and_tags import boxes

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """1 when the text begins with a thought and has a box behind it."""
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1 for the truth; spellings are compared as for MATH, where verl asks mathruler."""
    answers = boxes(predict_str) if use_boxed else [predict_str]
    return float(bool(answers) and is_equiv(answers[-1], ground_truth))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The weighted sum of the rewards for the right answer and for the format."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
