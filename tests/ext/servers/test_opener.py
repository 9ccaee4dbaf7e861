"""What vLLM and SGLang are started with, what is refused before, and what check and plan say."""

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
from inference_servers import Model, sglang_app, vllm_app

from turnwise.config import Config
from turnwise.data.task_config import configure
from turnwise.engines import devices
from turnwise.engines.devices import Gpu, VisibleGpus, choose
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.opener import model_source, opener_of
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, FullWeights, WeightsFolder
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ext.servers import gpus as server_gpus
from turnwise.ext.servers import opener as servers_opener
from turnwise.ext.servers.opener import GuestOpener
from turnwise.ext.servers.replicas import Replicas
from turnwise.ext.servers.streamed_sampler import StreamedSampler
from turnwise.ext.sglang import opener as sglang_opener
from turnwise.ext.vllm import opener as vllm_opener
from turnwise.ext.vllm.opener import VllmServers, vllm_options
from turnwise.rollout.prepare import make_renderer
from turnwise.system.folders import OwnFolder
from turnwise.system.serving import serving_beside


def options(*overrides: str, sees: bool = False) -> list[str]:
    config = configure("engine=vllm_server", *overrides)
    return vllm_options(config, model_source(config), sees=sees)


def capabilities(*overrides: str) -> Capabilities:
    config = configure(*overrides)
    return guest(config).capabilities(config)


def guest(config: Config) -> GuestOpener:
    opener = opener_of(config)
    assert isinstance(opener, GuestOpener)
    return opener


def devices_of(*overrides: str) -> list[str | None]:
    config = configure("engine=vllm_server", *overrides)
    return guest(config).devices(config)


def gpus_each(*overrides: str) -> int:
    config = configure(*overrides)
    return guest(config).gpus_each(config)


def check_apart(config: Config, machine: VisibleGpus) -> str | None:
    return guest(config).check_beside_learner(config, machine)


def after(found: list[str], name: str) -> str:
    return found[found.index(name) + 1]


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (devices, server_gpus, servers_opener, sglang_opener, vllm_opener):
        monkeypatch.setattr(
            module, "visible_gpus", lambda: VisibleGpus(tuple(Gpu("NVIDIA H200", 2**37) for _ in range(count)))
        )


def test_vllm_is_told_what_the_config_says_and_the_users_own_words_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert after(options(), "--max-num-seqs") == "128", "what is assumed for rollout.concurrency is what it is told"
    assert after(options(), "--stream-interval") == "64"
    found = options("servers.options=[--max-model-len, '512']", "learner.lora_rank=9", "engine.max_batch=7")
    assert found[-2:] == ["--max-model-len", "512"]
    assert after(found, "--logprobs-mode") == "processed_logprobs" and after(found, "--generation-config") == "vllm"
    assert after(found, "--max-lora-rank") == "16" and after(found, "--max-num-seqs") == "7"
    assert after(found, "--dtype") == "float32" and "--no-enable-chunked-prefill" in found
    with_gpus(monkeypatch, 1)
    found = options("engine.memory_fraction=0.4", "engine.sleep=true")
    assert after(found, "--gpu-memory-utilization") == "0.4" and after(found, "--dtype") == "bfloat16"
    assert "--enable-sleep-mode" in found and "--enforce-eager" not in found and "--enable-lora" not in found
    with pytest.raises(ConfigError, match="rank 512 at most"):
        options("learner.lora_rank=600")


def test_log_probs_are_said_to_be_filtered_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    for overrides, kind in (((), Logprobs.SCALED), (("sampling.top_p=0.9",), Logprobs.FILTERED)):
        assert capabilities("engine=vllm", *overrides).logprobs is kind
    found = capabilities("engine=sglang_server", "sampling.top_k=5", "learner.lora_rank=4", "engine.sleep=true")
    assert found.logprobs is Logprobs.SCALED and found.updates == {WeightsFolder, Adapter} and found.sleeps


def test_weights_go_by_nccl_only_where_servers_and_learner_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 2)
    nccl = ("engine=vllm_server", "servers.transfer=nccl")
    opener = VllmServers()
    opener.check_settings(configure(*nccl))
    assert capabilities(*nccl).updates == {FullWeights}
    with pytest.raises(ConfigError, match="share the learner's GPU"):
        opener.check_settings(configure(*nccl, "servers.replicas=2"))
    with pytest.raises(ConfigError, match="its object store"):
        opener.check_settings(configure(*nccl, "cluster=ray"))


