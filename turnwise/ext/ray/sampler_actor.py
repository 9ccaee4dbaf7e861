"""The actor that hosts a sampler: takes many requests with one call and gives many results with another."""

import asyncio
import shutil
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.engines.devices import published_format
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.opener import OpenSampler, model_source
from turnwise.engines.publish_weights import needs_files, weights_folder, write_weights
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Capabilities, Sampler
from turnwise.engines.weight_updates import WeightsFolder
from turnwise.errors import EngineError, EngineLost, EpisodeError
from turnwise.ext.ray.connection import SearchPath, load_ray
from turnwise.ext.ray.messages import PackedOutcomes, PackedRequests, TurnOutcome
from turnwise.ext.ray.numeric_fingerprint import machine_words
from turnwise.ext.ray.sent_images import ImageStore, Placed, at_their_places
from turnwise.ext.ray.weight_store import Part, Shapes, unpack
from turnwise.ledger import Media

SAMPLER_CALLS = 100
"""Calls that an actor works on at once; requests are many to a call."""


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """What a sampler says of itself once it is open."""

    context_length: int
    capabilities: Capabilities
    threads: int
    regime: Any
    machine: str
    """What its arithmetic depends on: equal words promise equal bits."""
    precision: str
    notes: tuple[str, ...]
    node: str
    node_id: str = ""


@dataclass(slots=True, eq=False)
class _Client:
    """A process that asks for turns, and what it has under way here."""

    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    done: list[TurnOutcome] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)
    conversations: set[str] = field(default_factory=set)


