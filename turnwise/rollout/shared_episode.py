"""What the conversations of one episode share: its end, its limits, and the tasks that work for it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from turnwise.config import RolloutConfig, SamplingConfig
from turnwise.rollout.chat_backends import ChatBackend
from turnwise.rollout.episode_limits import EpisodeLimits
from turnwise.rollout.toolbox.toolbox import EpisodeTools
from turnwise.types import EpisodeFacts, Image, JsonSchema, Sample, StopReason

if TYPE_CHECKING:
    from turnwise.rollout.conversation import Conversation


class EpisodeEnd(Exception):
    """Raised through the agent loop when the episode is over; carries the reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class BranchEnd(EpisodeEnd):
    """Raised when a branch can say no more, while the episode goes on; a loop that lets it pass ends the episode."""


class SharedEpisode:
    """One for each episode, held by all of its conversations.

    A conversation that writes holds the tokens it may need (`hold_tokens`); another that needs more than is left beside
    them waits until one is done (`release_tokens` wakes it), so that the budget is neither overrun nor cut short for
    tokens that nobody wrote.
    """

    def __init__(
        self,
        sample: Sample,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        tools: EpisodeTools,
        make_backend: Callable[[str, int, list[JsonSchema]], ChatBackend],
    ) -> None:
        self.sample, self.rollout, self.sampling, self.tools = sample, rollout, sampling, tools
        self.make_backend = make_backend
        """By the branch's name ("" for the main one), its number and the tools it shows."""
        self.conversations: list[Conversation] = []
        """The main one, then the branches as they were opened."""
        self.ended: StopReason | None = None
        self.artifacts: dict[str, Any] = {}
        """What the agent loop leaves on the trajectory, as JSON values by name."""
        self.facts = EpisodeFacts()
        """What is found out beside the messages, written on the trajectory as it is."""
        self.limits = EpisodeLimits(rollout, self.conversations)
        self._at_work: set[asyncio.Task[object]] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def broken(self) -> Exception | None:
        """What kept the model from speaking in any of the conversations; no matter of the agent loop."""
        return next(
            (conversation.broken for conversation in self.conversations if conversation.broken is not None), None
        )

    def end(self, reason: StopReason) -> NoReturn:
        """No conversation goes on from here."""
        self.ended = reason
        raise EpisodeEnd(reason)

    def check_going_on(self) -> None:
        """Raise again what ended the episode."""
        if self.ended is not None:
            raise EpisodeEnd(self.ended)

    def unique_name(self, name: str) -> str:
        """The branch's name; the second of a name is `name 2`: noise and readers tell branches apart by it."""
        names, number, candidate = {conversation.name for conversation in self.conversations}, 1, name
        while not candidate or candidate in names:
            number += 1
            candidate = f"{name} {number}"
        return candidate

    def begin_turn(self) -> None:
        """Count a turn that begins, or end the episode where there was none left."""
        if self.limits.turns_are_used:
            self.end(StopReason.ASSISTANT_TURN_BUDGET)
        self.limits.count_turn()

    async def prepare_images(self, backend: ChatBackend, images: Sequence[Image]) -> None:
        """Prepare a tool's images unless they are too many: those end the episode when they are shown."""
        if self.limits.may_show(images):
            await backend.prepare_images(images)

    async def hold_tokens(self, wanted: int) -> int:
        """Hold up to `wanted` tokens, fewer when fewer are left, once others hold them no more; how many they are."""
        while (held := self.limits.hold_tokens(wanted)) is None:
            await self.changed()
            self.check_going_on()
        return held

    def release_tokens(self, held: int) -> None:
        """Hold them no more, and wake those that wait for them."""
        self.limits.release_tokens(held)
        if self._waiting:
            self._wake()

    async def changed(self) -> None:
        """Wait until another conversation is done writing."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def enter(self) -> "asyncio.Task[object] | None":
        """The task that works for the episode from here to `leave`."""
        task = asyncio.current_task()
        if task is not None:
            self._at_work.add(task)
        return task

    def leave(self, task: "asyncio.Task[object] | None") -> None:
        """Notes that a task does not work on the episode any more, and wakes those that wait."""
        if task is not None:
            self._at_work.discard(task)
        if self._waiting:
            self._wake()

    async def stop(self, reason: StopReason) -> None:
        """End the episode for whoever still works in it: tasks that an agent loop left behind are cancelled."""
        self.ended = self.ended or reason
        for task in self._at_work:
            task.cancel()
        while self._at_work:
            await self.changed()

    async def close(self, backends: Sequence[ChatBackend] | None = None) -> None:
        """Release what the engine keeps for each conversation, whatever becomes of the others."""
        left = [conversation.backend for conversation in self.conversations] if backends is None else backends
        if left:
            try:
                await left[0].close()
            finally:
                await self.close(left[1:])

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
