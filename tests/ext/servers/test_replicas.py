"""Several samplers as one: who gets which turn, and what becomes of turns, weights and waiting when one is lost."""

import asyncio
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import FullWeights, WeightsFolder
from turnwise.errors import ConfigError, EngineError, EngineLost, WeightsSuperseded
from turnwise.ext.servers import replicas as replicas_module
from turnwise.ext.servers.replicas import MOST_RESTARTS, Replicas
from turnwise.types import Completion, FinishReason

TAKES = Capabilities(Logprobs.SCALED, frozenset({FullWeights, WeightsFolder}))


class Local:
    """A replica in this process: writes its own number, and the weights it was given as the version."""

    def __init__(self, number: int) -> None:
        self.name, self.number, self.problem = f"replica {number}", number, ""
        self.context_length, self.capabilities = 32 + number, TAKES
        self.version, self.seen = 0, list[float]()
        self.alive, self.returns, self.restarts, self.closed, self.asleep = True, True, 0, False, False
        self.gate = asyncio.Event()
        self.gate.set()
        self.wrote: list[str] = []

    async def generate(self, request: Request) -> Completion:
        await self.gate.wait()
        if not self.alive:
            raise EngineLost("it is gone")
        self.wrote.append(request.conversation)
        return Completion.of([self.number], [-1.0], FinishReason.STOP, version=self.version)

    async def release(self, conversation: str) -> None:
        self.wrote.remove(conversation)

    async def publish(self, update: Any, version: int) -> None:
        if not self.alive:
            raise EngineLost("it is gone")
        self.seen = [float(tensor.sum()) for _, tensor in update.tensors]
        self.version = version

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def close(self) -> None:
        self.closed = True

    async def healthy(self) -> bool:
        return self.alive

    async def restart(self) -> None:
        self.restarts += 1
        self.version, self.seen, self.asleep = 0, [], False
        if not self.returns:
            raise EngineLost("it does not start")
        self.alive = True


def request(conversation: str) -> Request:
    return Request(conversation, np.array([1, 2]), SamplingParams(max_tokens=4), NoiseKey(0, 0, "s", 0))


def weights(value: float) -> FullWeights:
    return FullWeights({"w": (2,)}, iter([("w", torch.full((2,), value))]))


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_conversation_stays_with_its_replica_and_new_ones_go_where_least_is_under_way() -> None:
    async def main() -> None:
        first, second = Local(0), Local(1)
        sampler = Replicas([first, second], lambda text: None)
        assert sampler.context_length == 32
        first.gate.clear()
        slow = [asyncio.create_task(sampler.generate(request(name))) for name in "ab"]
        await asyncio.sleep(0.01)
        assert [(await sampler.generate(request(name))).token_ids.tolist() for name in "bccd"] == [[1]] * 4
        assert sum(not one.done() for one in slow) == 1
        first.gate.set()
        assert [(await one).token_ids.tolist() for one in slow] == [[0], [1]]
        assert (await sampler.generate(request("a"))).token_ids.tolist() == [0]
        await sampler.release("a")
        await sampler.release("unheard of")
        assert first.wrote == ["a"]
        await sampler.close()
        assert first.closed and second.closed
        with pytest.raises(EngineError, match="closed"):
            await sampler.generate(request("e"))

    asyncio.run(main())


def test_a_lost_replica_comes_back_with_the_latest_weights_and_its_turns_go_elsewhere_meanwhile() -> None:
    async def main() -> None:
        replicas, said = [Local(0), Local(1)], list[str]()
        sampler = Replicas(replicas, said.append)
        await sampler.publish(weights(3.0), 7)
        assert [one.seen for one in replicas] == [[6.0], [6.0]]
        home = (await sampler.generate(request("a"))).token_ids[0]
        lost, other = replicas[home], replicas[1 - home]
        lost.alive = False
        with pytest.raises(EngineLost, match=f"replica {home}: it is gone") as caught:
            await sampler.generate(request("a"))
        assert caught.value.elsewhere
        assert (await sampler.generate(request("a"))).token_ids.tolist() == [other.number]
        await until(lambda: len(sampler.names) == 2)
        assert (lost.restarts, lost.version, lost.seen) == (1, 7, [6.0])
        assert sampler.lost == 1 and [text for text in said if "serves again" in text]

    asyncio.run(main())


