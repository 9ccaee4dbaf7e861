"""What vLLM and SGLang are started with, what is refused before, and what check and plan say."""

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
from inference_servers import Model, sglang_app, vllm_app

from turnwise.assemble import make_renderer
from turnwise.compose import configure
from turnwise.engines import devices, opening_foreign, server_gpus
from turnwise.engines.devices import Gpu, Seen
from turnwise.engines.opening import model_source, open_sampler
from turnwise.engines.opening_foreign import check_foreign, described, shared_place
from turnwise.engines.samplers.sampler import Logprobs
from turnwise.engines.samplers.vllm_server import VllmServer
from turnwise.engines.server_gpus import check_apart, devices_of, gpus_of_a_server
from turnwise.engines.updates import Adapter, FullWeights, WeightsFolder
from turnwise.errors import ConfigError, EngineError
from turnwise.serving import serving_beside


def options(*overrides: str, sees: bool = False) -> list[str]:
    config = configure("engine=vllm_server", *overrides)
    return opening_foreign._options(config, model_source(config), sees=sees)


def after(found: list[str], name: str) -> str:
    return found[found.index(name) + 1]


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (devices, opening_foreign, server_gpus):
        monkeypatch.setattr(module, "look", lambda: Seen(tuple(Gpu("NVIDIA H200", 2**37) for _ in range(count))))


def test_vllm_is_told_what_the_config_says_and_the_users_own_words_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    found = options("engine.server_options=[--max-model-len, '512']", "learner.lora_rank=9", "engine.max_batch=7")
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
        assert opening_foreign._capabilities(configure("engine=vllm", *overrides)).logprobs is kind
    config = configure("engine=sglang_server", "sampling.top_k=5", "learner.lora_rank=4", "engine.sleep=true")
    found = opening_foreign._capabilities(config)
    assert found.logprobs is Logprobs.SCALED and found.updates == {WeightsFolder, Adapter} and found.sleeps


def test_weights_go_by_nccl_only_where_servers_and_learner_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 2)
    given = ("engine=vllm_server", "engine.transfer=nccl")
    opening_foreign._check_transfer(configure(*given))
    assert opening_foreign._capabilities(configure(*given)).updates == {FullWeights}
    assert after(options("engine.transfer=nccl"), "--weight-transfer-config") == '{"backend": "nccl"}'
    assert "--weight-transfer-config" not in options()
    with pytest.raises(ConfigError, match="share the learner's GPU"):
        opening_foreign._check_transfer(configure(*given, "engine.replicas=2"))
    with pytest.raises(ConfigError, match="its object store"):
        opening_foreign._check_transfer(configure(*given, "cluster=ray"))


def test_servers_take_the_gpus_that_the_learner_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_gpus(monkeypatch, 4)
    pair = configure("engine=vllm_server", "engine.server_options=[--tensor-parallel-size, '2']")
    assert devices_of(configure("engine=vllm_server"), 3) == ["3", "2", "1"]
    assert devices_of(pair, 2) == ["3,2", "1,0"]
    assert devices_of(configure("engine=vllm_server", "engine.server_options=['--tp-size=4']"), 1) == ["3,2,1,0"]
    with pytest.raises(ConfigError, match="this machine has 4"):
        devices_of(pair, 3)
    with pytest.raises(ConfigError, match="--tp-size takes a number"):
        devices_of(configure("engine=vllm_server", "engine.server_options=[--tp-size, many]"), 1)
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")  # as a scheduler names those that are ours
    assert devices_of(configure("engine=vllm_server"), 2) == ["GPU-6", "5"]
    with_gpus(monkeypatch, 0)
    assert devices_of(configure("engine=vllm_server"), 2) == [None, None]


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
    assert gpus_of_a_server(configure(f"engine={engine}", f"engine.server_options={written.split()}").engine) == gpus


