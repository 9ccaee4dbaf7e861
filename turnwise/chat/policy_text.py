"""The text that a policy writes to say an assistant's message which somebody else has said."""

from collections.abc import Sequence
from dataclasses import replace

from turnwise.chat.renderer import Renderer
from turnwise.chat.template.message_forms import squash
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, ToolCall


def policy_text(
    renderer: Renderer, context: Sequence[Message], message: Message, tools: Sequence[JsonSchema]
) -> tuple[str, Message]:
    """(the text that follows the header of a reply to `context`, the message that it is read as).

    It is what the chat template writes of the message, as its last, where that is read back as the same; else what the
    tool-call format writes. TemplateError for a message that neither can write.
    """
    is_open = _opens_thought(renderer, context, tools)
    heard = renderer.call_format.parse(message.text, turn=0, in_reasoning=False, tools=tools)
    if any(call.problem is not None for call in heard.tool_calls):  # what it says cannot be said otherwise
        wanted = replace(message, tool_calls=(), answer=None)
        words = _by_format(renderer, wanted, is_open=is_open)
        return words, renderer.call_format.parse(words, turn=0, in_reasoning=is_open, tools=tools)
    wanted = _in_parts(message, heard)
    for text in (_by_template(renderer, context, wanted, tools), _by_format(renderer, wanted, is_open=is_open)):
        if text is not None:
            heard = renderer.call_format.parse(text, turn=0, in_reasoning=is_open, tools=tools)
            if says_the_same(heard, wanted):
                return text, heard
    raise TemplateError(
        "neither the chat template nor the tool-call format writes this message so that it is read back as the same"
    )


def says_the_same(heard: Message, wanted: Message) -> bool:
    """Whether it makes the same calls, after the same thoughts, with the same words; white space does not count."""
    same_calls = _calls(heard.tool_calls) == _calls(wanted.tool_calls)
    pairs = (heard.visible, wanted.visible), (heard.reasoning or "", wanted.reasoning or "")
    return same_calls and all(squash(ours) == squash(theirs) for ours, theirs in pairs)


def _calls(calls: Sequence[ToolCall]) -> list[tuple[str, object, bool]]:
    return [(call.name, call.arguments, call.problem is None) for call in calls]


def _in_parts(message: Message, heard: Message) -> Message:
    """The message with its thoughts and calls set apart, also where its text spells them; no text of the policy's."""
    calls = message.tool_calls or heard.tool_calls
    reasoning = heard.reasoning if message.reasoning is None else message.reasoning
    return replace(message, content=heard.visible, tool_calls=calls, reasoning=reasoning or None, answer=None)


def _opens_thought(renderer: Renderer, context: Sequence[Message], tools: Sequence[JsonSchema]) -> bool:
    thought = renderer.template.thought
    return bool(thought) and renderer.render(context, tools, reply=True).endswith(thought)


def _by_template(
    renderer: Renderer, context: Sequence[Message], message: Message, tools: Sequence[JsonSchema]
) -> str | None:
    """What the template writes between the header of a reply and its end."""
    header = renderer.render(context, tools, reply=True)
    whole = renderer.render([*context, message], tools, reply=False)
    end = renderer.template.closing_start(whole, structured=bool(message.tool_calls))
    if end is None or end < len(header) or not whole.startswith(header):
        return None
    text = whole[len(header) : end]
    stops = (*renderer.template.stop_texts, *renderer.call_format.STOPS)
    ends = [stop for stop in stops if text.rstrip().endswith(stop)]
    return text.rstrip().removesuffix(max(ends, key=len)) if ends else text


def _by_format(renderer: Renderer, message: Message, *, is_open: bool) -> str:
    form, words = renderer.call_format, message.visible
    thought = form.render_thought(message.reasoning or "", is_open=is_open) if message.reasoning or is_open else ""
    calls = "\n".join(form.render_call(call) for call in message.tool_calls)
    answer = f"{form.ANSWER}{words}" if words or not calls else ""
    return thought + answer + ("\n" if answer and calls else "") + calls
