"""The transcript shows everything and sends nothing to the terminal that the model wrote as control."""

import io
from collections.abc import Callable, Sequence

from rich.console import Console

from turnwise.storage.transcript import transcript
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Ledger,
    Message,
    Origin,
    Remark,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)


def shown(trajectory: Trajectory, decode: Callable[[Sequence[int]], str] | None = None, colour: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if colour else None
    Console(file=out, width=200, force_terminal=colour, color_system=system).print(transcript(trajectory, decode))
    return out.getvalue()


def episode(reply: str = "18") -> Trajectory:
    call, bad = ToolCall("c0", "calculate", {"expression": "6*3"}), ToolCall("c1", "", {}, "not valid JSON")
    said = Message(Role.ASSISTANT, "<think>hm</think>I ask.", (call, bad), reasoning="hm", answer="I ask.")
    first = Turn(0, said, FinishReason.STOP, 0, 2, 2, 0, 2)
    first.calls = [CallRecord(call, CallStatus.OK, 0.25), CallRecord(bad, CallStatus.MALFORMED, 0.0)]
    first.replies = [Message(Role.TOOL, reply, tool_call_id="c0"), Message(Role.TOOL, "Error", tool_call_id="c1")]
    second = Turn(1, Message(Role.ASSISTANT, "#### 18"), FinishReason.LENGTH, 0, 5, 1, 0, 5, user_score=0.5)
    second.replies = [Message(Role.USER, "Sure?")]
    ledger = Ledger()
    ledger.append([1, 2], Origin.PROMPT, 0)
    ledger.append([3, 4], Origin.POLICY, 0, [-0.1, -0.1], 0)
    ledger.append([5], Origin.TOOL, 0)
    ledger.append([6], Origin.POLICY, 1, [-0.1], 0)
    ledger.append([7], Origin.TEMPLATE, 1)
    prompt = (Message(Role.USER, (Text("6*3?"), Image("cat.png"))),)
    messages = [*prompt, first.message, *first.replies, second.message, *second.replies]
    sample = Sample("test:0", prompt, "arithmetic", "18")
    reason = StopReason.ASSISTANT_TURN_BUDGET
    trajectory = Trajectory(sample, 1, 4, messages, [first, second], [ledger], reason, 1.0)
    trajectory.reward, trajectory.parts = 1.5, {"correct": 1.0, "format": 0.5}
    return trajectory


def test_everything_is_there() -> None:
    text = shown(episode())
    for piece in (
        "test:0  arithmetic, step 4, sibling 1",
        "6*3?",
        "[image cat.png]",
        "assistant, turn 0  2 tokens, stop",
        "hm",
        "I ask.",
        '-> calculate {"expression": "6*3"}',
        "-> a call: not valid JSON",
        "tool calculate, turn 0  ok, 0.25 s",
        "malformed",
        "assistant, turn 1  1 tokens, length",
        "user, turn 1  score 0.5",
        "stopped: assistant_turn_budget",
        "ground truth: 18",
        "reward: 1.5 (correct 1, format 0.5)",
        "tokens: prompt 2, policy 3, tool 1, user 0, template 1, 7 in 1 segment",
    ):
        assert piece in text
    assert "as written:" in text and "<think>hm</think>I ask." in text, "one of its calls could not be read"


def test_the_turns_as_they_were_written() -> None:
    out = io.StringIO()
    trajectory = episode()
    trajectory.turns[0].message = Message(Role.ASSISTANT, "<think>hm</think>6*3?", (), reasoning="hm", answer="6*3?")
    Console(file=out, width=200).print(transcript(trajectory))
    assert "<think>" not in out.getvalue() and "as written" not in out.getvalue()
    Console(file=out, width=200).print(transcript(trajectory, raw=True))
    assert "<think>hm</think>6*3?" in out.getvalue()


def test_nothing_a_model_wrote_reaches_the_terminal_as_control() -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202egnp.exe [bold red]x[/bold red] [/] \ud800\n\ttab"
    trajectory = episode(hostile)
    trajectory.turns[0].message = Message(
        Role.ASSISTANT, hostile, (ToolCall("c0", hostile, {hostile: hostile}),), reasoning=hostile
    )
    trajectory.sample = Sample(hostile, (Message(Role.USER, hostile),), hostile, hostile)
    trajectory.failure, trajectory.parts = hostile, {hostile: 1.0}
    text = shown(trajectory, lambda ids: hostile)
    left = {character for character in text if not character.isprintable()} - {"\n"}
    assert left == set()
    assert "␛[2J" in text and "<U+202E>" in text and "<U+D800>" in text and "[bold red]x[/bold red]" in text


def test_every_origin_has_its_colour_in_the_token_view() -> None:
    text = shown(episode(), lambda ids: " ".join(map(str, ids)), colour=True)
    for coloured in ("\x1b[2m1 2\x1b[0m", "\x1b[32m3 4\x1b[0m", "\x1b[36m5\x1b[0m", "\x1b[90m7\x1b[0m"):
        assert coloured in text
    assert "tokens as the model saw them" not in shown(episode())


def test_failures_and_missing_pieces_are_said() -> None:
    trajectory = episode()
    trajectory.turns[0].replies = []
    trajectory.turns[1].message = Message(Role.ASSISTANT, "")
    trajectory.segments, trajectory.reward, trajectory.parts = [], None, {}
    trajectory.stop_reason, trajectory.failure = StopReason.FAILED, "the endpoint is gone"
    text = shown(trajectory, lambda ids: "never")
    for piece in (
        "failure: the endpoint is gone",
        "reward: none",
        "no token ids were recorded",
        "(nothing)",
        "before its reply was read",
    ):
        assert piece in text
    assert "never" not in text


def test_several_segments_are_told_apart() -> None:
    trajectory = episode()
    trajectory.segments = trajectory.segments * 2
    text = shown(trajectory, lambda ids: "t")
    assert "segment 0" in text and "segment 1" in text and "14 in 2 segments" in text


def test_what_scoring_said_stands_with_its_turn_and_at_the_end() -> None:
    made = episode()
    made.turns[0].scores = {"tool": -0.5}
    made.remarks = [Remark("red lines", "print_only", -0.5, 0), Remark("judge", "TRUE\x1b[31m", 1.0)]
    text = shown(made)
    before, after = text.split("assistant, turn 1")
    assert "scored: tool -0.5" in before and "red lines -0.5: print_only" in before and "judge 1" not in before
    assert "judge 1: TRUE\u241b[31m" in after and "red lines" not in after


def test_an_evaluation_of_a_training_run_shows_the_step_it_was_made_at() -> None:
    trajectory = episode()
    trajectory.step = -1 - 20
    assert "arithmetic, evaluation at step 20, sibling 1" in shown(trajectory)


def test_tokens_of_several_versions_are_told_apart() -> None:
    trajectory = episode()
    assert "version" not in shown(trajectory)
    trajectory.segments[0].append([8, 9, 10], Origin.POLICY, 1, [-0.1, -0.1, -0.1], 1)
    assert "; the policy's: 3 by version 0, 3 by version 1" in shown(trajectory)
