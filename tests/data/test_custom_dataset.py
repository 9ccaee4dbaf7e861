"""data.dataset: a plain function that reads the files."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.data.custom_dataset import dataset_rows
from turnwise.errors import TurnwiseError

FUNCTION = """
import json

def rows(files):
    for name in files:
        for line in open(name):
            question = json.loads(line)["question"]
            yield {"data_source": "x", "prompt": question + " Be brief.", "reward_model": {"ground_truth": "hi"}}
"""


def test_a_function_gives_the_rows_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("".join(json.dumps({"question": f"Say {n}."}) + "\n" for n in range(3)))
    (tmp_path / "own.py").write_text(FUNCTION)
    report = evaluate(
        configure(
            "task=null", "engine=scripted", "engine.script=[hi]", f"data.eval_files={tmp_path}/questions.txt",
            "scoring.scorers={default: exact_match}", f"runs_dir={tmp_path}/runs",
            f"data.dataset={tmp_path}/own.py:rows",
        ),
        console=Console(quiet=True),
    )  # fmt: skip
    assert [trajectory.sample.prompt[-1].text for trajectory in report.trajectories] == [
        "Say 0. Be brief.", "Say 1. Be brief.", "Say 2. Be brief.",
    ]  # fmt: skip
    assert [trajectory.reward for trajectory in report.trajectories] == [1.0] * 3


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("def rows(files, split): return []", r"must be a function `rows\(files\)`.*it is rows\(files, split\)"),
        ("class rows: pass", "a class that an extension reads; it is the class rows"),
        ("def rows(files): return [1]", "row 0 is a int, not a dict of columns"),
        ("def rows(files): raise OSError('no disk')", "failed: OSError: no disk"),
        ("def rows(files): return 3", "failed: TypeError"),
    ],
)
def test_one_that_cannot_be_used_is_named(tmp_path: Path, code: str, complaint: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(TurnwiseError, match=complaint) as caught:
        list(dataset_rows(f"{tmp_path}/own.py:rows", ["a.txt"], "prompt", lambda: None))
    assert "own.py:rows" in str(caught.value)
