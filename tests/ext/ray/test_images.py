"""Images of turns on their way to a sampler in an actor, without a cluster: each goes once, as its file."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vision_processors

from turnwise import configure
from turnwise.chat.images.processor import ImageProcessor, find_image_processor
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.sections import section
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.errors import EngineError, EpisodeError
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection
from turnwise.ext.ray.messages import PackedRequests
from turnwise.ext.ray.sampler_actor import SamplerActor, SamplerFacts
from turnwise.ext.ray.samplers import ActorSampler
from turnwise.ext.ray.sent_images import ImageStore
from turnwise.ledger import Media, MediaSpan, check_places
from turnwise.types import Completion, FinishReason

TAKES = Capabilities(Logprobs.SCALED, frozenset(), media=True)


def processor_in(folder: Path) -> ImageProcessor:
    made = vision_processors.build("qwen2_5_vl", folder)
    found = find_image_processor(made, Tokenizer(made), None)
    assert found is not None
    return found


class Sampler:
    """Looks at what it is given, and answers with one token."""

    capabilities, context_length = TAKES, 512

    def __init__(self) -> None:
        self.given: list[Request] = []
        self.refuses = False

    async def generate(self, request: Request) -> Completion:
        self.given.append(request)
        check_places(request.media, request.token_ids)
        if self.refuses:
            raise EpisodeError("of this turn only")
        return Completion.of([7], [-1.0], FinishReason.LENGTH, version=0)

    async def release(self, conversation: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Remote:
    """A method of an actor, with everything that goes there on a wire between."""

    def __init__(self, work: Callable[..., Awaitable[Any]], sizes: list[int]) -> None:
        self._work, self._sizes = work, sizes

    def remote(self, *args: Any) -> "asyncio.Future[Any]":
        sent = pickle.dumps(args)
        self._sizes.append(len(sent))
        return asyncio.ensure_future(self._work(*pickle.loads(sent)))


def opened(sampler: Sampler, store: ImageStore, sizes: list[int]) -> ActorSampler:
    """An ActorSampler over a SamplerActor in this process; `sizes` are those of its messages."""
    actor: Any = SamplerActor(SimpleNamespace(enter=lambda: None), configure())  # type: ignore[arg-type]
    actor._sampler, actor._shown = sampler, store

    async def ready() -> SamplerFacts:
        return SamplerFacts(512, TAKES, 1, None, "", "float32", (), "a node")

    async def there() -> str:
        return "a node"

    remote = SimpleNamespace(
        submit=Remote(actor.submit, sizes), collect=Remote(actor.collect, []), close=Remote(actor.close, []),
        open=Remote(ready, []), ping=Remote(there, []),
    )  # fmt: skip
    ray = SimpleNamespace(exceptions=import_module("ray").exceptions, kill=lambda _: None, nodes=lambda: [])
    return ActorSampler(Connection(section(configure("cluster=ray"), RayConfig), ray), lambda: remote, 1)


def shown(*parts: Media | list[int], name: str = "c") -> Request:
    ids, spans = list[int](), list[MediaSpan]()
    for part in parts:
        if isinstance(part, Media):
            spans.append(MediaSpan(part, len(ids)))
        ids += part.token_ids.tolist() if isinstance(part, Media) else part
    return Request(name, np.array(ids), SamplingParams(max_tokens=1), NoiseKey(0, 0, "s", 0), tuple(spans))


def picture(seed: int) -> bytes:
    return vision_processors.encoded(vision_processors.picture(40, 32, seed))


def test_an_image_goes_to_a_sampler_once_and_again_when_it_was_forgotten(tmp_path: Path) -> None:
    here, there = processor_in(tmp_path / "here"), processor_in(tmp_path / "there")
    prepared: list[bytes] = []

    def prepare(content: bytes) -> Media:
        prepared.append(content)
        return there.prepare(content)

    cat, dog = here.prepare(picture(1)), here.prepare(picture(2))

    async def main() -> None:
        sampler, sizes = Sampler(), list[int]()
        room = len(cat.content) + len(dog.content)
        remote = opened(sampler, ImageStore(prepare, kept_bytes=room), sizes)
        await remote.start()
        try:
            for request in (shown([1], cat, [2]), shown([1], cat, [2, 7], dog), shown([1], cat, [2, 7], dog, [3], cat)):
                found = await remote.generate(request)
                assert found.token_ids.tolist() == [7]
                got = sampler.given[-1]
                assert [(one.start, one.media.digest) for one in got.media] == [
                    (one.start, one.media.digest) for one in request.media
                ]
            assert prepared == [cat.content, dog.content]  # each once, whatever the turns
            assert all(len(one.content) < size for one, size in ((cat, sizes[0]), (dog, sizes[1])))
            assert sizes[2] < min(sizes[:2]) / 2
            first = sampler.given[0].media[0].media
            assert first is sampler.given[2].media[2].media and first is not cat
            for name, array in cat.arrays.items():
                assert np.array_equal(first.arrays[name], array)
            for seed in (3, 4):  # others take the room
                await remote.generate(shown(here.prepare(picture(seed)), name=str(seed)))
            before = len(sizes)
            await remote.generate(shown([1], cat, [2, 7], dog, [4]))
            assert len(sizes) == before + 2 and sizes[-1] > room  # asked for, and sent
            sampler.refuses = True
            with pytest.raises(EpisodeError, match="of this turn only"):
                await remote.generate(shown([1], cat))
        finally:
            await remote.close()

    asyncio.run(main())


def test_an_image_that_cannot_be_prepared_there_fails_the_turns_that_show_it(tmp_path: Path) -> None:
    cat = processor_in(tmp_path).prepare(picture(1))

    def prepare(content: bytes) -> Media:
        raise EngineError("the model in this process reads text only")

    async def main() -> None:
        sampler = Sampler()
        remote = opened(sampler, ImageStore(prepare), [])
        await remote.start()
        try:
            turns = [remote.generate(shown([1], cat)), remote.generate(shown([1, 2]))]
            failed, written = await asyncio.gather(*turns, return_exceptions=True)
            assert isinstance(failed, EngineError) and isinstance(written, Completion)
        finally:
            await remote.close()

    asyncio.run(main())


def test_a_message_has_the_file_of_an_image_and_not_what_a_processor_made_of_it(tmp_path: Path) -> None:
    cat = processor_in(tmp_path).prepare(picture(1))
    siblings = [(number, shown([1], cat, [number])) for number in range(8)]
    named = len(pickle.dumps(PackedRequests.of(siblings)))
    sent = len(pickle.dumps(PackedRequests.of(siblings, {cat.digest})))
    assert len(cat.content) <= sent - named < len(cat.content) + 100
    assert sum(array.nbytes for array in cat.arrays.values()) > 2 * len(cat.content)
