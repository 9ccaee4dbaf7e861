"""vLLM and SGLang clients against small real servers: tokens, stops, versions across updates, hostile answers, death."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import inference_servers
import numpy as np
import pytest
import torch
from images import AN_IMAGE
from inference_servers import CONTEXT, VOCABULARY, Model, children, logprob, sglang_app, vllm_app

from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, FullWeights, WeightsFolder
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ext.servers import inference_server
from turnwise.ext.servers.inference_server import InferenceServer
from turnwise.ext.servers.process import ServerProcess
from turnwise.ext.servers.replicas import Replicas
from turnwise.ext.sglang.opener import SglangServer
from turnwise.ext.vllm.nccl_transfer import NcclSender, Transfer
from turnwise.ext.vllm.server import VllmServer, vllm_command
from turnwise.ledger import MediaSpan
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retrying
from turnwise.system.serving import serving_beside
from turnwise.types import Completion, FinishReason, VersionRun

TAKES = Capabilities(Logprobs.SCALED, frozenset({WeightsFolder, Adapter}), sleeps=True)
HELD = Capabilities(Logprobs.SCALED, frozenset({WeightsFolder}))
"""Of an engine that can hold turns over an update: an adapter would belong to a turn, and sleep would cut it off."""
KINDS = ("vllm", "vllm before 0.32", "vllm that holds turns", "sglang", "sglang, each token once")


def decode(ids: Any) -> str:
    return "".join(f"<{token}>" for token in ids)


def request(ids: list[int], *, name: str = "c", seed: int = 0, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 8} | params)
    return Request(name, np.array(ids), sampling, NoiseKey(seed, 0, "s", 0))


def client(
    kind: type[InferenceServer], where: ServerProcess | str, name: str = "server 0", takes: Capabilities = TAKES
) -> InferenceServer:
    return kind(name, where, vocabulary=VOCABULARY, decode=decode, capabilities=takes)


@contextlib.asynccontextmanager
async def opened(kind: str, model: Model) -> AsyncIterator[InferenceServer]:
    model.tokens = kind != "vllm before 0.32"
    app = vllm_app(model) if kind.startswith("vllm") else sglang_app(model, repeats=kind == "sglang")
    async with serving_beside(app, "127.0.0.1") as port:
        held = kind == "vllm that holds turns"
        made = VllmServer if kind.startswith("vllm") else SglangServer
        server = client(made, f"http://127.0.0.1:{port}", takes=HELD if held else TAKES)
        try:
            await server.start()
            yield server
        finally:
            await server.close()


def played(kind: str, work: Callable[[InferenceServer, Model], Any], **model: Any) -> Any:
    async def main() -> Any:
        made = Model(**model)
        async with asyncio.timeout(60), opened(kind, made) as server:
            return await work(server, made)

    return asyncio.run(main())


def folder(place: Path, weights: int) -> Path:
    place.mkdir(exist_ok=True)
    (place / "weights").write_text(str(weights))
    return place


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_go_in_and_come_out_with_log_probs_until_a_stop_or_a_limit(kind: str) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        assert server.context_length == CONTEXT
        found = await server.generate(request([1, 2, 3], max_tokens=4, temperature=0.5, top_p=0.9, top_k=7))
        assert found.token_ids.tolist() == [4, 5, 6, 7] and found.finish_reason is FinishReason.LENGTH
        assert found.logprobs.tolist() == [logprob(0)] * 4 and found.versions == (VersionRun(0, 4),)
        by_id = await server.generate(request([1], stop_ids=frozenset({5, 50})))
        assert by_id.token_ids.tolist() == [2, 3, 4, 5] and by_id.finish_reason is FinishReason.STOP
        by_text = await server.generate(request([1], stop_strings=("4><5",)))
        assert by_text.token_ids.tolist() == [2, 3, 4, 5] and by_text.finish_reason is FinishReason.STOP
        full = await server.generate(request([9] * (CONTEXT - 2)))
        assert len(full.token_ids) == 2 and full.finish_reason is FinishReason.LENGTH
        none = await server.generate(request([9] * CONTEXT))
        assert len(none.token_ids) == 0 and none.finish_reason is FinishReason.LENGTH
        assert len(model.asked) == 4
        with pytest.raises(EngineError, match="reads text only"):
            await server.generate(
                Request("c", np.array([1]), SamplingParams(1), NoiseKey(0, 0, "s", 0), (MediaSpan(AN_IMAGE, 0),))
            )

    played(kind, work)


def test_what_is_asked_for_is_said_in_full_and_the_seed_depends_on_the_noise_alone() -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        for seed in (1, 1, 2):
            await server.generate(request([1, 2], seed=seed, temperature=0.7, top_p=0.9, top_k=3, max_tokens=2))
        first, again, other = model.asked
        assert first == again and first["seed"] != other["seed"] and 0 <= first["seed"] < 2**63
        wanted = {
            "prompt": [1, 2], "stream": True, "temperature": 0.7, "top_p": 0.9, "top_k": 3, "max_tokens": 2, "ignore_eos": True,
            "repetition_penalty": 1.0, "return_token_ids": True, "cache_salt": "version 0",
        }  # fmt: skip
        assert {key: first[key] for key in wanted} == wanted

    played("vllm before 0.32", work)

    async def same(server: InferenceServer, model: Model) -> None:
        await server.generate(request([1, 2]))
        sampling = model.asked[0]["sampling_params"]
        assert sampling["top_k"] == -1 and 0 <= sampling["sampling_seed"] < 2**31 and sampling["no_stop_trim"]

    played("sglang", same)


@pytest.mark.parametrize(
    ("update", "kind"), [(WeightsFolder, kind) for kind in KINDS] + [(Adapter, kind) for kind in ("vllm", "sglang")]
)
def test_a_turn_goes_on_across_an_update_and_every_token_has_the_version_that_wrote_it(
    kind: str, update: type[WeightsFolder] | type[Adapter], tmp_path: Path
) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        turns = [asyncio.create_task(server.generate(request([1], name=str(n), max_tokens=20))) for n in range(3)]
        await until(lambda: model.streams == 3)
        await asyncio.sleep(0.05)
        await server.publish(update(folder(tmp_path / "a", 2)), 5)
        await asyncio.sleep(0.05)
        await server.publish(update(folder(tmp_path / "b", 4)), 6)
        later = await server.generate(request([1], max_tokens=2))
        assert later.token_ids.tolist() == [6, 11] and later.versions == (VersionRun(6, 2),)
        for turn in turns:
            found = await turn
            assert len(found.token_ids) == 20 and [run.version for run in found.versions][-1] == 6
            _check_versions(found, start=1, weights={0: 0, 5: 2, 6: 4})
        assert model.streams == 0
        held = kind == "vllm that holds turns"
        assert (len(model.asked) == 4) == held and model.kept == (["true"] * 2 if held else [])

    played(kind, work, pause=0.01)


def test_turns_that_are_held_keep_their_cache_or_make_it_anew_and_a_server_that_cannot_hold_them_is_refused(
    tmp_path: Path,
) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        server.keeps = True
        turn = asyncio.create_task(server.generate(request([1], max_tokens=20)))
        await until(lambda: model.streams == 1)
        await asyncio.sleep(0.05)
        await server.publish(WeightsFolder(folder(tmp_path / "a", 2)), 5)
        found = await turn
        assert [run.version for run in found.versions] == [0, 5] and model.kept == ["false"]
        _check_versions(found, start=1, weights={0: 0, 5: 2})
        await server.generate(request([1], max_tokens=1))
        # What the next turn reads must not be found under the salt of what was kept.
        assert [body["cache_salt"] for body in model.asked] == ["version 0", "version 5"]
        model.called_weights = "those of others"
        with pytest.raises(EngineLost, match="calls them those of others: another server runs there"):
            await server.generate(request([1], max_tokens=1))
        model.spoil = lambda event: {"choices": [event["choices"][0] | {"weight_versions": None}]}
        with pytest.raises(EngineError, match="does not tell which weights wrote a turn"):
            await server.generate(request([1], max_tokens=1))

    played("vllm that holds turns", work, pause=0.01)

    async def refused(server: InferenceServer, _: Model) -> None:
        server.keeps = True
        with pytest.raises(EngineError, match=r"cache_at_update=keep.*0\.32 or newer, started with --enable-scale-out"):
            await server.start()

    played("vllm before 0.32", refused)


def test_a_load_that_fails_under_turns_that_are_held_ends_them(tmp_path: Path) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        turn = asyncio.create_task(server.generate(request([1], max_tokens=50)))
        await until(lambda: model.streams == 1)
        with pytest.raises(EngineError, match="/collective_rpc answered 500"):
            await server.publish(WeightsFolder(tmp_path / "missing"), 4)
        with pytest.raises(EngineError, match="publishing version 4 failed"):
            await turn
        model.running.set()
        await until(lambda: model.streams == 0)

    played("vllm that holds turns", work, pause=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_update_comes_midway_a_turn_is_asked_for_in_one_answer(kind: str) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        server.midway = False
        found = await server.generate(request([1], stop_ids=frozenset({5, 50})))
        assert found.token_ids.tolist() == [2, 3, 4, 5] and found.finish_reason is FinishReason.STOP
        assert found.logprobs.tolist() == [logprob(0)] * 4 and found.versions == (VersionRun(0, 4),)
        assert [body["stream"] for body in model.asked] == [False]
        turn = asyncio.create_task(server.generate(request([1], max_tokens=50)))
        await until(lambda: model.streams == 1)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        if kind.startswith("vllm"):
            await until(lambda: model.streams == 0)

    played(kind, work, pause=0.02)


def _check_versions(found: Completion, *, start: int, weights: dict[int, int]) -> None:
    """Each token is what the weights of its version make of the one before it."""
    by = [run.version for run in found.versions for _ in range(run.tokens)]
    before = [start, *found.token_ids.tolist()]
    for number, version in enumerate(by):
        assert before[number + 1] == (before[number] + 1 + weights[version]) % VOCABULARY
        assert found.logprobs[number] == logprob(weights[version])


def test_an_update_pauses_the_engine_clears_its_cache_and_other_updates_are_refused_untouched(tmp_path: Path) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        await server.publish(WeightsFolder(folder(tmp_path / "a", 1)), 1)
        loaded = ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/reset_prefix_cache"]
        assert model.called == loaded
        await server.publish(Adapter(folder(tmp_path / "b", 2)), 2)
        await server.publish(Adapter(folder(tmp_path / "c", 3)), 3)
        assert list(model.adapters.values()) == [3]  # the one before is unloaded
        assert (await server.generate(request([1], max_tokens=1))).token_ids.tolist() == [5]
        await server.publish(WeightsFolder(folder(tmp_path / "d", 9)), 3)
        assert not model.adapters  # all weights are new: no adapter stands on them
        assert (await server.generate(request([1], max_tokens=1))).token_ids.tolist() == [11]
        with pytest.raises(EngineError, match="takes Adapter and WeightsFolder, not FullWeights"):
            await server.publish(FullWeights({}, iter(())), 4)
        assert (await server.generate(request([1], max_tokens=1))).versions == (VersionRun(3, 1),)
        with pytest.raises(EngineError, match="/collective_rpc answered 500"):  # it would fail again, so nobody retries
            await server.publish(WeightsFolder(tmp_path / "missing"), 4)
        with pytest.raises(EngineError, match="publishing version 4 failed"):
            await server.generate(request([1]))

    played("vllm", work)

    async def refused(server: InferenceServer, model: Model) -> None:
        with pytest.raises(EngineError, match="no such folder"):
            await server.publish(WeightsFolder(tmp_path / "missing"), 4)

    played("sglang", refused)


@pytest.mark.parametrize("kind", ("vllm", "sglang"))
def test_turns_wait_while_the_engine_sleeps_and_an_update_wakes_it(kind: str, tmp_path: Path) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        turn = asyncio.create_task(server.generate(request([1], max_tokens=20)))
        await until(lambda: model.streams == 1)
        await server.sleep()
        await server.sleep()
        assert model.streams == 0 and not turn.done()
        await server.publish(WeightsFolder(folder(tmp_path / "a", 1)), 1)
        await asyncio.sleep(0.02)
        assert not turn.done()
        await server.wake()
        assert len((await turn).token_ids) == 20
        names = [path for path in model.called if path in ("/sleep", "/wake_up") or "memory" in path]
        assert len(names) == 2

    played(kind, work, pause=0.01)


def test_nobody_begins_to_write_between_the_end_of_a_sleep_and_an_update_that_follows_at_once(tmp_path: Path) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        await server.sleep()
        turn = asyncio.create_task(server.generate(request([1], max_tokens=20)))
        await asyncio.sleep(0.01)
        await server.wake()
        await server.publish(WeightsFolder(folder(tmp_path / "a", 2)), 1)
        found = await turn
        assert found.versions == (VersionRun(1, 20),)
        _check_versions(found, start=1, weights={1: 2})

    played("vllm", work)


@pytest.mark.parametrize("kind", ("vllm", "vllm that holds turns", "sglang"))
def test_a_cancelled_turn_is_stopped_at_the_server(kind: str) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        turn = asyncio.create_task(server.generate(request([1], max_tokens=50)))
        await until(lambda: model.streams == 1)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await until(lambda: model.streams == 0)

    played(kind, work, pause=0.2)


def _choice(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda event: {"choices": [{**event["choices"][0], **changes}]}


def _meta(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda event: {"meta_info": {**event["meta_info"], **changes}}


HOSTILE: dict[str, list[tuple[Any, str]]] = {
    "vllm": [
        (_choice(logprobs=None), "without tokens and log-probs"),
        (_choice(logprobs={"token_logprobs": [None]}), "log-probs that are missing"),
        (_choice(logprobs={"token_logprobs": [float("nan")]}), "log-probs that are missing, nan"),
        (_choice(logprobs={"token_logprobs": [0.5]}), "above 0"),
        (_choice(logprobs={"token_logprobs": [-1.0, -1.0]}), "1 tokens with 2 log-probs"),
        (_choice(logprobs={"token_logprobs": -1.0}), "without lists"),
        (_choice(token_ids=[VOCABULARY]), "outside a vocabulary"),
        (_choice(token_ids=[-1]), "outside a vocabulary"),
        (_choice(token_ids=["7"]), "outside a vocabulary"),
        (_choice(token_ids=[1] * 9, logprobs={"token_logprobs": [-1.0] * 9}), "9 tokens where 8"),
        (lambda event: {"choices": [7]}, "without tokens and log-probs"),
        (lambda event: b"data: {broken\n\n", "not JSON"),
        (lambda event: b"data: []\n\n", "no JSON object"),
        (lambda event: {"error": {"message": "no", "code": 400}}, "answered 400"),
    ],
    "sglang": [
        (_meta(output_token_logprobs=None), "without tokens and log-probs"),
        (_meta(completion_tokens=3), "says it wrote 3 tokens, and 1 came"),
        (_meta(output_token_logprobs=[[-0.5, VOCABULARY, None]]), "outside a vocabulary"),
        (_meta(output_token_logprobs=[[None, 3, None]]), "log-probs that are missing"),
        (_meta(finish_reason="stop"), "without tokens and log-probs"),
    ],
}
BROKEN: dict[str, list[Any]] = {
    "vllm": [
        lambda event: None,
        _choice(finish_reason="abort"),
        lambda event: {"error": {"message": "dead", "code": 500}},
        lambda event: b"data: [DONE]\n\n",
    ],
    "sglang": [_meta(finish_reason={"type": "abort", "message": "flushed"})],
}


@pytest.mark.parametrize("kind", ("vllm", "vllm before 0.32", "sglang"))
def test_a_hostile_answer_ends_the_run_by_name_and_a_turn_that_broke_off_is_asked_for_again(kind: str) -> None:
    async def work(server: InferenceServer, model: Model) -> None:
        for spoil, words in HOSTILE[kind.split()[0]]:
            model.spoil = spoil
            with pytest.raises(EngineError, match=words) as caught:
                await server.generate(request([1]))
            assert not isinstance(caught.value, EngineLost)
        for spoil in BROKEN[kind.split()[0]]:
            model.spoil = spoil
            with pytest.raises(EngineLost):
                await server.generate(request([1]))
        model.spoil = lambda event: event
        assert len((await server.generate(request([1]))).token_ids) == 8

    played(kind, work)


def test_servers_that_are_not_there_or_not_what_they_should_be_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(EngineLost, match="nothing that serves"):
            await client(VllmServer, "http://127.0.0.1:9").start()
        with pytest.raises(ConfigError, match="must be like"):
            await client(VllmServer, "ftp://x").start()
        model = Model()
        async with serving_beside(sglang_app(model), "127.0.0.1") as port:
            with pytest.raises(EngineError, match="answered 404"):
                await client(VllmServer, f"http://127.0.0.1:{port}").start()
        async with serving_beside(vllm_app(model), "127.0.0.1") as port:
            named = VllmServer(
                "s", f"http://127.0.0.1:{port}", vocabulary=9, decode=decode, capabilities=TAKES, model="polcy"
            )
            with pytest.raises(ConfigError, match="did you mean 'policy'"):
                await named.start()

    asyncio.run(main())


class Wire:
    """In place of NCCL: what is sent goes into the server's queue."""

    unique_id = b"x" * 128

    def __init__(self, model: Model, workers: int) -> None:
        self.model, self.ranks = model, workers + 1

    def join(self) -> None:
        self.model.wire.put(self.ranks)

    def send(self, tensors: Any) -> None:
        self.model.wire.put(list(tensors))


