"""`turnwise judge check`: what it says of good, wrong and missing endpoints."""

import argparse
import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from judge_servers import GOOD, real_server, says, settings, unreliable

from turnwise.errors import ConfigError
from turnwise.ext.judge import command
from turnwise.ext.judge.endpoint_check import probe_all, settings_in


def test_a_good_endpoint_passes_everything() -> None:
    async def main() -> None:
        async with real_server() as url:
            (report,) = await probe_all(settings(url))
            assert report.is_good and report.model == "rule-judge"
            names = [check.name for check in report.checks]
            assert names[0] == "models" and {"an answer that gives orders", "a graded verdict, twice", "latency"} <= {
                *names
            }
            assert "rule-judge" in report.text() and "FAIL" not in report.text()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "failing"),
    [("TRUE", "an answer that gives orders"), ("0.3", "an equal answer"), ("it depends", "a graded verdict, twice")],
)
def test_a_judge_that_says_yes_to_everything_or_nothing_readable_fails(reply: str, failing: str) -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: says(reply) if number >= 0 else GOOD) as server:
            (report,) = await probe_all(settings(server.url))
            failed = [check.name for check in report.checks if not check.passed]
            assert failing in failed and not report.is_good and f"FAIL  {failing}" in report.text()

    asyncio.run(main())


def test_a_judge_that_changes_its_mind_is_found_out() -> None:
    async def main() -> None:
        def plan(number: int, request: Any) -> Any:
            graded = number >= 0 and "TOOL OUTPUT" in request["messages"][1]["content"]
            return says("0.25" if number % 2 else "0.5") if graded else GOOD

        async with unreliable(plan) as server:
            (report,) = await probe_all(settings(server.url))
            assert [check.name for check in report.checks if not check.passed] == ["a graded verdict, twice"]

    asyncio.run(main())


@contextlib.contextmanager
def in_thread(make: Callable[[], contextlib.AbstractAsyncContextManager[Any]]) -> Iterator[Any]:
    """A server in an event loop of its own: the command starts another."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = make()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[str, str]]:
    async with unreliable() as one, unreliable(model="another") as other:
        yield one.url, other.url


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(["check", *argv]))
    return code, capsys.readouterr().out


def test_the_command_tells_good_from_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with in_thread(two) as (one, other):
        code, out = run(capsys, f"scoring.options.judge.base_urls=[{one}]", "scoring.options.judge.rule=gsm8k")
        assert code == 0 and one in out and "good" in out
        monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", one)
        assert run(capsys)[0] == 0
        code, out = run(capsys, f"scoring.options.judge.base_urls=[{one},{other}]")
        assert code == 1 and "different models" in out
        code, out = run(capsys, f"scoring.options.judge.base_urls=[{one}]", "scoring.options.judge.model=gpt")
        assert code == 1 and "FAIL  models: gpt (serves rule-judge)" in out
    code, out = run(capsys, "scoring.options.judge.retries=0")
    assert code == 1 and "FAIL  models" in out and "ConnectError" in out


def test_settings_are_found_among_a_scorers_options() -> None:
    assert settings_in({"rule": "gsm8k", "votes": 3}).votes == 3
    assert settings_in({"judge": "llm", "judge_options": {"votes": 5}}).votes == 5
    with pytest.raises(ConfigError, match="odd"):
        settings_in({"votes": 2})
