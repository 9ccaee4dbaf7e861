"""Whose images a chat template shows, found by trying."""

from collections.abc import Sequence
from dataclasses import replace

from turnwise.chat.template import CALL, HELLO, RESULT, ChatTemplate
from turnwise.errors import TemplateError
from turnwise.types import Image, Message, Role, Text


def image_roles(template: ChatTemplate, marker: str) -> frozenset[Role]:
    """Whose images it shows, each once and where its message stands, with the marker of an image."""
    picture, said = Image("data:,"), template.assistant(f"{template.call_format.ANSWER}yes")
    asked = template.assistant(template.call_format.render_call(CALL))
    shown = Message(Role.USER, (Text("a"), picture, Text("b"), picture))
    talks: dict[Role, list[Message]] = {
        Role.USER: [shown, said, shown],
        Role.TOOL: [HELLO, asked, replace(RESULT, content=shown.content)],
        Role.SYSTEM: [replace(shown, role=Role.SYSTEM), HELLO],
    }
    return frozenset(role for role, talk in talks.items() if _counts_images(template, talk, marker))


def _counts_images(template: ChatTemplate, talk: Sequence[Message], marker: str) -> bool:
    images = 0
    for number, message in enumerate(talk):
        images += len(message.images)
        try:
            text = template.render(talk[: number + 1], (), reply=message is talk[-1])
        except TemplateError:
            if message is talk[-1]:
                return False
            continue
        if text.count(marker) != images:
            return False
    return True
