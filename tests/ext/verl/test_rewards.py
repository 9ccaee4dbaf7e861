"""verl's reward functions and reward managers, of both kinds, as scorers."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_recipe import make_tokenizer

from turnwise import configure, evaluate
from turnwise.errors import PluginError, TurnwiseError
from turnwise.system.plugins import load_module

LEGACY = """
import torch
from collections import defaultdict
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("mine")
class Manager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.0, **kwargs):
        self.tokenizer, self.bonus = tokenizer, bonus
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            length = item.batch["attention_mask"][prompt_length:].sum()
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            score = self.compute_score(item.non_tensor_batch[self.reward_fn_key], text, truth)
            extra["length"].append(int(length))
            reward_tensor[i, length - 1] = score + self.bonus
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra} if return_dict else reward_tensor
"""
LOOP = """
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.reward_score import default_compute_score


@register("mine")
class Manager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score=None, **kwargs):
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: DataProto) -> dict:
        item = data[-1:][0]
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(item.batch["responses"], skip_special_tokens=True))
        score = default_compute_score(item.non_tensor_batch["data_source"], text,
                                      item.non_tensor_batch["reward_model"]["ground_truth"])
        return {"reward_score": score, "reward_extra_info": {"acc": score, "turns": item.non_tensor_batch["__num_turns__"]}}
"""


@pytest.fixture
def scored(tmp_path: Path) -> Any:
    """(code, overrides) -> the trajectory of one scripted episode."""
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "6*7?"}],
           "reward_model": {"ground_truth": "42"}, "extra_info": {"index": 3}}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    def play(code: str, name: str, *overrides: str) -> Any:
        file = tmp_path / "reward.py"
        file.write_text(code)
        settings = [
            "task=null", "engine=scripted", "engine.script=['#### 42']", f"data.eval_files={tmp_path}/rows.jsonl",
            f"runs_dir={tmp_path}/runs", f"scoring.scorers={{default: '{file}:{name}'}}", *overrides,
        ]  # fmt: skip
        return evaluate(configure(*settings), console=Console(quiet=True)).trajectories[0]

    return play


def test_a_manager_of_a_whole_batch_scores(scored: Any, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    options = f"scoring.options={{Manager: {{tokenizer: {tmp_path}/model, bonus: 0.5}}}}"
    trajectory = scored(LEGACY, "Manager", options)
    assert trajectory.failure is None and trajectory.reward == 1.5
    assert trajectory.parts["length"] == trajectory.turns[0].completion_tokens


def test_a_manager_of_the_reward_loop_scores(scored: Any, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    trajectory = scored(LOOP, "Manager", f"scoring.options={{Manager: {{tokenizer: {tmp_path}/model}}}}")
    assert trajectory.failure is None and trajectory.reward == 1.0
    assert trajectory.parts == {"acc": 1.0, "turns": 2.0}


OVERLONG = """
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn


class Manager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score: RawRewardFn = None, reward_fn_key="data_source",
                 overlong_buffer_cfg=None, **kwargs):
        self.buffer = overlong_buffer_cfg

    def __call__(self, data, return_dict=False):
        import torch

        reward = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        if self.buffer.enable and self.buffer["len"] == self.buffer.len and self.buffer.get("absent") is None:
            reward[:, -1] = self.buffer.penalty.factor
        return {"reward_tensor": reward, "reward_extra_info": {"overlong": [reward.sum()]}}
"""
BUFFER = "{enable: true, len: 4, penalty: {factor: -0.5}}"
OVERLONG_LOOP = """
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.ray_utils import get_event_loop


class LoopManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.buffer = config.reward.get("reward_kwargs", {}).get("overlong_buffer_cfg", None)
        assert get_event_loop() is self.loop and config.trainer.experiment_name

    async def run_single(self, data):
        score = data.batch["responses"].sum() * 0 + (self.buffer.penalty.factor if self.buffer is not None else 0.25)
        scores = self.assemble_rm_scores(data, [float(score)])
        return {"reward_score": score, "reward_extra_info": {"last": scores[0, -1], "sum": float(scores.sum())}}
