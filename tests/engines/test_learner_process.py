"""A learner in another process is used as one in this process is, and computes the same to the last bit."""

import gc
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_process import make, started

from turnwise.data.task_config import configure
from turnwise.engines.learners.learner import SUPERVISED, Learner, NotFinite, Objective, TokenBatch, Who
from turnwise.engines.learners.process_group import LearnerLost
from turnwise.errors import EngineError, PluginError
from turnwise.training.kl import controller
from turnwise.training.optimise import check_logprob_gap, optimise, score
from turnwise.training.packing import pack, tokens_by_trajectory
from turnwise.training.sequences import TrainSequence

MINE = """
import torch
def smooth(batch):
    ratio = (batch.logprobs - batch.old_logprobs).clamp(-20, 20).exp()
    return -batch.advantages * torch.tanh(ratio - 1.0)
def broken(batch):
    return batch.rewards
"""


def sequences(seed: int) -> list[TrainSequence]:
    """Two groups of three episodes with a tool's reply in the middle of each."""
    noise = np.random.default_rng(seed)
    made = []
    for number in range(6):
        length = int(noise.integers(20, 40))
        mask = [place >= 5 and place % 9 < 6 for place in range(length)]
        logprobs = np.where(mask, -noise.uniform(0.5, 5.0, length), 0.0)
        turns = [place // 9 for place in range(length)]
        ids = noise.integers(3, 96, length)
        made.append(TrainSequence(ids, mask, logprobs, turns, 0, number, number // 3, float(number % 3 == 0)))  # type: ignore[arg-type]
    return made


def batch(made: list[TrainSequence]) -> TokenBatch:
    return pack(made, tokens_by_trajectory(made))


def train(learner: Learner, *overrides: str) -> list[Any]:
    """Two steps; everything that came of them."""
    config = configure("learner.token_budget=80", "training.minibatches=2", *overrides)
    kl_controller, found = controller(config.algorithm.kl_reward, config.algorithm.kl_target), []
    for step in range(2):
        made = sequences(step)
        found.append(optimise(learner, made, config, step, kl_controller=kl_controller))
        found += [s.new_logprobs.tolist() for s in made if s.new_logprobs is not None]
    weights = learner.weights()
    found.append({name: tensor.float().numpy().tobytes() for name, tensor in weights.tensors})
    assert {name: tuple(shape) for name, shape in weights.shapes.items()}.keys() == found[-1].keys()
    return found


def test_a_learner_in_a_process_computes_what_one_here_computes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    here, gae, notes = make(lora=False), "algorithm.advantage=gae", list[str]()
    with closing(started(lora=False, notes=notes)) as there:
        for overrides in (
            (gae, "algorithm.kl_loss=0.1", "algorithm.entropy=0.01"),
            (gae, f"algorithm.loss={tmp_path}/mine.py:smooth", "algorithm.kl_reward=0.1"),
        ):
            assert train(there, *overrides) == train(here, *overrides)
        assert there.step == here.step == 8 and there.token_budget == here.token_budget
        assert notes == ["lora=False"], "what it has to say is said here"
        one, two = (learner.update([batch(sequences(5))], SUPERVISED) for learner in (here, there))
        assert one.metrics == two.metrics and one.metrics["loss"] > 0
        for who in Who:
            assert there.score(batch(sequences(6)), who).tolist() == here.score(batch(sequences(6)), who).tolist()
        config, checked = configure(), sequences(6)
        score(there, Who.SAMPLER, checked, "old_logprobs", 100)
        for sequence in checked:
            assert sequence.old_logprobs is not None
            sequence.logprobs = sequence.old_logprobs
        assert "are bitwise equal" in check_logprob_gap(there, checked, config, exact=True)
        # A state crosses over, and both go on from it alike.
        there.save(tmp_path / "state")
        fresh = make(lora=False)
        fresh.load(tmp_path / "state")
        assert fresh.step == there.step == 9
        assert train(fresh, gae, "algorithm.loss=cispo") == train(there, gae, "algorithm.loss=cispo")
        fresh.save(tmp_path / "back")
        there.load(tmp_path / "back")
        assert there.step == fresh.step and train(there, gae) == train(fresh, gae)
        process = there._group._processes[0]
    assert process.returncode is not None and not Path(there._group._folder).exists()


def test_errors_come_back_and_leave_the_learner_usable_and_a_stop_ends_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    made = sequences(0)
    for sequence in made:
        sequence.write("advantages", np.full(sequence.policy_tokens, np.nan))
        sequence.write("old_logprobs", np.zeros(sequence.policy_tokens))
    given = batch(made)
    with closing(started(lora=True, notes=[], published=torch.bfloat16)) as there:
        before = {name: tensor.clone() for name, tensor in there.weights().tensors}
        with pytest.raises(NotFinite, match="the loss is nan after 0 weight updates"):
            there.update([given, given], Objective("reinforce"))
        with pytest.raises(PluginError, match="broken.*raised AttributeError"):
            there.update([given], Objective(f"{tmp_path}/mine.py:broken"))
        with pytest.raises(EngineError, match="an update needs a batch"):
            there.update([], SUPERVISED)
        with pytest.raises(RuntimeError, match="the learner's own process: Traceback(?s:.*)TypeError"):
            there.score(given, None)  # type: ignore[arg-type]
        make(lora=False).save(tmp_path)
        with pytest.raises(EngineError, match="of another model: .*lora was None"):
            there.load(tmp_path)
        assert there.step == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in there.weights().tensors)
        there.save(tmp_path)  # and no gradient waits
        there.save_policy(tmp_path)
        assert (tmp_path / "policy/model.safetensors").is_file() and (tmp_path / "policy_adapter").is_dir()
        assert there.save_adapter(tmp_path / "adapter") and (tmp_path / "adapter/adapter_config.json").is_file()
        here, kl_loss = make(lora=True), ("algorithm.advantage=grpo", "algorithm.kl_loss=0.1")
        assert train(there, *kl_loss)[:-1] == train(here, *kl_loss)[:-1]
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in here.weights().tensors}
        handed = dict(there.weights().tensors)
        assert rounded.keys() == handed.keys() and all(torch.equal(rounded[name], handed[name]) for name in rounded)
        there._group._limit = 0.5  # opening it may take longer on a busy machine
        process = there._group._processes[0]
        os.kill(process.pid, signal.SIGSTOP)
        words = r"hangs in `score`.*the learner's own process has given no sign of life for 0.5 s \(learner.hang_secon"
        with pytest.raises(LearnerLost, match=words):
            there.score(batch(sequences(6)), Who.POLICY)
        assert process.returncode is not None
        with pytest.raises(LearnerLost, match="processes are gone: the learner's own process has given"):
            there.save(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_weights_are_handed_over_where_they_are() -> None:
    cuda, files = torch.device("cuda:0"), set(Path("/dev/shm").glob("torch_*"))
    with closing(started(lora=False, notes=[], reader=cuda, published=torch.bfloat16)) as there:
        here = make(lora=False)
        for _ in range(2):
            for learner in (here, there):
                learner.update([batch(sequences(5))], SUPERVISED)
            handed = dict(there.weights().tensors)
            for name, tensor in here.weights().tensors:
                assert handed[name].device == cuda and handed[name].dtype == torch.bfloat16
                assert torch.allclose(handed[name].float(), tensor.float(), rtol=0.02, atol=1e-3), name
    del there, learner, handed
    gc.collect()
    torch.cuda.ipc_collect()
    assert set(Path("/dev/shm").glob("torch_*")) == files
