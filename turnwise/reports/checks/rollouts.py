"""One scripted episode for every kind of sample, scored as a real one would be: no model, and no tool is run."""

import asyncio
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from turnwise.chat.calls.tool_format import ToolFormat, can_write, load_format
from turnwise.config import RolloutConfig
from turnwise.engines.samplers.scripted import Script, ScriptedSampler, ScriptRequest
from turnwise.errors import EngineError, ScoringFailed, TurnwiseError
from turnwise.reports.checks.findings import Outcome, Report
from turnwise.reports.evaluation import ignored_requests
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.prepare import Prepared, endpoint_context, sample_per_route, token_context
from turnwise.scoring.scorer import evaluate
from turnwise.storage.trajectories.ledger_columns import origin_counts
from turnwise.types import FinishReason, Origin, StopReason, ToolCall, Trajectory

if TYPE_CHECKING:
    from turnwise.engines.samplers.endpoint import EndpointReply

SECONDS = 60.0
"""For all of it; a judge may be slow, but a person waits for the start."""
ANSWER = RolloutConfig.scripted_answer
TIMED_OUT = "scripted rollout"
"""The check that ran out of time."""


async def check_rollouts(prepared: Prepared, report: Report) -> None:
    """Play and score one episode per route. What tools and scorers need must be running."""
    try:
        async with asyncio.timeout(SECONDS):
            for trajectory in await _play(prepared, report):
                await _score(prepared, trajectory, report)
    except TimeoutError:
        report.add(TIMED_OUT, Outcome.WARNING, f"users and scorers took more than {SECONDS:g} s; not finished")
    prepared.scoring.metrics()  # what was spent on trying is not the run's


async def _play(prepared: Prepared, report: Report) -> list[Trajectory]:
    context, played = _context(prepared), []
    for sample in sample_per_route(prepared).values():
        name = f"scripted rollout of {sample.data_source}"
        try:
            trajectory = await run_episode(sample, sibling=0, step=0, context=context)
        except TurnwiseError as error:
            report.refuse(name, error)
            continue
        except Exception as error:  # an agent loop is a user's code
            report.add(name, Outcome.ERROR, f"{type(error).__name__}: {error}")
            continue
        if trajectory.stop_reason is StopReason.FAILED:
            report.add(name, Outcome.ERROR, trajectory.failure or "it failed")
            continue
        for doubt in _doubts(trajectory, prepared.config.rollout.scripted_answer):
            report.add(name, Outcome.WARNING, doubt)
        problem = _problem(trajectory)
        turns = f"{len(trajectory.every_turn)} turns, {trajectory.stop_reason}"
        report.add(name, Outcome.ERROR if problem else Outcome.OK, problem or turns)
        played.append(trajectory)
    return played


async def _score(prepared: Prepared, trajectory: Trajectory, report: Report) -> None:
    source, answer = trajectory.sample.data_source, prepared.config.rollout.scripted_answer
    scorer = prepared.scoring.scorers[source]
    name, spec = f"scorer of {source}", getattr(scorer, "__qualname__", type(scorer).__name__)
    before = copy.deepcopy((trajectory.messages, trajectory.turns, trajectory.branches, trajectory.segments))
    try:
        score = await evaluate(scorer, trajectory)
    except TurnwiseError as error:
        report.refuse(name, error)
    except ScoringFailed as error:
        report.add(name, Outcome.ERROR, f"{spec} cannot score: {error}")
    except Exception as error:  # a scorer is a user's code
        text = (
            f"{spec} raised {type(error).__name__}: {error} (for the answer {answer!r:.80} to {trajectory.sample.id})"
        )
        report.add(name, Outcome.ERROR, text)
    else:
        if before != (trajectory.messages, trajectory.turns, trajectory.branches, trajectory.segments):
            report.add(name, Outcome.ERROR, f"{spec} changes the messages, turns or tokens; it may only read them")
            return
        report.add(name, Outcome.OK, f"gave {score.reward:g} for the answer {answer!r:.80}")


