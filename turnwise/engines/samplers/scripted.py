"""The scripted sampler: says what a function tells it to say, for tests, dry runs and teaching traces."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.chat.calls.tool_format import ToolFormat
from turnwise.chat.formats import hermes
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import Config
from turnwise.engines.opener import Opener, OpenSampler, Say
from turnwise.engines.samplers.request import NoiseKey, Request
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, FullWeights, Update, WeightsFolder
from turnwise.errors import EngineError
from turnwise.types import Completion, FinishReason, JsonSchema, Message, Sample, ToolCall

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer


@dataclass(frozen=True, slots=True)
class Situation:
    """What a conversation of an episode is about, and what was said in it."""

    sample: Sample | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonSchema, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """What a script may look at: whose turn it is, which turn, and all that was said."""

    noise: NoiseKey
    turn: int
    token_ids: list[int]
    tokenizer: Tokenizer
    call_format: ToolFormat
    """How calls are written: `request.call_format.render_call(call)`."""
    images: tuple[bytes, ...] = ()
    """Those the conversation has shown so far, encoded, in order."""
    situation: Situation = Situation()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far, the prompt's first; none where an agent loop speaks in token ids."""
        return self.situation.messages

    @property
    def tools(self) -> tuple[JsonSchema, ...]:
        """The schemas of the tools that are offered."""
        return self.situation.tools

    @property
    def sample(self) -> Sample:
        """The row that is played: its ground truth, its `tools_kwargs`, all that the model is not told."""
        if self.situation.sample is None:
            raise EngineError("only the script of a fine-tuning (sft.script) gets the sample")
        return self.situation.sample

    def call(self, name: str, **arguments: Any) -> str:
        """The text of a call, in the format of the model."""
        return self.call_format.render_call(ToolCall("", name, arguments))

    @property
    def text(self) -> str:
        """The whole conversation so far as text, the prompt included."""
        return self.tokenizer.decode(self.token_ids)


Script = Callable[[ScriptRequest], str]


def lines(replies: Sequence[str]) -> Script:
    """A script that says one line a turn and repeats the last."""
    if not replies:
        raise EngineError("the scripted engine has nothing to say: set engine.script=['...']")
    return lambda request: replies[min(request.turn, len(replies) - 1)]


class ScriptedOpener(Opener):
    """Of `engine=scripted`, whose lines are `engine.script`."""

    async def open(self, config: Config, renderer: "Renderer", say: Say) -> OpenSampler:
        """A sampler that says the lines."""
        return OpenSampler(scripted_sampler(renderer, lines(config.engine.script)), threads=1)

    async def check(self, config: Config) -> str | None:
        """There must be something to say."""
        lines(config.engine.script)
        return None


def scripted_sampler(renderer: "Renderer", script: Script) -> "ScriptedSampler":
    """A sampler that says what a script says, as this renderer writes turns."""
    if renderer.end_id is None:
        raise EngineError("the tokenizer names no end token; the scripted sampler cannot end a turn")
    ends = {"end_id": renderer.end_id, "call_end_id": renderer.call_end_id}
    return ScriptedSampler(renderer.tokenizer, script, **ends, call_format=renderer.call_format)


class ScriptedSampler:
    """A Sampler whose words come from a script. Its logprobs are 0: it was certain."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        end_id: int,
        call_end_id: int | None = None,
        call_format: ToolFormat = hermes,
        context_length: int = 1 << 20,
        latency: float = 0.0,
    ) -> None:
        self.context_length = context_length
        self.capabilities = Capabilities(Logprobs.SCALED, frozenset({FullWeights, Adapter, WeightsFolder}), media=True)
        self._version = 0
        self._tokenizer = tokenizer
        self._script = script
        self._call_format = call_format
        self._end_id = end_id
        self._call_end_id = end_id if call_end_id is None else call_end_id
        self._latency = latency
        self._turns: dict[str, int] = defaultdict(int)
        self.situations: dict[str, Situation] = {}
        """By conversation, where its backend tells them."""

    async def generate(self, request: Request) -> Completion:
        """Encode what the script says, cut after a stop and to the limits."""
        if self._latency:
            await asyncio.sleep(self._latency)
        params, token_ids = request.params, request.token_ids.tolist()
        episode = _episode(request.conversation)
        turn = self._turns[episode]
        self._turns[episode] += 1
        images = tuple(span.media.content for span in request.media)
        situation = self.situations.get(episode, Situation())
        reply = self._script(
            ScriptRequest(request.noise, turn, token_ids, self._tokenizer, self._call_format, images, situation)
        )
        cut = _first_stop(reply, params.stop_strings)
        ids = self._tokenizer.encode(reply[:cut]).ids
        stopped = next((n for n, token in enumerate(ids, start=1) if token in params.stop_ids), None)
        if stopped is not None:  # a call that ends the turn, as a model's would
            ids = ids[:stopped]
        elif cut is None:
            calls = self._call_format.parse(reply, turn=turn, in_reasoning=False).tool_calls
            ids = [*ids, self._call_end_id if calls else self._end_id]
        room = min(params.max_tokens, self.context_length - len(token_ids))
        finish = FinishReason.STOP if len(ids) <= room else FinishReason.LENGTH
        ids = ids[: max(room, 0)]
        return Completion.of(ids, [0.0] * len(ids), finish, version=self._version)

    async def release(self, conversation: str) -> None:
        """Forgets what the conversation was and how many turns it has had."""
        self._turns.pop(_episode(conversation), None)
        self.situations.pop(_episode(conversation), None)

    async def publish(self, update: Update, version: int) -> None:
        """The script says the same; its tokens carry the new version."""
        self._version = version

    async def sleep(self) -> None:
        """Does nothing: a scripted sampler holds no memory."""

    async def wake(self) -> None:
        """Does nothing: `sleep` gave nothing back."""

    async def close(self) -> None:
        """Forgets all conversations."""
        self._turns.clear()
        self.situations.clear()


def _episode(conversation: str) -> str:
    """The segments of an episode are named `<episode>/<number>`; its turns are counted through."""
    return conversation.rpartition("/")[0] or conversation


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that comes to its end first ends."""
    return min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