def test_copies_that_the_environment_asks_of_vllm_count_where_no_option_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "4")
    assert gpus_of_a_server(configure("engine=vllm_server").engine) == 4
    assert gpus_of_a_server(configure("engine=vllm_server", "engine.server_options=[-dp, '2']").engine) == 2
    assert gpus_of_a_server(configure("engine=sglang_server").engine) == 1
    monkeypatch.setenv("VLLM_DP_SIZE", "many")
    with pytest.raises(ConfigError, match="VLLM_DP_SIZE takes a number of GPUs, not 'many'"):
        gpus_of_a_server(configure("engine=vllm_server").engine)


def test_servers_and_learner_do_not_meet_on_a_gpu_in_silence() -> None:
    four = Seen(tuple(Gpu("NVIDIA H200", 2**37) for _ in range(4)))
    servers = ("engine=vllm_server", "learner.device=cuda")
    assert check_apart(configure(*servers, "engine.replicas=2", "learner.processes=2"), four) is None
    assert check_apart(configure(*servers[:1], "engine.replicas=4", "learner.device=cpu"), four) is None
    assert check_apart(configure("learner.device=cuda", "learner.processes=3"), four) is None
    with pytest.raises(ConfigError, match=r"replicas=3 takes 3 .*processes=2 takes 2, together 5, .* has 4; lower one"):
        check_apart(configure(*servers, "engine.replicas=3", "learner.processes=2"), four)
    with pytest.raises(ConfigError, match=r"replicas=1 takes 4 GPU\(s\) .*, together 6"):
        check_apart(configure(*servers, "engine.server_options=['--tp-size=4']", "learner.processes=2"), four)
    turns = check_apart(configure(*servers, "engine.replicas=3", "learner.processes=2", "engine.sleep=true"), four)
    assert turns is not None and turns.endswith("some are shared")
    alone = check_apart(configure(*servers, "engine.replicas=4"), four)
    assert alone is not None and "engine.memory_fraction must leave the learner room" in alone
    with pytest.raises(ConfigError, match=r"engine=vllm writes on the first GPU\(s\), which learner.processes=2 takes"):
        check_apart(configure("engine=vllm", "learner.device=cuda", "learner.processes=2"), four)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("engine.servers=['nowhere']",), "engine.servers='nowhere' must be like"),
        (("engine.servers=['http://127.0.0.1:9']",), "does not serve"),
        (("engine.servers=['ftp://x']",), "must be like http://127.0.0.1:8000$"),
        (("engine.servers=['http://127.0.0.1:9?a=b']",), "must be like"),
        (("engine.servers=['http://me:word@127.0.0.1:9']",), "no name or password"),
        (("engine.servers=['http://127.0.0.1:9', 'http://127.0.0.1:9/v1/']",), "names a server twice"),
        (("engine.server_options=[--logprobs-mode, raw_logprobs]",), "--logprobs-mode is Turnwise's to say"),
        (("engine.server_options=['--host=0.0.0.0']",), "--host is Turnwise's to say"),
        (("engine.server_options=[--api-key, abc]",), "--api-key would be kept .* TURNWISE_ENGINE_KEY"),
        (("engine.server_options=['--hf_token=abc']",), "--hf_token would be kept"),
        (("engine.servers=['http://127.0.0.1:9']", "engine.replicas=2"), "engine.replicas=2 are started where"),
        (("engine.servers=['http://127.0.0.1:9', 'http://127.0.0.1:9/']",), "names a server twice"),
        (("engine.servers=['http://127.0.0.1:9']", "engine.server_options=[-tp, '2']"), "engine.server_options=.* run"),
        (("engine.servers=['http://127.0.0.1:9']", "engine.python=python3"), "engine.python=python3 is for servers"),
        (("engine.model=gpt",), "engine.servers is empty"),
        (("engine.server_options=[--tensor-parallel-size, many]",), "takes a number of GPUs, not 'many'"),
        (("engine.server_options=[-tp]",), "takes a number of GPUs, not ''"),
        (("engine.server_options=['--tp-size=0']",), "takes a number of GPUs, not '0'"),
        (("engine.python=/no/such/python",), "there is no such program"),
        ((f"engine.python={sys.executable}",), "has no package vllm"),
        (("model.path=a.gguf",), "reads a Hugging Face folder"),
        (("engine.transfer=nccl",), "engine.transfer=nccl: the learner is on the CPU"),
        (("engine.transfer=nccl", "learner.lora_rank=4"), "an adapter is small"),
        (("engine.transfer=nccl", "learner.processes=2"), "gathered through the CPU"),
    ],
)
def test_what_cannot_be_opened_is_refused_before_anything_is_written(
    overrides: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=words):
        asyncio.run(check_foreign(configure("engine=vllm_server", *overrides)))


