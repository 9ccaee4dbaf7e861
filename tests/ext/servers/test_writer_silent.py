"""A server that answers while its process that writes stands still: found by a question that only that one answers."""

import asyncio

import numpy as np
import pytest
from inference_servers import VOCABULARY, Model, vllm_app
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import WeightsFolder
from turnwise.ext.servers import inference_server
from turnwise.ext.servers.replicas import Replicas
from turnwise.ext.vllm.server import VllmServer
from turnwise.system.serving import serving_beside

TAKES = Capabilities(Logprobs.SCALED, frozenset({WeightsFolder}))
LONG_TURN = Request("c", np.array([1]), SamplingParams(max_tokens=4000), NoiseKey(0, 0, "s", 0))


def test_a_writer_that_stands_still_is_lost_by_name_unless_nobody_waits_or_it_changes_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inference_server, "WRITER_SECONDS", 1.0)
    still, asked = asyncio.Event(), list[str]()

    async def is_sleeping(question: HttpRequest) -> JSONResponse:
        asked.append(question.url.path)
        if still.is_set():
            await asyncio.sleep(30)
        return JSONResponse({"is_sleeping": False})

    async def main() -> None:
        app = vllm_app(Model(pause=20.0))
        app.router.routes.append(Route("/is_sleeping", is_sleeping))
        said: list[str] = []
        async with asyncio.timeout(60), serving_beside(app, "127.0.0.1") as port:
            server = VllmServer("server 0", f"http://127.0.0.1:{port}", vocabulary=VOCABULARY,
                                decode=lambda ids: "", capabilities=TAKES)  # fmt: skip
            await server.start()
            replicas = Replicas([server], said.append, health_seconds=0.05)
            still.set()
            assert await server.healthy() and asked == [], "nobody waits for it"
            still.clear()
            turn = asyncio.create_task(replicas.generate(LONG_TURN))
            while not asked:
                await asyncio.sleep(0.01)
            assert replicas.lost == 0 and server.problem == ""
            still.set()
            async with server._changing:
                assert await server.healthy(), "weights are loaded by the same process"
            while not replicas.lost:
                await asyncio.sleep(0.01)
            words = "lost server 0: server 0 answers, but its process that writes has not for 2 s"
            assert said[0] == words
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            await replicas.close()

    asyncio.run(main())


def test_a_server_that_has_no_such_question_is_known_by_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), serving_beside(vllm_app(Model(pause=20.0)), "127.0.0.1") as port:
            server = VllmServer("server 0", f"http://127.0.0.1:{port}", vocabulary=VOCABULARY,
                                decode=lambda ids: "", capabilities=TAKES)  # fmt: skip
            await server.start()
            turn = asyncio.create_task(server.generate(LONG_TURN))
            while not server._reading:
                await asyncio.sleep(0.01)
            assert await server.healthy()
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            await server.close()

    asyncio.run(main())
