"""Conversations with an environment server: the task against the small one, evaluated, trained and prepared."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from server import make_app

from turnwise import evaluate, train
from turnwise.data.loader import load_samples
from turnwise.data.task import prepare_files
from turnwise.data.task_config import compose, configure
from turnwise.errors import ConfigError
from turnwise.reports.preflight import preflight

QUIET = Console(quiet=True)
PRICE = '<tool_call>\n{"name": "price", "arguments": {"item": "pen"}}\n</tool_call>'
BUY = '<tool_call>\n{"name": "buy", "arguments": {"item": "pen", "dollars": 3}}\n</tool_call>'


@pytest.fixture
def small(serving_in_a_thread):
    """(the URL of the small server, its sessions)."""
    app = make_app()

    @asynccontextmanager
    async def opened():
        yield app

    with serving_in_a_thread(opened) as url:
        yield url, app.state.sessions


def test_it_is_evaluated_and_leaves_no_session(small, tmp_path: Path) -> None:
    url, sessions = small
    config = configure("task=chat_env", "engine=scripted", "eval.samples=8", f"runs_dir={tmp_path}")
    config.rollout.agent_options = {"url": url}
    config.engine.script = ["50", "25", "75"]
    report = evaluate(config, console=QUIET)
    source = report.sources["chat_env"]
    assert source.failed == 0 and source.episodes == 8 and source.task["left_open"] == 0.0
    assert all(0 <= one.reward < 1 and one.messages[0].text.startswith("I think") for one in report.trajectories)
    assert source.task["observations"] > 1 and sessions.counts["started"] >= 8 and not sessions.open


def test_rows_of_any_server_are_prepared_and_its_tools_used(small, tmp_path: Path) -> None:
    url, sessions = small
    options = ["--name", "shop", "--index-start", "8", "--index-end", "20", "--test", "4", "--out", str(tmp_path)]
    assert list(prepare_files("chat_env", options).values()) == [8, 4]
    found = load_samples([tmp_path / "test.parquet"], prompt_key="prompt")
    assert [one.info["extra_info"]["index"] for one in found] == [16, 17, 18, 19]
    files = f"data.eval_files=['{tmp_path}/test.parquet']"
    config = configure("task=chat_env", "engine=scripted", files, f"runs_dir={tmp_path}/runs")
    config.rollout.agent_options, config.engine.script = {"url": url}, [PRICE, BUY]
    report = evaluate(config, console=QUIET)
    assert report.accuracy == 0.25 and [one.reward for one in report.trajectories] == [1.0, 0.0, 0.0, 0.0]
    assert report.sources["chat_env"].task["finished"] == 1.0 and sessions.counts["finished"] >= 4 and not sessions.open
    with pytest.raises(ConfigError, match="--index-end 3 and --test 5 must leave rows for"):
        prepare_files("chat_env", ["--index-end", "3", "--test", "5", "--out", str(tmp_path / "b")])


def test_it_is_trained_on_the_embedded_model(small, tmp_path: Path) -> None:
    url, sessions = small
    overrides = ["task=chat_env", "training.steps=1", "training.groups=2", "training.group_size=2", "eval.samples=2"]
    composed = compose([*overrides, "sampling.max_tokens=8", f"runs_dir={tmp_path}", "rollout.max_assistant_turns=2"])
    config = composed.config
    config.rollout.agent_options = {"url": url}
    assert preflight(composed).passed
    report = train(config, console=QUIET)
    lines = [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]
    (left_open,) = [line["task/chat_env/left_open"] for line in lines if "task/chat_env/left_open" in line]
    assert left_open == 0.0 and not sessions.open and sessions.counts["started"] >= 4
