"""Samples back to rows: read again they are the same samples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.data.loader import load_samples
from turnwise.data.rows import Row
from turnwise.data.sample_to_row import to_values
from turnwise.data.samples import to_sample
from turnwise.data.write import write_rows

PIXEL = "data:image/png;base64,iVBORw0KGgo="
ROWS: list[dict[str, Any]] = [
    {"data_source": "a", "prompt": [{"role": "user", "content": "6*7?"}]},
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?", "name": "ann"}],
        "ability": "math",
        "uid": 4,
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {
            "index": 3,
            "split": "train",
            "need_tools_kwargs": True,
            "tool_selection": ["calculate"],
            "tools_kwargs": {"calculate": {"create_kwargs": {"ground_truth": "42"}}},
            "interaction_kwargs": {"name": "gsm8k", "query": "How many?"},
        },
    },
    {
        "data_source": "look",
        "prompt": [{"role": "user", "content": "<image>Which digit?"}],
        "images": [PIXEL],
        "tools_kwargs": {"zoom": {"create_kwargs": {"k": 1}}},
        "interaction_kwargs": {"name": "code_verify", "query": "q"},
        "reward_model": {"ground_truth": 7},
        "extra_info": {"target_boxes": [[1, 2, 3, 4]]},
    },
    {"data_source": "b", "prompt": "plain", "interaction_kwargs": {"query": "nobody named"}},
]


@pytest.mark.parametrize("values", ROWS, ids=lambda values: values["data_source"])
def test_a_row_read_written_and_read_is_the_same_sample(values: dict[str, Any]) -> None:
    sample = to_sample(Row(Path("f"), 0, values), prompt_key="prompt")
    assert to_sample(Row(Path("f"), 0, to_values(sample)), prompt_key="prompt") == sample
    assert to_sample(Row(Path("f"), 0, to_values(sample, prompt_key="q")), prompt_key="q") == sample


@pytest.mark.parametrize("values", ROWS[1:3], ids=lambda values: values["data_source"])
def test_through_a_file(tmp_path: Path, values: dict[str, Any]) -> None:
    sample = to_sample(Row(Path("f"), 0, values), prompt_key="prompt")
    write_rows([to_values(sample)], tmp_path / "rows.parquet")
    (found,) = load_samples([tmp_path / "rows.parquet"], prompt_key="prompt")
    assert replace(found, id=sample.id) == sample
