"""The tasks `vstar`, `hrbench` and `mathvista`: held-out rows only, made by `turnwise prepare NAME --source FOLDER`."""

import enum
from pathlib import Path
from typing import Annotated

from turnwise.data.task import Task
from turnwise.ext.vision_bench.prepare import write_bench
from turnwise.ext.vision_bench.published import hrbench_reader, read_mathvista, read_vstar

SCORER = "vision_bench"
_ENV = "of the rows, such as code: with it codev_7b.yaml's tool may be called"
_MATH = ("figure_question_answering", "geometry_problem_solving", "math_word_problem", "textbook_question_answering",
         "visual_question_answering")  # fmt: skip


class HrBenchSize(enum.StrEnum):
    """Which of the two HR-Bench files."""

    FOUR_K = "4k"
    EIGHT_K = "8k"


def prepare_vstar(
    out: Path,
    *,
    source: Annotated[str | None, "the folder of test_questions.jsonl and its images"] = None,
    env_name: Annotated[str | None, _ENV] = None,
) -> dict[Path, int]:
    """Write test.parquet and images/ of V*Bench."""
    return write_bench(read_vstar, source, out, env_name)


def prepare_hrbench(
    out: Path,
    *,
    source: Annotated[str | None, "the folder of hr_bench_4k.parquet or HRBench4K.tsv"] = None,
    size: Annotated[HrBenchSize, "4k or 8k"] = HrBenchSize.FOUR_K,
    env_name: Annotated[str | None, _ENV] = None,
) -> dict[Path, int]:
    """Write test.parquet and images/ of HR-Bench."""
    return write_bench(hrbench_reader(size.value), source, out, env_name)


def prepare_mathvista(
    out: Path,
    *,
    source: Annotated[str | None, "the folder of data/testmini-*.parquet, or of testmini.json and images/"] = None,
    env_name: Annotated[str | None, _ENV] = None,
) -> dict[Path, int]:
    """Write test.parquet and images/ of MathVista's testmini."""
    return write_bench(read_mathvista, source, out, env_name)


VSTAR = Task(
    name="vstar",
    data_source="vstar/direct_attributes",  # rows of CodeV, which are to be trained on, have the source vstar
    further_sources=("vstar/relative_position",),
    prepare=prepare_vstar,
    scorer=SCORER,
    defaults={"data.eval_files": ["data/vstar/test.parquet"]},
)
HRBENCH = Task(
    name="hrbench",
    data_source="hrbench_4k/single",
    further_sources=("hrbench_4k/cross", "hrbench_8k/single", "hrbench_8k/cross"),
    prepare=prepare_hrbench,
    scorer=SCORER,
    defaults={"data.eval_files": ["data/hrbench/test.parquet"]},
)
MATHVISTA = Task(
    name="mathvista",
    further_sources=tuple(f"mathvista/{task}" for task in _MATH),
    prepare=prepare_mathvista,
    scorer=SCORER,
    defaults={"data.eval_files": ["data/mathvista/test.parquet"]},
)