def test_all_weights_go_by_the_engines_own_transfer_in_the_order_that_it_wants() -> None:
    def update(value: float) -> FullWeights:
        tensors = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("w", torch.full((2,), value))]
        return FullWeights({name: tuple(one.shape) for name, one in tensors}, iter(tensors))

    async def work(server: InferenceServer, model: Model) -> None:
        assert isinstance(server, VllmServer)
        server.capabilities = Capabilities(Logprobs.SCALED, frozenset({FullWeights}))
        server.transfer = Transfer(lambda device, workers: Wire(model, workers))
        turn = asyncio.create_task(server.generate(request([1], max_tokens=20)))
        await until(lambda: model.streams == 1)
        await server.publish(update(1.0), 5)
        await server.publish(update(2.0), 6)
        found = await turn
        _check_versions(found, start=1, weights={0: 0, 5: 2, 6: 4})
        update_calls = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
                        "/update_weight_version", "/resume"]  # fmt: skip
        first = [path for path in model.called if path != "/reset_prefix_cache"]
        assert first == [update_calls[0], "/init_weight_transfer_engine", *update_calls[1:], *update_calls]
        server.transfer.forget()
        model.refuses = True
        with pytest.raises(EngineError, match="by NCCL broke off.*no NCCL here") as caught:
            await server.publish(update(3.0), 7)
        assert not isinstance(caught.value, EngineLost)
        with pytest.raises(EngineError, match="the learner's are on cpu"):
            NcclSender(torch.device("cpu"), 1)

    played("vllm", work, pause=0.02)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("vllm", {"model_config": {"enable_sleep_mode": False}}, "--enable-sleep-mode"),
        ("vllm", {"lora_config": None}, "--enable-lora"),
        ("vllm", {"model_config": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode processed_logprobs"),
        ("sglang", {"enable_memory_saver": False}, "--enable-memory-saver"),
        ("sglang", {"enable_lora": None}, "--enable-lora"),
        ("sglang", {"context_length": -1}, "may have -1 tokens"),
    ],
)
def test_what_an_attached_server_cannot_do_is_asked_of_it_and_not_of_this_machine(
    kind: str, settings: dict[str, Any], words: str
) -> None:
    async def work(server: InferenceServer, _: Model) -> None:
        assert server.capabilities.sleeps

    with pytest.raises(EngineError, match=words):
        played(kind, work, settings=settings)
    played(kind, work)


