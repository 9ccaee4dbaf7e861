"""What rows ask for and a run would not give is refused or told, and never left out in silence."""

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise import configure
from turnwise.commands.cli import main
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.reports.preflight import preflight
from turnwise.rollout.prepare import prepare
from turnwise.training.runs.prepare_training import prepare_training

ROW: dict[str, Any] = {"data_source": "s", "prompt": "6*7?", "reward_model": {"ground_truth": "42"}}
SCHEMA = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
QUIET = ("task=null", "scoring.scorers={default: exact_match}", "board.live=false")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the row's other columns, overrides) -> what is prepared."""
    monkeypatch.chdir(tmp_path)

    def make(columns: dict[str, Any], *overrides: str) -> Any:
        (tmp_path / "rows.jsonl").write_text(json.dumps(ROW | columns))
        return prepare(configure(*QUIET, "data.eval_files=[rows.jsonl]", *overrides), "test")

    return make


REFUSED = {
    "videos": ({"videos": ["a.mp4"]}, "rows.jsonl row 0: videos: only text and images are supported"),
    "a video": ({"video": {"path": "a.mp4"}}, "video: only text and images are supported"),
    "audio": ({"audio": {"bytes": "x", "path": None}}, "audio: only text and images are supported"),
    "audios": ({"audios": ["a.wav"]}, "audios: only text and images are supported"),
    "a video part": ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, "unknown part type"),
    "an image without a place": ({"images": ["a.png"]}, "1 images for 0 places"),
    "schemas of tools": ({"tools": [WEATHER]}, "sample rows.jsonl:0: its column tools has 'get_weather', which rollout.tools"),
    "tools as text": ({"tools": json.dumps([WEATHER])}, "'get_weather', which rollout.tools does not offer (it has none)"),
    "names of tools": ({"tools": ["get_weather"]}, "add FILE.py:get_weather"),
    "a built-in name": ({"tools": [SCHEMA]}, "'calculate', which rollout.tools does not offer"),
    "tools that are none": ({"tools": 5}, "tools: expected a list of names, or of schemas"),
    "kwargs of nobody": ({"extra_info": {"interaction_kwargs": {"goal": "x"}}}, "names no interaction: set rollout.interaction"),
    "kwargs that gsm8k does not read": ({"extra_info": {"interaction_kwargs": {"name": "gsm8k", "hints": True}}}, "'gsm8k' does not read interaction_kwargs.hints"),
    "kwargs that code_verify does not read": ({"interaction_kwargs": {"name": "code_verify", "max_turns": 3}}, "does not read interaction_kwargs.max_turns"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_episode_is_refused(name: str, plan: Any) -> None:
    columns, words = REFUSED[name]
    with pytest.raises(TurnwiseError) as refused:
        plan(columns)
    assert words in str(refused.value) and "\n" not in str(refused.value)


TOLD = {
    "env_name": ({"env_name": "visual_toolbox_v2"}, "1 samples have the column 'env_name', which is not read here"),
    "env_name beside": (
        {"extra_info": {"env_name": "code"}},
        "1 samples have 'extra_info.env_name', which is not read here: rollout.tool_options={TOOL: {env_names: [NAME]}}",
    ),
    "tools beside": (
        {"extra_info": {"tools": [WEATHER]}},
        "'extra_info.tools', which is not read here: a row's tools stand in a column",
    ),
    "videos beside": (
        {"extra_info": {"videos": ["a.mp4"]}},
        "'extra_info.videos', which is not read here: only text and images are shown",
    ),
    "sampling": (
        {"temperature": 0.3},
        "the column 'temperature', which is not read here: sampling sets it for all rows",
    ),
    "old schemas": ({"functions": [WEATHER]}, "the column 'functions'"),
    "env_class": ({"env_class": "gsm8k"}, "the column 'env_class'"),
    "system": ({"system": "Be brief."}, "a system message stands in the prompt"),
    "thinking": ({"chat_template_kwargs": {"enable_thinking": False}}, "chat.template_kwargs sets it for all rows"),
    "<image>": ({"prompt": "<image>What?"}, "<image> in the prompt but no image for it"),
    "<video>": ({"prompt": "<video>What?"}, "<video> in the prompt"),
    "<audio>": ({"prompt": [{"role": "user", "content": "<audio>"}]}, "<audio> in the prompt"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_may_be_meant_otherwise_is_told(name: str, plan: Any) -> None:
    columns, words = TOLD[name]
    assert any(words in notice for notice in plan(columns).plan.notices)
    report = preflight(compose([*QUIET, "data.eval_files=[rows.jsonl]"]))
    assert report.passed and any(words in found.text for found in report.findings if found.outcome == "warning")


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"videos": [], "audio": None, "tools": [], "env_name": None},
        {"extra_info": {"need_tools_kwargs": False, "interaction_kwargs": {"query": "q", "ground_truth": "42"}}},
        {"ability": "math", "uid": "1", "id": 3, "question": "x", "golden_answers": ["a"], "metadata": {"a": 1}},
        {"extra_info": {"index": 0, "split": "train", "need_tools_kwargs": False, "interaction_kwargs": {"name": "gsm8k", "query": "q", "ground_truth": "42"}}},
    ],
)  # fmt: skip
def test_rows_as_others_write_them_pass_without_a_word(columns: dict[str, Any], plan: Any) -> None:
    assert plan(columns).plan.notices == []


