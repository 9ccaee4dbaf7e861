"""Tools that do not work are seen: counts by tool, the commonest error, a sentence for those that mostly fail."""

from turnwise.rollout.toolbox.report import NO_SUCH_TOOL, UNREADABLE, tool_reports, warnings
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def episode(*calls: tuple[str, CallStatus, str | None]) -> Trajectory:
    turn = Turn(0, Message(Role.ASSISTANT, ""), FinishReason.STOP, 0, 0, 0)
    for number, (name, status, said) in enumerate(calls):
        turn.calls.append(CallRecord(ToolCall(f"c{number}", name, {}), status, 0.0))
        if said is not None:
            turn.replies.append(Message(Role.TOOL, said, tool_call_id=f"c{number}"))
    return Trajectory(Sample("s", (), "d"), 0, 0, [], [turn], [], StopReason.ANSWERED, 0.0)


ERROR, OK = CallStatus.ERROR, CallStatus.OK


def test_each_tool_is_counted_by_status_with_its_commonest_error() -> None:
    found = tool_reports(
        [
            episode(("python", ERROR, "Error:\n no\nsandbox"), ("python", CallStatus.TIMEOUT, None), ("look", OK, "x")),
            episode(("python", ERROR, "Error: no sandbox"), ("pyton", CallStatus.UNKNOWN_TOOL, "Error: unknown")),
            episode(("python", OK, "4"), ("", CallStatus.MALFORMED, "Error: not JSON")),
        ]
    )
    assert list(found) == ["look", "python", NO_SUCH_TOOL, UNREADABLE]
    python = found["python"]
    assert (python.calls, python.failed, python.by_status) == (4, 3, {"error": 2, "ok": 1, "timeout": 1})
    assert (python.commonest_error, python.commonest_count) == ("Error: no sandbox", 2)
    assert str(python) == "4 calls, 75% failed (2 error, 1 timeout)" and str(found["look"]) == "1 calls"
    assert warnings(found) == {"python": "tool python failed in 3 of 4 calls, most often: Error: no sandbox"}


def test_a_tool_that_never_worked_is_named_at_once_and_a_few_failures_are_not() -> None:
    assert warnings(tool_reports([episode(("a", ERROR, "Error: x"))]))["a"] == (
        "tool a failed in 1 of 1 calls, most often: Error: x"
    )
    assert warnings(tool_reports([episode(("a", ERROR, "Error"), ("a", ERROR, "Error"), ("a", OK, "1"))])) == {}
    unreadable = tool_reports([episode(*[("", CallStatus.MALFORMED, "Error: not JSON")] * 5, ("a", OK, "1"))])
    assert warnings(unreadable) == {
        UNREADABLE: f"5 of 6 tool calls reached no tool {UNREADABLE}, most often: Error: not JSON"
    }
    assert tool_reports([episode()]) == {}


def test_a_mistake_in_a_tools_code_is_told_from_what_it_says_on_purpose() -> None:
    crashed = CallStatus.CRASHED
    calls = [("a", OK, "1"), ("a", ERROR, "Error: no such page"), ("a", ERROR, "Error: no such page")]
    found = tool_reports(
        [episode(*calls, ("a", crashed, "Error: ValueError: bad page"), ("a", OK, "2"), ("a", OK, "3"))]
    )
    assert (found["a"].crashed, found["a"].commonest_crash) == (1, "ValueError: bad page")
    assert str(found["a"]) == "6 calls, 50% failed (1 crashed, 2 error)" and found["a"].commonest_count == 2
    assert warnings(found) == {
        "a crashed": "the code of tool a raised in 1 of 6 calls, most often ValueError: bad page"
    }
    broken = warnings(tool_reports([episode(("a", crashed, "Error: KeyError: 'x'"))]))
    assert broken == {"a": "tool a failed in 1 of 1 calls, most often: Error: KeyError: 'x'"}  # said once
