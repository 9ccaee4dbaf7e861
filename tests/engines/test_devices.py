"""What `auto` and null mean: the GPU where PyTorch sees one, and on every other machine what they always meant."""

from dataclasses import replace

import pytest

from turnwise import Config, configure
from turnwise.config import LearnerConfig
from turnwise.config.choices import LearnerPlace, Precision
from turnwise.engines.devices import (
    Gpu,
    VisibleGpus,
    choose,
    device_of,
    episode_workers,
    gpus_for_learner,
    learner_here,
    learner_place,
    rank_devices,
)
from turnwise.engines.samplers.cpu import threads
from turnwise.errors import ConfigError

NONE, ONE = VisibleGpus(), VisibleGpus((Gpu("NVIDIA H200", 150 * 10**9),))
TWO = VisibleGpus((*ONE.gpus, Gpu("NVIDIA H200", 150 * 10**9)))


def test_without_a_gpu_everything_is_as_on_any_cpu():
    found = choose(configure("task=null", "data.eval_files=[x]"), NONE)
    assert (found.engine, found.device, found.precision, found.batch_invariant) == (
        "torch",
        "cpu",
        Precision.float32,
        True,
    )
    assert (found.max_batch, found.episodes, found.on_gpu) == (64, 256, False)
    assert str(found) == "torch (auto: PyTorch sees no GPU)"
    here = learner_here(LearnerConfig(), NONE)
    assert (here.device, here.precision) == ("cpu", Precision.float32)


def test_with_a_gpu_it_is_used_without_being_told():
    found = choose(configure("task=null", "data.eval_files=[x]"), ONE)
    assert (found.engine, found.device, found.precision, found.batch_invariant) == (
        "cuda", "cuda:0", Precision.bfloat16, False,
    )  # fmt: skip
    assert (found.max_batch, found.episodes) == (1024, 2048)
    assert str(found) == "cuda (auto: PyTorch sees NVIDIA H200, 140 GiB)"
    here = learner_here(LearnerConfig(), ONE)
    assert (here.device, here.precision) == ("cuda:0", Precision.bfloat16)


def test_what_is_said_is_done():
    config = configure(
        "engine=torch", "engine.max_batch=7", "engine.batch_invariant=false", "model.precision=bfloat16", "rollout.concurrency=3",
    )  # fmt: skip
    found = choose(config, ONE)
    assert (found.engine, str(found), found.device, found.max_batch, found.episodes) == ("torch", "torch", "cpu", 7, 3)
    assert not found.batch_invariant and found.precision is Precision.bfloat16
    exact = choose(configure("engine=cuda", "engine.batch_invariant=true", "model.precision=float32"), ONE)
    assert exact.batch_invariant and exact.precision is Precision.float32 and exact.device == "cuda:0"
    assert choose(configure("engine=scripted", "engine.script=[x]")).engine == "scripted"


@pytest.mark.parametrize(
    ("said", "seen", "place"),
    [
        ((), ONE, "here"),  # sampler and learner take turns
        (("training.max_lag=1",), ONE, "process"),
        (("training.max_lag=1", "learner.place=here"), ONE, "here"),
        (("training.max_lag=1", "learner.device=cpu"), ONE, "here"),  # another device
        (("training.max_lag=1", "engine=torch"), ONE, "here"),
        (("training.max_lag=1", "learner.processes=2"), TWO, "here"),  # ranks have processes anyway
        (("training.max_lag=1",), NONE, "here"),
        (("learner.place=process",), NONE, "process"),
        (("learner.place=process",), ONE, "process"),
        (("learner.place=process", "engine.sleep=true"), NONE, "process"),
    ],
)
def test_the_learner_gets_a_process_where_it_would_wait_for_the_interpreter(
    said: tuple[str, ...], seen: VisibleGpus, place: str
):
    assert learner_place(configure("task=null", "data.eval_files=[x]", *said), seen) is LearnerPlace(place)


def test_two_processes_on_one_gpu_cannot_lend_each_other_memory():
    config = configure("learner.place=process", "engine.sleep=true")
    with pytest.raises(ConfigError, match="learner.place=process with engine.sleep=true.*learner.place=here"):
        learner_place(config, ONE)


@pytest.mark.parametrize(
    ("said", "seen", "cores", "workers"),
    [
        ([], NONE, 64, 0),  # the cores are the engine's
        ([], ONE, 16, 4),
        ([], ONE, 6, 2),
        ([], ONE, 2, 0),
        (["rollout.workers=0"], ONE, 16, 0),
        (["rollout.workers=3"], NONE, 1, 3),
        (["engine=torch"], ONE, 16, 0),
        (["engine=scripted", "engine.script=[x]"], ONE, 16, 0),
        (["engine=openai", "engine.base_url=http://127.0.0.1:1"], ONE, 16, 0),
        (["engine=vllm"], ONE, 16, 4),
        (["engine=vllm"], NONE, 16, 0),  # somebody else's, elsewhere
        (["cluster=ray"], ONE, 16, 0),
    ],
)
def test_episodes_have_processes_of_their_own_where_a_gpu_leaves_cores(
    monkeypatch: pytest.MonkeyPatch, said: list[str], seen: VisibleGpus, cores: int, workers: int
):
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert episode_workers(configure(*said), seen) == workers