def test_one_that_comes_back_misses_neither_an_update_nor_the_end_of_a_sleep_that_came_meanwhile() -> None:
    async def main() -> None:
        stays, returns = Local(0), Local(1)
        sampler = Replicas([stays, returns], lambda text: None)
        await sampler.publish(weights(1.0), 1)
        await sampler.sleep()
        lie_down, came = returns.sleep, asyncio.Event()

        async def slow_sleep() -> None:
            await lie_down()
            came.set()
            await asyncio.sleep(0.02)

        returns.sleep, returns.alive = slow_sleep, False  # type: ignore[method-assign]
        sampler._lose(sampler._seats[1], EngineLost("gone"))
        await came.wait()
        await sampler.publish(weights(2.0), 2)
        await sampler.wake()
        await until(lambda: len(sampler.names) == 2)
        assert (returns.version, returns.asleep, stays.version, stays.asleep) == (2, False, 2, False)

    asyncio.run(main())


def test_where_nobody_is_left_turns_wait_and_an_update_that_comes_meanwhile_is_not_missed() -> None:
    async def main() -> None:
        only = Local(0)
        sampler = Replicas([only], lambda text: None)
        await sampler.publish(weights(1.0), 1)
        only.alive = False
        back = asyncio.Event()

        async def restart() -> None:
            await back.wait()
            only.alive, only.version = True, 0

        only.restart = restart  # type: ignore[method-assign]
        with pytest.raises(EngineLost) as caught:
            await sampler.generate(request("a"))
        assert not caught.value.elsewhere
        waiting = asyncio.create_task(sampler.generate(request("a")))
        newer = asyncio.create_task(sampler.publish(weights(2.0), 2))
        await asyncio.sleep(0.02)
        assert not waiting.done() and not newer.done()
        back.set()
        await newer
        assert (await waiting).policy_version == 2 and only.seen == [4.0]

    asyncio.run(main())


def test_one_that_never_comes_back_is_given_up_and_said_and_the_last_one_ends_the_run() -> None:
    async def main() -> None:
        replicas, said = [Local(0), Local(1)], list[str]()
        sampler = Replicas(replicas, said.append)
        for one in replicas:
            one.alive = one.returns = False
        for name in "ab":
            with pytest.raises(EngineError):
                await sampler.generate(request(name))
        with pytest.raises(EngineError, match="no replica is left") as caught:
            await sampler.generate(request("c"))
        assert not isinstance(caught.value, EngineLost)
        assert [one.restarts for one in replicas] == [MOST_RESTARTS] * 2
        assert sum("given up" in text for text in said) == 2
        with pytest.raises(EngineError, match="no replica is left"):
            await sampler.publish(weights(1.0), 1)

    asyncio.run(main())


def test_health_is_watched_between_turns_and_one_that_only_lost_a_connection_is_not_restarted() -> None:
    async def main() -> None:
        replicas = [Local(0), Local(1)]
        sampler = Replicas(replicas, lambda text: None, health_seconds=0.01)
        await sampler.generate(request("a"))
        replicas[1].alive = False  # nobody asks it
        await until(lambda: replicas[1].restarts == 1 and len(sampler.names) == 2)
        assert replicas[0].restarts == 0

        async def stumble(_: Request) -> Completion:
            del replicas[0].generate  # type: ignore[attr-defined]
            raise EngineLost("a connection broke")

        replicas[0].generate = stumble  # type: ignore[method-assign]
        with pytest.raises(EngineLost):
            await sampler.generate(request("a"))
        await until(lambda: len(sampler.names) == 2)
        assert replicas[0].restarts == 0
        await sampler.close()

    asyncio.run(main())


def test_one_more_replica_gets_the_weights_first_and_one_of_another_kind_is_refused() -> None:
    async def main() -> None:
        sampler = Replicas([Local(0)], lambda text: None)
        await sampler.publish(weights(5.0), 3)
        await sampler.sleep()
        late = Local(1)
        await sampler.add(late)
        assert late.version == 3 and late.asleep and len(sampler.names) == 2
        await sampler.wake()
        assert not late.asleep
        other = Local(2)
        other.capabilities = Capabilities(Logprobs.NONE, frozenset())
        with pytest.raises(EngineError, match="must be alike"):
            await sampler.add(other)
        with pytest.raises(EngineError, match="no replica"):
            Replicas([], lambda text: None)

    asyncio.run(main())


