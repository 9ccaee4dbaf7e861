"""Which scorer a data source gets: the config's, its task's, or the one that is known for it, as in verl."""

from collections.abc import Mapping

from turnwise.errors import ConfigError, DataError, unknown
from turnwise.types import Sample

VERL = "verl_default"
"""The built-in scorer that has verl's own rules by source (turnwise/compat/verl/reward_score.py)."""
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
KNOWN = {
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **{f"numina_{name}": "math" for name in _NUMINA},
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "hiyouga/geometry3k"), VERL),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_tests"),
    **{f"searchR1_{name}": "search_qa" for name in _SEARCH},
}
"""The scorer of data sources that neither `scoring.scorers` nor a task covers."""
FAMILIES = {"aime": VERL}
"""The same for every source that begins so: aime_2024, aime25."""


def spec_for(data_source: str, scorers: Mapping[str, str], of_tasks: Mapping[str, str] | None = None) -> str:
    """The scorer's name for a data source: its own entry, then "default", then its task's or the known one."""
    known = KNOWN | dict(of_tasks or {})
    for table, key in ((scorers, data_source), (scorers, "default"), (known, data_source)):
        if key in table:
            return table[key]
    for start, name in FAMILIES.items():
        if data_source.startswith(start):
            return name
    hint = unknown("data source", data_source[:80], [*scorers, *known])
    raise ConfigError(f"no scorer: {hint} Name one with scoring.scorers, or one for all under the key default.")


def some_truth(sample: Sample) -> object:
    """The ground truth, whatever its shape; DataError for none: verl's rules would call every answer wrong."""
    truth = sample.ground_truth
    if truth is None or (isinstance(truth, str) and not truth.strip()):
        raise DataError(f"sample {sample.id!r}: {VERL} needs reward_model.ground_truth")
    return truth
