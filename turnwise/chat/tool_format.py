"""What a tool-call format is: how a model's text is read into thoughts, calls and an answer, and how each is written.

A format is one file of `chat/formats`, named as the value of `chat.tool_format`; the module itself has these names.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from turnwise.chat.infer_format import choose_format
from turnwise.plugins import builtin
from turnwise.types import JsonSchema, Message, ToolCall


class ToolFormat(Protocol):
    """One way to write thoughts and tool calls. What `render_call` writes, `parse` reads back as the same call."""

    @property
    def THINK(self) -> str:
        """Opens a thought; a chat template may have written it already."""
        ...

    @property
    def UNTHINK(self) -> str:
        """Ends a thought."""
        ...

    @property
    def ANSWER(self) -> str:
        """What a model writes before the words of its answer; a chat template may write it already."""
        ...

    @property
    def STOPS(self) -> tuple[str, ...]:
        """Texts that end a turn besides what the chat template ends it with."""
        ...

    @property
    def CALL_ENDS(self) -> tuple[str, ...]:
        """Those of them that also close a call, and so stand at the end of the text that `parse` is given."""
        ...

    def parse(self, text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
        """The assistant message in a completion's text, its thoughts set apart: a call that is only thought about is
        none. `in_reasoning` says that the prompt already opened a thought. A call that cannot be read has a `problem`.

        Where a format writes values without quotes, the schemas of `tools` say what is a text and what a number.
        """
        ...

    def render_call(self, call: ToolCall) -> str:
        """The text a model writes to make this call; scripts speak with it."""
        ...

    def render_malformed_call(self, call: ToolCall) -> str:
        """The same as a learner gets it wrong: `parse` gives it a problem. For scripted traces."""
        ...

    def render_thought(self, thought: str, *, is_open: bool) -> str:
        """The text of a thought; `is_open` when the prompt opened it."""
        ...


def load_format(name: str | None) -> ToolFormat:
    """The format of this name, ours or another system's; null: the one of most models."""
    ours = choose_format(name).name
    return cast(ToolFormat, builtin("turnwise.chat.formats", ours, "tool format", takes_own=False))
