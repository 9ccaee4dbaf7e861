"""docs/tools.md: every example runs as it stands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.rollout.toolbox.files import read_tool_file
from turnwise.rollout.toolbox.options import OPTIONS
from turnwise.types import CallStatus

PAGE = (Path(__file__).parent.parent.parent / "docs" / "tools.md").read_text()
FORECAST = "\n\ndef forecast_service(city):\n    return f'rain in {city}'\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    function, schema, notebook, reward, recorded = blocks("python")
    (tools,) = blocks("yaml")
    for name, text in {
        "weather.py": function + FORECAST,
        "repeat.py": schema,
        "notebook.py": notebook,
        "reward.py": reward,
        "recorded.py": recorded,
        "tools.yaml": tools,
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(
    folder: Path, script: list[str], row: dict[str, Any], *overrides: str, columns: dict[str, Any] | None = None
) -> Any:
    """The one trajectory of an evaluation in which the model says what the script says."""
    given = {"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "extra_info": row} | (columns or {})
    (folder / "rows.jsonl").write_text(json.dumps(given))
    config = configure("task=null", "data.eval_files=rows.jsonl", "engine=scripted", "engine.script=[]", *overrides)
    config.engine.script = script
    config.scoring.scorers = {"default": "reward.py:reward"}
    (played,) = evaluate(config, console=Console(quiet=True)).trajectories
    return played


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(played: Any) -> list[str]:
    return [reply.text for turn in played.turns for reply in turn.replies]


def test_the_file_of_tools_and_a_rows_arguments(folder: Path) -> None:
    (kwargs,) = blocks("json")
    script = [
        call("temperature", city="Bonn"),
        call("temperature", city="Oslo", fahrenheit=True),
        call("temperature", city="Rome"),
        call("forecast", city="Lima"),
        call("notebook", line="one"),
        call("notebook", line="two"),
        call("notebook", line="three"),
        call("calculate", expression="6*7"),
        "done",
    ]
    played = play(folder, script, {"tools_kwargs": json.loads(kwargs)}, "rollout.tools=[tools.yaml]")
    assert played.failure is None
    assert said(played) == [
        "9 C", "39.2 F", "Error: no city 'Rome'; there are Oslo, Lima, Bonn", "rain in Lima",
        "Plan:\none", "Plan:\none\ntwo", "Error: the notebook has 3 lines and is full", "42",
    ]  # fmt: skip
    assert played.facts.tool_rewards == {"notebook": 1.5}
    assert (played.reward, played.parts["notebook"]) == (2.5, 1.5)


def test_a_schema_of_ones_own(folder: Path) -> None:
    script = [call("repeat", word="ha", times=2), call("repeat", word="ha", times=10), "done"]
    played = play(folder, script, {}, "rollout.tools=[repeat.py:repeat]")
    assert said(played)[0] == "ha ha" and "10 is greater than the maximum of 9" in said(played)[1]
    assert [record.status for record in played.calls] == [CallStatus.OK, CallStatus.BAD_ARGUMENTS]


def test_tools_that_only_exist_as_schemas_of_a_row(folder: Path) -> None:
    names = ("get_weather", "get_time")
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schemas = [
        {"type": "function", "function": {"name": name, "description": "?", "parameters": city}} for name in names
    ]
    tools = [{"class_name": "recorded.py:Recorded", "tool_schema": schema} for schema in schemas]
    (folder / "simulated.yaml").write_text(yaml.safe_dump({"tools": tools}))
    answers = {name: {"create_kwargs": {"answers": {'{"city": "Oslo"}': f"{name}!"}}} for name in names}
    script = [call("get_weather", city="Oslo"), call("get_weather", city="Rome"), call("get_time", city="Oslo"), "done"]
    columns = {"tools": json.dumps(schemas)}
    played = play(folder, script, {"tools_kwargs": answers}, "rollout.tools=[simulated.yaml]", columns=columns)
    assert said(played) == ["get_weather!", "Error: nothing was recorded for this call", "get_time!"]
    only = play(folder, script, {"tools_kwargs": {}}, "rollout.tools=[simulated.yaml, calculate]", columns={"tools": ["calculate"]})  # fmt: skip
    assert all("unknown tool" in text for text in said(only))


def test_the_options_of_the_command_line_and_of_the_table(folder: Path) -> None:
    (line,) = re.findall(r"^    turnwise eval rollout.tools=\[tools.yaml\] '(.*)'$", PAGE, re.MULTILINE)
    played = play(folder, [call("temperature", city="Oslo"), "done"], {}, "rollout.tools=[tools.yaml]", line)
    assert said(played) == ["4 C"]
    assert (
        tuple(re.findall(r"^\| `(\w+)` \|", PAGE.split("## Options")[1].split("## What")[0], re.MULTILINE)) == OPTIONS
    )
    statuses = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE.split("go wrong")[1], re.MULTILINE)))
    assert {*statuses} == {status.value for status in CallStatus} - {"unknown"}
    kinds = [tool.name for tool in read_tool_file(folder / "tools.yaml")]
    assert kinds == ["temperature", "forecast", "notebook", "calculate"]
    assert len(yaml.safe_load((folder / "tools.yaml").read_text())["tools"]) == len(kinds)
