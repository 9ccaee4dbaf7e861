"""The same against verl itself, where TURNWISE_VERL names a folder with one of its releases: `make test-peers`.

TURNWISE_VERL_DEPS is one with what it imports (Ray, tensordict). A module that this release cannot import beside our
packages is skipped, with what it wants.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REAL, DEPS = os.environ.get("TURNWISE_VERL", ""), os.environ.get("TURNWISE_VERL_DEPS", "")
pytestmark = pytest.mark.skipif(not REAL, reason="TURNWISE_VERL names no folder with verl's files")

PREPARE = """
import asyncio, importlib, json, os, sys
from pathlib import Path
REAL, folder = sys.argv[1], Path(sys.argv[3])
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parents[1])]  # tests/ext/verl, and tests for what all share
from rich.console import Console
from turnwise import configure, evaluate
from turnwise.system.plugins import load, load_module
from turnwise.ext.verl.tools import function_tools, verl_tool
from turnwise.config.choices import Lifecycle
from tiny_recipe import make_tokenizer
import test_dataset, test_loops, test_rewards
import test_tools as shared


def need(module):
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        print(f"SKIP {module}: {error.msg}")
        sys.exit(0)
    assert found.__file__.startswith(REAL), found
    return found


def write(name, code):
    (folder / name).write_text(code)
    return f"{folder}/{name}"


def play(script, *settings, row=()):
    whole = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "6*7?"}],
             "reward_model": {"ground_truth": "42"}, **dict(row)}
    rows = write("rows.jsonl", json.dumps(whole))
    found = evaluate(configure(
        "task=null", "engine=scripted", f"engine.script={json.dumps(script)}", f"data.eval_files={rows}",
        f"runs_dir={folder}/runs", "scoring.scorers={default: exact_match}", *settings), console=Console(quiet=True))
    assert found.trajectories[0].failure is None, found.trajectories[0].failure
    return found.trajectories[0]
"""
SCRIPTS = {
    "a tool class on the real base class": """
need("verl.tools.base_tool")
kind = load(write("checker.py", shared.LEGACY) + ":Checker", "tool")
from verl.tools.base_tool import BaseTool
assert issubclass(kind, BaseTool) and BaseTool.__module__ == "verl.tools.base_tool"
for lifecycle, scores in ((Lifecycle.per_call, [0.0, 0.0]), (Lifecycle.per_trajectory, [0.0, -0.05])):
    tool = verl_tool(kind, {"type": "native"}, shared.SCHEMA).with_lifecycle(lifecycle)
    assert tool.schema == shared.SCHEMA
    given = shared.context(create_kwargs={"ground_truth": "42"})
    replies = asyncio.run(shared.played(tool, given, {"answer": "42"}, {"answer": "42"}))
    assert [reply.score for reply in replies] == scores, replies
""",
    "verl's own GSM8K tool": """
need("verl.tools.gsm8k_tool")
kind = load("verl.tools.gsm8k_tool.Gsm8kTool", "tool")
tool = verl_tool(kind, {"type": "native"}, shared.SCHEMA).with_lifecycle(Lifecycle.per_trajectory)
replies = asyncio.run(shared.played(
    tool, shared.context(create_kwargs={"ground_truth": "18"}), {"answer": "17"}, {"answer": "18"}, {"answer": "18"}))
assert [reply.text for reply in replies][-1].startswith("Current parsed answer='18' reward=1.0"), replies
assert [reply.score for reply in replies] == [-0.05, 0.0, -0.05]
""",
    "function tools": """
need("verl.tools.function_tool")
tools = function_tools(load_module(write("functions.py", shared.FUNCTIONS), "tool"))
assert [tool.name for tool in tools] == ["add", "minus"]
(reply,) = asyncio.run(shared.played(tools[1], shared.context(), {"a": 1}))
assert (reply.text, reply.score, reply.info) == ("0", 0.5, {"kind": "minus"})
assert sys.modules["verl.tools.function_tool"].FUNCTION_TOOL_REGISTRY["add"].fn is not None
""",
    "an interaction, real or stood in for": """
kind = load("verl.interactions.gsm8k_interaction.Gsm8kInteraction", "interaction")
real = os.path.isdir(REAL + "/verl/interactions")
assert kind.__module__.startswith("verl." if real else "turnwise."), kind


