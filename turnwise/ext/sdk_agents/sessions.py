"""One episode as a client sees it: each call extends the recorded sequence that it goes on, or opens another."""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.images.blocks import images_in
from turnwise.errors import DataError, TemplateError, one_line
from turnwise.ext.sdk_agents import matching, message_cache
from turnwise.ext.sdk_agents.calls import FULL, Call, ClientReply, Refused
from turnwise.ext.sdk_agents.replies import check_heads, check_tools, reply_to, strict_checkers
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.conversation import BranchEnd, Conversation, EpisodeEnd
from turnwise.rollout.toolbox.schema import ArgumentChecker
from turnwise.types import CallRecord, CallStatus, Image, Message, Role, Turn

ENDED = "episode_ended"
BROKEN = "engine_failed"


@dataclass(slots=True, eq=False)
class _Sequence:
    """A conversation and what a client knows of it. While a call works on it, nobody else finds it."""

    chat: Conversation
    digest: bytes
    """Of its tools and messages."""
    waits: bool
    """Its last message is not answered: the call that brought it was broken off."""
    answered: float = 0.0
    """When its last turn was given to the client."""


class ClientSession:
    """What a client's calls lead to: `await session.reply(call)`. Closed, it answers that the episode has ended."""

    def __init__(self, chat: Conversation) -> None:
        self.broken: Exception | None = None
        """What kept the model from speaking; the client is told, and the episode fails with it."""
        self.refusal: Refused | None = None
        """What the newest of our answers refused; None when it was the policy's words."""
        self.kept: dict[str, tuple[Message, ...]] = {}
        """The messages up to and with a reply, by the name under which a client may go on from it."""
        self.items: dict[str, dict[str, Any]] = {}
        """What was in such replies, by the names that a client may put in their place."""
        self._chat = chat
        self._idle: dict[bytes, list[_Sequence]] = {}
        self._written: dict[bytes, Message] = {}
        """What the policy wrote, by what a client sees of it."""
        self._drawn: set[str] = set()
        """The names of the noise that turns were drawn with."""
        self._is_new = True
        self._tasks: set[asyncio.Task[ClientReply]] = set()
        self._closed = False
        # A call comes through the server, whose context knows nothing of the episode: its time budget, for one.
        self._context = contextvars.copy_context()

    @property
    def has_spoken(self) -> bool:
        """Whether the policy has written a turn."""
        return bool(self._chat.turns)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around one answer: who asks what became of the agent wants to know whether it was refused."""
        try:
            yield
        except Refused as refused:
            self.refusal = refused
            raise
        self.refusal = None

    async def reply(self, call: Call) -> ClientReply:
        """The policy's next message after those of the call; Refused when there can be none."""
        self._check_going_on()
        self._check(call)
        check_tools(call)
        checkers = await asyncio.to_thread(strict_checkers, call) if call.strict else {}
        task = asyncio.create_task(self._reply(call, checkers), context=self._context.copy())
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and not _is_cancelled():
                self._check_going_on()
            raise
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """Break off what is under way; later calls are told so."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _check_going_on(self) -> None:
        if self.broken is not None:
            raise Refused(f"the model cannot speak: {one_line(self.broken)}", status=500, code=BROKEN)
        reason = self._chat.ended
        if reason is not None or self._closed:
            raise Refused(f"the episode has ended: {reason or 'its session is closed'}", code=ENDED)

    def _check(self, call: Call) -> None:
        """Refuse images where nobody can see them, and keep what else is not done: the run draws as its config says,
        and its log-probabilities are of that."""
        ours, ignored = self._chat.sampling, list(call.ignored)
        for name in ("temperature", "top_p", "top_k"):
            requested, set_to = getattr(call, name), getattr(ours, name)
            if requested is not None and requested != set_to:
                ignored.append(f"{name}={requested:g} (sampling.{name}={set_to:g} is used)")
        if ignored:
            requests = self._chat.facts.ignored_requests
            requests += [text for text in ignored if text not in requests]
        image_roles = self._chat.backend.image_roles
        for message in call.messages:
            if message.images and not image_roles:
                raise Refused("messages: this run's engine reads text only, and there is an image", code="no_images")
            if message.images and message.role not in image_roles:
                raise Refused(f"messages: a {message.role} message has no images", code="invalid_image")

    async def _prepare_images(self, images: Sequence[Image]) -> None:
        """Have new images prepared: first the number of all, then the heads of all, and only then their pixels.

        Too many are left alone: they end the episode when they are shown.
        """
        backend, most = self._chat.backend, self._chat.rollout.max_images
        if most is not None and len(images) > most:
            return
        new = [image for image in dict.fromkeys(images) if not backend.has_prepared([image])]
        try:
            if new:
                await asyncio.to_thread(check_heads, new, by_us=isinstance(backend, TokenBackend))
                await backend.prepare_images(new)
        except DataError as error:
            raise Refused(f"messages: {one_line(error)}", code="invalid_image") from error

    def count(self, call: Call) -> int:
        """The tokens of a prompt as it would be shown if it were new."""
        self._check_going_on()
        backend = self._chat.backend
        if not isinstance(backend, TokenBackend):
            raise Refused("this run's engine counts tokens only when it answers")
        self._check(call)
        if images_in(call.messages):
            raise Refused("messages: tokens of images are counted only when the model answers", code="no_images")
        prompt = [self._as_written(message) for message in call.messages]
        try:
            return len(backend.renderer.open(prompt, message_cache.tools(call.tools)))
        except TemplateError as error:
            raise Refused(f"messages: {one_line(error)}", code="invalid_message") from error

    async def _reply(self, call: Call, checkers: Mapping[str, ArgumentChecker]) -> ClientReply:
        if images := images_in(call.messages):
            await self._prepare_images(images)
            digests = await asyncio.to_thread(_digests, call)  # of every byte of every image
        else:
            digests = _digests(call)
        sequence, new = self._take(call, digests)
        digest = digests[-1]
        chat, written = sequence.chat, len(sequence.chat.turns)
        noise = self._noise(digest)
        chat.backend.noise = replace(chat.backend.noise, branch=noise)
        try:
            try:
                if new:
                    _record_results(chat.turns[-1], new, time.perf_counter() - sequence.answered)
                    chat.add(new)
                sequence.digest, sequence.waits = digest, True
                await chat.generate(max_tokens=call.max_tokens, stop=call.stop)
            except EpisodeEnd as end:
                if len(chat.turns) == written:  # else a limit cut it short, which is an answer all the same
                    raise _refusal(end) from end
            except TemplateError as error:
                if not written:  # nothing was opened: the next prompt may be better
                    self._is_new = self._is_new or chat is self._chat
                raise Refused(f"messages: {one_line(error)}", code="invalid_message") from error
            except Exception as error:
                self.broken = error
                raise Refused(f"the model cannot speak: {one_line(error)}", status=500, code=BROKEN) from error
            stops = (*self._chat.sampling.stop, *call.stop)
            reply = await reply_to(call, chat.turns[-1], chat.backend, stops, checkers)
            next_digest = matching.assistant_after(sequence.digest, reply.text, reply.calls)
            sequence.digest, sequence.waits, sequence.answered = next_digest, False, time.perf_counter()
            self._written[matching.assistant_after(b"", reply.text, reply.calls)] = chat.turns[-1].message
            return reply
        finally:
            if len(chat.turns) == written:
                self._drawn.discard(noise)
            if chat.ended is None and not (chat is self._chat and self._is_new):
                self._idle.setdefault(sequence.digest, []).append(sequence)

    def _take(self, call: Call, digests: Sequence[bytes]) -> tuple[_Sequence, Sequence[Message]]:
        """The longest recorded sequence that the call goes on and the messages that are new to it, or a new one.
        `digests` are those of the call's first messages, from none to all of them."""
        for length in range(len(call.messages), 0, -1):
            is_new = length < len(call.messages)
            if is_new and call.messages[length].role is Role.ASSISTANT:
                break  # only the policy speaks as the assistant in what it is trained on
            for sequence in self._idle.get(digests[length], ()):
                if sequence.waits is not is_new:
                    self._idle[digests[length]].remove(sequence)
                    if not self._idle[digests[length]]:
                        del self._idle[digests[length]]
                    return sequence, call.messages[length:]
        prompt = [self._as_written(message) for message in call.messages]
        tools = message_cache.tools(call.tools)
        try:
            if self._is_new:
                self._chat.reprompt(prompt, tools)
                self._is_new = False
                return _Sequence(self._chat, digests[-1], waits=True), ()
            branch = self._chat.fork(prompt, name=f"prompt {digests[-1][:4].hex()}", tools=tools)
            return _Sequence(branch, digests[-1], waits=True), ()
        except EpisodeEnd as end:
            raise _refusal(end) from end

    def _noise(self, digest: bytes) -> str:
        """Of a call, named by what it says: whichever of two comes first, and whether it goes on a sequence or opens
        one, each draws its own; the same call once more draws another."""
        number = 1
        while (name := f"call {digest[:8].hex()} {number}") in self._drawn:
            number += 1
        self._drawn.add(name)
        return name

    def _as_written(self, message: Message) -> Message:
        """The assistant's own message for what the client has of it; it may also be one that the client made up."""
        if message.role is not Role.ASSISTANT:
            return message_cache.message(message)
        return self._written.get(matching.after(b"", message), message)


def _digests(call: Call) -> list[bytes]:
    return list(matching.digests(call.tools, call.messages))


def _record_results(turn: Turn, new: Sequence[Message], seconds: float) -> None:
    """The client ran the tools itself: what they said is known, how it went is not."""
    recorded = [record.call for record in turn.calls]
    for call in turn.message.tool_calls:
        if call in recorded:
            continue
        if call.problem is not None:
            turn.calls.append(CallRecord(call, CallStatus.MALFORMED, 0.0))
        elif any(message.tool_call_id == call.id for message in new):
            turn.calls.append(CallRecord(call, CallStatus.UNKNOWN, seconds))


def _refusal(end: EpisodeEnd) -> Refused:
    if isinstance(end, BranchEnd):
        return Refused(f"the model cannot go on with these messages: {end.reason}", code=FULL)
    return Refused(f"the episode has ended: {end.reason}", code=ENDED)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
