"""Episode workers on a cluster, in parts: whose samplers are whose, what becomes of turns, and what goes to and fro."""

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turnwise import configure
from turnwise.config.sections import section
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection
from turnwise.ext.ray.episode_workers import ActorHost, ActorLink, ClusterHosts
from turnwise.ext.ray.resource_needs import demands
from turnwise.ext.ray.roster import Roster, RosterEntry, RosterSampler, SamplerSuspected, SamplerWrote, shares
from turnwise.ext.ray.sampler_actor import SamplerActor
from turnwise.ext.ray.samplers import ActorSampler, ClusterSamplers
from turnwise.ext.ray.worker_actor import Letterbox
from turnwise.rollout.placement import placement_of
from turnwise.rollout.workers.link import LinkLost
from turnwise.rollout.workers.messages import End, Ready, SamplerTraits
from turnwise.types import Completion, FinishReason

TAKES = Capabilities(Logprobs.SCALED, frozenset({FullWeights}))
TRAITS = SamplerTraits(64, TAKES)


def ray() -> Any:
    return SimpleNamespace(exceptions=import_module("ray").exceptions, kill=lambda _: None, nodes=lambda: [])


def connection(said: list[str]) -> Connection:
    return Connection(section(configure("cluster=ray"), RayConfig), ray(), listeners=[said.append])


def within(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Answering:
    """An engine that answers with its own number as the token; a prompt of 9 waits for ever."""

    capabilities, context_length = TAKES, 64

    def __init__(self, number: int) -> None:
        self.number, self.released, self.cancelled = number, list[str](), 0

    async def generate(self, request: Request) -> Completion:
        try:
            await (asyncio.Event().wait() if request.token_ids[0] == 9 else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Completion.of([self.number], [-1.0], FinishReason.STOP, version=0)

    async def release(self, conversation: str) -> None:
        self.released.append(conversation)


async def _nothing() -> None:
    pass


class There:
    """A SamplerActor in this process, called as one on a node; `gone` ends it."""

    def __init__(self, number: int) -> None:
        self.engine, self.gone = Answering(number), asyncio.Event()
        actor: Any = SamplerActor(SimpleNamespace(enter=lambda: None), configure())  # type: ignore[arg-type]
        actor._sampler = self.engine
        self.inside = actor
        for name in ("submit", "collect", "leave"):
            setattr(self, name, SimpleNamespace(remote=self._remote(getattr(actor, name))))
        for name, work in (("ping", asyncio.Event().wait), ("close", _nothing)):
            setattr(self, name, SimpleNamespace(remote=self._remote(work)))

    def _remote(self, work: Callable[..., Any]) -> Callable[..., "asyncio.Future[Any]"]:
        async def call(*args: Any) -> Any:
            calling, ending = asyncio.ensure_future(work(*args)), asyncio.ensure_future(self.gone.wait())
            await asyncio.wait({calling, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                calling.cancel()
                raise ray().exceptions.ActorDiedError()
            ending.cancel()
            return calling.result()

        return lambda *args: asyncio.ensure_future(call(*pickle.loads(pickle.dumps(args))))


def roster(*there: tuple[There, float], starts: int = 1, given_up: str = "") -> Roster:
    entries = [
        RosterEntry((one.engine.number, starts), f"sampler {one.engine.number}", one, part) for one, part in there
    ]
    return Roster(tuple(entries), given_up)


def turn(conversation: str, first: int = 1) -> Request:
    return Request(conversation, np.array([first]), SamplingParams(max_tokens=1), NoiseKey(0, 0, conversation, 0))


@pytest.mark.parametrize(("samplers", "workers"), [(3, 2), (1, 4), (8, 3), (64, 5), (2, 2)])
def test_every_worker_has_as_much_of_the_samplers_and_every_sampler_is_given_out(samplers: int, workers: int) -> None:
    every = np.array([shares(samplers, workers, worker) for worker in range(workers)])
    assert np.allclose(every.sum(axis=0), 1) and np.allclose(every.sum(axis=1), samplers / workers)
    assert (every >= 0).all() and (every > 0).sum() <= samplers + workers


def test_a_worker_asks_its_own_share_and_stays_with_a_conversation() -> None:
    async def main() -> None:
        first, second, third = There(1), There(2), There(3)
        sampler = RosterSampler(ray(), TRAITS, "worker 1 0", lambda _: None)
        sampler.take(roster((first, 1.0), (second, 0.5), (third, 0.0)))
        waiting = [asyncio.create_task(sampler.generate(turn(f"c{n}", 9))) for n in range(6)]
        there = {one.engine.number: one.inside for one in (first, second, third)}

        def asked() -> dict[int, int]:
            return {number: sum(len(each.tasks) for each in one._clients.values()) for number, one in there.items()}

        await until(lambda: sum(asked().values()) == 6)
        assert asked() == {1: 4, 2: 2, 3: 0}, "by their shares"
        again = await sampler.generate(turn("c0"))
        home = sampler._homes["c0"].key[0]
        assert again.token_ids.tolist() == [home]
        await sampler.release("c0")
        await until(lambda: "c0" in (first, second)[home - 1].engine.released)
        waiting[0].cancel()
        await until(lambda: (first, second)[home - 1].engine.cancelled == 1)
        sampler.end()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, EngineLost) for one in ended[1:])
        await until(lambda: first.engine.cancelled + second.engine.cancelled == 6)

    within(main())


def test_a_sampler_that_goes_away_is_told_of_and_its_turns_are_lost_but_not_the_next_ones() -> None:
    async def main() -> None:
        first, second, told = There(1), There(2), list[object]()
        sampler = RosterSampler(ray(), TRAITS, "worker 1 0", told.append)
        sampler.take(roster((first, 1.0), (second, 0.0)))
        waiting = [asyncio.create_task(sampler.generate(turn(f"c{n}", 9))) for n in range(3)]
        await until(lambda: len(sampler._homes) == 3)
        first.gone.set()
        lost = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, EngineLost) and one.elsewhere for one in lost)
        assert [one for one in told if isinstance(one, SamplerSuspected)] == told and len(told) == 1
        assert told[0].key == (1, 1) and "ActorDiedError" in told[0].problem  # type: ignore[attr-defined]
        told.clear()
        assert (await sampler.generate(turn("c0"))).token_ids.tolist() == [2], "one that is not its own, in need"
        sampler.take(roster())
        later = asyncio.create_task(sampler.generate(turn("d")))
        await asyncio.sleep(0.01)
        assert not later.done(), "it waits for somebody"
        back = There(1)
        sampler.take(roster((back, 1.0), starts=2))
        assert (await later).token_ids.tolist() == [1]
        assert (await sampler.generate(turn("d"))).token_ids.tolist() == [1]
        sampler.take(roster(given_up="no replica is left: they burn"))
        with pytest.raises(EngineError, match="they burn"):
            await sampler.generate(turn("e"))
        assert told == [SamplerWrote((2, 1)), SamplerWrote((1, 2))], "each once"

    within(main())


