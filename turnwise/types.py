"""The nouns of the system, in the order they come into being: Sample, Message, Completion, Turn, Trajectory, Group."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.ledger import Ledger as Ledger
from turnwise.ledger import Origin as Origin
from turnwise.ledger import RenderCheck as RenderCheck
from turnwise.ledger import VersionRun as VersionRun

JsonSchema = dict[str, Any]


class Role(enum.StrEnum):
    """Who speaks in a message: the system, a user, the assistant or a tool."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(enum.StrEnum):
    """Why the sampler stopped writing."""

    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """The token limit of the request or the model's context."""
    UNKNOWN = "unknown"
    """Another system's record does not say."""


class StopReason(enum.StrEnum):
    """Why an episode ended: with an answer, at a limit, or by an error."""

    ANSWERED = "answered"
    """The assistant answered and nobody asked for more."""
    USER_ENDED = "user_ended"
    """The simulated user ended the conversation."""
    TOKEN_BUDGET = "token_budget"
    """`rollout.max_tokens` policy and reply tokens were used."""
    TURN_TRUNCATED = "turn_truncated"
    """An assistant turn hit `sampling.max_tokens` before its end token."""
    CONTEXT_FULL = "context_full"
    """The conversation no longer fits the model's context."""
    ASSISTANT_TURN_BUDGET = "assistant_turn_budget"
    """`rollout.max_assistant_turns` was used while there was more to say."""
    USER_TURN_BUDGET = "user_turn_budget"
    """`rollout.max_user_turns` was used and the user wanted to go on."""
    MALFORMED_CALL_BUDGET = "malformed_call_budget"
    """`rollout.max_malformed_calls` tool calls in a row could not be parsed."""
    IMAGE_BUDGET = "image_budget"
    """`rollout.max_images` images were shown and there was another."""
    TEMPLATE_REFUSED = "template_refused"
    """The chat template cannot show a reply to what the assistant wrote."""
    TIME_BUDGET = "time_budget"
    """`rollout.max_seconds` passed."""
    AGENT_ERROR = "agent_error"
    """An agent of the user's raised because of what the policy wrote; `EpisodeFacts.agent_error` says what."""
    FAILED = "failed"
    """An infrastructure failure; `Trajectory.failure` says which."""
    UNKNOWN = "unknown"
    """Another system's record does not say."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text: `Text("How many?")`."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A reference to an image file or data URL: `Image("cat.png")`."""

    source: str


Part = Text | Image


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the assistant asked a tool: `ToolCall("call_0", "calculate", {"expression": "6*7"})`.

    `problem` says why a call could not be read; it is then answered with an error and never run.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message: `Message(Role.USER, "What is 6 times 7?")`.

    An assistant's `content` is exactly what the policy wrote, tags included; `reasoning`, `answer` and `tool_calls`
    are read from it.
    """

    role: Role
    content: str | tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    answer: str | None = None

    @property
    def text(self) -> str:
        """The text of all text parts, joined; images are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images among its parts, in order."""
        return () if isinstance(self.content, str) else tuple(part for part in self.content if isinstance(part, Image))

    @property
    def visible(self) -> str:
        """What a reader takes as said: the answer without reasoning and tool calls, else the text."""
        return self.text if self.answer is None else self.answer


@dataclass(frozen=True, slots=True)
class InteractionSpec:
    """Which simulated user a sample wants: `InteractionSpec("code_verify", {"query": "..."})`."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One dataset row, ready to roll out.

    `Sample("test:0", (Message(Role.USER, "6*7?"),), "arithmetic", ground_truth="42")`. `agent`, `tools` and
    `interaction` are None when the row names none; the plan then decides and says so.
    """

    id: str
    prompt: tuple[Message, ...]
    data_source: str
    ground_truth: Any = None
    agent: str | None = None
    tools: tuple[str, ...] | None = None
    tools_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    interaction: InteractionSpec | None = None
    images: tuple[Image, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a sampler wrote: `Completion.of([3, 7], [-0.1, -0.4], FinishReason.STOP, version=0)`.

    `logprobs` are those of the sampled tokens under the temperature-scaled distribution before top-k/top-p (at
    temperature 0: unscaled), which is what a learner recomputes.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    versions: tuple[VersionRun, ...]
    """Which weights wrote which tokens: a turn may go on across a publish. An empty turn has a run of no tokens."""
    experts: NDArray[Any] | None = None
    """[n, routers, k] those chosen for the n tokens before its last: all that were computed for this turn."""

    @classmethod
    def of(cls, ids: Sequence[int], logprobs: Sequence[float], finish: FinishReason, *, version: int) -> "Completion":
        """That of one version, from plain numbers."""
        return cls(np.array(ids, np.int64), np.array(logprobs, np.float32), finish, (VersionRun(version, len(ids)),))

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(self.logprobs)} logprobs")
        if not self.versions or sum([run.tokens for run in self.versions]) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with versions {self.versions}")

    @property
    def policy_version(self) -> int:
        """The oldest that wrote any of it."""
        return min(run.version for run in self.versions)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's reply: `ToolResult("42")`. `score` and `info` are recorded, the model sees text and images."""

    text: str
    images: tuple[Image, ...] = ()
    score: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