def test_the_plan_says_who_writes_and_other_machines_find_weights_with_the_runs(tmp_path: Path) -> None:
    attached = configure("engine=sglang_server", "engine.servers=['http://node1:8000']", f"runs_dir={tmp_path}")
    assert described(attached) == "sglang_server, attached to http://node1:8000"
    assert shared_place(attached) == tmp_path / ".weights"
    here = configure("engine=vllm_server", "engine.servers=['http://127.0.0.1:8000']")
    assert shared_place(here) is None
    assert described(configure("engine=vllm_server", "engine.replicas=2")) == (
        "vllm_server, 2 started here by this interpreter"
    )
    assert described(configure("engine=vllm")) == "vllm, in this process"


def test_servers_are_attached_to_by_address_and_closed_when_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        said: list[str] = []
        async with (
            serving_beside(vllm_app(Model()), "127.0.0.1") as one,
            serving_beside(vllm_app(Model()), "127.0.0.1") as two,
        ):
            urls = [f"http://127.0.0.1:{port}" for port in (one, two)]
            config = configure("engine=vllm_server", f"engine.servers={[urls[0], urls[1] + '/v1']}")
            assert (await check_foreign(config)).startswith("2 server(s) answer, with the model of model.path")
            opened = await open_sampler(config, make_renderer(config), said.append)
            assert opened.sampler.context_length == 64 and "takes WeightsFolder" in said[-1]
            await opened.sampler.close()
            config.engine.servers = [urls[0], "http://127.0.0.1:9"]
            with pytest.raises(EngineError, match="nothing that serves"):
                await open_sampler(config, make_renderer(config), said.append)

    asyncio.run(main())


def test_log_probs_that_no_learner_recomputes_are_refused_when_a_server_is_attached() -> None:
    async def main() -> None:
        async with serving_beside(sglang_app(Model(unscaled=True)), "127.0.0.1") as port:
            given = ("engine=sglang_server", f"engine.servers=['http://127.0.0.1:{port}']")
            with pytest.raises(EngineError, match="at temperature 0.7 does not recompute"):
                warm = configure(*given, "sampling.temperature=0.7")
                await open_sampler(warm, make_renderer(warm), print)
            plain = configure(*given)
            await (await open_sampler(plain, make_renderer(plain), print)).sampler.close()

    asyncio.run(main())


def test_a_started_server_is_given_its_key_by_the_environment_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_API_KEY", "a judge's")
    config = configure("engine=vllm_server")
    for key in (None, "our own"):
        if key is not None:
            monkeypatch.setenv("TURNWISE_ENGINE_KEY", key)
        (server,) = opening_foreign._servers(
            config,
            model_source(config),
            opening_foreign._capabilities(config),
            print,
            vocabulary=9,
            decode=str,
            sees=False,
        )
        assert isinstance(server, VllmServer) and server._process is not None
        assert server._process._environment["VLLM_API_KEY"] == (key or "")
        assert "our own" not in " ".join(server._process._command(1))
    (first, second) = tmp_path.iterdir()  # logs outlive who wrote them, until the next one comes
    for folder in (first, second):
        (folder / "lock").unlink()
        (folder / "lock").touch()
    opening_foreign.OwnFolder("turnwise-servers-").remove()
    assert list(tmp_path.iterdir()) == []
