"""An attached server tells which weights it has: one that comes to have others, or another model, is not written with."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inference_servers import VOCABULARY, Model, logprob, sglang_app, vllm_app

from turnwise.data.task_config import configure
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.opener import opener_of
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, WeightsFolder
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ext.servers.inference_server import InferenceServer, OtherWeights
from turnwise.ext.servers.replicas import MOST_RESTARTS, Replicas
from turnwise.ext.servers.same_model import refuse_other, sizes_of
from turnwise.ext.sglang.opener import SglangServer
from turnwise.ext.vllm.server import VllmServer
from turnwise.rollout.prepare import make_renderer
from turnwise.system.serving import serving_beside
from turnwise.types import Completion, VersionRun

TAKES = Capabilities(Logprobs.SCALED, frozenset({WeightsFolder, Adapter}))
OURS = {"parallel_config": {"worker_extension_cls": "vllm_worker.WeightReader"}}
HELD = Capabilities(Logprobs.SCALED, frozenset({WeightsFolder}))
KINDS = ("vllm", "vllm with our extension", "vllm that holds turns", "sglang")


class Address:
    """One address behind which another server can come to stand, as behind a proxy or a service of Kubernetes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.app: Any = None

    def lead_to(self, model: Model) -> Model:
        if self.kind == "vllm with our extension":
            model.settings = OURS
        self.app = sglang_app(model) if self.kind == "sglang" else vllm_app(model)
        return model

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def folder(place: Path, weights: int) -> Path:
    place.mkdir(exist_ok=True)
    (place / "weights").write_text(str(weights))
    return place


def turn(name: str = "c", tokens: int = 4) -> Request:
    return Request(name, np.array([1, 2]), SamplingParams(max_tokens=tokens), NoiseKey(0, 0, "s", 0))


def written(found: Completion, weights: int, version: int) -> bool:
    return found.logprobs.tolist() == [logprob(weights)] * 4 and found.versions == (VersionRun(version, 4),)


def played(kind: str, work: Callable[[InferenceServer, Replicas, Address, Model, list[str]], Any]) -> None:
    async def main() -> None:
        address, said = Address(kind), list[str]()
        first = address.lead_to(Model())
        async with asyncio.timeout(60), serving_beside(address, "127.0.0.1") as port:
            made = SglangServer if kind == "sglang" else VllmServer
            server = made("server 0", f"http://127.0.0.1:{port}", vocabulary=VOCABULARY,
                          decode=lambda ids: "",
                          capabilities=HELD if kind == "vllm that holds turns" else TAKES)  # fmt: skip
            await server.start()
            replicas = Replicas([server], said.append, health_seconds=3600)
            try:
                await work(server, replicas, address, first, said)
            finally:
                await replicas.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_another_one_stands_in_for_is_given_the_weights_before_it_writes(
    kind: str, tmp_path: Path
) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        await replicas.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)
        assert written(await replicas.generate(turn()), 3, 7) and first.weights == 3
        other = address.lead_to(Model(weights=50, instance="fghij"))
        with pytest.raises(EngineLost, match="has other weights than it was given.*another server runs there"):
            await replicas.generate(turn())
        assert written(await replicas.generate(turn()), 3, 7) and other.weights == 3
        assert any("lost server 0" in line and "another server runs there" in line for line in said)
        assert replicas.lost == 1 and said[-1] == "server 0 serves again"

    played(kind, work)


@pytest.mark.parametrize("kind", KINDS)
def test_health_finds_it_while_nobody_writes_and_says_why(kind: str, tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        assert await server.healthy()
        await replicas.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)
        assert await server.healthy() and server.problem == ""
        address.lead_to(Model(instance="fghij"))
        assert not await server.healthy() and "another server runs there" in server.problem
        replicas._health_seconds = 0.01
        assert replicas._watch is not None
        replicas._watch.cancel()
        replicas._watch = None
        replicas._start_watch()
        while not any("serves again" in line for line in said):
            await asyncio.sleep(0.01)
        assert "another server runs there" in said[0] and written(await replicas.generate(turn()), 3, 7)

    played(kind, work)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_weights_that_another_run_gives_the_same_server_are_noticed(kind: str, tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        await replicas.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)
        first.weights = 5
        first.label = first.called_weights = "version 7 of run 00000000"
        with pytest.raises(EngineLost, match="another program gives it weights"):
            await replicas.generate(turn())
        assert written(await replicas.generate(turn()), 3, 7)

    played(kind, work)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_turn_wrote_before_an_update_is_vouched_for_before_the_update(kind: str, tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        await server.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)
        other = address.lead_to(Model(weights=50, instance="fghij", pause=0.01))
        under_way = asyncio.create_task(server.generate(turn(tokens=50)))
        while not other.streams and not under_way.done():
            await asyncio.sleep(0.005)
        with pytest.raises(OtherWeights):
            await server.publish(WeightsFolder(folder(tmp_path / "w", 4)), 8)
        with pytest.raises(EngineLost):
            await under_way
        assert other.weights == 50, "nothing was pushed"

    played(kind, work)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "holds" not in kind])
