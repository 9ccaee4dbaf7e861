"""Stand-in for verl.utils.reward_score: scoring by data source, for the sources whose rules are ours too."""

from typing import Any

from turnwise.ext.verl.stand_ins.rewards import dapo as reward_dapo
from turnwise.ext.verl.stand_ins.rewards import geo3k as reward_geo3k
from turnwise.ext.verl.stand_ins.rewards import gsm8k as reward_gsm8k
from turnwise.ext.verl.stand_ins.rewards import math as reward_math
from turnwise.ext.verl.stand_ins.rewards import search as reward_search

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
INSTEAD = {"numina_": "math", **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_tests")}
"""Sources that verl has a rule for and we a better scorer, which a plain function cannot run."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """What a solution is worth by the rule of its source; NotImplementedError where there is none, as in verl."""
    if data_source == "openai/gsm8k":
        return reward_gsm8k.compute_score(solution_str, ground_truth)
    if data_source in MATH:
        return reward_math.compute_score(solution_str, ground_truth)
    if data_source in DAPO or data_source.startswith("aime"):
        return reward_dapo.compute_score(solution_str, ground_truth)
    if data_source == "hiyouga/geometry3k":
        return reward_geo3k.compute_score(solution_str, ground_truth)
    if data_source.startswith("searchR1_"):
        return float(reward_search.compute_score(solution_str, ground_truth))
    ours = next((name for start, name in INSTEAD.items() if data_source.startswith(start)), None)
    hint = "name one in scoring.scorers" if ours is None else f"set scoring.scorers={{{data_source}: {ours}}}"
    raise NotImplementedError(f"no reward function for the data source {data_source!r}: {hint}")


_default_compute_score = default_compute_score
