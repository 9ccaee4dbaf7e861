"""Memory of the machine and room on its disk are counted before a model is read, and what does not fit is refused."""

import math
from pathlib import Path

import pytest

from turnwise.config import Config
from turnwise.data.task_config import compose
from turnwise.engines import devices, disk_plan
from turnwise.engines import host_memory as host
from turnwise.engines.devices import Gpu, VisibleGpus
from turnwise.engines.disk_plan import check_disk, checkpoints
from turnwise.engines.host_memory import CUDA, PROCESS, HostMemory, check_host_memory, host_memory
from turnwise.engines.memory_plan import Training
from turnwise.engines.model.huggingface_folder import DecoderConfig, layout
from turnwise.engines.model.loading import ModelFacts
from turnwise.errors import ConfigError
from turnwise.system.resources import free_memory

GIB = 2**30
POLICY = Training()
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
    for module in (host, disk_plan):
        monkeypatch.setattr(module, "facts_of", lambda config: with_facts(SEVEN_B))


def config_of(*overrides: str) -> Config:
    return compose(["learner.device=cuda", *overrides]).config


def offloaded(*overrides: str, training: Training = POLICY) -> HostMemory:
    found = host_memory(config_of("learner.offload=optimizer", *overrides), training)
    assert found is not None
    return found


def of(memory: HostMemory, what: str) -> int:
    (found,) = [each.bytes for each in memory.held if each.what == what]
    return found


@pytest.mark.usefixtures("seven")
def test_an_optimizer_of_seven_billion_weights_takes_twelve_bytes_a_weight_and_two_buffers() -> None:
    found = offloaded()
    weights = sum(with_facts(SEVEN_B).tensors)
    assert of(found, "float32 weights") == 4 * weights and of(found, "moments") == 8 * weights
    assert of(found, "buffers between the two") == 512 << 20
    assert found.bytes == 12 * weights + (512 << 20) + PROCESS + CUDA
    assert "CPU memory, in all: 89.1 GiB at most" in found.lines()
    with_critic = offloaded(training=Training(critic=True))
    assert with_critic.bytes - PROCESS - CUDA == 2 * (found.bytes - PROCESS - CUDA)
    eighth = offloaded("learner.optimizer=adamw8bit")  # what is read takes more than the moments that come later
    assert eighth.bytes == 8 * weights + 9 * (256 << 20) + PROCESS + CUDA


@pytest.mark.usefixtures("seven")
def test_what_does_not_fit_is_refused_by_name() -> None:
    asked = config_of("learner.offload=optimizer")
    with pytest.raises(
        ConfigError, match=r"needs 89.1 GiB of the machine's own memory, of which 80.0 GiB are free here"
    ):
        check_host_memory(asked, Training(), free=80 * GIB)
    check_host_memory(asked, Training(), free=117 * GIB)
    with pytest.raises(ConfigError, match=r"needs 31.9 GiB .* float32 weights while they are read 28.4 GiB"):
        check_host_memory(config_of(), Training(), free=31 * GIB)
    check_host_memory(config_of("cluster=ray"), Training(), free=0)


@pytest.mark.usefixtures("seven")
def test_on_the_cpu_a_cache_and_a_pass_are_counted_and_not_held_against_the_run() -> None:
    asked = config_of("learner.device=cpu", "engine=torch", "learner.token_budget=1024", "engine.max_batch=8")
    found = host_memory(asked, Training(reference=True))
    assert found is not None and 2 * of(found, "gradients") == of(found, "moments")
    weights = with_facts(SEVEN_B).weights
    assert [each.bytes for each in found.held if each.what == "weights"] == [4 * weights, 8 * weights]
    optional = sum(each.bytes for each in found.held if not each.certain)
    assert optional > 0
    check_host_memory(asked, Training(reference=True), free=found.bytes - optional)
    with pytest.raises(ConfigError, match="the run needs"):
        check_host_memory(asked, Training(reference=True), free=found.bytes - optional - 1)
    alone = host_memory(asked, None)
    assert alone is not None and {each.owner for each in alone.held} == {"process", "sampler"}


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
    tuned = checkpoints(config_of("training.save_every=0"), Training(), tunes=True)
    assert tuned is not None and tuned.total == last.each + last.policy  # it leaves a policy beside the checkpoint
    eighth = checkpoints(config_of("learner.optimizer=adamw8bit"), Training())
    assert eighth is not None and eighth.each / 1e9 == pytest.approx(60.9, abs=0.1)


@pytest.mark.usefixtures("seven")
def test_without_a_last_checkpoint_the_policy_needs_room_and_a_stop_is_warned_of(tmp_path: Path) -> None:
    alone = ("training.save_last=false", "training.save_every=0", "training.ship=last")
    asked = config_of(f"runs_dir={tmp_path}", *alone)
    found = checkpoints(asked, Training())
    assert found is not None and found.most == 0 and found.total == found.policy == found.least
    assert "ends with its policy alone, 14.2 GiB" in found.line()
    with pytest.raises(ConfigError, match=r"has 14.0 GiB left, and a run ends with a policy of 14.2 GiB; what helps"):
        list(check_disk(asked, Training(), free=14 * GIB))
    (warning,) = check_disk(asked, Training(), free=15 * GIB)
    assert "15.0 GiB left: a run that is stopped could not save the 99.3 GiB that it would go on from" in warning
    assert list(check_disk(asked, Training(), free=100 * GIB)) == []
    between = checkpoints(config_of("training.save_last=false", "training.steps=20", "training.save_every=10"), POLICY)
    assert between is not None and between.most == 1


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