@pytest.mark.parametrize(
    ("name", "head", "problem"),
    [
        ("silent", "", r"does not read interaction_kwargs.goal.*READS = \('goal',\)"),
        ("other", "READS = ('goals',)", "did you mean 'goals'"),
        ("wrong", "READS = 'goal'", "READS is a tuple of names"),
        ("right", "READS = ('goal',)", None),
    ],
)
def test_a_function_is_given_what_its_file_says_that_it_reads(
    name: str, head: str, problem: str | None, plan: Any, tmp_path: Path
) -> None:
    row = {"extra_info": {"interaction_kwargs": {"goal": "x", "query": "q"}}}
    (tmp_path / f"{name}.py").write_text(f"{head}\n\n\ndef user(turn):\n    return None\n")
    if problem is None:
        assert plan(row, f"rollout.interaction={name}.py:user").plan.notices == []
        return
    with pytest.raises(TurnwiseError, match=problem):
        plan(row, f"rollout.interaction={name}.py:user")


def test_a_rows_column_of_tools_chooses_among_those_that_are_offered(plan: Any) -> None:
    offered = "rollout.tools=[calculate, search]"
    for column, chosen in (([SCHEMA], ("calculate",)), (json.dumps([SCHEMA]), ("calculate",)), (["search"], ("search",)), ([], ())):  # fmt: skip
        (route,) = plan({"tools": column}, offered).plan.routes
        assert route.tools == chosen
    (route,) = plan({"tools": ["search"], "extra_info": {"tool_selection": ["calculate"]}}, offered).plan.routes
    assert route.tools == ("calculate",)


def test_a_schema_that_differs_from_the_tools_own_is_told(plan: Any) -> None:
    def described(*names: str) -> dict[str, Any]:
        return {
            "name": "calculate",
            "parameters": {"type": "object", "properties": {name: {"type": "string"} for name in names}},
        }

    (own,) = plan({"tools": ["calculate"]}, "rollout.tools=[calculate]").toolbox.tools.values()
    same, apigen = described(*own.schema["function"]["parameters"]["properties"]), described()
    apigen["parameters"] = {"first": {"type": "int"}}
    for schema, tells in ((same, False), ({"function": same}, False), (SCHEMA, False), (described("x"), True), (apigen, True)):  # fmt: skip
        notices = plan({"tools": json.dumps([schema])}, "rollout.tools=[calculate]").plan.notices
        assert any("a schema of 'calculate' with other parameters" in one for one in notices) is tells, schema


ENVS = (
    "rollout.tools=[calculate, search]",
    "rollout.tool_options={calculate: {env_names: [math, all]}, search: {env_names: [all]}}",
)


