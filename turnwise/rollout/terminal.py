"""A person talks to a policy: who types is the user of an ordinary episode, which is printed as it goes on."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text as Styled

from turnwise.rollout.conversation import Conversation
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.users.user import UserTurn
from turnwise.storage.transcript import STYLES, call_line, visible
from turnwise.types import Message, Origin, Role, Sample, StopReason, Trajectory

COMMANDS = "/reset begins a new conversation, /exit leaves"
_ASK = "you: "


class TypedLines:
    """The lines of a file descriptor as they come, read in a thread that nobody waits for: a signal that ends the
    program must not wait for a person's next line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._ended = False

    async def next(self) -> str | None:
        """The next line without its end; None after the last one."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._read, args=(self._loop,), name="turnwise-typed", daemon=True).start()
        line = None if self._ended else await self._lines.get()
        self._ended = line is None
        return line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        rest = b""

        def put(line: bytes | None) -> None:
            text = None if line is None else line.decode("utf-8", "replace").rstrip("\r")
            loop.call_soon_threadsafe(self._lines.put_nowait, text)

        with suppress(RuntimeError):  # the event loop is over: nobody reads on
            with suppress(OSError):  # a descriptor that is closed has no more lines
                while piece := os.read(self._descriptor, 1 << 16):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        put(line)
            if rest:
                put(rest)
            put(None)


@dataclass(slots=True)
class Terminal:
    """Where a person types and reads: `Terminal(TypedLines(0), Console())`."""

    lines: TypedLines
    out: Console
    echo: bool = False
    """Repeat what is typed: nobody sees the lines of a file."""
    left: bool = field(default=False, init=False)
    """Whether the person is done."""

    async def ask(self) -> str | None:
        """What the person says next; None for a conversation that ends here."""
        while not self.left:
            self.out.print(Styled(_ASK, style="bold"), end="")
            self.out.file.flush()
            line = await self.lines.next()
            if self.echo or line is None:
                self.out.print("" if line is None else line, markup=False, highlight=False, soft_wrap=True)
            words = "/exit" if line is None else line.strip()
            if words == "/exit":
                self.left = True
            elif words == "/reset":
                return None
            elif words.startswith("/"):
                self.say(f"there is no {words.split()[0]!r}: {COMMANDS}")
            elif words:
                return words
        return None

    async def user(self, turn: UserTurn) -> str | None:
        """The person as the user of an episode."""
        return await self.ask()

    def say(self, text: str) -> None:
        """Something of our own, which is no part of the conversation."""
        self.out.print(Styled(visible(text), style="dim"), soft_wrap=True)

    def show(self, who: str, text: str, origin: Origin) -> None:
        """Prints a message, or a piece of one, in its speaker's style."""
        style = STYLES[origin]
        self.out.print(Styled.assemble((f"{who}: ", f"bold {style}"), (visible(text), style)), soft_wrap=True)


class PrintedConversation(Conversation):
    """A conversation whose every message is printed when it is there."""

    def __init__(self, terminal: Terminal, prints_user: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._terminal, self._prints_user = terminal, prints_user

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Message:
        before = len(self.turns)
        try:
            return await super().generate(max_tokens=max_tokens, stop=stop)
        finally:
            for turn in self.turns[before:]:  # also one that a limit cut off, which ends the episode
                self._print(turn.message)

    async def call_tools(self, message: Message) -> list[Message]:
        replies = await super().call_tools(message)
        for reply in replies:
            self._terminal.show(f"tool {reply.name}" if reply.name else "tool", reply.text, Origin.TOOL)
        return replies

    async def ask_user(self) -> list[Message]:
        replies = await super().ask_user()
        for reply in replies if self._prints_user else ():
            self._terminal.show("user", reply.text, Origin.USER)
        return replies

    async def finish(self) -> None:
        if self._prints_user:  # a person need not be asked about what has ended
            await super().finish()

    def _print(self, message: Message) -> None:
        if message.reasoning:
            self._terminal.out.print(Styled(visible(message.reasoning), style="dim italic"), soft_wrap=True)
        unread = any(call.problem is not None for call in message.tool_calls)
        words = message.text if unread else message.visible  # of a call that cannot be read all that was written
        if words or not message.tool_calls:
            self._terminal.show("assistant", words or "(nothing)", Origin.POLICY)
        for call in message.tool_calls:
            self._terminal.out.print(call_line(call), soft_wrap=True)


async def conversations(
    context: RolloutContext, terminal: Terminal, sample: Sample, *, typed: bool, simulated: bool
) -> AsyncGenerator[Trajectory, None]:
    """One episode after the other until the person leaves. With `typed` the person's first words stand in the place of
    the sample's; `simulated` says that the task's own user speaks after them."""

    def conversation(*args: Any, **kwargs: Any) -> Conversation:
        return PrintedConversation(terminal, simulated, *args, **kwargs)

    context, number = replace(context, conversation=conversation), 0
    while not terminal.left:
        played = sample
        if typed:
            words = await terminal.ask()
            if words is None:
                continue
            played = replace(sample, prompt=(*_preface(sample.prompt), Message(Role.USER, words)))
        else:
            for message in sample.prompt:
                terminal.show(message.role.value, message.text, Origin.PROMPT)
        trajectory = await run_episode(played, sibling=number, step=0, context=context)
        yield trajectory
        number += 1
        if trajectory.failure is not None:
            terminal.say(f"the conversation failed: {trajectory.failure}")
        elif trajectory.stop_reason is not StopReason.USER_ENDED or simulated:
            terminal.say(f"the conversation is over: {trajectory.stop_reason.value}")
        if not typed:
            return


def _preface(prompt: Sequence[Message]) -> Sequence[Message]:
    """What stands before the first words of a user."""
    return [message for message in prompt if message.role is Role.SYSTEM]


def terminal_here() -> Terminal:
    """Of this process: what is typed on standard input, answered on standard output."""
    return Terminal(TypedLines(sys.stdin.fileno()), Console(), echo=not sys.stdin.isatty())
