"""A chat template tried with what an episode may hold: calls, thoughts and answers, and what tools and users reply."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnwise.chat.images.blocks import MediaOf, images_in, place_images
from turnwise.chat.template.history import HistoryRewritten, RewriteRefused
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import TemplateError
from turnwise.types import (
    Completion,
    FinishReason,
    Image,
    JsonSchema,
    Ledger,
    Message,
    Origin,
    Role,
    Text,
    ToolCall,
)

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer

BLANK = Image("data:,")
"""Stands for an image that a tool draws."""
THOUGHT = "six sevens"
LAST = "It is 42."


class Course(enum.Enum):
    """What becomes of the tokens so far when a reply comes."""

    APPENDS = "appends"
    """They stay what a full render has."""
    KEEPS = "keeps"
    """They stay, and a full render has other ones."""
    REOPENS = "reopens"
    """A new sequence starts from a full render."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an assistant says, and what it is replied."""

    name: str
    text: str
    replies: list[Message]
    thinks: bool = False
    """Whether a thought stands before the text, also where the header opened none."""

    @property
    def by(self) -> Role:
        """The role that replies in this exchange."""
        return self.replies[0].role


@dataclass(frozen=True, slots=True)
class Tried:
    """One exchange, or all of them one after another, and what became of it."""

    name: str
    course: Course
    exchange: Exchange | None
    thinks: bool
    """Whether the assistant thought, of its own accord or because the header opened a thought."""


def exchanges(renderer: "Renderer", *, tools: bool, user: bool) -> Iterator[Exchange]:
    """The exchanges an episode may hold."""
    form = renderer.call_format
    if tools:
        calls = [ToolCall("t000c0000", "probe", {"x": "6*7"}), ToolCall("t000c0001", "probe", {"x": "7*6"})]
        for count in (1,) if form.CALL_ENDS else (1, 2):  # a call may end the turn
            text = "\n".join(form.render_call(call) for call in calls[:count])
            read: Message = form.parse(text, turn=0, in_reasoning=False)
            replies = [Message(Role.TOOL, "42", tool_call_id=call.id, name="probe") for call in read.tool_calls]
            yield Exchange(f"{count} tool call(s), then the tool", text, replies)
            if count == 1:
                yield Exchange("a thought and a tool call, then the tool", text, replies, thinks=True)
            if Role.TOOL in renderer.image_roles:
                with_image = [replace(reply, content=(Text("42"), BLANK, Text("."))) for reply in replies]
                yield Exchange(f"{count} tool call(s), then the tool with an image", text, with_image)
    if user:
        sure, answer = [Message(Role.USER, "Are you sure?")], f"{form.ANSWER}{LAST}"
        yield Exchange("plain answer, then the user", answer, sure)
        yield Exchange("answer with reasoning, then the user", answer, sure, thinks=True)


def try_out(
    renderer: "Renderer",
    prompt: Sequence[Message],
    schemas: Sequence[JsonSchema],
    possible: Sequence[Exchange],
    media: MediaOf,
) -> list[Tried]:
    """What becomes of each exchange, and of all one after another; TemplateError for one that cannot be played."""
    strict, tried = renderer.with_history(HistoryPolicy.refuse), renderer.with_history(renderer.history)
    runs: list[tuple[str, list[Exchange]]] = [(exchange.name, [exchange]) for exchange in possible]
    if possible:
        runs.append(("several of these", [exchange for _ in range(2) for exchange in possible]))
    trials = []
    for name, played in runs:
        exchange = played[0] if len(played) == 1 else None
        try:
            try:
                segments = play(strict, prompt, schemas, played, media)
                course = Course.APPENDS
            except RewriteRefused:
                if renderer.history is HistoryPolicy.refuse:
                    raise
                segments = play(tried, prompt, schemas, played, media)
                course = Course.REOPENS if len(segments) > 1 else Course.KEEPS
        except TemplateError as error:
            raise TemplateError(f"{name}: {error}") from error
        thinks = renderer.in_reasoning or (exchange is not None and exchange.thinks)
        trials.append(Tried(name, course, exchange, thinks))
    return trials


def play(
    renderer: "Renderer",
    prompt: Sequence[Message],
    schemas: Sequence[JsonSchema],
    planned: Sequence[Exchange],
    media: MediaOf,
) -> list[Ledger]:
    """The exchanges as an episode records them, then a last answer, each sequence compared with one full render."""
    messages = list(prompt)
    ledgers = [_open(renderer, messages, schemas, media, 0)]
    thought, length = renderer.template.thought, renderer.header_length
    for turn, exchange in enumerate([*planned, Exchange("", LAST, [])]):
        ledger, replies = ledgers[-1], exchange.replies
        opened = bool(thought) and renderer.tokenizer.decode(ledger.token_ids[-length:]).endswith(thought)
        thinks = opened or exchange.thinks
        words = renderer.call_format.render_thought(THOUGHT, is_open=opened) if thinks else ""
        words += exchange.text
        completion = _completion(renderer, words, calls=any(reply.role is Role.TOOL for reply in replies))
        message = renderer.read(completion, turn, ledger.token_ids, schemas)
        ledger.append(completion.token_ids, Origin.POLICY, turn, completion.logprobs, completion.versions)
        rewritten = False
        if replies:
            try:
                spans = renderer.extend(messages, message, completion, replies, schemas, media)
                ledger.append_given(spans, turn)
                place_images(ledger, [media[image] for image in images_in(replies)])
            except HistoryRewritten:
                rewritten = True
        if rewritten or not replies:
            problem = renderer.check(ledger, [*messages, message], schemas, media).problem
            if problem is not None:
                raise TemplateError(f"the recorded tokens differ from a full render {problem}")
        messages += [message, *replies]
        if rewritten:
            _demand_words(renderer, messages, schemas)
            ledgers.append(_open(renderer, messages, schemas, media, turn))
    return ledgers


def _open(
    renderer: "Renderer", messages: Sequence[Message], schemas: Sequence[JsonSchema], media: MediaOf, turn: int
) -> Ledger:
    prompt, ledger = renderer.prompt(messages, schemas, media), Ledger()
    ledger.append(prompt.ids, Origin.PROMPT, turn)
    ledger.place_at(prompt.media)
    return ledger


def _completion(renderer: "Renderer", text: str, *, calls: bool) -> Completion:
    ids = renderer.tokenizer.encode(text, after="").ids
    end = renderer.call_end_id if calls else renderer.end_id
    if end is not None and ids[-1] not in renderer.stop_ids:  # a call may end the turn
        ids = [*ids, end]
    return Completion.of(ids, [0.0] * len(ids), FinishReason.STOP, version=0)


def _demand_words(renderer: "Renderer", messages: Sequence[Message], schemas: Sequence[JsonSchema]) -> None:
    """A rewritten history may lack thoughts, not what the assistant answered."""
    text = renderer.render(messages, schemas, reply=True)
    for message in messages:
        if message.role is Role.ASSISTANT and message.answer and message.answer not in text:
            raise TemplateError(f"the chat template drops what the assistant said before a reply: {message.answer!r}")