def test_log_probs_without_the_temperature_are_taken_where_it_is_1_and_refused_elsewhere() -> None:
    async def work(server: InferenceServer, _: Model) -> None:
        assert (await server.generate(request([1], temperature=1.0, max_tokens=2))).token_ids.tolist() == [2, 3]
        with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB, or set sampling.temperature=1"):
            await server.generate(request([1], temperature=0.7))

    played("sglang", work, unscaled=True)


def process(log: Path, said: list[str]) -> ServerProcess:
    def command(port: int) -> list[str]:
        return [sys.executable, inference_servers.__file__, str(port)]

    return ServerProcess("server 0", command, log=log, environment={}, say=said.append)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_server_that_dies_in_the_middle_is_started_again_with_the_weights_and_the_turn_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """One that stands still too: its health is asked for while a turn waits."""
    if number is signal.SIGSTOP:
        monkeypatch.setattr(inference_server, "HEALTH_SECONDS", 5.0)

    async def main() -> None:
        said: list[str] = []
        started = process(tmp_path / "logs" / "server_0.log", said)
        server = client(VllmServer, started)
        await server.start()
        sampler = Replicas([server], said.append, health_seconds=10.0 if number is signal.SIGKILL else 0.5)
        try:
            await sampler.publish(WeightsFolder(folder(tmp_path / "a", 2)), 3)
            before = started.url

            async def attempt() -> Completion:
                try:
                    return await sampler.generate(request([1], max_tokens=30))
                except EngineLost as error:
                    raise AttemptFailed(str(error)) from error

            turn = asyncio.create_task(retrying(attempt, RetryPolicy(3, 0.01)))
            await asyncio.sleep(0.1)
            assert started._guard is not None
            for child in children(started._guard.pid):
                os.kill(child, number)
            found = await turn
            assert len(found.token_ids) == 30 and found.versions == (VersionRun(3, 30),)
            _check_versions(found, start=1, weights={3: 2})
            assert sampler.lost == 1 and started.url != before and sum("serves at" in text for text in said) == 2
        finally:
            await sampler.close()
        assert not started.alive

    asyncio.run(asyncio.wait_for(main(), 120))


def test_commands_name_the_port_and_the_options_come_last() -> None:
    assert vllm_command("py", ["--a", "1"])(7)[-2:] == ["--a", "1"]
