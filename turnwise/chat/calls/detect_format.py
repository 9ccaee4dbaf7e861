"""The tool-call format of a model, found by trial: its chat template writes a call, and every format reads it."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.calls.format_words import DEFAULT, ONE_TOOL, FormatChoice, by_signs, choose_format, sign_order
from turnwise.chat.calls.tool_format import is_taught, load_format
from turnwise.chat.control_tokens import fresh_mark, shared
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.knobs import is_plugin
from turnwise.system.plugins import names_in

_NAME = "look_up"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["city"],
        },
    },
}
_TRIALS: tuple[dict[str, Any], ...] = ({"city": "New York", "days": 3}, {"city": "New York"}, {"days": 3})
"""Some templates spell calls of several arguments, texts or numbers otherwise than they ask the model to."""
_IDS = ("t000c0000", f"functions.{_NAME}:0")
"""Some templates take ids of nine letters and digits only, others show the id as the name."""
_MOST_SHOWN = 300


@dataclass(frozen=True, slots=True)
class _Written:
    """A call as a template writes it."""

    arguments: dict[str, Any]
    texts: tuple[str, ...]
    """Where what the model itself would write begins and ends is not marked: what it may be, the likeliest first."""


def find_format(named: str | None, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> FormatChoice:
    """The format that reads the calls of this tokenizer's chat template, or the configured one, tried in the same way.

    Where the template writes no calls, its words and the special tokens tell; where no format reads what it writes, the
    choice has a problem.
    """
    named = None if named is None else choose_format(named).name
    is_own = named is not None and is_plugin(named)
    if named in ONE_TOOL or (is_own and is_taught(load_format(named))):
        return choose_format(named)
    sources = list(tokenizer.templates.values())
    order = sign_order("\n".join(sources))
    names = [name for name in names_in("turnwise.chat.formats") if name not in ONE_TOOL]
    names += [named] if named is not None and is_own else []
    written = ""
    for trial in _TRIALS:
        for call in _calls(tokenizer, kwargs, trial):
            written = written or call.texts[0].strip()
            readers = [name for name in names if _reads(name, call)]
            if named in readers or (named is None and readers):
                name = named or min(
                    readers, key=lambda format_: order.index(format_) if format_ in order else len(order)
                )
                return FormatChoice(name, "" if named else "it reads the calls that the chat template writes")
    if not written:
        return choose_format(named) if named else by_signs(sources, tokenizer.added_ids)
    example = f"the chat template writes a call as {written[:_MOST_SHOWN]!r}"
    if named is None:
        problem = f"no tool-call format reads the calls of this model: {example}; {_WAYS_OUT}"
        return FormatChoice(DEFAULT, f"only for conversations without tools: {example}, which no format reads", problem)
    other = find_format(None, tokenizer, kwargs)
    advice = _WAYS_OUT if other.problem else f"chat.tool_format={other.name} reads it"
    return FormatChoice(
        named, "", f"chat.tool_format={named} does not read the calls of this model: {example}; {advice}"
    )


_WAYS_OUT = "try chat.template=chatml_hermes, or write a format for it (docs/formats.md)"


def _reads(name: str, written: _Written) -> bool:
    """Whether a format reads exactly this call in one of the texts, and nothing else."""
    form = load_format(name)
    for text in written.texts:
        ends = [text.removesuffix(stop) for stop in form.STOPS if stop not in form.CALL_ENDS and text.endswith(stop)]
        for candidate in (text, *ends):
            message = form.parse(candidate, turn=0, in_reasoning=False, tools=[_TOOL])
            read = [(call.name, call.arguments, call.problem) for call in message.tool_calls]
            if read == [(_NAME, written.arguments, None)] and not message.answer:
                return True
    return False


def _calls(tokenizer: Tokenizer, kwargs: dict[str, Any], arguments: dict[str, Any]) -> Iterator[_Written]:
    """The call, in every way of handing it to the template that has it written."""
    hello = fresh_mark(())
    mark = fresh_mark([hello])
    question = {"role": "user", "content": hello}
    opened = _render(tokenizer, [question], kwargs, reply=True) or ""
    answered = _render(tokenizer, [question, {"role": "assistant", "content": mark}], kwargs, reply=False) or ""
    frames = [opened.rpartition(hello)[2], *answered.rpartition(hello)[2].split(mark)[:2]]
    answers = set[str]()
    for spelling, content, call_id in itertools.product((arguments, json.dumps(arguments)), ("", None), _IDS):
        call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": spelling}}
        calling = {"role": "assistant", "content": content, "tool_calls": [call]}
        whole = _render(tokenizer, [question, calling], kwargs, reply=False) or ""
        answer = whole.rpartition(hello)[2]
        texts = tuple(dict.fromkeys(_spoken(answer, *frames, special=tokenizer.special_texts)))
        if _NAME in texts[0] and answer not in answers:  # a list of tools may stand behind the user's words
            answers.add(answer)
            yield _Written(arguments, texts)


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], kwargs: dict[str, Any], *, reply: bool) -> str | None:
    try:
        return tokenizer.apply_template(messages, [_TOOL], reply, kwargs)
    except Exception:  # a template is a program of the model's authors, and may refuse what it does not know
        return None


def _spoken(answer: str, opening: str, header: str = "", closing: str = "", *, special: Sequence[str]) -> Iterator[str]:
    """What the model may have written of all that follows a user's words: without the header before it (as it is for a
    reply, or in a finished text), and without what closes the message."""
    heads = [len(head) for head in (opening, header) if answer.startswith(head)]
    meeting = shared(answer, opening)
    heads.append(max(answer.rfind(border, 0, meeting) + 1 for border in (">", "\n", "]")))
    for head in dict.fromkeys(heads):
        text = answer[head:]
        if closing.strip() and text.endswith(closing):
            yield text.removesuffix(closing)
        while True:
            yield text
            bare = text.rstrip()
            end = max((token for token in special if bare.endswith(token)), key=len, default="")
            if not end:
                break
            text = bare.removesuffix(end)
