"""What a tool-call format is: how a model's text is read into thoughts, calls and an answer, and how each is written.

A format is one file of `chat/formats`, named as the value of `chat.tool_format`; the module itself has these names. One
of the user's own is a function, `chat.tool_format=mine.py:fmt` (docs/formats.md), or an object with the same names.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from turnwise.chat.calls.format_words import choose_format
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought, split_thoughts
from turnwise.chat.calls.scanning import FoundCall, numbered, refuse_unless_read_back
from turnwise.config.knobs import is_plugin
from turnwise.errors import PluginError, one_line
from turnwise.system import plugins
from turnwise.types import JsonSchema, Message, Role, ToolCall

T = TypeVar("T")


class ToolFormat(Protocol):
    """One way to write thoughts and tool calls. What `render_call` writes, `parse` reads back as the same call."""

    @property
    def THINK(self) -> str:
        """Opens a thought; a chat template may have written it already."""
        ...

    @property
    def UNTHINK(self) -> str:
        """The tag that ends a thought, such as `</think>`."""
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
    """The format of this name, ours, another system's name of ours, or the user's own (`mine.py:fmt`); null: the one of
    most models."""
    chosen = choose_format(name).name
    if is_plugin(chosen):
        return _own_format(chosen)
    return cast(ToolFormat, plugins.builtin("turnwise.chat.formats", chosen, "tool format"))


def is_taught(form: ToolFormat) -> bool:
    """Whether a task teaches it (`fmt.taught = True`), so that it need not read what the chat template writes."""
    return bool(getattr(form, "taught", False))


def can_write(form: ToolFormat) -> bool:
    """Whether it writes calls; a function without `write` reads only, which is enough for an endpoint's text."""
    return not isinstance(form, FunctionFormat) or form.write is not None


# --- one's own ----------------------------------------------------------------------------------------------------