def test_servers_take_the_gpus_that_the_learner_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_gpus(monkeypatch, 4)
    pair = "servers.options=[--tensor-parallel-size, '2']"
    assert devices_of("servers.replicas=3") == ["3", "2", "1"]
    assert devices_of(pair, "servers.replicas=2") == ["3,2", "1,0"]
    assert devices_of("servers.options=['--tp-size=4']") == ["3,2,1,0"]
    with pytest.raises(ConfigError, match="this machine has 4"):
        devices_of(pair, "servers.replicas=3")
    with pytest.raises(ConfigError, match="--tp-size takes a number"):
        devices_of("servers.options=[--tp-size, many]")
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")  # as a scheduler names those that are ours
    assert devices_of("servers.replicas=2") == ["GPU-6", "5"]
    with_gpus(monkeypatch, 0)
    assert devices_of("servers.replicas=2") == [None, None]


@pytest.mark.parametrize(
    ("engine", "written", "gpus"),
    [
        ("vllm_server", "--data-parallel-size 8 --enable-expert-parallel", 8),
        ("vllm_server", "-dp 2 -tp 2", 4),
        ("vllm_server", "--data-parallel-size=8", 8),
        ("vllm_server", "--data_parallel_size=2 --pipeline_parallel_size=3 -tp=2", 12),
        ("vllm_server", "-dp 8 -dpl 4 -tp 2", 8),
        ("vllm_server", "-tp 2 --tensor-parallel-size 4", 4),
        ("vllm_server", "-pcp 2 -tp 2 -dcp 2", 4),
        ("vllm_server", "", 1),
        ("sglang_server", "--dp-size 4 --tp-size 2", 8),
        ("sglang_server", "--dp 4", 4),
        ("sglang_server", "--dp 4 --tp 8 --enable-dp-attention", 8),
    ],
)
def test_every_kind_of_parallel_copy_counts_among_the_gpus_of_a_server(
    engine: str, written: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_DP_SIZE", raising=False)
    assert gpus_each(f"engine={engine}", f"servers.options={written.split()}") == gpus


def test_every_copy_behind_an_address_decodes_sequences_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DP_SIZE", raising=False)
    eight = VisibleGpus(tuple(Gpu("NVIDIA H200", 2**37) for _ in range(8)))

    def together(engine: str, written: str) -> int:
        return choose(configure(f"engine={engine}", f"servers.options={written.split()}"), eight).max_batch

    assert together("vllm_server", "--max-num-seqs 64 -tp 2") == 64
    assert together("vllm_server", "--max-num-seqs 64 -dp 8") == 512
    assert together("vllm_server", "--max-num-seqs 64 -dp 8 -dpl 4") == 512, "those of other machines too"
    assert together("sglang_server", "--max-running-requests 64 --dp 4") == 256
    assert together("sglang_server", "--max-running-requests 64 --dp 4 --tp 8 --enable-dp-attention") == 64


def test_copies_that_the_environment_asks_of_vllm_count_where_no_option_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "4")
    assert gpus_each("engine=vllm_server") == 4
    assert gpus_each("engine=vllm_server", "servers.options=[-dp, '2']") == 2
    assert gpus_each("engine=sglang_server") == 1
    monkeypatch.setenv("VLLM_DP_SIZE", "many")
    with pytest.raises(ConfigError, match="VLLM_DP_SIZE takes a number of GPUs, not 'many'"):
        gpus_each("engine=vllm_server")


