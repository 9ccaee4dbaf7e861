"""Memory of the machine and room on its disk are counted before a model is read, and what does not fit is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from turnwise.config import Config
from turnwise.data.task_config import compose
from turnwise.engines import devices
from turnwise.engines import host_memory as module
from turnwise.engines.devices import Gpu, VisibleGpus
from turnwise.engines.host_memory import check_disk, check_host_memory, checkpoints, host_memory, page_locked
from turnwise.engines.memory_plan import Training
from turnwise.engines.model.huggingface_folder import DecoderConfig, layout
from turnwise.engines.model.loading import ModelFacts
from turnwise.errors import ConfigError
from turnwise.system.resources import free_memory

GIB = 2**30
SEVEN_B = DecoderConfig("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128, 32_768, qkv_bias=True)


def with_facts(config: DecoderConfig) -> ModelFacts:
    tensors = tuple(math.prod(part.shape) for part in layout(config))
    return ModelFacts(
        "qwen2", config.vocab_size, config.context_length, config.num_layers,
        2 * config.num_layers * config.num_kv_heads * config.head_dim, (2,), sum(tensors), config.hidden_size,
        tensors=tensors,
    )  # fmt: skip


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-7B on a machine with an H200; nothing is read or computed."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: VisibleGpus((Gpu("NVIDIA H200", 150 * 10**9),)))
    monkeypatch.setattr(module, "facts_of", lambda config: with_facts(SEVEN_B))


def config_of(*overrides: str) -> Config:
    return compose(["learner.device=cuda", *overrides]).config


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    assert [page_locked(size) for size in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]


@pytest.mark.usefixtures("seven")
def test_an_optimizer_of_seven_billion_weights_takes_what_was_measured() -> None:
    """107.0 GiB were page-locked when the kernel ended it: masters and gradients, 53.5 GiB each. Masters of narrow
    weights are plain memory now."""
    found = host_memory(config_of("learner.offload=optimizer"), Training())
    assert found is not None
    assert found.gradients / GIB == pytest.approx(53.5, abs=0.05)
    assert found.masters / GIB == pytest.approx(28.4, abs=0.05) and found.moments == 2 * found.masters
    assert found.rounded == found.gradients // 2
    assert "machine's own memory 165.4 GiB" in found.line()
    with_critic = host_memory(config_of("learner.offload=optimizer"), Training(critic=True))
    assert with_critic is not None and with_critic.bytes == 2 * found.bytes


@pytest.mark.usefixtures("seven")
def test_what_does_not_fit_is_refused_by_name() -> None:
    asked = config_of("learner.offload=optimizer")
    with pytest.raises(ConfigError, match=r"learner.offload=optimizer keeps 165.4 GiB .* 117.0 GiB are free here"):
        check_host_memory(asked, Training(), free=117 * GIB)
    check_host_memory(asked, Training(), free=166 * GIB)
    for fits in ("learner.offload=none", "learner.lora_rank=16"):
        check_host_memory(config_of("learner.offload=optimizer", fits), Training(), free=4 * GIB)
    smaller = config_of("learner.offload=optimizer", "learner.optimizer=adamw8bit")
    check_host_memory(smaller, Training(), free=124 * GIB)


@pytest.mark.usefixtures("seven")
def test_on_the_cpu_nothing_is_kept_elsewhere() -> None:
    assert host_memory(config_of("learner.offload=optimizer", "learner.device=cpu"), Training()) is None


@pytest.mark.usefixtures("seven")
def test_checkpoints_are_counted_and_a_full_disk_is_refused_before_the_run(tmp_path: Path) -> None:
    """12 bytes a weight to go on from and 2 for the policy: the 106 GB that one of 7B took."""
    asked = config_of(f"runs_dir={tmp_path / 'not' / 'yet'}", "training.steps=40", "training.save_every=10")
    found = checkpoints(asked, Training())
    assert found is not None and found.most == 3 and found.each / 1e9 == pytest.approx(106.6, abs=0.1)
    assert found.total == 3 * found.each + found.policy  # of the best evaluation
    assert list(check_disk(asked, Training(), free=found.total)) == []
    assert "3 checkpoints of 99.3 GiB" in next(check_disk(asked, Training(), free=found.total - 1))
    with pytest.raises(ConfigError, match=r"not/yet has 50.0 GiB left, and a run ends with a checkpoint of 99.3 GiB"):
        list(check_disk(asked, Training(), free=50 * GIB))
    last = checkpoints(config_of("training.save_every=0", "training.ship=last"), Training())
    assert last is not None and last.most == 1 and last.total == last.each
    eighth = checkpoints(config_of("learner.optimizer=adamw8bit"), Training())
    assert eighth is not None and eighth.each / 1e9 == pytest.approx(60.9, abs=0.1)


def test_a_checkpoint_is_as_large_as_it_was_said_to_be(tmp_path: Path) -> None:
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.memory_plan import facts_of
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.sources import find_model

    config = compose(["model.path=tiny", "learner.device=cpu"]).config
    learner = LocalLearner(Decoder.read(find_model("tiny").folder), config.learner, temperature=1.0, updates=1)
    learner.save_policy(tmp_path)
    learner.save(tmp_path)
    policy = sum(file.stat().st_size for file in tmp_path.rglob("model.safetensors"))
    found = checkpoints(config, Training())
    assert found is not None and policy == pytest.approx(found.policy, rel=0.02)
    assert facts_of(config).weights * 12 == found.state  # moments come with the first step


V2 = {
    "proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n",
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/memory.max": "max",
    "sys/fs/cgroup/memory.current": "7",
    "sys/fs/cgroup/a/memory.max": "500000",
    "sys/fs/cgroup/a/memory.current": "300000",
    "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 40000\nactive_file 10000\nshmem 9\n",
}
V1 = {
    "proc/meminfo": V2["proc/meminfo"],
    "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/c\n",
    "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "400000",
    "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "390000",
    "sys/fs/cgroup/memory/c/memory.stat": "inactive_file 1\ntotal_inactive_file 90000\ntotal_active_file 0\n",
}


@pytest.mark.parametrize(("files", "free"), [
    (V2, 500_000 - (300_000 - 50_000)), (V1, 400_000 - (390_000 - 90_000)),
    ({**V2, "sys/fs/cgroup/a/memory.max": "max"}, 1_024_000), ({**V2, "proc/self/cgroup": ""}, 1_024_000),
])  # fmt: skip
def test_free_memory_is_the_least_that_anybody_allows(files: dict[str, str], free: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_facts_of_a_model_whose_tensors_are_not_known_count_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(with_facts(SEVEN_B), tensors=())
    monkeypatch.setattr(devices, "visible_gpus", lambda: VisibleGpus((Gpu("NVIDIA H200", 150 * 10**9),)))
    monkeypatch.setattr(module, "facts_of", lambda config: facts)
    found = host_memory(config_of("learner.offload=optimizer"), Training())
    assert found is not None and found.gradients == 2 * found.masters
