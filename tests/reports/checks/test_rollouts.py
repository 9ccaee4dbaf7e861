"""The scripted rollout: calls in the configured format, run by no tool."""

from types import ModuleType

import pytest

from turnwise.chat.formats import code, hermes
from turnwise.data.task_config import compose
from turnwise.reports.checks.rollouts import harmless_call
from turnwise.reports.preflight import preflight
from turnwise.system.plugins import builtin, names_in

FORMATS = [builtin("turnwise.chat.formats", name, "tool format") for name in names_in("turnwise.chat.formats")]


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_call_in_every_format_is_read_as_a_call_and_run_by_nobody(call_format: ModuleType) -> None:
    calls = call_format.parse(
        harmless_call(call_format, ["python", "calculate"]), turn=0, in_reasoning=False
    ).tool_calls
    assert calls and all(call.problem is not None or call.name not in ("python", "calculate") for call in calls)


def test_the_formats_tried_are_the_ones_there_are() -> None:
    assert {hermes, code} <= set(FORMATS)


@pytest.mark.parametrize(("tool_format", "tools"), [("hermes", "[calculate, python]"), ("code", "[python]")])
def test_the_scripted_episode_calls_a_tool_in_the_configured_format(tool_format: str, tools: str) -> None:
    chosen = ["eval.samples=2", "rollout.interaction=null", f"rollout.tools={tools}", f"chat.tool_format={tool_format}"]
    report = preflight(compose(chosen))
    assert report.passed, [finding.text for finding in report.errors]
    (played,) = [finding.text for finding in report.findings if finding.check.startswith("scripted rollout")]
    assert played == "2 turns, answered"


def test_a_tool_that_the_format_cannot_call_is_an_error() -> None:
    report = preflight(compose(["eval.samples=2", "rollout.tools=[calculate]", "chat.tool_format=code"]))
    assert any("chat.tool_format=code: a call of 'calculate' is read back as" in one.text for one in report.errors)


def test_an_agent_loop_that_raises_is_an_error_not_a_crash(tmp_path) -> None:
    (tmp_path / "loops.py").write_text("async def mine(chat):\n    raise KeyError('gone')\n")
    report = preflight(compose(["eval.samples=2", f"rollout.agent={tmp_path}/loops.py:mine"]))
    assert any("KeyError: 'gone'" in one.text for one in report.errors)
