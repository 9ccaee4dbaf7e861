"""Turns that the run's sampler writes for one episode worker: asked for, waited for, withdrawn."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Sampler
from turnwise.rollout.workers.conversations import Heard
from turnwise.rollout.workers.hosts import RunLink
from turnwise.rollout.workers.link import sendable
from turnwise.rollout.workers.messages import Ask, Raised, Release, Withdraw, Written
from turnwise.system import time_budget


@dataclass(slots=True, eq=False)
class _AskUnderWay:
    task: asyncio.Task[None]
    waited: Callable[[], float]


class WorkerTurns:
    """What one worker has under way with the sampler."""

    def __init__(self, sampler: Sampler, link: RunLink) -> None:
        self._sampler, self._link = sampler, link
        self._asks: dict[int, _AskUnderWay] = {}
        self._heard = Heard()
        self._releasing: set[asyncio.Future[None]] = set()

    def take(self, message: Ask | Withdraw | Release) -> None:
        """What the worker wants of the sampler."""
        match message:
            case Ask(number):
                request = self._heard.request(message)
                with time_budget.measured() as waited:  # the task's context has it
                    task = asyncio.create_task(self._write(number, request, waited))
                self._asks[number] = _AskUnderWay(task, waited)
            case Withdraw(number):
                if (asked := self._asks.get(number)) is not None:
                    asked.task.cancel()
            case Release(conversation):
                self._heard.said.pop(conversation, None)
                releasing = asyncio.ensure_future(self._sampler.release(conversation))
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)

    async def _write(self, number: int, request: Request, waited: Callable[[], float]) -> None:
        try:
            completion = await self._sampler.generate(request)
            self._link.send(Written(number, completion, waited()))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the episode says what becomes of it, as where the sampler is its own
            self._link.send(Raised(number, sendable(error)))
        finally:
            self._asks.pop(number, None)

    def waits(self) -> Mapping[int, float]:
        """How long turns have waited for a place so far, by the number of their ask; those that have not, left out."""
        waits = {number: ask.waited() for number, ask in self._asks.items()}
        return {number: seconds for number, seconds in waits.items() if seconds > 0}

    def cancel(self) -> None:
        """Nobody takes what is being written."""
        for ask in list(self._asks.values()):
            ask.task.cancel()

    async def release(self) -> None:
        """The worker has ended: so have its conversations."""
        self.cancel()
        for conversation in list(self._heard.said):
            await self._sampler.release(conversation)