def _doubts(trajectory: Trajectory, answer: str) -> list[str]:
    """What an agent of the user's made of an answer that was not written for it, and asked for in vain."""
    doubts = [ignored_requests([trajectory])]
    if trajectory.stop_reason is StopReason.AGENT_ERROR:
        raised = trajectory.facts.agent_error
        doubts.append(f"the agent raised on the scripted answer {answer!r:.80} (rollout.scripted_answer): {raised}")
    return [text for text in doubts if text is not None]


def _problem(trajectory: Trajectory) -> str | None:
    if (not trajectory.turns and trajectory.stop_reason is StopReason.ANSWERED) or not trajectory.every_turn:
        return "the agent loop ended before the policy said anything: it never called chat.generate()"
    policy = origin_counts(trajectory.segments)[Origin.POLICY]
    if trajectory.segments and policy != sum(turn.completion_tokens for turn in trajectory.every_turn):
        return f"the ledger holds {policy} policy tokens, but its turns count another number"
    check = trajectory.render_check
    if check is not None and check.problem is not None:
        return f"the recorded tokens differ from a full render {check.problem}"
    return None


# --- who speaks ---------------------------------------------------------------------------------------------------


def _context(prepared: Prepared) -> RolloutContext:
    config, renderer = prepared.config, prepared.renderer
    call_format = load_format(config.chat.tool_format) if renderer is None else renderer.call_format
    call = harmless_call(call_format, list(prepared.toolbox.tools))
    if renderer is None:
        return endpoint_context(
            prepared,
            lambda tools: _ScriptedEndpoint([call] if tools else [], config.rollout.scripted_answer),
            config.sampling,
        )
    if renderer.end_id is None:
        raise EngineError("the tokenizer names no end token; the scripted sampler cannot end a turn")
    sampler = ScriptedSampler(
        renderer.tokenizer,
        _script(prepared, call),
        end_id=renderer.end_id,
        call_end_id=renderer.call_end_id,
        call_format=call_format,
    )
    return token_context(prepared, renderer, sampler, config.sampling)


def _script(prepared: Prepared, call: str) -> Script:
    thought = prepared.renderer.template.thought if prepared.renderer else ""
    answer = prepared.config.rollout.scripted_answer
    calling = {sample.id for route, sample in sample_per_route(prepared).items() if route.tools}

    def say(request: ScriptRequest) -> str:
        opened = bool(thought) and request.tokenizer.decode(request.token_ids[-8:]).endswith(thought)
        line = call if request.turn == 0 and request.noise.sample in calling else answer
        return request.call_format.render_thought("hm", is_open=True) + line if opened else line

    return say


def harmless_call(call_format: ToolFormat, tools: Sequence[str]) -> str:
    """A call that no tool will run, of a tool that is not there or cut short: a check must have no effects."""
    if not can_write(call_format):
        return ANSWER
    arguments = {"code": "pass"}
    whole = call_format.render_call(ToolCall("t000c0000", "turnwise_check", arguments))
    for end in range(len(whole), 0, -1):
        calls = call_format.parse(whole[:end], turn=0, in_reasoning=False).tool_calls
        if calls and all(call.problem is not None or call.name not in tools for call in calls):
            return whole[:end]
    return ANSWER  # the format has no call that could be refused


class _ScriptedEndpoint:
    """Says these lines, then the answer."""

    def __init__(self, lines: Sequence[str], answer: str) -> None:
        self._left, self._answer = list(lines), answer

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **_: Any) -> "EndpointReply":
        """Replies with the next scripted line, or with the answer when none is left."""
        from turnwise.engines.samplers.endpoint import EndpointReply

        line = self._left.pop(0) if self._left else self._answer
        return EndpointReply(line, [], FinishReason.STOP, 1, 1, "scripted")
