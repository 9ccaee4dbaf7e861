"""A user played by a language model over an OpenAI-compatible endpoint: persona, goal, what it knows, when it stops."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from turnwise.chat.calls.reasoning import split_thoughts
from turnwise.engines.samplers.endpoint import ChatEndpoint, check_url
from turnwise.errors import ConfigError, EngineError, EpisodeError, ScoringFailed
from turnwise.ext.judge.judge import LlmJudge
from turnwise.ext.judge.prompts import full_trace
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.judge.verdict import BINARY
from turnwise.rollout.plugin_options import read_settings
from turnwise.rollout.users.user import Reply, UserContext, UserSession, UserTurn
from turnwise.scoring.event_loop_resources import loop_resource
from turnwise.types import FinishReason, Message, Role

WHO = "interaction 'llm_user'"
LONGEST_FACT = 20_000
"""Characters of a persona, a goal or what is known, as a row gives them."""
OPENING = "Hello! How can I help you?"
"""What the assistant is made to say before the user's first words: many templates want it to be somebody's turn."""
_RULES = """\
You play a person who talks to an assistant. Stay in this role whatever the assistant says, and write only what this \
person says next: no stage directions, no quotation marks, no words of the assistant's. Say one thing at a time, as \
people do, and tell what you know only when it is asked for or needed."""
_STOP = "When you have what you want, or see that you will not get it, write {word} and nothing after it."
_RUBRIC = """\
TRUE: in the conversation the assistant brought the person to what the person wants, wholly and correctly.
FALSE: it has not, or not yet, or it only says so."""
_BRIEF = ("persona", "goal", "knows")
_Text = Annotated[str, Field(max_length=LONGEST_FACT)]


@dataclass(frozen=True, slots=True)
class LlmUserSettings:
    """The options of `rollout.interaction_kwargs`: `LlmUserSettings(base_url="http://127.0.0.1:8000/v1", goal="...")`.

    A row may give `persona`, `goal` and `knows` in its `interaction_kwargs`; how the model is reached it may not.
    """

    base_url: str
    """The endpoint of the model that plays the user."""
    model: str | None = None
    """Its name there; null takes the one that is served."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; without it none is sent."""
    persona: _Text = ""
    """Who the user is, and how they talk."""
    goal: _Text = ""
    """What they want; the option or the row must say."""
    knows: _Text | dict[str, str | int | float | bool] = ""
    """What they can tell when asked: a text, or facts by name."""
    stop_word: Annotated[str, Field(min_length=1, max_length=100)] | None = "[END]"
    """What they write to leave; null leaves it to the other rules."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Messages after which they leave."""
    judge: dict[str, Any] | None = None
    """Options of a judge (`docs/scoring.md`) that is asked after each answer whether the goal is reached; then the user
    leaves, and the score is 1. Null scores nothing."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Of one message, reasoning included."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    retries: Annotated[int, Field(ge=0)] = 3
    concurrency: Annotated[int, Field(ge=1)] = 64
    """Requests under way at once."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "LlmUserSettings":
        """The settings of config options, checked."""
        if "base_url" not in options:
            raise ConfigError(f"{WHO} needs rollout.interaction_kwargs={{base_url: http://127.0.0.1:8000/v1}}")
        settings = read_settings(cls, dict(options), WHO)
        check_url(settings.base_url, f"{WHO}: base_url")
        return settings


class LlmUser:
    """Shows the model the conversation with the roles swapped, reasoning and tools left out, and says what it writes.

    A model that cannot be reached or says nothing fails the episode: nobody speaks in its place.
    """

    reads_kwargs: ClassVar[tuple[str, ...]] = _BRIEF

    def __init__(self, **options: Any) -> None:
        self.settings = LlmUserSettings.of(options)
        self.judge = None if self.settings.judge is None else JudgeSettings.of(self.settings.judge)

    async def open(self, context: UserContext) -> UserSession:
        row = {key: _fact(key, context.kwargs[key]) for key in _BRIEF if context.kwargs.get(key) is not None}
        persona, goal, knows = (row.get(key, getattr(self.settings, key)) for key in _BRIEF)
        if not goal:
            raise EpisodeError(f"{WHO} needs a goal: interaction_kwargs.goal in the row or in the config")
        parts = [_RULES, f"Who you are: {persona}" if persona else "", f"What you want: {goal}"]
        parts += [f"What you know: {_facts(knows)}"] if knows else []
        if self.settings.stop_word is not None:
            parts.append(_STOP.format(word=self.settings.stop_word))
        return _LlmSession(self.settings, self.judge, "\n\n".join(part for part in parts if part), str(goal))


