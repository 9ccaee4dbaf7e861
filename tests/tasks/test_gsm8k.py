"""GSM8K rows: verl's shape with its gaps closed, from self-written rows and, where present, the real data."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from turnwise.data.lint import lint
from turnwise.data.loader import load_samples
from turnwise.data.write import write_rows
from turnwise.errors import ConfigError, DataError
from turnwise.tasks.gsm8k import TOOLS, Flavour, ground_truth, prepare, rows
from turnwise.types import InteractionSpec, Role

REAL = Path(os.environ.get("TURNWISE_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))
OWN = [
    ("Mia bakes 3 trays of 12 rolls. How many rolls is that?", "3 trays of 12 are 3 * 12 = <<3*12=36>>36.\n#### 36"),
    ("A barn holds 2,000 bales; 500 are sold. How many stay?", "2,000 - 500 = <<2000-500=1500>>1,500\n#### 1,500"),
    ("It is 4 degrees and gets 9 colder. How warm is it?", "4 - 9 = <<4-9=-5>>-5\n#### -5"),
    ("Two friends share 5 dollars. How much does each get?", "5 / 2 = <<5/2=2.5>>2.5\n#### 2.5"),
    ("Zoë’s café sells 7 teas at €3. What is earned?", "7 * 3 = <<7*3=21>>21\n####21 "),
    ("Tom has 1 cat. How many cats has Tom?", "He has 1.\n#### 1"),
]
TRUTHS = ["36", "1500", "-5", "2.5", "21", "1"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    made = [{"question": question, "answer": answer} for question, answer in OWN]
    write_rows(made[:4], folder / "train.jsonl")
    write_rows(made[4:], folder / "test.jsonl")
    return folder


def made(split: str, source: Path, flavour: Flavour, interaction: str | None = None) -> list[dict[str, Any]]:
    return list(rows(split, str(source), flavour, interaction))


def test_plain_rows_have_verls_shape(source: Path) -> None:
    first = made("train", source, Flavour.PLAIN)[0]
    question, answer = OWN[0]
    assert {key: value for key, value in first.items() if key != "prompt"} == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "36"},
        "extra_info": {"split": "train", "index": 0, "answer": answer, "question": question},
    }
    (message,) = first["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith(question)
    assert "####" in message["content"]


def test_ground_truths_follow_the_mark(source: Path) -> None:
    both = made("train", source, Flavour.PLAIN) + made("test", source, Flavour.PLAIN)
    assert [row["reward_model"]["ground_truth"] for row in both] == TRUTHS
    assert [row["extra_info"]["index"] for row in both] == [0, 1, 2, 3, 0, 1]
    assert ground_truth("no mark") is None
    assert ground_truth("#### \n") is None


@pytest.mark.parametrize("flavour", list(Flavour))
def test_prepared_files_load_as_the_flavour_says(source: Path, tmp_path: Path, flavour: Flavour) -> None:
    report = prepare(str(source), tmp_path / "out", flavour=flavour, interaction=None)
    assert report.rows == {"train": 4, "test": 2}
    assert report.interaction == ("gsm8k" if flavour.has_interaction else None)
    assert lint(report.files.values(), prompt_key="prompt").findings == []
    for split, path in report.files.items():
        for index, sample in enumerate(load_samples([path], prompt_key="prompt")):
            question, _ = OWN[index + (4 if split == "test" else 0)]
            truth = TRUTHS[index + (4 if split == "test" else 0)]
            kwargs = {"query": question, "ground_truth": truth}
            assert sample.ground_truth == truth
            assert sample.agent == (None if flavour is Flavour.PLAIN else "tool_agent")
            assert sample.tools == (TOOLS if flavour.has_tools else None)
            assert sample.interaction == (InteractionSpec("gsm8k", kwargs) if flavour.has_interaction else None)
            assert [message.role for message in sample.prompt][-1] is Role.USER
            assert ("tools" in sample.prompt[0].text) == flavour.has_tools


def test_the_interaction_can_be_chosen(source: Path) -> None:
    first = made("test", source, Flavour.TOOL_INTERACTION, "code_verify")[0]
    assert first["extra_info"]["interaction_kwargs"]["name"] == "code_verify"
    assert first["extra_info"]["need_tools_kwargs"] is False
    assert first["extra_info"]["tools_kwargs"].keys() == set(TOOLS)
    for flavour in (Flavour.PLAIN, Flavour.TOOL):
        with pytest.raises(ConfigError, match="has no interaction: leave 'code_verify' out"):
            made("test", source, flavour, "code_verify")
    with pytest.raises(ConfigError, match="empty"):
        made("test", source, Flavour.INTERACTION, " ")


def test_parquet_sources_and_downloaded_copies(source: Path, tmp_path: Path) -> None:
    wanted = made("train", source, Flavour.PLAIN)
    raw = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    write_rows(raw, tmp_path / "whole" / "train.parquet")
    assert made("train", tmp_path / "whole", Flavour.PLAIN) == wanted
    write_rows(raw[:3], tmp_path / "copy" / "main" / "train-00000-of-00002.parquet")
    write_rows(raw[3:], tmp_path / "copy" / "main" / "train-00001-of-00002.parquet")
    assert made("train", tmp_path / "copy", Flavour.PLAIN) == wanted


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"question": "q", "answer": "41"}, "train.jsonl row 1: answer: no number after ####"),
        ({"question": "q", "answer": "#### "}, "train.jsonl row 1: answer: no number after ####"),
        ({"question": "q", "answer": None}, "train.jsonl row 1: answer: expected text"),
        ({"question": 3, "answer": "#### 1"}, "train.jsonl row 1: question: expected text"),
        ({"qestion": "q", "answer": "#### 1"}, "question: expected text: did you mean 'qestion'?"),
    ],
)
def test_bad_source_rows_are_named_and_nothing_is_written(
    source: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    lines = [{"question": "q", "answer": "#### 1"}, values]
    (source / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError) as caught:
        prepare(str(source), tmp_path / "out", flavour=Flavour.PLAIN, interaction=None)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sources_that_are_not_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for wrong, text in [
        (str(tmp_path / "no"), "no such folder, and not a hub id"),
        ("../x", "no such folder, and not a hub id"),
        ("", "no such folder, and not a hub id"),
        ("a\0/b", "no such folder, and not a hub id"),
        (str(source / "train.jsonl"), "is a file; give the folder"),
        (str(tmp_path), "holds neither train.jsonl nor train.parquet"),
    ]:
        with pytest.raises(DataError, match=text):
            prepare(wrong, tmp_path / "out", flavour=Flavour.PLAIN, interaction=None)
    with pytest.raises(DataError, match="unknown split of gsm8k 'tset': did you mean 'test'"):
        made("tset", source, Flavour.PLAIN)


def test_a_source_is_never_overwritten_nor_guessed(source: Path) -> None:
    with pytest.raises(DataError, match="is the source itself"):
        prepare(str(source), source / ".." / "source", flavour=Flavour.PLAIN, interaction=None)
    (source / "train.parquet").touch()
    with pytest.raises(DataError, match=r"holds train.jsonl and train.parquet"):
        made("train", source, Flavour.PLAIN)


def test_the_hub_out_of_reach_points_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the `datasets` package, or with it and no network: the same way out is named."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    installed = importlib.util.find_spec("datasets") is not None
    wanted = "the hub does not give it" if installed else "needs `pip install datasets`"
    with pytest.raises(DataError, match=f"'no-such-owner/gsm8k' is not a folder here, and .*{wanted}.* train.jsonl"):
        prepare("no-such-owner/gsm8k", tmp_path, flavour=Flavour.PLAIN, interaction=None)


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="the real GSM8K files are not here")
def test_the_real_data(tmp_path: Path) -> None:
    report = prepare(str(REAL), tmp_path, flavour=Flavour.TOOL_INTERACTION, interaction="code_verify")
    assert report.rows == {"train": 7473, "test": 1319}
    samples = load_samples([report.files["test"]], prompt_key="prompt")
    assert samples[0].ground_truth == "18"
    assert samples[0].interaction is not None
    assert all(float(sample.ground_truth) is not None for sample in samples)
    assert lint([report.files["test"]], prompt_key="prompt").errors == 0