"""


def test_options_of_managers_have_attributes_all_the_way_down(scored: Any, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    code, words = OVERLONG + OVERLONG_LOOP, f"tokenizer: {tmp_path}/model"
    options = f"scoring.options={{Manager: {{{words}, overlong_buffer_cfg: {BUFFER}}}}}"
    batch = scored(code, "Manager", options)
    assert batch.reward == -0.5 and batch.parts == {"overlong": -0.5}
    config = f"config: {{reward: {{reward_kwargs: {{overlong_buffer_cfg: {BUFFER}}}}}}}"
    assert scored(code, "LoopManager", f"scoring.options={{LoopManager: {{{words}, {config}}}}}").reward == -0.5
    plain = scored(code, "LoopManager", f"scoring.options={{LoopManager: {{{words}}}}}")
    assert plain.reward == 0.25 and plain.parts == {"last": 0.25, "sum": 0.25}


def test_a_manager_without_a_tokenizer_says_what_to_set(scored: Any) -> None:
    with pytest.raises(PluginError, match=r"set scoring.options=\{Manager: \{tokenizer: FOLDER\}\}"):
        scored(LEGACY, "Manager")


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "float(extra_info['index'])"),
        ("data_source, solution_str, ground_truth, **kwargs", "float(kwargs['extra_info']['index'])"),
        ("data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer",
         "3.0 if reward_router_address is None else 0.0"),
        ("data_source, solution_str, ground_truth, extra_info, bonus=1.0", "{'score': 2.0 + bonus, 'note': 'fine'}"),
    ],
)  # fmt: skip
def test_reward_functions_of_every_signature_score(scored: Any, signature: str, body: str) -> None:
    for kind in ("def", "async def"):
        assert scored(f"{kind} compute_score({signature}):\n    return {body}\n", "compute_score").reward == 3.0


def test_a_batch_function_scores_with_the_batch_manager(scored: Any) -> None:
    code = "def score(data_sources, solution_strs, ground_truths, extra_infos, **kw):\n    return [{'score': 1.0}] * "
    assert scored(f"{code}len(data_sources)\n", "score", "scoring.run=batch").reward == 1.0


def test_a_loop_that_returns_no_reward_is_not_given_one(scored: Any) -> None:
    with pytest.raises(TurnwiseError, match="the agent loop returned no reward_score"):
        scored("x = 1\n", "x", "scoring.scorers={default: loop_reward}")


IMPORTS = """
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.reward_score.geo3k import compute_score as geo3k
from verl.utils.reward_score.math_dapo import compute_score as dapo
from verl.utils.reward_score.math_reward import is_equiv
from verl.utils.reward_score.search_r1_like_qa_em import compute_score_subem
"""


def test_reward_rules_are_routed_by_data_source(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(IMPORTS)
    rules = load_module(f"{tmp_path}/rules.py", "scorer")
    score = rules.default_compute_score
    assert score("openai/gsm8k", "#### 1,234", "1234") == 1.0
    assert score("lighteval/MATH", r"so \boxed{\frac12}", r"\frac{1}{2}") == 1.0
    assert score("aime2024", "Answer: 42", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert score("hiyouga/geometry3k", r"<think>x</think> \boxed{5}", "5") == pytest.approx(1.0)
    assert rules.geo3k(r"\boxed{5}", "5") == pytest.approx(0.9)
    assert score("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["beatles"]}) == 1.0
    assert rules.compute_score_subem("<answer>the Beatles band</answer>", {"target": "beatles"}) == 1.0
    assert rules.gsm8k.extract_solution("it is 1,234 .", method="flexible") == "1,234"
    assert rules.dapo("no", "1")["score"] == -1.0 and rules.is_equiv("x=5", "5")
    for source, hint in (("taco", "code_tests"), ("numina_olympiads", "math"), ("mine", "name one in scoring.scorers")):
        with pytest.raises(NotImplementedError, match=hint):
            score(source, "", "")


PARTS = r"""
import verl.utils.torch_functional as verl_F
from verl.experimental.agent_loop.agent_loop import AsyncLLMServerManager
from verl.experimental.agent_loop.utils import add_generation_prompt_for_gpt_oss, resolve_config_path
from verl.utils.model import compute_position_id_with_mask
from verl.utils.ray_utils import auto_await, get_event_loop
from verl.utils.reward_score import math_dapo, math_reward
from verl.workers.rollout.schemas import Message
"""


def test_parts_that_recipes_import_behave(tmp_path: Path) -> None:
    import torch

    (tmp_path / "parts.py").write_text(PARTS)
    parts = load_module(f"{tmp_path}/parts.py", "scorer")
    for rule in (parts.math_reward, parts.math_dapo):
        assert rule.last_boxed_only_string(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\boxed{\frac{1}{2}}"
        assert rule.remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
        assert rule.last_boxed_only_string("none") is rule.last_boxed_only_string(r"\boxed{open") is None
        with pytest.raises(AssertionError, match="is no box"):
            rule.remove_boxed("5")
    assert parts.math_reward.last_boxed_only_string(r"\fbox{3}") == r"\fbox{3}"
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64)
    padded, shown = parts.verl_F.postprocess_data(ids, mask, 5, pad_token_id=0)
    assert padded.tolist() == [[0, 0, 5, 6, 7]] and shown.tolist() == [[0, 0, 1, 1, 1]]
    assert parts.compute_position_id_with_mask(shown).tolist() == [[0, 0, 0, 1, 2]]
    cuts = {"left": [[6, 7]], "right": [[5, 6]], "middle": [[5, 7]]}
    for side, kept in cuts.items():
        assert parts.verl_F.postprocess_data(ids, mask, 2, 0, truncation=side)[0].tolist() == kept
    with pytest.raises(NotImplementedError, match="3 tokens, and max_length is 2"):
        parts.verl_F.postprocess_data(ids, mask, 2, 0)
    values = torch.tensor([1.0, 3.0, float("nan")])
    assert float(parts.verl_F.masked_mean(values, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(2.0)
    assert parts.verl_F.get_response_mask(torch.tensor([[4, 2, 9]])).tolist() == [[1, 1, 0]]
    assert parts.Message(role="user", content="hi").tool_calls is None
    assert parts.add_generation_prompt_for_gpt_oss("x") == "x<|start|>assistant"

    async def one() -> int:
        return 1

    assert parts.auto_await(one)() == 1
