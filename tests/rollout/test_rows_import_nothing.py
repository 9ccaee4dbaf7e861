"""Rows choose among names; whatever a row writes where a name stands, no code is imported for it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise import configure, evaluate
from turnwise.commands.cli import main
from turnwise.config import Config, RolloutConfig
from turnwise.config.sections import with_section
from turnwise.errors import PluginError, TurnwiseError
from turnwise.ext.verifiers.task import run as play_environment
from turnwise.ext.verl.config import VerlConfig
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.types import InteractionSpec, Message, Role, Sample

ROW = {"data_source": "arithmetic", "prompt": "6*7?", "reward_model": {"ground_truth": "42"}}
QUIET = ("task=null", "scoring.scorers={default: exact_match}", "board.live=false")
EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from turnwise import BaseInteraction
async def loop(chat):
    await chat.generate()
class User(BaseInteraction):
    pass
"""
CODE = [
    "evil.py:loop", "evil:loop", "./evil.py:loop", "FOLDER/evil.py:loop", "../FOLDER_NAME/evil.py:loop", "evil.loop", "evil.User",
    "FOLDER/evil.py", "evil.py", "evil", "sub.evil:loop", "sub.evil.loop", "sub/evil.py:loop", "file://FOLDER/evil.py:loop",
    "this:d", "this.d", "this", "antigravity:webbrowser", "antigravity", "os:system", "os.system", "builtins:eval", "subprocess:run",
    " evil.py:loop", "evil.py:loop ", "evil.py:loop\n", "\tevil:loop", "evil :loop", "evil: loop", "evil.py：loop", "evil.py:loop\u200b", "\ufeffevil.py:loop",
    "evi\u006c.py:loop", "EVIL.py:loop", "evil.py::loop", ":loop", "evil:", ":", ".", "..", "...", "a:b:c", "evil.py:loop:loop", "evil.py:User.start",
    "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop", "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "verl.tools:gsm8k_tool",
    "turnwise.rollout.loops.single_turn:single_turn", "turnwise.rollout.users.gsm8k.Gsm8kInteraction", "turnwise.commands.cli:main",
    "base", "__init__", "tool", "_private", "..interactions.gsm8k", "gsm8k.INTERACTION", "tasks", "x" * 1_000_000, "x" * 1_000_000 + ":y", "\0evil:loop",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cloned repository of data with code beside it, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for place in (tmp_path, tmp_path / "sub"):
        (place / "evil.py").write_text(EVIL)
    for name in ("single_turn", "tool_calling", "gsm8k", "calculate", "evil_env"):  # namesakes of ours
        (tmp_path / f"{name}.py").write_text(EVIL)
    return tmp_path


STRANGE = {"this", "antigravity", "evil", "sub", "evil_env"}


def nothing_imported(folder: Path) -> bool:
    return not STRANGE & set(sys.modules) and not list(folder.rglob("imported"))


def plan_for(sample: Sample, config: Config) -> Plan:
    return Plan([sample], config, Toolbox([], config.rollout), Users(config))


def named(text: str, folder: Path) -> str:
    return text.replace("FOLDER_NAME", folder.name).replace("FOLDER", str(folder))


@pytest.mark.parametrize("config", [{}, {"agent": "tool_calling", "interaction": "gsm8k"}], ids=["plain", "configured"])
def test_no_name_of_a_row_leads_to_code(folder: Path, config: dict[str, Any]) -> None:
    whole = Config(rollout=RolloutConfig(**config))
    plan_of = lambda sample: plan_for(sample, whole)  # noqa: E731
    prompt = (Message(Role.USER, "6*7?"),)
    for text in CODE:
        name = named(text, folder)
        for fields in ({"agent": name}, {"interaction": InteractionSpec(name)}, {"tools": (name,)}, {"tools_kwargs": {name: {}}}):  # fmt: skip
            with pytest.raises(TurnwiseError) as refused:
                plan_of(Sample("rows.jsonl:3", prompt, "s", **fields))
            said = str(refused.value)
            assert "sample rows.jsonl:3" in said and len(said) < 1000 and "\n" not in said, (fields, said)
            assert nothing_imported(folder), fields


@pytest.mark.parametrize(
    ("column", "keys"),
    [
        ({"agent_name": "evil.py:loop"}, ("rollout.agent=...", "verl.agents_file=FILE")),
        ({"agent_name": "this:d"}, ("rollout.agent=...", "verl.agents_file=FILE")),
        ({"extra_info": {"interaction_kwargs": {"name": "evil.py:User"}}}, ("verl.interactions_file=FILE",)),
        ({"interaction_kwargs": {"name": "evil.User"}}, ("rollout.interaction=...",)),
        ({"extra_info": {"tool_selection": ["evil.py:loop"]}}, ("which is not available",)),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_commands_name_the_row_and_what_to_write(
    folder: Path, column: dict[str, Any], keys: tuple[str, ...], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW, ROW | column]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([{**row, "extra_info": row.get("extra_info"), **column} for row in rows[1:]]), "rows.parquet")  # fmt: skip
    else:
        Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = (*QUIET, f"data.eval_files=[rows.{form}]", f"data.train_files=[rows.{form}]")
    for command in ("check", "eval", "train") if form == "jsonl" else ("check",):
        assert main([command, *overrides]) != 0
        printed = capsys.readouterr()
        said = " ".join((printed.err + printed.out).split())
        assert f"sample rows.{form}:{len(rows) - 1 if form == 'jsonl' else 0}: " in said and all(key in said for key in keys), said  # fmt: skip
    assert nothing_imported(folder) and not Path("runs").exists()


def test_what_the_config_names_rows_may_name(folder: Path) -> None:
    Path("friendly.py").write_text(EVIL)
    config = Config(rollout=RolloutConfig(agent="friendly.py:loop", interaction="friendly.py:User"))
    sample = Sample("a", (Message(Role.USER, "x"),), "s", agent="friendly.py:loop", interaction=InteractionSpec("friendly.py:User"))  # fmt: skip
    plan = plan_for(sample, config)
    assert [route.agent for route in plan.routes] == ["friendly.py:loop"] and (folder / "imported").exists()
    Path("agents.yaml").write_text("- name: mine\n  _target_: friendly.py:loop\n")
    Path("users.yaml").write_text("interaction:\n- name: me\n  class_name: friendly.User\n")
    config = with_section(Config(), VerlConfig(agents_file="agents.yaml", interactions_file="users.yaml"))
    sample = Sample("a", (Message(Role.USER, "x"),), "s", agent="mine", interaction=InteractionSpec("me"))
    assert [route.agent for route in plan_for(sample, config).routes] == ["mine"]
    with pytest.raises(PluginError, match="neither built in nor named by the config"):
        plan_for(Sample("a", sample.prompt, "s", agent="friendly.py:loop"), config)


def test_samples_of_a_program_and_recorded_ones_are_held_to_the_same(folder: Path) -> None:
    sample = Sample("a", (Message(Role.USER, "x"),), "arithmetic", "1", agent="evil.py:loop")
    with pytest.raises(TurnwiseError, match="named by the config"):
        evaluate(configure(*QUIET), samples=[sample])
    assert nothing_imported(folder)


def test_a_row_names_no_environment_that_no_task_named(folder: Path) -> None:
    extra = {"verifiers": {"config": json.dumps({"taskset": {"id": "evil_env"}}), "index": 0}}
    sample = Sample("rows.jsonl:0", (Message(Role.USER, "x"),), "s", info={"extra_info": extra})
    with pytest.raises(PluginError, match="task=verifiers:ENV_ID") as refused:
        asyncio.run(play_environment("http://127.0.0.1:1/v1", sample))
    assert "rows.jsonl:0" in str(refused.value) and nothing_imported(folder)