def test_servers_and_learner_do_not_meet_on_a_gpu_in_silence() -> None:
    four = VisibleGpus(tuple(Gpu("NVIDIA H200", 2**37) for _ in range(4)))
    servers = ("engine=vllm_server", "learner.device=cuda")
    assert check_apart(configure(*servers, "servers.replicas=2", "learner.processes=2"), four) is None
    assert check_apart(configure(*servers[:1], "servers.replicas=4", "learner.device=cpu"), four) is None
    with pytest.raises(ConfigError, match=r"replicas=3 takes 3 .*processes=2 takes 2, together 5, .* has 4; lower one"):
        check_apart(configure(*servers, "servers.replicas=3", "learner.processes=2"), four)
    with pytest.raises(ConfigError, match=r"replicas=1 takes 4 GPU\(s\) .*, together 6"):
        check_apart(configure(*servers, "servers.options=['--tp-size=4']", "learner.processes=2"), four)
    turns = check_apart(configure(*servers, "servers.replicas=3", "learner.processes=2", "engine.sleep=true"), four)
    assert turns is not None and turns.endswith("some are shared")
    alone = check_apart(configure(*servers, "servers.replicas=4"), four)
    assert alone is not None and "engine.memory_fraction must leave the learner room" in alone
    with pytest.raises(ConfigError, match=r"engine=vllm uses the first GPU\(s\), which learner.processes=2 uses"):
        check_apart(configure("engine=vllm", "learner.device=cuda", "learner.processes=2"), four)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("servers.addresses=['nowhere']",), "servers.addresses='nowhere' must be like"),
        (("servers.addresses=['http://127.0.0.1:9']",), "does not serve"),
        (("servers.addresses=['ftp://x']",), "must be like http://127.0.0.1:8000$"),
        (("servers.addresses=['http://127.0.0.1:9?a=b']",), "must be like"),
        (("servers.addresses=['http://me:word@127.0.0.1:9']",), "no name or password"),
        (("servers.addresses=['http://127.0.0.1:9', 'http://127.0.0.1:9/v1/']",), "names a server twice"),
        (("servers.options=[--logprobs-mode, raw_logprobs]",), "--logprobs-mode is set by Turnwise"),
        (("servers.options=['--host=0.0.0.0']",), "--host is set by Turnwise"),
        (("servers.options=[--api-key, abc]",), "--api-key would be kept .* TURNWISE_ENGINE_KEY"),
        (("servers.options=['--hf_token=abc']",), "--hf_token would be kept"),
        (("servers.addresses=['http://127.0.0.1:9']", "servers.replicas=2"), "servers.replicas=2 starts servers, but"),
        (("servers.addresses=['http://127.0.0.1:9', 'http://127.0.0.1:9/']",), "names a server twice"),
        (("servers.addresses=['http://127.0.0.1:9']", "servers.options=[-tp, '2']"), "servers.options=.* run"),
        (
            ("servers.addresses=['http://127.0.0.1:9']", "servers.python=python3"),
            "servers.python=python3 is for servers",
        ),
        (("engine.model=gpt",), "servers.addresses is empty"),
        (("servers.options=[--tensor-parallel-size, many]",), "takes a number of GPUs, not 'many'"),
        (("servers.options=[-tp]",), "takes a number of GPUs, not ''"),
        (("servers.options=['--tp-size=0']",), "takes a number of GPUs, not '0'"),
        (("servers.python=/no/such/python",), "there is no such program"),
        ((f"servers.python={sys.executable}",), "has no package vllm"),
        (("model.path=a.gguf",), "reads a Hugging Face folder"),
        (("servers.transfer=nccl",), "servers.transfer=nccl: the learner is on the CPU"),
        (("servers.transfer=nccl", "learner.lora_rank=4"), "an adapter is small"),
        (("servers.transfer=nccl", "learner.processes=2"), "gathered through the CPU"),
        (("servers.cache_at_update=keep", "learner.lora_rank=4"), "an adapter belongs to a turn"),
        (("servers.cache_at_update=keep", "engine.sleep=true"), "engine.sleep=true frees the cache"),
    ],
)
def test_what_cannot_be_opened_is_refused_before_anything_is_written(
    overrides: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=words):
        asyncio.run(VllmServers().check(configure("engine=vllm_server", *overrides)))


def test_the_plan_says_who_writes_and_other_machines_find_weights_with_the_runs(tmp_path: Path) -> None:
    def plan(*overrides: str) -> str:
        config = configure(*overrides)
        return opener_of(config).describe(config)

    attached = configure("engine=sglang_server", "servers.addresses=['http://node1:8000']", f"runs_dir={tmp_path}")
    assert opener_of(attached).describe(attached).startswith("sglang_server, attached to http://node1:8000, ")
    assert opener_of(attached).weights_folder(attached) == tmp_path / ".weights"
    here = configure("engine=vllm_server", "servers.addresses=['http://127.0.0.1:8000']")
    assert opener_of(here).weights_folder(here) is None
    started = plan("engine=vllm_server", "servers.replicas=2")
    assert started.startswith("vllm_server, 2 started here by this interpreter, 512 episodes at once (rollout.con")
    kept = plan("engine=vllm_server", "servers.cache_at_update=keep")
    assert "turns across an update keep their cache: log-probs behind it are of both weights" in kept
    assert "keep their cache" not in started
    assert plan("engine=vllm").startswith("vllm, in this process, ") and plan("engine=vllm").endswith("model tiny")


