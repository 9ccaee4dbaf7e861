"""Every knob of `learner` arrives: a learner opened from a config has it, or an update shows it."""

import asyncio
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload, OptimizerName, Precision
from turnwise.data.task_config import configure
from turnwise.engines.devices import learner_here, rank_devices
from turnwise.engines.learners.adamw_8bit import AdamW8bit
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.process import ProcessLearner
from turnwise.engines.open_configured import open_pair
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts
from turnwise.engines.rendering import make_renderer
from turnwise.errors import ConfigError
from turnwise.ext.fsdp.config import FsdpConfig
from turnwise.ext.fsdp.opening import local_ranks, open_over_ranks
from turnwise.rollout.prepare import prepare
from turnwise.training.optimise import optimise
from turnwise.training.sequences import TrainSequence

PLAIN = (
    "rollout.tools=[calculate]",
    "rollout.interaction=null",
    "engine.threads=1",
    "training.max_lag=0",
    "training.minibatches=1",
    "training.epochs=1",
    "learner.lr=0.01",
)
WITH_CRITIC = ("algorithm.advantage=gae", "learner.critic_lr=0.02")
UPDATES = 4


def opened(*settings: str) -> LocalLearner:
    config = configure(*PLAIN, *settings)
    renderer = prepare(config, "test", limit=1).renderer
    parts = LearnerParts(UPDATES, critic=config.algorithm.advantage == "gae", reference=False)
    learner = open_learner(config, renderer, parts, memory=None, say=lambda text: None)
    assert isinstance(learner, LocalLearner)
    return learner


def updated(*settings: str) -> tuple[LocalLearner, list[dict[str, float]]]:
    """After three updates on the same two episodes."""
    learner = opened(*settings)
    mask = [False, False, True, True, True]
    logprobs = [0.0, 0.0, -4.0, -4.0, -4.0]

    def sequences() -> list[TrainSequence]:
        made = [TrainSequence([5, 6, 7 + n, 8, 9], mask, logprobs, [0] * 5, 0, n, 0, float(n)) for n in range(2)]
        return made

    config = configure(*PLAIN, *settings)
    return learner, [optimise(learner, sequences(), config, step) for step in range(3)]


def weights(learner: LocalLearner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def group(learner: LocalLearner, name: str = "policy") -> dict[str, Any]:
    found: dict[str, Any] = learner._optimizers[name]._parts[0].param_groups[0]
    return found


def rate(*settings: str) -> list[float]:
    return [round(metrics["actor/lr"], 6) for metrics in updated(*settings)[1]]


def check_lr() -> None:
    assert rate("learner.lr=0.003") == [0.003] * 3


def check_critic_lr() -> None:
    learner = opened(*WITH_CRITIC)
    assert group(learner, "critic")["lr"] == 0.02 and group(learner)["lr"] == 0.01


def check_shared_critic() -> None:
    own, shared = opened(*WITH_CRITIC).critic, opened(*WITH_CRITIC, "learner.shared_critic=true").critic
    assert own is not None and own.trunk is not None and shared is not None and shared.trunk is None


def check_weight_decay() -> None:
    assert group(opened("learner.weight_decay=0.25"))["weight_decay"] == 0.25 != group(opened())["weight_decay"]


def check_beta2() -> None:
    assert group(opened("learner.beta2=0.9"))["betas"] == (0.9, 0.9) != group(opened())["betas"]


def check_warmup() -> None:
    assert rate("learner.warmup=2") == [0.005, 0.01, 0.01]


def check_decay() -> None:
    assert rate("learner.decay=linear") == [0.01, 0.0075, 0.005] != rate("learner.decay=cosine")


def check_min_lr_ratio() -> None:
    assert rate("learner.decay=linear", "learner.min_lr_ratio=0.5") == [0.01, 0.00875, 0.0075]


def check_grad_clip() -> None:
    free, clipped = updated("learner.grad_clip=1000000"), updated("learner.grad_clip=0.0000001")
    assert free[1][0]["actor/grad_norm"] == clipped[1][0]["actor/grad_norm"] > 1e-3
    moved = [sum(float((a - b).abs().sum()) for a, b in zip(weights(one), weights(opened()), strict=True)) for one in (free[0], clipped[0])]  # fmt: skip
    assert moved[1] < 0.99 * moved[0], "AdamW's epsilon is felt by gradients as small as that"


def check_token_budget() -> None:
    assert opened("learner.token_budget=77").token_budget == 77 != opened().token_budget


def check_gradient_checkpointing() -> None:
    assert opened("learner.gradient_checkpointing=true")._memory.recompute > 0 == opened()._memory.recompute


def check_device() -> None:
    assert opened("learner.device=cpu").device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"learner\.device=cuda:7"):
        opened("learner.device=cuda:7")


