"""verl's reward functions and reward managers, of both kinds, as scorers."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.errors import PluginError, TurnwiseError
from turnwise.models.tiny.recipe import make_tokenizer
from turnwise.plugins import load_module

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
