"""Images through vLLM's client against a small real server: sent once, the tokens it read checked, image tokens of the
policy's own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inference_servers import MARKER, VOCABULARY, Model, logprob, vllm_app

from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import WeightsFolder
from turnwise.errors import EngineError, EpisodeError
from turnwise.ext.servers.images import MOST_SENT, SentImages, check_prompt, with_markers
from turnwise.ext.vllm.server import VllmServer
from turnwise.ledger import Media, MediaSpan
from turnwise.system.image_bytes import digest_of
from turnwise.system.serving import serving_beside
from turnwise.types import VersionRun

TAKES = Capabilities(Logprobs.SCALED, frozenset({WeightsFolder}))


def image(name: str, tokens: int) -> Media:
    content = b"\x89PNG\r\n\x1a\n" + name.encode() + bytes([tokens])
    return Media(digest_of(content), content, np.full(tokens, MARKER), np.ones(tokens, bool), {})


CAT, DOG = image("cat", 4), image("dog", 6)


def shown(*parts: Media | list[int], tokens: int = 3) -> Request:
    ids, spans = list[int](), list[MediaSpan]()
    for part in parts:
        if isinstance(part, Media):
            spans.append(MediaSpan(part, len(ids)))
        ids += part.token_ids.tolist() if isinstance(part, Media) else part
    return Request("c", np.array(ids), SamplingParams(max_tokens=tokens), NoiseKey(0, 0, "s", 0), tuple(spans))


@contextlib.asynccontextmanager
async def opened(model: Model) -> AsyncIterator[VllmServer]:
    async with serving_beside(vllm_app(model), "127.0.0.1") as port:
        server = VllmServer(
            "server 0", f"http://127.0.0.1:{port}", vocabulary=VOCABULARY, decode=str, capabilities=TAKES
        )
        try:
            await server.start()
            yield server
        finally:
            await server.close()


def urls(body: dict[str, Any]) -> list[bool]:
    """Of each image of a request, whether its bytes came with it."""
    return ["url" in part for part in body["content_parts"]]


def test_an_image_is_sent_once_and_again_when_the_server_has_lost_it(tmp_path: Path) -> None:
    model = Model()

    async def main() -> None:
        async with opened(model) as server:
            with pytest.raises(EngineError, match="reads text only"):
                await server.generate(shown([1, 2], CAT))
            assert await server.try_image(MARKER, CAT) is None and server.capabilities.media
            model.images.clear()
            model.asked.clear()
            first = await server.generate(shown([1, 2], DOG, [3]))
            assert first.token_ids.tolist() == [4, 5, 6]
            assert first.logprobs.tolist() == [logprob(0)] * 3 and first.versions == (VersionRun(0, 3),)
            assert model.asked[-1]["token_ids"] == [1, 2, MARKER, 3]
            await server.generate(shown([1, 2], DOG, [3, 4, 5, 6, 7], DOG, [8]))
            assert [urls(body) for body in model.asked] == [[True], [False, False]]
            await server.generate(shown([1, 2], DOG, [3], CAT, [8]))  # it has had the cat, and lost it
            assert [urls(body) for body in model.asked[2:]] == [[False, False], [True, True]]
            (tmp_path / "weights").write_text("7")
            await server.publish(WeightsFolder(tmp_path), 1)
            assert "/reset_encoder_cache" in model.called  # features are of the weights before
            later = await server.generate(shown([1, 2], DOG, [3]))
            assert later.versions == (VersionRun(1, 3),) and later.logprobs.tolist() == [logprob(7)] * 3

    asyncio.run(main())


def test_a_server_that_reads_other_tokens_is_found_out() -> None:
    model = Model()
    wider = image("wide", 9)
    narrower = Media(wider.digest, wider.content, np.full(8, MARKER), np.ones(8, bool), {})

    async def main() -> None:
        async with opened(model) as server:
            assert "9 tokens of a prompt with images that has 8 here" in str(await server.try_image(MARKER, narrower))
            assert not server.capabilities.media
            assert await server.try_image(MARKER, CAT) is None
            with pytest.raises(EngineError, match="its image processor is set otherwise"):
                await server.generate(shown([1], narrower, [2]))
            model.spoil = lambda event: {key: one for key, one in event.items() if key != "prompt_token_ids"}
            with pytest.raises(EngineError, match="does not say which tokens"):
                await server.generate(shown([1], CAT, [2]))
            for other in ({"mm_device_do_normalize": True, "mm_processor_kwargs": {"use_fast": False}}, None, {}):
                model.settings = {"model_config": {"multimodal_config": other}}
                assert "makes other pixels than the learner" in str(await server.try_image(MARKER, CAT))
            model.settings = {}
            model.spoil = lambda event: None
            assert await server.try_image(MARKER, DOG) is not None  # it hung up, and is well

    asyncio.run(main())


def test_an_image_token_that_the_policy_wrote_never_takes_an_images_place() -> None:
    model = Model()

    async def main() -> None:
        async with opened(model) as server:
            await server.try_image(MARKER, CAT)
            model.asked.clear()
            for stray in ([1, MARKER], [MARKER]):  # right before the block the tokens would even be the same
                with pytest.raises(EpisodeError, match="was written 1 times as text"):
                    await server.generate(shown(stray, CAT, [2]))
            assert not model.asked
            found = await server.generate(shown([1], CAT, [2, MARKER, 3]))  # behind the last one it is any token
            assert found.token_ids.tolist() == [4, 5, 6]
            assert (await server.generate(shown([1, MARKER, 3]))).token_ids.tolist() == [4, 5, 6]

    asyncio.run(main())


def test_markers_stand_for_blocks_and_what_was_sent_is_not_remembered_for_ever() -> None:
    asked = shown([5], CAT, DOG, [6, 7])
    assert with_markers(asked.token_ids, asked.media, MARKER) == [5, MARKER, MARKER, 6, 7]
    check_prompt("it", asked.token_ids.tolist(), asked.token_ids)
    for other in ([*asked.token_ids.tolist()[:-1], 9], asked.token_ids.tolist()[1:], None, ["5"]):
        with pytest.raises(EngineError):
            check_prompt("it", other, asked.token_ids)
    sent = SentImages()
    sent.add(asked.media)
    assert not sent.new(asked.media)
    for number in range(MOST_SENT):
        sent.add([MediaSpan(image(str(number), 1), 0)])
    assert sent.new(asked.media) == {CAT.digest, DOG.digest}