def check_precision() -> None:
    assert (
        learner_here(configure("learner.precision=bfloat16", "learner.device=cpu").learner).precision
        is Precision.bfloat16
    )
    assert opened("learner.precision=bfloat16").forward.narrow and not opened().forward.narrow


def check_optimizer() -> None:
    kinds = {
        type(part) for part in opened(f"learner.optimizer={OptimizerName.adamw8bit.value}")._optimizers["policy"]._parts
    }
    assert AdamW8bit in kinds and AdamW8bit not in {type(part) for part in opened()._optimizers["policy"]._parts}


def check_offload() -> None:
    assert opened(f"learner.offload={Offload.optimizer.value}")._optimizers["policy"]._offload
    assert not opened()._optimizers["policy"]._offload


def check_processes() -> None:
    assert rank_devices(configure("learner.processes=3", "learner.device=cpu")) == ("cpu",) * 3


def check_hang_seconds() -> None:
    config = configure("learner.processes=2", "learner.device=cpu", "learner.hang_seconds=123")
    assert 123 in vars(local_ranks(config, samples=True)).values()


def check_place() -> None:
    """A pair that is opened from a config: the learner of the other process has the model, and says how long it may be
    silent."""
    config = configure(*PLAIN, "learner.place=process", "learner.hang_seconds=321", *WITH_CRITIC)
    renderer, before, said = make_renderer(config), torch.get_num_threads(), list[str]()

    async def body() -> None:
        async with open_pair(config, renderer, LearnerParts(UPDATES, critic=True), said.append) as pair:
            learner = pair.learner
            assert isinstance(learner, ProcessLearner) and learner._group._limit == 321
            assert pair.exact and pair.threads == 1 and learner.device == torch.device("cpu")
            assert learner.token_budget == opened().token_budget
            handed, here = dict(learner.weights().tensors), dict(opened().weights().tensors)
            assert handed.keys() == here.keys() and all(torch.equal(handed[name], here[name]) for name in here)
            process = learner._group._processes[0]
        assert process.returncode is not None

    try:
        asyncio.run(body())
    finally:
        torch.set_num_threads(before)
    assert any("learner: in process" in text and "handed over on cpu" in text for text in said), said


def rank_setup(*settings: str) -> Any:
    """What the ranks of a learner of four processes are opened with."""
    config = configure("learner.processes=4", "learner.device=cpu", *settings)
    renderer = prepare(config, "test", limit=1).renderer
    setups = []

    def started(ranks: Any, setup: Any, **_: Any) -> Any:
        setups.append(setup)
        return SimpleNamespace()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnwise.ext.fsdp.learner.ShardedLearner", started)
        parts, ranks = LearnerParts(UPDATES, critic=False, reference=False), local_ranks(config, samples=True)
        open_over_ranks(config, renderer, parts, ranks, lambda text: None)
    return setups[0]


def check_replicas() -> None:
    assert rank_setup("fsdp.replicas=2").replicas == 2


def check_context_parallel() -> None:
    assert rank_setup("fsdp.context_parallel=2").context == 2


def check_lora_rank() -> None:
    learner = opened("learner.lora_rank=3")
    assert learner.model.has_adapter and not opened().model.has_adapter
    trained = [tuple(p.shape) for p in learner.model.parameters() if p.requires_grad]
    assert trained and all(3 in shape for shape in trained)


def check_lora_alpha() -> None:
    """Scales are buffers or attributes of the adapter: the same update moves what it computes by as much more."""
    plain, louder = (updated("learner.lora_rank=3", f"learner.lora_alpha={alpha}") for alpha in (3, 300))
    norms = [metrics[1]["actor/grad_norm"] for _, metrics in (plain, louder)]
    assert norms[1] > 2 * norms[0]


def check_train_vision() -> None:
    with pytest.raises(Exception, match="vision"):
        opened("learner.train_vision=true")


ARRIVALS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize("knob", [field.name for field in (*fields(LearnerConfig), *fields(FsdpConfig))])
def test_a_knob_of_the_learner_arrives(knob: str) -> None:
    assert knob in ARRIVALS, f"learner.{knob} needs a check that its value arrives where it is used"
    ARRIVALS[knob]()