def test_the_environment_of_a_row_decides_between_tools_and_a_single_turn(plan: Any) -> None:
    for columns, chosen in (
        ({"env_name": "math"}, ("calculate",)),
        ({"extra_info": {"env_name": "all"}}, ("calculate", "search")),
        ({"env_name": "math", "tools": ["search"]}, ("search",)),
        ({"env_name": None, "extra_info": {"tool_selection": ["search"]}}, ("search",)),
        ({"env_name": ""}, ()), ({}, ()),
    ):  # fmt: skip
        made = plan(columns, *ENVS).plan
        (route,) = made.routes
        assert (route.tools, route.agent) == (chosen, "tool_calling" if chosen else "single_turn"), columns
        told = [one for one in made.notices if "env_name" in one]
        assert [
            one for one in told if "run single-turn (inferred: no env_name, and tools have env_names)" in one
        ] == told
        assert bool(told) is not bool(chosen), columns
    (route,) = plan({}, "rollout.tools=[calculate, search]").plan.routes
    assert route.tools == ("calculate", "search")  # without the option no row loses its tools
    (route,) = plan(
        {}, "rollout.tools=[calculate, search]", "rollout.tool_options={search: {env_names: [web]}}"
    ).plan.routes
    assert (route.tools, route.agent) == (("calculate",), "tool_calling")


WRONG_ENVIRONMENTS = {
    "unknown": ({"env_name": "maths"}, "sample rows.jsonl:0: no tool has its env_name 'maths': did you mean 'math'"),
    "code": ({"env_name": "os:system"}, "no tool has its env_name 'os:system'"),
    "a number": ({"env_name": 3}, "env_name: expected the name of an environment, got 3"),
    "arguments without one": ({"tools_kwargs": {"search": {"create_kwargs": {"k": 3}}}}, "has tools_kwargs and no env_name"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ENVIRONMENTS)
def test_an_environment_that_nobody_configured_is_refused(name: str, plan: Any) -> None:
    columns, words = WRONG_ENVIRONMENTS[name]
    with pytest.raises(TurnwiseError) as refused:
        plan(columns, *ENVS)
    assert words in str(refused.value)


@pytest.mark.parametrize("value", ["python", "[3]", "{a: b}"])
def test_environments_of_a_tool_are_a_list_of_names(value: str, plan: Any) -> None:
    with pytest.raises(ConfigError, match="tool_options.calculate.env_names must be a list of the names in the column"):
        plan({}, "rollout.tools=[calculate]", f"rollout.tool_options={{calculate: {{env_names: {value}}}}}")


def test_kwargs_by_name_of_a_users_own_class(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Narrow:\n    def __init__(self, config): pass\n"
        "    async def start_interaction(self, instance_id=None, mood=''): return instance_id\n"
        "    async def generate_response(self, instance_id, messages): return True, '', None, {}\n"
        "    async def calculate_score(self, instance_id): return None\n"
        "    async def finalize_interaction(self, instance_id): pass\n"
        "class Wide(Narrow):\n    async def start_interaction(self, instance_id=None, **kwargs): return instance_id\n"
    )
    row = {"extra_info": {"interaction_kwargs": {"mood": "bad", "query": "q", "ground_truth": "1"}}}
    assert plan(row, "rollout.interaction=mine.py:Narrow").plan.notices == []
    row["extra_info"]["interaction_kwargs"]["temper"] = "short"
    assert plan(row, "rollout.interaction=mine.py:Wide").plan.notices == []
    with pytest.raises(TurnwiseError, match="sample rows.jsonl:0: .*does not read interaction_kwargs.temper"):
        plan(row, "rollout.interaction=mine.py:Narrow")


def test_tools_without_what_they_work_on(plan: Any) -> None:
    with pytest.raises(TurnwiseError, match="sample rows.jsonl:0: the tool bash needs a repository; extra_info.swe"):
        plan({}, "rollout.tools=[bash]")
    assert "no sample has an image for the tools look to look at" in plan({}, "rollout.tools=[look]").plan.notices
    with_image = {"extra_info": {"tools_kwargs": {"look": {"create_kwargs": {"image": "a.png"}}}}}
    assert not any("no sample has an image" in one for one in plan(with_image, "rollout.tools=[look]").plan.notices)


def test_keys_that_would_not_be_read(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "data.images_from=/nonexistent"]) == 2
    said = capsys.readouterr().err
    assert "data.images_from (command line) is never read" in said and "or data.eval_files is set" in said
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    assert main(["eval", *QUIET, "data.eval_files=[rows.jsonl]", "data.images_from=/nonexistent"]) == 2
    assert "/nonexistent is neither a folder nor a .tar" in capsys.readouterr().err
    config = configure("training.target=0.9", "training.eval_every=0")
    with pytest.raises(ConfigError, match="training.target ends a run after an evaluation"):
        prepare_training(config, None, None, tools=None, scorer=None, interaction=None)
