"""What needs no cluster: what is refused, what an address in a run is worth, and how turns and weights travel."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise import configure
from turnwise.cluster import stored_weights
from turnwise.cluster.messages import Outcome, PackedOutcomes, PackedRequests
from turnwise.cluster.opening import check_cluster
from turnwise.cluster.stored_weights import WeightsPlan, pack, unpack
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.errors import ConfigError
from turnwise.trust import reaches
from turnwise.types import Completion, FinishReason, VersionRun


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["cluster.address=ray://there:10001"], "HOST:PORT"),
        (["cluster.address=there"], "HOST:PORT"),
        (["cluster.address='there:70000'"], "HOST:PORT"),
        (["engine=vllm_server", "engine.servers=['http://127.0.0.1:1']"], "samplers of a cluster start their own"),
        (["cluster.scorers=1", "scoring.run=http", "scoring.url=http://127.0.0.1:1"], "a server scores already"),
        (["cluster.sandboxes=1", "sandbox.url=http://127.0.0.1:1"], "a server runs the code already"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_at_once(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_cluster(configure("cluster=ray", *settings))


def test_without_ray_there_is_one_clear_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from turnwise.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "eval", "cluster=ray", "eval.samples=1"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 2 and "pip install 'turnwise[cluster]'" in found.stderr
    assert "Traceback" not in found.stderr and list(tmp_path.iterdir()) == []


def test_importing_turnwise_imports_no_ray() -> None:
    code = "import sys, turnwise.train, turnwise.cluster.engines; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_address_in_a_run_needs_trust(tmp_path: Path) -> None:
    config = configure("cluster=ray", "cluster.address=there:6379")
    assert "cluster.address=there:6379" in reaches(config, tmp_path)
    assert not [one for one in reaches(configure("cluster=ray"), tmp_path) if "cluster" in one]


def test_requests_and_results_arrive_as_they_were_sent() -> None:
    params, noise = SamplingParams(5, stop_strings=("x",)), NoiseKey(0, 1, "sample", 2)
    sent = [(n, Request(f"talk {n}", np.arange(n, dtype=np.int64), params, noise)) for n in (3, 0, 7)]
    for (number, one), (there, other) in zip(sent, PackedRequests.of(sent).requests(), strict=True):
        assert (number, one.conversation, one.params, one.noise) == (there, other.conversation, params, noise)
        assert other.token_ids.dtype == np.int64 and np.array_equal(one.token_ids, other.token_ids)
    runs = (VersionRun(1, 2), VersionRun(2, 1))
    good = Completion(np.array([4, 5, 6]), np.array([-1, -2, -3], np.float32), FinishReason.STOP, runs)
    empty = Completion.of([], [], FinishReason.LENGTH, version=3)
    outcomes = PackedOutcomes.of(
        [Outcome(1, good), Outcome(2, problem="gone", lost=True), Outcome(3, empty)]
    ).outcomes()
    found = {one.number: one for one in outcomes}
    assert found[2] == Outcome(2, problem="gone", lost=True) and len(found) == 3
    there = found[1].completion
    assert there is not None and there.versions == runs and there.finish_reason is FinishReason.STOP
    assert np.array_equal(there.token_ids, good.token_ids) and np.array_equal(there.logprobs, good.logprobs)
    there.logprobs[0] = 0.0  # it is the receiver's own
    assert PackedRequests.of([]).requests() == [] and PackedOutcomes.of([]).outcomes() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_arrive_as_they_were_put(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "PART_BYTES", 100)
    tensors = {f"layer.{n}": torch.randn(n + 1, 7) for n in range(6)} | {"bias": torch.randn(())}
    plan = WeightsPlan.of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    parts = list(pack(plan, reversed(tensors.items())))
    assert len(parts) == len(plan.parts) > 2
    update = unpack(plan.shapes, parts)
    found = dict(update.tensors)
    assert update.shapes == plan.shapes and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].to(getattr(torch, dtype))) for name in tensors)
