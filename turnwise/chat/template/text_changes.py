"""What a chat template does to the text of each kind of message, found by trying texts of all sorts.

A template is a program, and may look at any text it shows: take white space from its edges, encode it, split it at a
tag. It is tried with texts that such programs change, and with every word that the template itself mentions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from turnwise.chat.template.chat_template import CALL, HELLO, RESULT, ChatTemplate
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, Role

TEXTS = (
    "42",
    "-3.5",
    "true",
    '{"a": "b", "c": [1, "d"]}',
    "[1, 2]",
    'it\'s "so" \\n \\ /',
    "<b>&amp;</b> & <",
    "a\nb\n\n\tc\r\n  d",
    "{{ x }} {% if y %} {# z #} %}",
    "naïve 東京 🙂 e\u0301 \u2028 \xa0.",
    "# A: b, c; d. e! f?",
)
_LONG = "word\n" * 4000 + "end"
_EDGES = (" a", "a ", "\na", "a\n", "\t a \n\n")
_MARK, _LAST = "turnwiseXmark0X", "turnwiseXmark1X"
_ID = "q7w8e9r0t"

Build = Callable[[str], list[Message]]


@dataclass(frozen=True, slots=True)
class MessageKind:
    """A kind of message whose text stands in the render as it was written."""

    telling: tuple[str, ...]
    """Words that make a difference when they stand in it."""
    trims: bool | None
    """Whether white space at its edges is taken away; None: sometimes."""


class Manner(NamedTuple):
    """How an assistant's message comes to the template: with calls that it writes, with thoughts, before whom."""

    structured: bool
    calls: bool
    thinks: bool
    is_open: bool
    """Whether the header opens the thought."""
    before: Role


class Kinds:
    """The kinds of message in conversations that begin with prompts of one shape: the same roles, the same tools."""

    def __init__(
        self, template: ChatTemplate, words: Sequence[str], prompt: Sequence[Message], tools: Sequence[JsonSchema]
    ) -> None:
        self.tools = list(tools)
        self._template = template
        self._words = words
        last = max(number for number, message in enumerate(prompt) if message.role is Role.USER)
        self._prompt = [*prompt[:last], replace(prompt[last], content=HELLO.content), *prompt[last + 1 :]]
        self._call = template.call_format.render_call(CALL)
        self._found: dict[Role | Manner, MessageKind | None] = {}
        self.question = self._question(last)
        """The last user's message of the prompt; None when it is not shown as written."""
        self.shows_ids = self._shows_ids()

    def reply(self, role: Role) -> MessageKind | None:
        """What a tool or a user replies; None when it is not shown as written."""
        if role not in self._found:
            words, typical = (self._call, RESULT) if role is Role.TOOL else ("yes", HELLO)
            before = [*self._prompt, self._template.assistant(words)]
            self._found[role] = self._try(lambda text: [*before, replace(typical, content=text)])
        return self._found[role]

    def said(self, manner: Manner) -> MessageKind | None:
        """What an assistant says; None when it is not shown as written."""
        if manner not in self._found:
            builds = self._calls(manner) if manner.structured else self._spoken(manner)
            kinds = [self._try(build, tail=manner.structured) for build in builds]
            plain = [kind for kind in kinds if kind is not None]
            telling = tuple(sorted({word for kind in plain for word in kind.telling}))
            self._found[manner] = MessageKind(telling, None) if len(plain) == len(kinds) else None
        return self._found[manner]

    def _spoken(self, manner: Manner) -> list[Build]:
        reply, form = RESULT if manner.before is Role.TOOL else HELLO, self._template.call_format
        rest = self._call if manner.calls else "yes"

        def says(text: str) -> list[Message]:
            return [*self._prompt, Message(Role.ASSISTANT, text, answer=text), reply]

        def thinks(text: str) -> list[Message]:
            thought = form.render_thought(text, is_open=manner.is_open)
            return [*self._prompt, self._template.assistant(thought + rest), reply]

        def thought(text: str) -> list[Message]:
            thought = form.render_thought("hm", is_open=manner.is_open)
            return [*self._prompt, self._template.assistant(thought + text), reply]

        return [thinks, thought] if manner.thinks else [says]

    def _calls(self, manner: Manner) -> list[Build]:
        """Of a message whose calls the template writes, only what follows its calls is compared."""
        reply = RESULT if manner.before is Role.TOOL else HELLO

        def message(text: str, thought: str, arguments: dict[str, object]) -> list[Message]:
            calls = (replace(CALL, arguments={**arguments, "z": _LAST}),)
            reasoning = thought if manner.thinks else None
            return [*self._prompt, Message(Role.ASSISTANT, text, calls, reasoning=reasoning, answer=text), reply]

        return [
            lambda text: message(text, "hm", {}),
            lambda text: message("", text, {}),
            lambda text: message("", "hm", {"x": text, "y": [{"x": text}]}),
        ]

    def _question(self, last: int) -> MessageKind | None:
        before, question, after = self._prompt[:last], self._prompt[last], self._prompt[last + 1 :]
        talk = [self._template.assistant("yes"), HELLO]
        return self._try(lambda text: [*before, replace(question, content=text), *after, *talk])

    def _shows_ids(self) -> bool:
        calling = self._template.assistant(self._call)
        calling = replace(calling, tool_calls=tuple(replace(call, id=_ID) for call in calling.tool_calls))
        rendered = self._render([*self._prompt, calling, replace(RESULT, tool_call_id=_ID)])
        return rendered is None or _ID in rendered

    def _try(self, build: Build, *, tail: bool = False) -> MessageKind | None:
        base = self._render(build(_MARK))
        if base is None or (base.count(_LAST) if tail else base.count(_MARK)) != 1:
            return None

        def stands(text: str, expected: str) -> bool:
            rendered = self._render(build(text))
            if tail:
                return rendered is not None and rendered.rpartition(_LAST)[2] == base.rpartition(_LAST)[2]
            return rendered == base.replace(_MARK, expected)

        if not all(stands(text, text) for text in (*TEXTS, _LONG)):
            return None
        trims = None
        if all(stands(text, text) for text in _EDGES):
            trims = False
        elif all(stands(text, text.strip()) for text in _EDGES):
            trims = True
        telling = tuple(word for word in self._words if not stands(f"a {word} b", f"a {word} b"))
        return MessageKind(telling, trims)

    def _render(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._template.render(messages, self.tools, reply=True)
        except TemplateError:
            return None