SMALL = VisibleGpus((Gpu("NVIDIA L4", 24 * 10**9),))


@pytest.mark.parametrize(
    ("said", "seen", "together"),
    [
        ([], NONE, 128),  # on a CPU
        ([], SMALL, 256),
        ([], ONE, 1024),
        (["servers.replicas=2"], TWO, 2048),
        (["engine.max_batch=100"], ONE, 100),
        (["servers.options=[--max-num-seqs, '512']"], ONE, 512),
        (["servers.options=['--max_num_seqs=32']", "engine.max_batch=100"], ONE, 32),  # what is said last holds
        (["servers.addresses=[http://a:1, http://b:1, http://c:1]"], NONE, 768),
    ],
)
def test_servers_get_twice_as_many_episodes_as_they_decode_together(said, seen, together):
    found = choose(configure("task=null", "data.eval_files=[x]", "engine=vllm_server", *said), seen)
    assert (found.max_batch, found.episodes) == (together, 2 * together)
    assert (
        choose(
            configure("task=null", "data.eval_files=[x]", "engine=vllm_server", *said, "rollout.concurrency=9"), seen
        ).episodes
        == 9
    )


def test_the_sampler_is_beside_the_learner():
    assert choose(configure("learner.device=cuda:1"), TWO).device == "cuda:1"
    assert choose(configure("learner.device=cpu"), TWO).device == "cuda:0"


@pytest.mark.parametrize(
    ("device", "seen", "expected"),
    [
        ("cuda", NONE, "learner.device=cuda: PyTorch finds no CUDA device"),
        ("cuda:0", NONE, "learner.device=cuda:0: PyTorch finds no CUDA device"),
        ("cuda:1", ONE, "learner.device=cuda:1: this machine has 1 CUDA device"),
        ("gpu", ONE, "learner.device=gpu: auto, cpu or cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(device: str, seen: VisibleGpus, expected: str):
    with pytest.raises(ConfigError, match=expected):
        device_of(device, seen)


def test_the_cuda_engine_needs_a_gpu():
    with pytest.raises(ConfigError, match=r"engine=cuda: PyTorch sees no GPU on this machine; engine=torch"):
        choose(configure("engine=cuda"), NONE)
    assert choose(Config(), NONE).engine == "torch"


def test_a_gpu_that_cannot_be_used_is_left_alone_and_the_reason_is_said():
    unfit = replace(ONE, unfit="Triton, in which its kernels are written, is not installed")
    found = choose(configure("task=null", "data.eval_files=[x]"), unfit)
    assert (found.engine, found.device, found.precision) == ("torch", "cpu", Precision.float32)
    assert str(found) == "torch (auto: PyTorch sees NVIDIA H200, 140 GiB, but Triton, in which its kernels are written, is not installed)"  # fmt: skip
    assert device_of("auto", unfit) == "cpu"
    with pytest.raises(ConfigError, match=r"engine=cuda: PyTorch sees NVIDIA H200, 140 GiB, but Triton"):
        choose(configure("engine=cuda"), unfit)
    with pytest.raises(ConfigError, match=r"learner.device=cuda:0: PyTorch sees .* but Triton"):
        device_of("cuda:0", unfit)


def test_processes_of_a_learner_have_a_gpu_each_behind_the_samplers():
    eight = VisibleGpus(ONE.gpus * 8)
    assert rank_devices(configure("learner.processes=3"), VisibleGpus()) == ("cpu",) * 3
    assert rank_devices(configure("learner.processes=7"), eight) == tuple(f"cuda:{n}" for n in range(1, 8))
    assert rank_devices(configure("learner.processes=8"), eight, samples=False)[0] == "cuda:0"
    assert rank_devices(configure("learner.processes=8", "engine=torch"), eight)[-1] == "cuda:7"
    with pytest.raises(ConfigError, match=r"learner.processes=8 takes a GPU each and the sampler one more.* has 8"):
        rank_devices(configure("learner.processes=8"), eight)
    with pytest.raises(ConfigError, match=r"this machine has 8; lower it"):
        rank_devices(configure("learner.processes=9", "engine=torch"), eight)


def test_number_formats_are_those_of_where_it_computes():
    nodes = configure("profile=several_nodes")  # this machine need have no GPU
    assert learner_here(nodes.learner, gpus_for_learner(nodes)).precision is Precision.bfloat16
    assert choose(nodes).precision is Precision.bfloat16
    none = configure("cluster=ray")
    assert learner_here(none.learner, gpus_for_learner(none)).device == "cpu"
    assert choose(configure("engine=vllm_server"), ONE).precision is Precision.bfloat16
    assert choose(configure("engine=vllm_server"), VisibleGpus()).precision is Precision.float32
    assert not choose(configure("engine=vllm_server"), ONE).on_gpu