async def ask():
    user = kind({"name": "gsm8k"})
    await user.start_interaction("a", ground_truth="42")
    said = [await user.generate_response("a", [{"role": "assistant", "content": text}]) for text in ("#### 1", "#### 42")]
    await user.finalize_interaction("a")
    return [one[:3] for one in said]

wrong = "Your response is incorrect! You need to reflect on your answer and try again."
assert asyncio.run(ask()) == [(False, wrong, 0.0), (True, "Your response is correct!", 1.0)]
""",
    "an agent loop on the real base class, by YAML and by its registered name": """
need("verl.experimental.agent_loop.agent_loop")
if not hasattr(sys.modules["verl.experimental.agent_loop.agent_loop"].AgentLoopBase, "ct_build_initial_tokens"):
    print("SKIP verl.experimental.agent_loop.agent_loop: this release has another base class"); sys.exit(0)
file = write("many.py", test_loops.NEW.replace("class Many", "@register('many')\\nclass Many"))
agents = write("agents.yaml", f"- name: three\\n  _target_: {file}:Many\\n  times: 3\\n")
found = play(["It is 41.", "It is 42."], f"verl.agents_file={agents}", "rollout.agent=three")
assert len(found.segments) == 3 and [len(one.turns) for one in found.branches] == [2, 2]
found = play(["It is 41.", "It is 42."], f"verl.agents_file={agents}", row={"agent_name": "many"})
assert len(found.segments) == 2
kind = load(f"{file}:Many", "agent loop")
assert [base.__module__ for base in kind.__mro__[1:2]] == ["verl.experimental.agent_loop.agent_loop"]
""",
    "a loop derived from the real tool agent loop, with our tools": """
need("verl.experimental.agent_loop.tool_agent_loop")
if not hasattr(sys.modules["verl.experimental.agent_loop.agent_loop"].AgentLoopBase, "ct_build_initial_tokens"):
    print("SKIP verl.experimental.agent_loop.tool_agent_loop: this release has another base class"); sys.exit(0)
file = write("derived_loops.py", test_loops.DERIVED)
tools = write("counting.yaml", test_loops.COUNTING.replace("FOLDER", str(folder)))
found = play([test_loops.CALL % 2 + test_loops.CALL % 3, "It is 42."], f"rollout.agent={file}:Derived",
             f"rollout.tools=[{tools}]", "rollout.max_parallel_calls=2")
assert [call.status for call in found.calls] == ["ok", "ok"], found.calls
kept = found.artifacts["verl"]
assert kept["reward_score"] == 0.5 and kept["extra_fields"]["tool_rewards"] == [0.25, 0.25], kept
assert kept["extra_fields"]["asked"] == 5 and "counted 2!" in found.messages[2].text
assert len(play(["It is 42."], f"rollout.agent={file}:Brief").turns) == 1
""",
    "the naive reward manager of a batch": """
need("verl.workers.reward_manager.naive")
make_tokenizer(folder / "model")
write("reward.py", "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\\n"
      "    return {'score': float(ground_truth in solution_str), 'turns': extra_info['num_turns']}\\n")
file = write("naive.py", "from verl.workers.reward_manager.naive import NaiveRewardManager\\n")
options = f"{{NaiveRewardManager: {{tokenizer: {folder}/model, compute_score: '{folder}/reward.py:compute_score'}}}}"
found = play(["#### 42"], f"scoring.scorers={{default: '{file}:NaiveRewardManager'}}", f"scoring.options={options}")
assert found.reward == 1.0 and found.parts["turns"] == 2.0, (found.reward, found.parts)
""",
    "the naive reward manager of the reward loop": """
need("verl.experimental.reward_loop.reward_manager.naive")
make_tokenizer(folder / "model")
file = write("naive.py", "from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager\\n")
found = play(["#### 42"], f"scoring.scorers={{default: '{file}:NaiveRewardManager'}}",
             f"scoring.options={{NaiveRewardManager: {{tokenizer: {folder}/model}}}}")
assert found.reward == 1.0 and found.parts["acc"] == 1.0, (found.reward, found.parts)
""",
    "a dataset class derived from the real one": """
need("verl.utils.dataset.rl_dataset")
file = write("mine.py", test_dataset.SUBCLASS)
found = play(["ok"], f"data.dataset={file}:Mine", row={"extra_info": {"keep": True, "index": 0}})
assert found.sample.prompt[-1].text == "6*7? Be brief."
""",
    "tensors": """