def test_a_sampler_that_was_well_after_all_is_asked_again_by_the_same_client() -> None:
    async def main() -> None:
        one = There(1)
        sampler = RosterSampler(ray(), TRAITS, "worker 1 0", lambda _: None)
        sampler.take(roster((one, 1.0)))
        under_way = asyncio.create_task(sampler.generate(turn("a")))
        await until(lambda: "a" in sampler._homes)
        sampler.take(roster())
        assert (await under_way).token_ids.tolist() == [1], "what is under way goes on"
        sampler.take(roster((one, 1.0)))
        assert (await sampler.generate(turn("b"))).token_ids.tolist() == [1]
        assert len(one.inside._clients) == 1

    within(main())


def test_turns_of_clients_do_not_mix_and_those_of_one_that_left_are_forgotten() -> None:
    async def main() -> None:
        one = There(7)
        samplers = [RosterSampler(ray(), TRAITS, f"worker {n} 0", lambda _: None) for n in (1, 2)]
        for sampler in samplers:
            sampler.take(roster((one, 1.0)))
        answers = await asyncio.gather(*(each.generate(turn(f"c{n}")) for n, each in enumerate(samplers * 3)))
        assert {answer.token_ids[0] for answer in answers} == {7}
        dead, alive = (asyncio.create_task(each.generate(turn(f"w{n}", 9))) for n, each in enumerate(samplers))
        await until(lambda: sum(len(client.tasks) for client in one.inside._clients.values()) == 2)
        await one.leave.remote("worker 1 0")  # type: ignore[attr-defined]
        await until(lambda: one.engine.cancelled == 1)
        assert {"w0", "c0", "c2", "c4"} == set(one.engine.released) and not alive.done()
        assert list(one.inside._clients) == ["worker 2 0.0"]
        assert await one.inside.submit("worker 1 0.0", None, [], []) == [], "what comes late is not begun"
        dead.cancel()
        alive.cancel()

    within(main())


class Mailed:
    """A worker's actor in this process: its letterbox, the rosters that it saw, and what it does with a call."""

    def __init__(self) -> None:
        self.box, self.seen, self.fails = Letterbox(), list[object](), False
        self.deliver = SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._deliver(*args)))
        self.collect = SimpleNamespace(remote=lambda seconds: asyncio.ensure_future(self._collect()))
        self.beat = SimpleNamespace()

    async def _deliver(self, content: bytes, shown: Roster | None) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise ray().exceptions.ActorUnavailableError("its node does not answer", b"0" * 16)
        self.seen += [] if shown is None else [shown]
        messages = pickle.loads(content)
        self.seen += messages
        self.box.put(messages)

    async def _collect(self) -> bytes:
        messages = await self.box.fetch(0)
        return b"" if messages is None else pickle.dumps(messages)


