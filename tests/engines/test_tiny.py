"""The bundled model: size, format, and an accuracy that is real and leaves room to learn."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from turnwise import configure, evaluate
from turnwise.chat.tokenizer import Tokenizer, load_template
from turnwise.engines.model.sources import find_model
from turnwise.reports.data_sources import SourceReport

FOLDER = find_model("tiny").folder


def test_it_is_small_and_has_the_qwen3_architecture() -> None:
    weights = FOLDER / "model.safetensors"
    with safe_open(weights, "pt") as tensors:
        parameters = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert parameters <= 3_000_000
    assert weights.stat().st_size <= 6_000_000
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] == "qwen3"


def test_its_tokenizer_knows_chatml_and_hermes_and_any_text() -> None:
    tokenizer = Tokenizer(FOLDER)
    for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "<think>"):
        assert len(tokenizer.encode(token).ids) == 1, token
    for text in ("3.14159 ≠ π", "日本語", "a\n\n\tb  c", "\N{PILE OF POO}", "#### 1,234"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("1234").ids) == 4, "digits are single tokens"
    assert (FOLDER / "chat_template.jinja").read_text().strip() == load_template("chatml_hermes").strip()


def report_at(temperature: float, runs: Path) -> SourceReport:
    config = configure(f"sampling.temperature={temperature}", "eval.samples=200", "seed=11", f"runs_dir={runs}")
    return evaluate(config, console=Console(quiet=True)).sources["arithmetic"]


@pytest.mark.parametrize(
    ("temperature", "least", "most"), [(1.0, 0.25, 0.50), pytest.param(0.0, 0.25, 0.65, marks=pytest.mark.long)]
)
def test_it_is_right_often_enough_to_learn_from_and_wrong_often_enough_to_learn(
    tmp_path: Path, temperature: float, least: float, most: float
) -> None:
    source = report_at(temperature, tmp_path)
    assert source.accuracy is not None and least <= source.accuracy <= most
    assert source.episodes_with_valid_call is not None and source.episodes_with_valid_call >= 0.9
    assert source.failed == 0