import torch
from turnwise.ext.verl.stand_ins import tensors
real = need("verl.utils.torch_functional")
generator = torch.Generator().manual_seed(0)
values, logits = torch.randn(4, 7, generator=generator), torch.randn(4, 7, 11, generator=generator)
mask = (torch.rand(4, 7, generator=generator) > 0.4).float()
ids = torch.randint(0, 11, (4, 7), generator=generator)
for name in ("masked_sum", "masked_mean", "masked_var", "masked_whiten"):
    torch.testing.assert_close(getattr(tensors, name)(values, mask), getattr(real, name)(values, mask))
for name in ("masked_sum", "masked_mean"):
    torch.testing.assert_close(getattr(tensors, name)(values, mask, -1), getattr(real, name)(values, mask, -1))
torch.testing.assert_close(tensors.entropy_from_logits(logits), real.entropy_from_logits(logits))
torch.testing.assert_close(tensors.logprobs_from_logits(logits, ids), real.logprobs_from_logits_naive(logits, ids))
torch.testing.assert_close(tensors.get_response_mask(ids, [2, 3]), real.get_response_mask(ids, [2, 3]))
for length in (5, 7, 9):
    for side in ("left", "right", "middle"):
        for left in (True, False):
            for ours, theirs in zip(*(one.postprocess_data(ids, mask, length, 0, left, side) for one in (tensors, real))):
                torch.testing.assert_close(ours, theirs)
""",
    "the rules of reward functions": """
import contextlib, io
from turnwise.ext.verl.stand_ins.rewards import dapo as reward_dapo, gsm8k as reward_gsm8k
from turnwise.ext.verl.stand_ins.rewards import math as reward_math, search as reward_search
rules = "verl.utils.reward_score."
real = {one: need(rules + one) for one in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em")}
texts = ["#### 42", "#### -1,234.5 .", "no number . ,", "####5", "it is 1,234", "#### $5", "." * 9]
for text in texts:
    for method in ("strict", "flexible"):
        theirs = real["gsm8k"].extract_solution(text, method)
        assert theirs == reward_gsm8k.extract_solution(text, method), text
answers = ["1/2", r"\\frac12", "0.5", ".5", r"\\dfrac{1}{2}", "x=5", "5", r"5\\text{ cm}", r"50\\%", "50", r"\\sqrt2",
           r"\\sqrt{2}", r"90^\\circ", r"\\left(1, 2\\right)", "(1,2)", r"\\$5", "1,234", r"\\text{east}", "3/04"]
for one in answers:
    for other in answers:
        assert real["math_reward"].is_equiv(one, other) == reward_math.is_equiv(one, other), (one, other)
boxed = [r"a \\boxed{1} b \\boxed{\\frac{1}{2}} c", r"\\fbox{3}", r"\\boxed 5$ x", r"\\boxed{open", "none", r"\\boxed{1} \\fbox{2}"]
for text in boxed:
    for name, ours in (("math_reward", reward_math), ("math_dapo", reward_dapo)):
        assert real[name].last_boxed_only_string(text) == ours.last_boxed_only_string(text), (name, text)
        found = ours.last_boxed_only_string(text)
        if found is not None and "fbox" not in found:
            assert real[name].remove_boxed(found) == ours.remove_boxed(found), (name, text)
for text in ("Answer: 42", "Answer: $42$", "answer : 1,234", "Answer: 12 students", "nothing", "Answer: x = 5.", "Answer: -7"):
    for truth in ("42", "1234", "12", "5", "-7"):
        theirs, ours = (one.compute_score(text, truth) for one in (real["math_dapo"], reward_dapo))
        assert theirs["score"] == ours["score"] and bool(theirs["acc"]) == ours["acc"], (text, truth)
for text in ("<answer>The Beatles</answer>", "none", "<answer>x</answer>" * 11 + "<answer>beatles!</answer>"):
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = real["search_r1_like_qa_em"].compute_score(text, {"target": ["Beatles"]})
    assert theirs == reward_search.compute_score(text, {"target": ["Beatles"]}), text
""",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_with_verl_itself(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREPARE + SCRIPTS[what], REAL, str(HERE), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in (REAL, DEPS) if one)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.strip().removeprefix("SKIP "))
