"""Episodes that an endpoint wrote, which has messages and no tokens: with the tokens that the student would write."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.errors import DataError
from turnwise.rollout.imitation import Dialogue, imitate
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.system.stopping import run_stoppable
from turnwise.types import CallStatus, JsonSchema, Message, Sample, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Student:
    """The model that is to learn: what it must be able to read."""

    renderer: Renderer
    vocabulary: int
    context_length: int


def with_tokens(
    trajectories: Sequence[Trajectory], config: Config, student: Student, note: Callable[[str], None]
) -> list[Trajectory | str]:
    """Each of them, rendered where it has no tokens; or why it cannot be, in words that follow a number."""
    bare = [trajectory for trajectory in trajectories if not trajectory.segments]
    if not bare:
        return list(trajectories)
    tools = _shown_tools(config, [trajectory.sample for trajectory in bare])

    async def render() -> list[Trajectory | str]:
        return [
            entry if entry.segments else await _rendered(entry, tools(entry.sample), student) for entry in trajectories
        ]

    outcomes = run_stoppable(render())
    note(f"{len(bare)} episodes of an endpoint are rendered with the chat template and tool-call format of the model")
    return outcomes


def _shown_tools(config: Config, samples: Sequence[Sample]) -> Callable[[Sample], list[JsonSchema]]:
    """The schemas that a rollout of this config shows the student."""
    toolbox = Toolbox(
        [each for spec in config.rollout.tools for each in load_tools(spec, config)], config.rollout, config
    )
    plan = Plan(samples, config, toolbox, Users(config, None))
    return lambda sample: toolbox.schemas(plan.route(sample).tools)


async def _rendered(trajectory: Trajectory, tools: list[JsonSchema], student: Student) -> Trajectory | str:
    if trajectory.branches:
        return "of an endpoint with branches, whose prompts have tools of their own"
    offered = {schema["function"]["name"] for schema in tools}
    for record in trajectory.calls:
        if record.call.problem is not None:
            return "of an endpoint with a call that cannot be read"
        if record.status is not CallStatus.UNKNOWN_TOOL and record.call.name not in offered:
            return f"of an endpoint that calls {record.call.name!r}, which this config does not offer (rollout.tools)"
    prompt = trajectory.prompt
    dialogue = Dialogue(
        replace(trajectory.sample, prompt=tuple(prompt)),
        [_in_parts(message) for message in trajectory.messages[len(prompt) :]],
        tools,
    )
    try:
        imitation = await imitate(dialogue, student.renderer, student.context_length)
    except DataError as error:
        return f"of an endpoint that cannot be rendered: {error}"
    turns = list(_with_outcomes(imitation.turns, trajectory.turns))
    return replace(
        trajectory, messages=imitation.messages, turns=turns, segments=imitation.segments,
        render_check=imitation.render_check,
    )  # fmt: skip


def _in_parts(message: Message) -> Message:
    """What an endpoint's format read from the text, instead of the text."""
    return message if message.answer is None else replace(message, content=message.visible, answer=None)


def _with_outcomes(turns: Sequence[Turn], recorded: Sequence[Turn]) -> Iterator[Turn]:
    """The turns with what came of them when they were played."""
    for turn, before in zip(turns, recorded, strict=True):
        calls = [
            replace(record, call=call) for record, call in zip(before.calls, turn.message.tool_calls, strict=False)
        ]
        yield replace(
            turn, calls=calls, user_score=before.user_score, generate_seconds=before.generate_seconds,
            reply_seconds=before.reply_seconds, scores=before.scores,
        )  # fmt: skip
