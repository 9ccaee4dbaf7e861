"""A user's own advantage and loss: the contract, what is refused at the start, and what reaches the sequences."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turnwise import configure
from turnwise.config import AlgorithmConfig
from turnwise.engines.learners.device_batch import on_device
from turnwise.engines.learners.learner import Objective
from turnwise.engines.learners.losses import policy_objective
from turnwise.errors import ConfigError, PluginError
from turnwise.training.advantages import assign
from turnwise.training.checks import check_choices, check_training
from turnwise.training.packing import pack, tokens_by_trajectory
from turnwise.training.sequences import LEFT_OUT

CODE = """
import numpy as np, torch
def centred(batch): return batch.rewards - batch.rewards.mean()
def by_turn(batch): return np.repeat(batch.groups, batch.lengths) * 10.0 + batch.turns
def ppo(batch):
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    return torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
def short(batch): return batch.rewards[:-1]
def nan(batch): return batch.rewards / 0
def words(batch): return ["good"] * len(batch.rewards)
def two(batch, other): return batch.rewards
async def later(batch): return batch.rewards
def broken(batch): return batch.values
def number(batch): return 1.0
def summed(batch): return batch.logprobs.sum()
def fixed(batch): return batch.advantages
def infinite(batch): return batch.logprobs / 0
def idle(batch): return batch.logprobs * 0
NOTHING = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path}/mine.py"


def test_an_advantage_by_episode_or_by_token_reaches_every_policy_token(draw, mine: str) -> None:
    made = [
        draw("ppaata", trajectory=0, group=0, reward=1.0),
        draw("paa", trajectory=1, group=0, reward=0.0),
        draw("pa", trajectory=2, group=1, reward=0.5),
        draw("pa", trajectory=3, group=LEFT_OUT, reward=9.0),
    ]
    metrics = assign(made, f"{mine}:centred")
    assert [one.gather("advantages").tolist() for one in made] == [[0.5] * 3, [-0.5] * 2, [0.0], [0.0]]
    assert metrics["critic/score/mean"] == pytest.approx(0.5) and metrics["critic/advantages/max"] == 0.5
    assign(made, f"{mine}:by_turn")
    assert [one.gather("advantages").tolist() for one in made[:3]] == [[0.0, 0.0, 1.0], [0.0, 0.0], [10.0]]


def test_a_loss_of_ones_own_has_the_gradient_of_the_built_in_it_repeats(draw, mine: str) -> None:
    made = [
        draw("paa", trajectory=number, old_logprobs=[-1.0, -2.0], advantages=[sign, sign])
        for number, sign in enumerate((1.0, -1.0))
    ]
    batch = on_device(pack(made, tokens_by_trajectory(made)), torch.device("cpu"))
    gradients = []
    for algorithm in (AlgorithmConfig(clip_dual=None), AlgorithmConfig(loss=f"{mine}:ppo")):
        logprobs = torch.tensor([-0.5, -2.1, -1.6, -1.9], requires_grad=True)
        objective, _ = policy_objective(logprobs, torch.zeros(4), batch, Objective.of(algorithm))
        objective.backward()
        gradients.append((objective.item(), logprobs.grad.tolist()))
    assert gradients[0] == gradients[1] and any(gradients[0][1])


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("advantage", "short", r"returned an array of shape \(6,\) for 7 episodes with 14 tokens"),
        ("advantage", "nan", "returned inf for one of 7 episodes"),
        ("advantage", "words", "not numbers"),
        ("advantage", "two", "must take the batch and nothing else: missing a required argument: 'other'"),
        ("advantage", "later", "must be a plain function, not an async one"),
        ("advantage", "broken", "raised AttributeError: 'AdvantageBatch' object has no attribute 'values'"),
        ("advantage", "NOTHING", "must be a function, not int"),
        ("advantage", "centered", "did you mean 'centred'"),
        ("loss", "number", "returned float, not a tensor"),
        ("loss", "summed", r"returned a tensor of shape \(\) for 5 tokens: return \(5,\)"),
        ("loss", "fixed", "without a gradient"),
        ("loss", "infinite", "not finite"),
        ("loss", "idle", "has the gradient 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_breaks_the_contract_is_refused_before_anything_is_rolled_out(
    mine: str, key: str, name: str, said: str
) -> None:
    config = configure(f"algorithm.{key}={mine}:{name}")
    with pytest.raises(PluginError, match=said):
        check_training(config)


def test_a_name_nobody_offers_gets_the_nearest_however_it_was_set(mine: str) -> None:
    for override in ("algorithm.advantage=grpoo", "algorithm.loss=ppoclip"):
        with pytest.raises(ConfigError, match="did you mean"):
            configure(override)
    config = configure()
    with pytest.raises(ConfigError, match=r"algorithm.loss: unknown choice 'ppo_klip': did you mean 'ppo_clip'"):
        check_choices(replace(config.algorithm, loss="ppo_klip"))
    check_training(configure(f"algorithm.advantage={mine}:centred", "training.group_size=1"))