class FunctionFormat:
    """A format made of one function: `fmt(text) -> list[str | ToolCall]`, the words and the calls of a text in order.

    `fmt.write`, a function of a ToolCall that gives its text, is needed where a model runs here. Thoughts stand between
    <think> tags, and are cut out before the function sees the text; `fmt(text, tools)` gets the tools' schemas too.
    """

    THINK, UNTHINK, ANSWER, STOPS, CALL_ENDS = THINK, UNTHINK, ANSWER, STOPS, CALL_ENDS

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.__name__ = name
        self.read = function
        self.write: Callable[[ToolCall], Any] | None = getattr(function, "write", None)
        self.taught = bool(getattr(function, "taught", False))
        try:
            signature = inspect.signature(function)
            self._takes_tools = "tools" in signature.parameters
            signature.bind("", **({"tools": ()} if self._takes_tools else {}))
        except (TypeError, ValueError) as error:
            raise PluginError(f"tool format {name!r} must take a text, as fmt(text) or fmt(text, tools)") from error

    def parse(self, text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
        """The assistant message in a completion's text."""
        thoughts, rest = split_thoughts(text, in_reasoning)
        pieces = self._pieces(rest, tools)
        calls = [
            FoundCall(piece.name, piece.arguments, piece.problem, piece.id or None)
            for piece in pieces
            if isinstance(piece, ToolCall)
        ]
        answer = "".join(piece for piece in pieces if isinstance(piece, str)) if calls else rest
        reasoning = "\n".join(thoughts) if thoughts else None
        return Message(Role.ASSISTANT, text, tuple(numbered(calls, turn)), reasoning=reasoning, answer=answer.strip())

    def _pieces(self, text: str, tools: Sequence[JsonSchema]) -> list[Any]:
        try:
            pieces = self.read(text, **({"tools": tools} if self._takes_tools else {}))
        except (Exception, SystemExit) as error:  # a user's code, which must read whatever a model writes
            raise PluginError(f"tool format {self.__name__!r} failed on {text!r:.200}: {one_line(error)}") from error
        if not isinstance(pieces, list | tuple) or not all(map(_is_piece, pieces)):
            raise PluginError(
                f"tool format {self.__name__!r} returned {reprlib.repr(pieces)}; it must return a list of the words "
                "(texts) and the calls (ToolCall) in a text, in order"
            )
        return list(pieces)

    def render_call(self, call: ToolCall) -> str:
        """The text a model writes to make this call; TemplateError where it would not be read back as the same."""
        if self.write is None:
            raise PluginError(
                f"tool format {self.__name__!r} cannot write calls, but the template is tested with one: give it a "
                "function that returns the text of a ToolCall, as fmt.write = write"
            )
        text = plugins.call(self.write, self.__name__, "tool format", call)
        if not isinstance(text, str):
            raise PluginError(f"tool format {self.__name__!r}: write returned {reprlib.repr(text)}, not text")
        calls = self.parse(text, turn=0, in_reasoning=False).tool_calls
        return text if self.taught else refuse_unless_read_back(text, call, calls, self.__name__)

    def render_malformed_call(self, call: ToolCall) -> str:
        """The longest beginning of a call that is a problem, or is none."""
        text = self.render_call(call)
        for end in range(len(text) - 1, 0, -1):
            calls = self.parse(text[:end], turn=0, in_reasoning=False).tool_calls
            if any(part.problem for part in calls) or not calls:
                return text[:end]
        return ""

    def render_thought(self, thought: str, *, is_open: bool) -> str:
        """The text of a thought; `is_open` when the prompt opened it."""
        return render_thought(thought, is_open=is_open)


class ObjectFormat:
    """A format that is an object or a file of the user's: an error of its code names it."""

    def __init__(self, value: Any, name: str) -> None:
        self.__name__ = name
        self.THINK, self.UNTHINK, self.ANSWER = value.THINK, value.UNTHINK, value.ANSWER
        self.STOPS, self.CALL_ENDS = tuple(value.STOPS), tuple(value.CALL_ENDS)
        words = (self.THINK, self.UNTHINK, self.ANSWER, *self.STOPS, *self.CALL_ENDS)
        if not all(isinstance(word, str) for word in words):
            raise PluginError(f"tool format {name!r}: THINK, UNTHINK, ANSWER, STOPS, CALL_ENDS are texts, not {words}")
        self.taught = bool(getattr(value, "taught", False))
        self._value = value

    def parse(self, text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
        """The assistant message in a completion's text."""
        return self._call("parse", Message, text, turn=turn, in_reasoning=in_reasoning, tools=tools)

    def render_call(self, call: ToolCall) -> str:
        """The text a model writes to make this call."""
        return self._call("render_call", str, call)

    def render_malformed_call(self, call: ToolCall) -> str:
        """The same as a learner gets it wrong."""
        return self._call("render_malformed_call", str, call)

    def render_thought(self, thought: str, *, is_open: bool) -> str:
        """The text of a thought; `is_open` when the prompt opened it."""
        return self._call("render_thought", str, thought, is_open=is_open)

    def _call(self, method: str, kind: type[T], *args: Any, **options: Any) -> T:
        function = functools.partial(getattr(self._value, method), *args, **options)
        result = plugins.call(function, f"{self.__name__}: {method}", "tool format")
        if not isinstance(result, kind):
            problem = f"{method} returned {reprlib.repr(result)}, not a {kind.__name__}"
            raise PluginError(f"tool format {self.__name__!r}: {problem}")
        return result


def _is_piece(piece: object) -> bool:
    if not isinstance(piece, ToolCall):
        return isinstance(piece, str)
    return isinstance(piece.name, str) and isinstance(piece.arguments, dict) and isinstance(piece.problem, str | None)


def _own_format(spec: str) -> ToolFormat:
    """A function of the user's, or an object or a file with the names of ToolFormat, checked and tried."""
    in_file = spec.endswith(".py")
    value = plugins.load_module(spec, "tool format") if in_file else plugins.load(spec, "tool format")
    if inspect.isroutine(value):
        form: ToolFormat = FunctionFormat(value, spec)
    else:
        names = [name for name in vars(ToolFormat) if not name.startswith("_")]
        absent = [name for name in names if not hasattr(value, name)]
        if absent or isinstance(value, type):
            problem = f"has no {', '.join(absent)}" if absent else "is a class: name an object of it"
            raise PluginError(
                f"tool format {spec!r} {problem}; a format is a function fmt(text) that gives its words and calls, or "
                "an object with the names of turnwise.chat.calls.tool_format.ToolFormat (docs/formats.md)"
            )
        form = ObjectFormat(value, spec)
    if form.parse("Hello.", turn=0, in_reasoning=False).tool_calls:
        raise PluginError(f"tool format {spec!r} reads a call in 'Hello.'")
    if can_write(form) and not is_taught(form):
        text = form.render_call(_EXAMPLE)
        calls = form.parse(text, turn=0, in_reasoning=False).tool_calls
        refuse_unless_read_back(text, _EXAMPLE, calls, spec)
    return form


_EXAMPLE = ToolCall("t000c0000", "look_up", {"city": "New York", "days": 3})