class SamplerActor:
    """Implements the other side of `samplers.ActorSampler`. Made an actor by `Connection.actor`."""

    def __init__(self, path: SearchPath, config: Config) -> None:
        path.enter()
        self._config = config
        self._sampler: Sampler | None = None
        self._clients: dict[str, _Client] = {}
        self._left: set[str] = set()
        """Processes, and clients of theirs as PROCESS.NUMBER, of whom a message may still be on its way."""
        self._opened = ExitStack()
        self._shown = ImageStore(_text_only)
        self._weights: Path | None = None
        """Where files of weights are put for a sampler that takes only those."""

    async def open(self) -> SamplerFacts:
        """Load the model; returns when requests can be served."""
        notes: list[str] = []
        opened = await self._open(notes)
        self._sampler = opened.sampler
        return SamplerFacts(
            opened.sampler.context_length,
            opened.sampler.capabilities,
            opened.threads,
            opened.regime,
            machine_words(),
            published_format(self._config).value,
            tuple(notes),
            node_name(),
            load_ray().get_runtime_context().get_node_id(),
        )

    async def _open(self, notes: list[str]) -> OpenSampler:
        """The configured sampler, and a folder for files of weights where it takes no others."""
        renderer = make_renderer(self._config)
        opened = await open_sampler(self._config, renderer, notes.append)
        if renderer.images is not None:
            self._shown = ImageStore(renderer.images.prepare)
        if needs_files(opened.sampler.capabilities, lora=False):
            self._weights = self._opened.enter_context(weights_folder(model_source(self._config).weight_bytes, None))
        return opened

    @property
    def sampler(self) -> Sampler:
        """The sampler that this actor hosts; EngineLost before it is open."""
        if self._sampler is None:
            raise EngineLost("the sampler is not open")
        return self._sampler

    async def submit(
        self, name: str, packed: PackedRequests, dropped: Sequence[int], freed: Sequence[str]
    ) -> list[int]:
        """Begin with a client's new requests, drop others, forget conversations; the answer is who shows an image that
        is not here: to be sent again with its images."""
        if self._has_left(name):
            return []
        client = self._client(name)
        for number in dropped:
            if (task := client.tasks.get(number)) is not None:
                task.cancel()
        lacking: list[int] = []
        self._shown.take(packed.images)
        for number, request, placed in packed.requests():
            making = self._shown.find(placed)
            if making is None:
                lacking.append(number)
            else:
                client.conversations.add(request.conversation)
                client.tasks[number] = asyncio.create_task(self._serve(client, number, request, placed, making))
        self._shown.forget_some()
        for conversation in freed:
            client.conversations.discard(conversation)
            await self.sampler.release(conversation)
        return lacking

    async def collect(self, name: str, seconds: float) -> PackedOutcomes:
        """All of a client's that ended since its last call, at least one, and those of so many seconds after it."""
        client = self._client(name)
        await client.some.wait()
        if seconds:
            await asyncio.sleep(seconds)
        client.some.clear()
        done, client.done = client.done, []
        return PackedOutcomes.of(done)

    async def leave(self, who: str) -> None:
        """A process is gone, or one client of it: nobody waits for these turns."""
        self._left.add(who)
        for name in [name for name in self._clients if self._has_left(name)]:
            client = self._clients.pop(name)
            for task in list(client.tasks.values()):
                task.cancel()
            client.some.set()
            for conversation in client.conversations:
                await self.sampler.release(conversation)

    def _has_left(self, name: str) -> bool:
        return name in self._left or name.partition(".")[0] in self._left

    def _client(self, name: str) -> "_Client":
        if not self._has_left(name):
            return self._clients.setdefault(name, _Client())
        gone = _Client()
        gone.some.set()
        return gone

    async def _serve(
        self,
        client: "_Client",
        number: int,
        request: Request,
        placed: Placed,
        making: "Sequence[asyncio.Task[Media]]",
    ) -> None:
        try:
            if placed:
                request = replace(request, media=await at_their_places(placed, making))
            outcome = TurnOutcome(number, await self.sampler.generate(request))
        except EngineLost as error:
            outcome = TurnOutcome(number, problem=str(error), lost=True)
        except EngineError as error:
            outcome = TurnOutcome(number, problem=str(error))
        except EpisodeError as error:
            outcome = TurnOutcome(number, problem=str(error), ends_episode=True)
        except Exception:  # not swallowed: raised where the request came from
            outcome = TurnOutcome(number, problem=traceback.format_exc(), bug=True)
        finally:
            del client.tasks[number]
        client.done.append(outcome)
        client.some.set()

    async def publish(self, shapes: Shapes, parts: Sequence[Any], version: int) -> None:
        """Write with weights of the object store; they are all on this node before the sampler hears of them."""
        weights = unpack(shapes, await fetched(parts, int(load_ray().get_runtime_context().get_node_id(), 16)))
        if self._weights is None:
            await self.sampler.publish(weights, version)
            return
        folder = self._weights / str(version)
        await asyncio.to_thread(write_weights, weights, folder)
        await self.sampler.publish(WeightsFolder(folder), version)
        for before in self._weights.iterdir():
            if before != folder and before.is_dir():
                await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    async def sleep(self) -> None:
        await self.sampler.sleep()

    async def wake(self) -> None:
        await self.sampler.wake()

    async def close(self) -> None:
        """Free everything; pending requests fail."""
        if self._sampler is not None:
            await self._sampler.close()
        self._opened.close()

    async def beat(self) -> None:
        """A sign of life, by a thread of its own."""

    async def ping(self) -> str:
        """Answers while the actor lives."""
        return node_name()


async def fetched(parts: Sequence[Any], node: int) -> list[Part]:
    """All parts of an update, one after the other and from another one on at each node.

    Ray fetches an object from any node that has it by then: asked for in one order, all of them would come from where
    they were made, to every node.
    """
    found: dict[int, Part] = {}
    for number in range(len(parts)):
        at = (node + number) % len(parts)
        part = await parts[at]
        found[at] = part if isinstance(part, dict) else await part  # where a rank has put it
    return [found[at] for at in range(len(parts))]


def _text_only(content: bytes) -> Media:
    raise EngineError("the model in this process reads text only, and a turn shows an image")


def node_name() -> str:
    """The node that this process runs on, as people know it."""
    ray = load_ray()
    return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"