class CallStatus(enum.StrEnum):
    """How a tool call ended: well, refused, or with an error."""

    OK = "ok"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    REFUSED = "refused"
    """Over `rollout.max_parallel_calls`; answered, not run."""
    ERROR = "error"
    """The tool itself said so, with a ToolError or an answer that cannot be used."""
    CRASHED = "crashed"
    """The tool's code raised anything else: it has a mistake."""
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    """Answered; another system's record does not say how it went."""

    @property
    def failed(self) -> bool:
        """Whether it is known not to have worked."""
        return self not in (CallStatus.OK, CallStatus.UNKNOWN)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One tool call and its fate, for metrics and scoring."""

    call: ToolCall
    status: CallStatus
    seconds: float
    truncated: bool = False
    score: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Turn:
    """One assistant message with what came back.

    `segment` and `start` say where its tokens begin in the trajectory's ledgers; `calls` and `replies` are what tools
    or the user answered, `user_score` what the user thought of it. `experts` are the completion's; no file has them.
    """

    index: int
    message: Message
    finish_reason: FinishReason
    policy_version: int
    prompt_tokens: int
    completion_tokens: int
    segment: int = 0
    start: int = 0
    calls: list[CallRecord] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    user_score: float | None = None
    generate_seconds: float = 0.0
    reply_seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    """What scoring thought of this turn, by name."""
    experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Remark:
    """What a judge or a rule said with a score: `Remark("llm", "0.75", 0.75, turn=1)`; no turn means the whole."""

    by: str
    text: str
    value: float | None = None
    turn: int | None = None


@dataclass(slots=True)
class Branch:
    """A conversation beside the main one of the same episode, in a context of its own: a reviewer, a sub-agent.

    Its tokens lie among the trajectory's `segments`, where `Turn.segment` points; `Turn.index` counts on after the main
    conversation's. When `trained`, it is a sequence that ends in the trajectory's reward.
    """

    name: str
    messages: list[Message]
    turns: list[Turn]
    trained: bool = True


@dataclass(slots=True)
class EnvironmentRecord:
    """What an environment said: `EnvironmentRecord(1.0, finished=True)`. `left_open`: why it could not be closed."""

    reward: float | None = None
    finished: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    left_open: str | None = None


@dataclass(slots=True)
class EpisodeFacts:
    """What was found out beside the messages: `EpisodeFacts(user_score=0.5, tool_rewards={"search": 1.0})`.

    An agent of the user's raised `agent_error`; `engine_lost` are tries of turns whose engine went away.
    """

    environment: EnvironmentRecord | None = None
    user_score: float | None = None
    user_notes: list[dict[str, Any]] = field(default_factory=list)
    tool_rewards: dict[str, float] = field(default_factory=dict)
    agent_error: str | None = None
    ignored_requests: list[str] = field(default_factory=list)
    engine_lost: list[str] = field(default_factory=list)


@dataclass(slots=True, weakref_slot=True)
class Trajectory:
    """One finished episode. `reward`, `parts` and `remarks` are written by scoring, `advantage` by training,
    `first_right` (was the answer right before the user's first word) by evaluation; None before.

    `segments` holds one ledger, or several when the chat template rewrites history and a new sequence was opened, then
    those of the branches; an endpoint that speaks text only leaves it empty. `artifacts` is what loops left, in JSON.
    """

    sample: Sample
    sibling: int
    step: int
    messages: list[Message]
    turns: list[Turn]
    segments: list[Ledger]
    stop_reason: StopReason
    seconds: float
    failure: str | None = None
    artifacts: dict[str, Any] = field(default_factory=dict)
    render_check: RenderCheck | None = None
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    first_right: bool | None = None
    remarks: list[Remark] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    reused_from: int | None = None
    """The step that trained on it first, where a later one did again; None for a new episode."""
    facts: EpisodeFacts = field(default_factory=EpisodeFacts)

    @property
    def right(self) -> bool | None:
        """Whether the final answer is right; None when nothing scored it."""
        return None if self.reward is None else is_right(self.reward, self.parts)

    @property
    def answers(self) -> list[Message]:
        """The assistant's messages in order; all a scorer may take as the policy's words."""
        return [turn.message for turn in self.turns]

    @property
    def prompt(self) -> Sequence[Message]:
        """What the model was shown first: the sample's prompt, or one that the agent loop composed."""
        prompt, shown_first = self.sample.prompt, first_prompt(self.messages, self.turns)
        # Another system's record may have turns and messages that do not add up.
        lacks = len(shown_first) < len(prompt) and tuple(self.messages[: len(prompt)]) == prompt
        return prompt if lacks else shown_first

    @property
    def every_turn(self) -> list[Turn]:
        """The turns of the main conversation, then those of the branches: each at the place that is its index."""
        return [*self.turns, *(turn for branch in self.branches for turn in branch.turns)]

    @property
    def calls(self) -> list[CallRecord]:
        """Every tool call of the main conversation."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def every_call(self) -> list[CallRecord]:
        """All tool calls of the episode, those of its branches too."""
        return [call for turn in self.every_turn for call in turn.calls]


def first_prompt(messages: list[Message], turns: Sequence[Turn]) -> list[Message]:
    """What a conversation began with: the messages before those of its turns; the last replies may not be shown."""
    after = sum(1 + len(turn.replies) for turn in turns)
    if turns and messages and messages[-1].role is Role.ASSISTANT:
        after -= len(turns[-1].replies)
    return messages[: max(0, len(messages) - after)]


def is_right(reward: float, parts: Mapping[str, float]) -> bool:
    """Right means: the part `acc` says so, or else the reward is at least 1."""
    return parts.get("acc", reward) >= 1.0


@dataclass(slots=True)
class Group:
    """All sibling trajectories of one sample; the unit of scheduling and of the baseline."""

    sample: Sample
    trajectories: list[Trajectory]
