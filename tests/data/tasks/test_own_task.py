"""A task of the user's in one file: check, eval and train find all of it, what the user sets stands instead."""

import re
from pathlib import Path

import pytest

from turnwise import Task, evaluate
from turnwise.config.sections import to_yaml
from turnwise.data.task import config_values, load_task, prepare_files
from turnwise.data.task_config import compose, configure
from turnwise.errors import ConfigError, PluginError, TurnwiseError
from turnwise.reports.preflight import preflight
from turnwise.train import train
from turnwise.training.runs.trust import reaches

ROOT = Path(__file__).parents[3]
SHOP = ROOT / "examples" / "shop" / "task.py"
PRICE = '<tool_call>\n{"name": "price", "arguments": {"item": "pen"}}\n</tool_call>'


def test_the_docs_show_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    assert SHOP.read_text() in blocks


def test_one_file_brings_rows_tools_user_reward_and_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    composed = compose([f"task={SHOP}", "training.steps=1", "training.groups=2", "training.group_size=2"])
    config = composed.config
    assert config.rollout.tools == [f"{SHOP}:price", f"{SHOP}:total"]
    assert config.rollout.interaction == f"{SHOP}:customer" and config.scoring.scorers == {"shop": f"{SHOP}:correct"}
    assert composed.origins["rollout.tools"] == f"task {SHOP}"
    checked = preflight(composed)
    assert checked.passed, checked.findings
    config.sampling.max_tokens = 16
    report = train(config)
    assert [line["step"] for line in _lines(report.run / "metrics.jsonl") if "task/shop/looked_up" in line] == [1]
    said = configure(f"task={SHOP}", "engine=scripted", "eval.samples=1")
    said.engine.script = [PRICE, "#### 1", "#### 9"]
    (source,) = evaluate(said).sources.values()
    assert (source.data_source, source.accuracy, source.first_accuracy) == ("shop", 1.0, 0.0)
    assert source.user_turns == 1.0 and source.task["looked_up"] == 1.0


def _lines(path: Path) -> list[dict[str, float]]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_the_user_sets_stands_instead() -> None:
    config = configure(f"task={SHOP}", "rollout.tools=[calculate]", "scoring.scorers.default=gsm8k")
    assert config.rollout.tools == ["calculate"] and config.scoring.scorers == {"default": "gsm8k"}
    assert configure("task=arithmetic").rollout.tools == ["calculate", "python"]
    assert configure("task=arithmetic").scoring.scorers == {}, "known by its data source"


def test_a_recorded_config_runs_no_file_of_the_users(tmp_path: Path) -> None:
    task = tmp_path / "evil.py"
    task.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nTASK = None\n")
    recorded = tmp_path / "config.yaml"
    recorded.write_text(to_yaml(configure(f"task={SHOP}")).replace(str(SHOP), str(task)))
    found = compose(["eval.samples=3"], recorded=recorded).config
    assert found.task == str(task) and found.rollout.tools == [f"{task}:price", f"{task}:total"]
    assert f"task={task}" in reaches(found, tmp_path) and f"rollout.tools={task}:price" in reaches(found, tmp_path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(TurnwiseError, match="must be a Task|neither a Task"):
        compose([], recorded)  # given with --config: the user says so
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("TASK = 3", "neither a Task nor a function"),
        ("", "has no 'TASK'"),
        ("TASK = Task(name='x')", "has neither rows nor files"),
        ("TASK = Task(name='x', rows=3)", "rows cannot be 3"),
        ("TASK = Task(name='x', rows=print, tools='calculate')", "tools cannot be 'calculate'"),
        ("TASK = Task(name='x', rows=print, tools=[lambda: 1])", "its tool <lambda> has no name at the top level"),
        ("TASK = Task(name='x', rows=print, defaults={'sampling.temprature': 1})", "did you mean 'sampling.temperature'"),
        ("TASK = Task(name='x', rows=print, defaults={'sampling.top_k': 'many'})", "task's defaults: sampling.top_k must be"),
        ("TASK = Task(name='x', rows=print, tools=['python'], defaults={'rollout.tools': []})", "is set twice"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_is_refused_by_name(tmp_path: Path, source: str, complaint: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"from turnwise import Task\n{source}\n")
    with pytest.raises(TurnwiseError, match=complaint):
        compose([f"task={path}"])


def test_prepare_takes_its_options_from_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from pathlib import Path\nfrom typing import Annotated\nfrom turnwise import Task\n"
        "def prepare(out: Path, *, top_rows: Annotated[int, '100% of them'] = 3):\n    return {out / 'a': top_rows}\n"
        "TASK = Task(name='mine', prepare=prepare)\n"
    )
    assert prepare_files(str(path), ["--top-rows", "5"]) == {Path("data/mine/a"): 5}
    with pytest.raises(SystemExit):
        prepare_files(str(path), ["--help"])
    assert "100% of them (default 3)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        prepare_files("gsm9k", [])
    with pytest.raises(ConfigError, match="nothing to prepare"):
        prepare_files(str(SHOP), [])


def test_a_function_alone_is_a_task_of_rows() -> None:
    task = load_task(f"{SHOP}:rows")
    assert isinstance(task, Task) and task.rows is not None and config_values(f"{SHOP}:rows") == {}
    with pytest.raises(PluginError, match="neither a Task nor a function"):
        load_task(f"{SHOP}:PRICES")


def test_several_data_sources_have_one_scorer_and_one_set_of_metrics(tmp_path: Path) -> None:
    place = tmp_path / "two.py"
    place.write_text(
        "from turnwise import Reduction, Task\n"
        "def rows(split, seed):\n"
        "    for kind in ('a', 'b'):\n"
        "        yield {'data_source': f'two/{kind}', 'prompt': 'x', 'reward_model': {'ground_truth': kind}}\n"
        "async def right(trajectory):\n"
        "    return float(trajectory.answers[-1].visible == trajectory.sample.ground_truth)\n"
        "TASK = Task(name='two', data_source='two', further_sources=('two/a', 'two/b', 'two/c'), rows=rows, scorer=right,\n"
        "    reductions={'long': Reduction.MEAN}, metrics=lambda one: {'long': len(one.turns)})\n"
    )
    config = configure(f"task={place}", "engine=scripted", f"runs_dir={tmp_path}/runs")
    assert config.scoring.scorers == {"default": f"{place}:right"}
    config.engine.script = ["a"]
    report = evaluate(config)
    assert {name: source.accuracy for name, source in report.sources.items()} == {"two/a": 1.0, "two/b": 0.0}
    assert all(source.task == {"episodes": 1.0, "long": 1.0} for source in report.sources.values())
