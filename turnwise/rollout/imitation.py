"""A conversation that somebody else had, as an episode of the policy: with the tokens that it would have written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnwise.chat.policy_text import policy_text, says_the_same
from turnwise.chat.renderer import Renderer
from turnwise.config import SamplingConfig
from turnwise.engines.samplers.request import NoiseKey, Request
from turnwise.engines.samplers.scripted import ScriptedSampler
from turnwise.errors import DataError, EpisodeError, TemplateError
from turnwise.ledger import NO_VERSION, VersionRun
from turnwise.rollout.chat_backends import LOST_RETRY, TokenBackend, open_prompt, prepare_images_of
from turnwise.types import (
    CallRecord,
    CallStatus,
    Completion,
    FinishReason,
    JsonSchema,
    Message,
    Role,
    Sample,
    StopReason,
    Trajectory,
    Turn,
)

TOO_LONG = "longer than the model's context"


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What was said: `sample.prompt` comes first, then `messages`, the first of them the assistant's."""

    sample: Sample
    messages: Sequence[Message]
    tools: list[JsonSchema]
    """Those that the model is shown."""


async def imitate(dialogue: Dialogue, renderer: Renderer, context_length: int) -> Trajectory:
    """The episode that a rollout would have recorded had the policy said these words; DataError says why it cannot.

    What comes after the last assistant's message is recorded and not shown, as in a rollout.
    """
    try:
        return await _imitate(dialogue, renderer, context_length)
    except (TemplateError, EpisodeError) as error:
        raise DataError(str(error)) from error


async def _imitate(dialogue: Dialogue, renderer: Renderer, context_length: int) -> Trajectory:
    sample, tools = dialogue.sample, dialogue.tools
    speaker = _Speaker(renderer, context_length)
    noise = NoiseKey(0, 0, sample.id, 0)
    backend = TokenBackend(renderer, speaker, SamplingConfig(), tools, noise, f"{sample.id}/0", LOST_RETRY)
    messages, turns = list(sample.prompt), list[Turn]()
    exchanges = list(_exchanges(dialogue.messages))
    await prepare_images_of(backend, [*messages, *dialogue.messages])
    if not await open_prompt(backend, messages):
        raise DataError(TOO_LONG)
    for number, (assistant, answers) in enumerate(exchanges):
        speaker.text, heard = policy_text(renderer, messages, assistant, tools)
        room = backend.room()
        turn = await backend.reply(number, max(1, context_length if room is None else room))
        if turn.finish_reason is not FinishReason.STOP:
            raise DataError(TOO_LONG)
        if not says_the_same(turn.message, heard):
            raise DataError("an assistant's message spells a control token of the chat template")
        turn.replies = list(_addressed(assistant, turn.message, answers))
        turn.calls = [CallRecord(call, _status(call.problem), 0.0) for call in turn.message.tool_calls]
        messages.append(turn.message)
        turns.append(turn)
        if number < len(exchanges) - 1:
            full = backend.append_replies(messages, turn.replies, number, None)
            if full is not None:
                is_long = full is StopReason.CONTEXT_FULL
                raise DataError(
                    TOO_LONG if is_long else "the chat template cannot show a reply to an assistant's words"
                )
        messages += turn.replies
    check = backend.check(messages)
    if check is not None and check.problem is not None:
        raise DataError(f"the whole conversation renders otherwise than turn by turn: {check.problem}")
    return Trajectory(sample, 0, 0, messages, turns, backend.segments, StopReason.UNKNOWN, 0.0, render_check=check)


class _Speaker(ScriptedSampler):
    """Writes the text that it is handed; no weights of ours wrote it, and nobody knows how likely it was."""

    def __init__(self, renderer: Renderer, context_length: int) -> None:
        if renderer.end_id is None:
            raise DataError("the tokenizer names no end token: no turn can be ended")
        super().__init__(
            renderer.tokenizer,
            lambda request: self.text,
            end_id=renderer.end_id,
            call_end_id=renderer.call_end_id,
            call_format=renderer.call_format,
            context_length=context_length,
        )
        self.text = ""

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        length = len(completion.token_ids)
        unknown = np.full(length, np.nan, np.float32)
        return replace(completion, logprobs=unknown, versions=(VersionRun(NO_VERSION, length),))


def _exchanges(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Every assistant's message with what came back."""
    starts = [number for number, message in enumerate(messages) if message.role is Role.ASSISTANT]
    if not starts or starts[0] != 0:
        raise DataError("no message of the assistant's")
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        if end == start + 1 and end < len(messages):
            raise DataError("two messages of the assistant's follow each other")
        yield messages[start], list(messages[start + 1 : end])


def _addressed(original: Message, heard: Message, answers: Sequence[Message]) -> Iterator[Message]:
    """Replies with the names that a rollout gives to the calls they answer; each call has one at most."""
    waiting = list(range(len(heard.tool_calls)))
    names = [call.id for call in original.tool_calls]
    for answer in answers:
        if answer.role is not Role.TOOL:
            yield answer
            continue
        if not waiting:
            raise DataError("a tool's reply comes after a message without a call to it that the tool-call format reads")
        at = names.index(answer.tool_call_id) if answer.tool_call_id in names else waiting[0]
        if at not in waiting:
            raise DataError("two replies of tools answer one call")
        waiting.remove(at)
        call = heard.tool_calls[at]
        yield replace(answer, tool_call_id=call.id, name=call.name)


def _status(problem: str | None) -> CallStatus:
    return CallStatus.UNKNOWN if problem is None else CallStatus.MALFORMED