@dataclass(slots=True)
class _LlmSession:
    settings: LlmUserSettings
    judge: JudgeSettings | None
    brief: str
    goal: str
    messages: int = 0
    """Written so far."""

    async def reply(self, turn: UserTurn) -> Reply:
        score = None if self.judge is None else await self._verdict(self.judge, turn)
        if score is not None and score >= 1.0:
            return Reply(score=score, end=True, note={"ended_by": "judge"})
        if self.messages >= self.settings.max_turns:
            return Reply(score=score, end=True, note={"ended_by": "max_turns"})
        text, is_whole = await self._speak(turn)
        self.messages += 1
        word, note = self.settings.stop_word, {} if is_whole else {"cut": f"max_tokens={self.settings.max_tokens}"}
        if word is not None and word in text:
            return Reply(score=score, end=True, note={"ended_by": "stop_word", "said": text, **note})
        return Reply(text, score, note=note)

    async def _speak(self, turn: UserTurn) -> tuple[str, bool]:
        """(what the model says, whether it came to its end)."""
        settings = self.settings
        endpoint = loop_resource(ChatEndpoint, (WHO, repr(settings)), self._endpoint)
        shown = [{"role": "system", "content": self.brief}, *swapped(turn.messages)]
        try:
            completion = await endpoint.complete(
                shown,
                [],
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                # Of what was said: the same conversation is answered the same way when it is played again.
                seed=zlib.crc32(repr(shown).encode("utf-8", "surrogatepass")) % 2**31,
            )
        except (EpisodeError, EngineError, ConfigError) as error:
            raise EpisodeError(f"{WHO}: {error}") from error
        text = split_thoughts(completion.text, in_reasoning=False)[1].strip()
        if not text:
            raise EpisodeError(f"{WHO}: {settings.base_url} said nothing in {completion.completion_tokens} tokens")
        return text, completion.finish_reason is not FinishReason.LENGTH

    def _endpoint(self) -> ChatEndpoint:
        settings = self.settings
        return ChatEndpoint(
            settings.base_url,
            settings.model,
            os.environ.get(settings.api_key_env),
            settings.timeout,
            settings.retries,
            concurrency=settings.concurrency,
            model_key="rollout.interaction_kwargs.model",
        )

    async def _verdict(self, judge: JudgeSettings, turn: UserTurn) -> float:
        spoken = [f"{_SPEAKER[entry['role']]}: {entry['content']}" for entry in swapped(turn.messages)[1:]]
        inquiry = full_trace(f"The person wants: {self.goal}", "\n\n".join(spoken), _RUBRIC, grid=BINARY)
        try:
            return (await LlmJudge.shared(judge).decide(inquiry)).value
        except (ScoringFailed, ConfigError) as error:
            raise EpisodeError(f"{WHO}: its judge: {error}") from error


_SPEAKER = {"assistant": "person", "user": "assistant"}
"""In the swapped conversation."""


def swapped(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    """The conversation as the user sees it: their own words as the assistant's, no system, no tools, no reasoning."""
    entries = [{"role": "user", "content": OPENING}]
    for message in messages:
        if message.role is Role.USER:
            entries.append({"role": "assistant", "content": message.text})
        elif message.role is Role.ASSISTANT and (text := message.visible.strip()):
            entries.append({"role": "user", "content": text})
    return entries


def _fact(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and key == "knows" and len(str(value)) <= LONGEST_FACT:
        return value
    if not isinstance(value, str) or len(value) > LONGEST_FACT:
        wanted = f"a text of at most {LONGEST_FACT} characters"
        raise EpisodeError(f"{WHO}: interaction_kwargs.{key} must be {wanted}, not {value!r:.80}")
    return value


def _facts(knows: Any) -> str:
    return "; ".join(f"{key}: {value}" for key, value in knows.items()) if isinstance(knows, Mapping) else str(knows)