def test_servers_are_attached_to_by_address_and_closed_when_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        said: list[str] = []
        async with (
            serving_beside(vllm_app(Model()), "127.0.0.1") as one,
            serving_beside(vllm_app(Model()), "127.0.0.1") as two,
        ):
            urls = [f"http://127.0.0.1:{port}" for port in (one, two)]
            config = configure("engine=vllm_server", f"servers.addresses={[urls[0], urls[1] + '/v1']}")
            answer = await opener_of(config).check(config)
            assert answer is not None and answer.startswith("2 server(s) answer, with the model of model.path")
            opened = await open_sampler(config, make_renderer(config), said.append)
            assert opened.sampler.context_length == 64 and "takes a folder of weights" in said[-1]
            assert "the servers decode 24 sequences together: 48 episodes at once" in said
            assert choose(config).episodes == 48 and choose(configure("engine=vllm_server")).episodes == 256
            await opened.sampler.close()
            config.servers.addresses = [urls[0], "http://127.0.0.1:9"]
            with pytest.raises(EngineError, match="nothing that serves"):
                await open_sampler(config, make_renderer(config), said.append)

    asyncio.run(main())


@pytest.mark.parametrize(("wanted", "clears"), [("keep", "false"), ("recompute", "true")])
def test_what_becomes_of_the_cache_at_an_update_and_how_turns_are_asked_for_arrive_at_the_server(
    wanted: str, clears: str, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_text("2")
    model = Model(settings={"parallel_config": {"worker_extension_cls": "vllm_worker.WeightReader"}})

    async def main() -> None:
        async with serving_beside(vllm_app(model), "127.0.0.1") as port:
            for lag, overrides in ((0, ()), (1, (f"servers.cache_at_update={wanted}",))):
                given = (f"servers.addresses=['http://127.0.0.1:{port}']", f"training.max_lag={lag}", *overrides)
                config = configure("engine=vllm_server", *given)
                sampler = (await open_sampler(config, make_renderer(config), lambda text: None)).sampler
                assert isinstance(sampler, Replicas)
                replica = sampler._seats[0].replica
                assert isinstance(replica, StreamedSampler) and replica.midway == bool(lag)
                await sampler.publish(WeightsFolder(tmp_path), 1)
                await sampler.close()
        assert model.kept[-1] == clears and len(model.kept) == 2

    asyncio.run(main())


def test_log_probs_that_no_learner_recomputes_are_refused_when_a_server_is_attached() -> None:
    async def main() -> None:
        async with serving_beside(sglang_app(Model(unscaled=True)), "127.0.0.1") as port:
            given = ("engine=sglang_server", f"servers.addresses=['http://127.0.0.1:{port}']")
            with pytest.raises(EngineError, match="at temperature 0.7 does not recompute"):
                warm = configure(*given, "sampling.temperature=0.7")
                await open_sampler(warm, make_renderer(warm), print)
            plain = configure(*given)
            await (await open_sampler(plain, make_renderer(plain), print)).sampler.close()

    asyncio.run(main())


INTERPRETER = """#!/bin/sh
env > {folder}/environment
echo "$@" > {folder}/arguments
echo no such model
exit 1
"""


def test_a_started_server_is_given_its_key_by_the_environment_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, python = tmp_path / "temporary", tmp_path / "python"
    temporary.mkdir()
    python.write_text(INTERPRETER.format(folder=tmp_path))
    python.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("VLLM_API_KEY", "a judge's")
    config = configure("engine=vllm_server", f"servers.python={python}")
    for key in (None, "our own"):
        if key is not None:
            monkeypatch.setenv("TURNWISE_ENGINE_KEY", key)
        with pytest.raises(EngineLost, match="no such model"):
            asyncio.run(open_sampler(config, make_renderer(config), print))
        environment = (tmp_path / "environment").read_text().splitlines()
        assert f"VLLM_API_KEY={key or ''}" in environment
        arguments = (tmp_path / "arguments").read_text()
        assert "our own" not in arguments and "--worker-extension-cls vllm_worker.WeightReader" in arguments
    (first, second) = temporary.iterdir()  # logs outlive who wrote them, until the next one comes
    for folder in (first, second):
        (folder / "lock").unlink()
        (folder / "lock").touch()
    OwnFolder("turnwise-servers-").remove()
    assert list(temporary.iterdir()) == []
