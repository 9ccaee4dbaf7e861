"""Dataset classes as verl's data.custom_cls names them."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.errors import TurnwiseError

SUBCLASS = """
from verl.utils.dataset.rl_dataset import RLHFDataset


class Mine(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = [row for row in self.dataframe if row["extra_info"]["keep"]]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt"][-1]["content"] += " Be brief."
        del row["prompt"]
        return row
"""
PLAIN = """
import json
from torch.utils.data import Dataset
import torch


class Mine(Dataset):
    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        assert processor is None and config.get("prompt_key") == "prompt" and tokenizer.eos_token_id is not None
        self.rows = [json.loads(line) for name in data_files for line in open(name)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {**self.rows[number], "input_ids": torch.zeros(3), "index": number}
"""


def played(tmp_path: Path, code: str) -> list[str]:
    rows = [
        {"data_source": "x", "prompt": [{"role": "user", "content": f"Say {n}."}],
         "reward_model": {"ground_truth": "hi"}, "extra_info": {"keep": n % 2 == 1, "index": n}}
        for n in range(4)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(code)
    report = evaluate(
        configure(
            "task=null", "engine=scripted", "engine.script=[hi]", f"data.eval_files={tmp_path}/rows.jsonl",
            "scoring.scorers={default: exact_match}", f"runs_dir={tmp_path}/runs",
            f"data.dataset={tmp_path}/own.py:Mine",
        ),
        console=Console(quiet=True),
    )  # fmt: skip
    assert all(trajectory.reward == 1.0 for trajectory in report.trajectories)
    return [trajectory.sample.prompt[-1].text for trajectory in report.trajectories]


def test_a_subclass_of_verls_dataset_gives_its_rows(tmp_path: Path) -> None:
    assert sorted(played(tmp_path, SUBCLASS)) == ["Say 1. Be brief.", "Say 3. Be brief."]


def test_any_dataset_class_gives_its_rows(tmp_path: Path) -> None:
    assert sorted(played(tmp_path, PLAIN)) == ["Say 0.", "Say 1.", "Say 2.", "Say 3."]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "Mine = 3",
            r"must be a function `rows\(files\)` that gives rows, or a class that an extension reads; it is a int",
        ),
        ("class Mine(list):\n    def __init__(self, **kw): raise OSError('no disk')", "failed: .*no disk"),
        ("class Mine(list):\n    def __init__(self, **kw): super().__init__([1])", "is a int, not a dict"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(TurnwiseError, match=said):
        played(tmp_path, code)


def test_a_dataset_without_files_is_refused_not_passed_over() -> None:
    with pytest.raises(TurnwiseError, match=r"data\.dataset=d\.py:Mine reads files, and there are none"):
        evaluate(configure("data.dataset=d.py:Mine", "eval.samples=1"), console=Console(quiet=True))
