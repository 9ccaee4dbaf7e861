"""Files as verl's users have them: what works unchanged, and what is answered with the line to change."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError, PluginError
from turnwise.reports.preflight import preflight
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.loading import load_tool

DOC = Path(__file__).parents[3] / "docs" / "ext" / "verl.md"
SYSTEM = {"role": "system", "content": "You are a math expert. Answer as `#### <answer>`."}
ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [SYSTEM, {"role": "user", "content": "What is 6 times 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
}
INFO = {"split": "test", "index": 0, "answer": "#### 42", "question": "What is 6 times 7?"}
TOOLS_KWARGS = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}
WITH_TOOL = {
    **INFO, "need_tools_kwargs": True, "tools_kwargs": TOOLS_KWARGS,
    "interaction_kwargs": {"query": "What is 6 times 7?", "ground_truth": "42"},
}  # fmt: skip
WITH_USER = {**INFO, "interaction_kwargs": {"name": "gsm8k", "query": "What is 6 times 7?", "ground_truth": "42"}}
CLASS = """\
{imports}

class MineInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._seen = {{}}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._seen[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = self._seen[instance_id] in messages[-1]["content"]
        return right, "right" if right else "try again", 1.0 if right else 0.0, {{}}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.0

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._seen[instance_id]
"""
YAML = "interaction:\n  - name: mine\n    class_name: {name}\n    config: {{}}\n"
TOOL_YAML = """\
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: A tool for calculating the reward of gsm8k
        parameters: {type: object, properties: {answer: {type: string, description: x}}, required: [answer]}
"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., str]:
    """(row, overrides) -> the errors of `turnwise check` in one text; "" when it passed."""

    def found(row: dict[str, Any], *overrides: str) -> str:
        file = tmp_path / "test.parquet"
        pq.write_table(pa.Table.from_pylist([row]), file)
        scorer = "scoring.scorers={default: gsm8k}"
        report = preflight(compose(["task=null", f"data.eval_files={file}", scorer, *overrides]))
        return " | ".join(finding.text for finding in report.errors)

    return found


def test_rows_of_all_four_gsm8k_scripts_are_read(check: Callable[..., str], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "tools.py").write_text(code)
    offered = f"rollout.tools=[{tmp_path}/tools.py:calc_gsm8k_reward]"
    assert check({**ROW, "extra_info": INFO}) == ""
    assert check({**ROW, "agent_name": "tool_agent", "extra_info": WITH_TOOL}, offered) == ""
    assert check({**ROW, "extra_info": WITH_TOOL}, offered) == ""
    assert check({**ROW, "extra_info": WITH_USER}) == ""
    row = tmp_path / "row.jsonl"
    row.write_text(json.dumps({**ROW, "extra_info": WITH_TOOL}))
    call = '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "42"}}</tool_call>'
    script = ["engine=scripted", f"engine.script=['{call}', '#### 42']", f"runs_dir={tmp_path}/runs", offered]
    scorer = "scoring.scorers={default: gsm8k}"
    report = evaluate(configure("task=null", f"data.eval_files={row}", scorer, *script), console=Console(quiet=True))
    (played,) = report.trajectories
    assert [reply.text for turn in played.turns for reply in turn.replies] == ["right"] and played.reward == 1.0


@pytest.mark.parametrize("agent", [{}, {"agent_name": "tool_agent"}])
def test_rows_with_arguments_for_a_missing_tool_say_how_to_offer_it(check: Callable[..., str], agent: dict) -> None:
    found = check({**ROW, **agent, "extra_info": WITH_TOOL})
    assert "has tools_kwargs for the tool 'calc_gsm8k_reward', which is not among rollout.tools" in found
    assert "rollout.tools=[FILE.py:calc_gsm8k_reward]" in found and "agent_name" not in found


def test_an_interaction_of_verls_works_as_it_is(check: Callable[..., str], tmp_path: Path) -> None:
    row = {**ROW, "extra_info": {**INFO, "interaction_kwargs": {"name": "mine", "ground_truth": "42"}}}
    registry = tmp_path / "interaction.yaml"
    for number, module in enumerate(("verl.interactions.base", "turnwise")):
        (tmp_path / f"mine_{number}.py").write_text(CLASS.format(imports=f"from {module} import BaseInteraction"))
        registry.write_text(YAML.format(name=f"mine_{number}.MineInteraction"))
        assert check(row, f"verl.interactions_file={registry}") == ""
    (tmp_path / "loose.py").write_text(CLASS.format(imports="from verl.interactions.base import BaseInteraction"))
    assert check({**ROW, "extra_info": INFO}, f"rollout.interaction={tmp_path}/loose.py:MineInteraction") == ""
    registry.write_text(YAML.format(name="verl.interactions.gsm8k_interaction.Gsm8kInteraction"))
    assert check(row, f"verl.interactions_file={registry}") == ""
    assert not [name for name in sys.modules if name.split(".")[0] == "verl"]


def test_parts_of_verl_that_nobody_has_are_answered_with_file_and_line(tmp_path: Path) -> None:
    for line, said in (
        ("from verl.single_controller.ray import RayWorkerGroup", "has no stand-in here; keep what you need"),
        ("from verl.tools.schemas import Nothing", "which has no such name here .*; import BaseTool, the schemas"),
        ("import importlib; importlib.import_module('verl.single_controller')", "it needs verl.single_controller"),
    ):
        file = tmp_path / f"part_{len(said)}.py"
        file.write_text(f"{line}\n")
        where = "" if said.startswith("it needs") else rf"{re.escape(str(file))}, line 1: `{re.escape(line)}` needs .*"
        with pytest.raises(PluginError, match=where + said):
            load_tool(f"{file}:anything")


def test_a_tool_config_of_verls_is_played_and_its_rewards_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_tool.yaml").write_text(TOOL_YAML)
    row = tmp_path / "row.jsonl"
    row.write_text(json.dumps({**ROW, "agent_name": "tool_agent", "extra_info": WITH_TOOL}))
    call = '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "42"}}</tool_call>'
    settings = [
        "task=null", "engine=scripted", f"engine.script=['{call}', '{call}', '#### 42']", f"runs_dir={tmp_path}/runs",
        f"data.eval_files={row}", "scoring.scorers={default: gsm8k}", f"rollout.tools=[{tmp_path}/gsm8k_tool.yaml]",
    ]  # fmt: skip
    for lifecycle, rewards in (("per_call", [0.0, 0.0]), ("per_trajectory", [0.0, -0.05])):
        options = f"rollout.tool_options={{calc_gsm8k_reward: {{lifecycle: {lifecycle}}}}}"
        report = evaluate(configure(*settings, options), console=Console(quiet=True))
        (played,) = report.trajectories
        assert played.failure is None and played.reward == 1.0
        assert [call.score for call in played.calls] == rewards
        assert {reply.text for turn in played.turns for reply in turn.replies} == {
            "Current parsed answer='42' reward=1.0"
        }
    assert played.facts.tool_rewards == {"calc_gsm8k_reward": 1.0}


def test_a_file_of_function_tools_is_taken_as_a_whole(tmp_path: Path) -> None:
    code = 'from verl.tools.function_tool import function_tool\n@function_tool\ndef one() -> str:\n    """One."""\n'
    (tmp_path / "functions.py").write_text(f"{code}    return '1', 0.5\n")
    (tool,) = load_tools(f"{tmp_path}/functions.py")
    assert tool.name == "one" and load_tool(f"{tmp_path}/functions.py:one").name == "one"
    (tmp_path / "none.py").write_text("def one(): ...\n")
    with pytest.raises(PluginError, match=r"none.py marks no function as a tool: name one"):
        load_tools(f"{tmp_path}/none.py")


def test_a_class_that_is_no_tool_of_either_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    async def execute(self, instance_id, parameters): ...\n")
    with pytest.raises(PluginError, match=r"is not a tool but a class: derive it from turnwise.ToolClass"):
        load_tool(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize(
    "signature",
    ["data_source, solution_str, ground_truth, extra_info=None", "data_source, solution_str, ground_truth, **kwargs"],
)
def test_a_compute_score_of_verls_scores(check: Callable[..., str], tmp_path: Path, signature: str) -> None:
    (tmp_path / "reward.py").write_text(
        f"def compute_score({signature}):\n    return float(ground_truth in solution_str)\n"
    )
    own = f"scoring.scorers={{default: '{tmp_path}/reward.py:compute_score'}}"
    assert check({**ROW, "extra_info": INFO}, own) == ""


def test_arrow_nulls_among_kwargs_are_dropped(check: Callable[..., str], tmp_path: Path) -> None:
    lines = [{**ROW, "extra_info": INFO}, {**ROW, "extra_info": {**WITH_USER, "index": 1, "tools_kwargs": None}}]
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "mixed.parquet")
    assert check({**ROW, "extra_info": INFO}, f"data.eval_files={tmp_path}/mixed.parquet") == ""


def test_keys_of_verl_are_answered_with_ours() -> None:
    for key, ours in (
        ("actor_rollout_ref.rollout.n=8", "training.group_size"),
        ("train=false", "turnwise eval"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=x", "rollout.tools"),
        ("algorithm.lam=0.9", "algorithm.gae_lambda"),
    ):
        with pytest.raises(ConfigError, match=ours):
            compose([key])


def test_jsonl_rows_are_read_too(check: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({**ROW, "extra_info": WITH_USER}) + "\n")
    assert check({**ROW, "extra_info": INFO}, f"data.eval_files={tmp_path}/test.jsonl") == ""