def test_an_adapter_of_a_server_that_was_exchanged_is_given_again(kind: str, tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        await replicas.publish(Adapter(folder(tmp_path / "w", 3)), 7)
        assert written(await replicas.generate(turn()), 3, 7)
        other = address.lead_to(Model(weights=50, instance="fghij"))
        with pytest.raises(EngineLost, match="another server runs there"):
            await replicas.generate(turn())
        assert written(await replicas.generate(turn()), 3, 7) and len(other.adapters) == 1

    played(kind, work)


def test_one_question_answers_for_many_turns(tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        await server.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)
        before = first.called.count("/collective_rpc")
        await asyncio.gather(*(server.generate(turn(f"c{n}")) for n in range(64)))
        assert 1 <= first.called.count("/collective_rpc") - before < 32

    played("vllm with our extension", work)


def test_an_address_that_leads_now_here_now_there_ends_in_one_clear_line(tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        await replicas.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)
        with pytest.raises(EngineError, match="no replica is left: .*restarts in a row.*another server runs there"):
            for number in range(MOST_RESTARTS + 2):
                address.lead_to(Model(weights=50, instance=f"i{number}"))
                try:
                    await replicas.generate(turn())
                except EngineLost:
                    while not replicas.names and not any("given up" in line for line in said):
                        await asyncio.sleep(0.005)

    played("vllm", work)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", "neither which weights it has nor which server it is"),
        ("vllm with our extension", "worker extension that does not tell which weights it loaded"),
        ("sglang", "does not tell which weights it has .weight_version.: take SGLang"),
    ],
)
def test_a_server_that_cannot_tell_what_it_has_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    async def work(
        server: InferenceServer, replicas: Replicas, address: Address, first: Model, said: list[str]
    ) -> None:
        first.old = True
        with pytest.raises(EngineError, match=words):
            await server.start()
            await server.publish(WeightsFolder(folder(tmp_path / "w", 3)), 7)

    played(kind, work)


@pytest.mark.parametrize("kind", ["vllm_server", "sglang_server"])
def test_another_model_is_refused_before_weights_are_pushed(kind: str, tmp_path: Path) -> None:
    """The bundled model has its own number of layers; the server's config says one more."""
    config = configure(f"engine={kind}")
    renderer = make_renderer(config)
    raw = json.loads((Path(__file__).parents[3] / "turnwise/engines/bundled/tiny/config.json").read_text())
    layers = raw["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": layers + 1}))
    model = Model(sizes={"num_hidden_layers": layers + 1, "vocab_size": raw["vocab_size"]}, path=str(tmp_path))

    async def main() -> None:
        app = vllm_app(model) if kind == "vllm_server" else sglang_app(model)
        async with serving_beside(app, "127.0.0.1") as port:
            there = configure(f"engine={kind}", f"servers.addresses=['http://127.0.0.1:{port}']")
            words = f"serves another model: {layers + 1} layers where the policy has {layers}; start it with"
            with pytest.raises(EngineError, match=words):
                await open_sampler(there, renderer, lambda text: None)
            with pytest.raises(ConfigError, match=f"servers.addresses: server 0 .*{words}"):
                await opener_of(there).check(there)
            assert model.called == [] and model.asked == []
            model.sizes, model.path = {"num_hidden_layers": layers}, "m"
            opened = await open_sampler(there, renderer, lambda text: None)
            await opened.sampler.close()

    asyncio.run(main())


def test_sizes_are_read_of_an_object_of_its_text_and_of_the_part_that_writes() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 96}
    text = f"Qwen3Config {json.dumps(sizes | {'rope': None, 'dtype': 'bfloat16'}, indent=2)}\n"
    assert sizes_of(sizes | {"model_type": "x"}) == sizes_of(text) == sizes
    looks = {"vision hidden_size": 3, "vision depth": 2}
    tower = {"hidden_size": 3, "depth": 2, "in_chans": 3}
    assert sizes_of({"hidden_size": 4, "text_config": sizes, "vision_config": tower}) == sizes | looks
    for nothing in (None, "Config without JSON", "{", [], {"vocab_size": True}, {"vocab_size": "96"}):
        assert sizes_of(nothing) == {}
    refuse_other("server 0", sizes, {"hidden_size": 8, "intermediate_size": 3})
    with pytest.raises(EngineError, match="another model: 9 hidden where the policy has 8, 95 vocabulary where"):
        refuse_other("server 0", sizes, {"hidden_size": 9, "vocab_size": 95})
    with pytest.raises(EngineError, match="another model: 4 vision layers where the policy has 2; start"):
        refuse_other("server 0", sizes | looks, sizes | looks | {"vision depth": 4})