def test_messages_keep_their_order_a_roster_comes_before_them_and_the_end_is_heard_of() -> None:
    async def main() -> None:
        actor, told = Mailed(), list[object]()
        link = ActorLink(connection([]), actor, told.append)
        link.show(roster())
        await asyncio.sleep(0.01)
        assert actor.seen == [], "the first message is the Setup"
        for number in range(4):
            link.send(number)
        await link.drain()
        link.send(4)
        link.show(roster(given_up="late"))
        await link.drain()
        assert actor.seen == [roster(), 0, 1, 2, 3, roster(given_up="late"), 4]
        assert await actor.box.receive() == [0, 1, 2, 3, 4]
        news = [SamplerSuspected((1, 1), "silent"), SamplerWrote((1, 1))]
        for message in (Ready([]), *news, End()):
            actor.box.send(message)
        assert await link.receive() == [Ready([]), End()] and told == news
        actor.box.send("the last word")
        actor.box.close()
        assert await link.receive() == ["the last word"]
        for _ in range(2):
            with pytest.raises(LinkLost):
                await link.receive()
        assert link.problem == "it ended"

    within(main())


def test_a_worker_that_was_not_told_something_is_ended() -> None:
    """It would play on without what it does not know of: a group would be waited for in vain."""

    async def main() -> None:
        actor, said = Mailed(), list[str]()
        cluster, killed = connection(said), list[Any]()
        cluster.ray.kill = killed.append
        link = ActorLink(cluster, actor, lambda _: None)
        host = ActorHost(cluster, actor, 0, "worker 1 0", "a node", link)
        actor.fails = True
        link.send("play")
        await link.drain()
        assert killed == [actor] and await host.reaped() == "its process was lost (ActorUnavailableError)"

    within(main())


def test_shares_are_given_out_anew_when_a_worker_or_a_sampler_comes_or_goes() -> None:
    async def main() -> None:
        cluster, facts = connection([]), There(0)
        samplers = []
        for number in (1, 2):
            one = ActorSampler(cluster, lambda: None, number)
            one.capabilities, one.context_length, one.node_id = TAKES, 64, f"node {3 - number}"
            one._begin(facts)
            samplers.append(one)
        pool = ClusterSamplers(samplers, lambda _: None)
        hosts = ClusterHosts(configure("cluster=ray", "rollout.workers=2"), pool)
        shown: dict[int, list[Roster]] = {0: [], 1: []}
        made = []
        for place in (0, 1):
            link: Any = SimpleNamespace(show=shown[place].append)
            made.append(ActorHost(cluster, Mailed(), place, f"worker {place + 1} 0", "a node", link))
        hosts._hosts = list(made)
        pool.tell(hosts._show_all)
        assert pool._watch is not None, "they are looked after though this process asks them for nothing"
        pool.suspect((1, 5), "of an actor that was there before")
        assert shown == {0: [], 1: []} and pool.lost == 0
        hosts._show_all()
        parts = [[(entry.name, entry.share) for entry in shown[place][-1].entries] for place in (0, 1)]
        assert parts == [[("sampler 2", 1.0), ("sampler 1", 0.0)], [("sampler 2", 0.0), ("sampler 1", 1.0)]]
        hosts.left(made[0])
        assert [entry.share for entry in shown[1][-1].entries] == [1.0, 1.0]
        pool._seats[1].restarts = 4
        pool.wrote((2, 0))
        assert pool._seats[1].restarts == 0, "it was not started in vain"
        pool.suspect((2, 0), "it did not answer")
        assert pool.lost == 1 and [entry.name for entry in shown[1][-1].entries] == ["sampler 1"]
        hosts.left(made[1])
        assert not pool.watchers
        await asyncio.gather(*hosts._forgetting)
        await pool.close()

    within(main())


def test_workers_count_among_what_a_run_asks_for_and_where_they_are_is_said() -> None:
    config = configure("cluster=ray", "rollout.workers=3", "ray.scorers=2", "ray.service_cpus=2")
    assert [str(one) for one in demands(config, training=False)] == [
        "samplers 1 x (1 CPUs, 0 GPUs)", "scorers 2 x (2 CPUs, 0 GPUs)", "workers 3 x (2 CPUs, 0 GPUs)",
    ]  # fmt: skip
    lines = placement_of(config).plan_lines(training=True)
    assert (
        "2 scorers, 3 episode workers beside the samplers with sandboxes, tools, users there, here: the loop"
        in (lines[1])
    )
    with pytest.raises(ConfigError, match=r"each of rollout.workers runs sandboxes on its own node"):
        placement_of(configure("cluster=ray", "rollout.workers=3", "ray.sandboxes=1")).check()