def test_one_that_is_only_behind_in_weights_is_not_restarted_and_gets_those_that_come_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas_module, "NEWER_SECONDS", 0.005)

    async def main() -> None:
        stays, late, said = Local(0), Local(1), list[str]()
        sampler = Replicas([stays], said.append)
        take, tries = Local.publish, 0

        async def superseded(update: Any, version: int) -> None:
            nonlocal tries
            if version < 2:
                tries += 1
                raise WeightsSuperseded("newer weights are on their way")
            await take(late, update, version)

        await sampler.publish(weights(1.0), 1)
        late.publish = superseded  # type: ignore[method-assign]
        joining = asyncio.create_task(sampler.add(late))
        await until(lambda: tries > 2)
        assert sampler.names == [stays.name]
        await sampler.publish(weights(2.0), 2)
        await joining
        assert (late.restarts, late.version, len(sampler.names)) == (0, 2, 2)
        stays.publish = superseded  # type: ignore[method-assign]
        await sampler.publish(weights(3.0), 1)
        assert stays.restarts == sampler.lost == 0 and len(sampler.names) == 2 and "keeps its weights" in said[-1]
        await sampler.close()

    asyncio.run(main())


def test_weights_are_kept_once_however_many_updates_there_were() -> None:
    async def main() -> None:
        replicas = [Local(number) for number in range(3)]
        sampler = Replicas(replicas, lambda text: None)
        given: list[weakref.ref[torch.Tensor]] = []
        for version in range(1, 6):
            await sampler.publish(weights(float(version)), version)
            assert [one.seen for one in replicas] == [[2.0 * version]] * 3
            assert sampler._published is not None and sampler._published.tensors is not None
            given += [weakref.ref(tensor) for _, tensor in sampler._published.tensors]
        for _ in range(200):  # the thread that copied may not have come to let go of its result
            if not any(one() is not None for one in given[:-1]):
                break
            await asyncio.sleep(0.05)
        assert [one() is not None for one in given] == [False] * 4 + [True]

    asyncio.run(main())


def test_one_that_came_back_by_itself_gets_the_weights_again_although_it_is_well() -> None:
    async def main() -> None:
        replicas = [Local(0), Local(1)]
        sampler = Replicas(replicas, lambda text: None)
        await sampler.publish(weights(3.0), 7)
        home = replicas[(await sampler.generate(request("a"))).token_ids[0]]

        async def fell(_: Request) -> Completion:
            del home.generate  # type: ignore[attr-defined]
            home.version, home.seen = 0, []  # its supervisor was faster than we are
            raise EngineLost("the connection was reset")

        home.generate = fell  # type: ignore[method-assign]
        with pytest.raises(EngineLost):
            await sampler.generate(request("a"))
        await until(lambda: len(sampler.names) == 2)
        assert home.restarts == 0 and (home.version, home.seen) == (7, [6.0])
        await sampler.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [ConfigError("it serves 2 models"), ValueError("a bug")])
def test_one_whose_repair_fails_in_any_way_does_not_count_as_one_that_serves(error: Exception) -> None:
    async def main() -> None:
        replicas, said = [Local(0), Local(1)], list[str]()
        sampler = Replicas(replicas, said.append)
        home = replicas[(await sampler.generate(request("a"))).token_ids[0]]
        home.alive = False

        async def restart() -> None:
            raise error

        home.restart = restart  # type: ignore[method-assign]
        with pytest.raises(EngineLost):
            await sampler.generate(request("a"))
        await until(lambda: any("given up" in text for text in said))
        await asyncio.sleep(0)
        assert sampler.names == [one.name for one in replicas if one is not home]
        assert str(error) in said[-1]
        await sampler.close()

    asyncio.run(main())


def test_a_watch_that_failed_is_heard_of_by_who_asks_next() -> None:
    async def main() -> None:
        replica = Local(0)
        sampler = Replicas([replica], lambda text: None, health_seconds=0.001)

        async def healthy() -> bool:
            raise ValueError("a bug")

        replica.healthy = healthy  # type: ignore[method-assign]
        await sampler.generate(request("a"))
        await until(lambda: sampler._watch is not None and sampler._watch.done())
        with pytest.raises(ValueError, match="a bug"):
            await sampler.generate(request("a"))
        await sampler.close()

    asyncio.run(main())
