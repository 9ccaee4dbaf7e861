"""What a sampler is given of a learner's weights, where it lies, and that it does not pile up."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turnwise.data.task_config import configure
from turnwise.engines import publish_weights
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts
from turnwise.engines.publish_weights import check_trainable, make_update, needs_files, publish, weights_folder
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, FullWeights, Update, WeightsFolder
from turnwise.errors import ConfigError, EngineError
from turnwise.rollout.prepare import make_renderer


def takes(*kinds: type) -> Capabilities:
    return Capabilities(Logprobs.SCALED, frozenset(kinds))


def learner(*overrides: str) -> LocalLearner:
    config = configure("learner.device=cpu", *overrides)
    return open_learner(config, make_renderer(config), LearnerParts(updates=1))


class Reader:
    """A sampler that reads what it is given at once."""

    context_length = 8

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.given: list[tuple[Update, int, int]] = []

    async def publish(self, update: Update, version: int) -> None:
        folder = getattr(update, "folder", None)
        size = sum(file.stat().st_size for file in folder.iterdir()) if folder else 0
        self.given.append((update, version, size))


def test_the_cheapest_update_that_a_sampler_takes_is_made(tmp_path: Path) -> None:
    plain, adapted = learner(), learner("learner.lora_rank=4")
    assert isinstance(make_update(plain, takes(FullWeights, Adapter, WeightsFolder), tmp_path / "a"), FullWeights)
    assert not (tmp_path / "a").exists()
    assert isinstance(make_update(plain, takes(WeightsFolder, Adapter), tmp_path / "b"), WeightsFolder)
    assert isinstance(make_update(adapted, takes(WeightsFolder, Adapter), tmp_path / "c"), Adapter)
    small = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert small < sum(file.stat().st_size for file in (tmp_path / "b").iterdir()) / 2
    assert (tmp_path / "c" / "adapter_config.json").is_file()
    assert isinstance(make_update(adapted, takes(FullWeights), tmp_path / "d"), FullWeights)
    for wrong in ((plain, takes(Adapter), tmp_path / "e"), (plain, takes(WeightsFolder), None), (plain, takes(), None)):
        with pytest.raises(EngineError, match="which this learner cannot give"):
            make_update(*wrong)


def test_files_hold_every_weight_as_it_is_however_many_files_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_weights, "PART_BYTES", 200_000)
    made = learner()
    publish_weights.write_weights(made.weights(), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = dict(made.weights().tensors)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_updates_do_not_pile_up_and_the_latest_stays_for_who_asks_again(tmp_path: Path) -> None:
    sampler: Any = Reader(takes(WeightsFolder))
    made = learner()

    async def main() -> None:
        for version in (0, 1, 2, 2, 3):  # a version may come twice: after a resume
            await publish(made, sampler, version, tmp_path)
            assert [folder.name for folder in tmp_path.iterdir()] == [str(version)]

    asyncio.run(main())
    assert [version for _, version, _ in sampler.given] == [0, 1, 2, 2, 3]
    assert len({size for _, _, size in sampler.given}) == 1  # an update costs the same, however many there were
    direct: Any = Reader(takes(FullWeights))
    asyncio.run(publish(made, direct, 1, None))
    assert isinstance(direct.given[0][0], FullWeights)


def test_the_folder_of_updates_is_gone_afterwards_and_what_a_killed_process_left_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_weights, "MEMORY", tmp_path)
    shared = tmp_path / "shared"
    script = f"""
import os, pathlib, signal
from turnwise.engines import publish_weights
publish_weights.MEMORY = pathlib.Path({str(tmp_path)!r})
with publish_weights.weights_folder(10, None) as one, publish_weights.weights_folder(10, pathlib.Path({str(shared)!r})) as two:
    print(one, two, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    left = [Path(name) for name in killed.stdout.split()]
    (tmp_path / "turnwise-weights-zzz").mkdir()
    assert len(left) == 2 and all(folder.is_dir() for folder in left)
    with weights_folder(10, None) as place:
        assert place.parent == tmp_path and place.is_dir()
        assert not left[0].exists() and (tmp_path / "turnwise-weights-zzz").exists()
        with weights_folder(10, shared) as other:
            assert other.parent == shared and not left[1].exists() and place.exists()
    assert not place.exists() and not other.exists()
    with weights_folder(2**60, None) as place:  # no memory has room for that
        assert place.parent != tmp_path


def test_samplers_that_cannot_be_trained_with_are_refused() -> None:
    check_trainable("x", takes(FullWeights), lora=False)
    check_trainable("x", takes(WeightsFolder), lora=False)
    check_trainable("x", takes(Adapter), lora=True)
    with pytest.raises(ConfigError, match="all weights after each step, but engine=x takes: Adapter"):
        check_trainable("x", takes(Adapter), lora=False)
    with pytest.raises(ConfigError, match="takes: nothing"):
        check_trainable("x", takes(), lora=True)
    assert needs_files(takes(WeightsFolder), lora=False) and not needs_files(takes(FullWeights, Adapter), lora=False)
    assert needs_files(takes(FullWeights, Adapter), lora=True)
