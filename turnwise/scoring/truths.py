"""Whether samples have the ground truth that their scorers compare with, asked before anything is rolled out."""

from collections.abc import Iterable
from typing import Any

from turnwise.errors import DataError
from turnwise.plugins import load
from turnwise.scoring.scorer import ScorerSpec
from turnwise.types import Sample

READERS = {
    "gsm8k": "turnwise.scoring.gsm8k:truth_number",
    "gsm8k_strict": "turnwise.scoring.gsm8k:truth_text",
    "gsm8k_flexible": "turnwise.scoring.gsm8k:truth_text",
    "exact_match": "turnwise.scoring.text_match:text_of",
    "text_match": "turnwise.scoring.text_match:texts_of",
    "search_qa": "turnwise.scoring.text_match:texts_of",
    "math": "turnwise.scoring.math_boxed:golds_of",
    "code_tests": "turnwise.scoring.code_cases:cases_of",
    "judge": "turnwise.scoring.judge_scorer:reference_of",
    "verl_default": "turnwise.scoring.sources:some_truth",
}
"""What reads a sample's ground truth for a scorer; those of one's own look for themselves."""


def check_truths(spec: ScorerSpec, samples: Iterable[Sample]) -> None:
    """DataError for the first sample whose ground truth this scorer could not read."""
    spec = _comparing(spec)
    if spec.name not in READERS or (spec.name == "judge" and spec.options.get("rubric") is not None):
        return
    read: Any = load(READERS[spec.name], "scorer")
    for sample in samples:
        if spec.name == "code_tests" and sample.ground_truth:
            continue  # thousands of tests in a sample are read when they are needed
        try:
            read(sample)
        except DataError as error:
            raise DataError(f"scorer {spec.name}: {error}") from error


def _comparing(spec: ScorerSpec) -> ScorerSpec:
    """The scorer that says whether an answer is right."""
    while spec.name == "tapo":
        spec = ScorerSpec(spec.options.get("accuracy", "exact_match"), spec.options.get("accuracy_options") or {})
    return spec
