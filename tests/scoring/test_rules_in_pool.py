"""The scorers that have processes of their own, run in the workers of the scoring pool."""

import asyncio
import json
from typing import Any

import pytest

from turnwise.config import ScoringConfig
from turnwise.config.choices import ScoringRun
from turnwise.ext.sandbox.opening import open_pool
from turnwise.ext.sandbox.scoring.code_tests import sandbox_config
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.scoring.scorer import Score, ScorerSpec, evaluate
from turnwise.scoring.service import make_runner
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


def trajectory(text: str, truth: Any) -> Trajectory:
    message = Message(Role.ASSISTANT, text)
    turn = Turn(0, message, FinishReason.STOP, 0, 1, 1)
    return Trajectory(Sample("s", (), "x", truth), 0, 0, [message], [turn], [], StopReason.ANSWERED, 0.0)


def test_math_and_code_in_worker_processes() -> None:
    async def main() -> list[Score]:
        async with open_pool(sandbox_config()):
            pass
        runner = make_runner(ScoringConfig(run=ScoringRun.pool, workers=1, timeout=60.0))
        math, code = runner.scorer(ScorerSpec("math")), runner.scorer(ScorerSpec("code_tests", {"seconds": 5.0}))
        program = "```python\nprint(int(input()) + 1)\n```"
        tests = json.dumps({"inputs": ["1", "2"], "outputs": ["2", "4"]})
        try:
            await runner.start()
            return [
                await evaluate(math, trajectory("\\boxed{0.5}", "\\frac{1}{2}")),
                await evaluate(code, trajectory(program, tests)),
                await evaluate(math, trajectory("\\boxed{x^2}", "x^3")),
            ]
        finally:
            await runner.stop()

    try:
        scores = asyncio.run(main())
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert scores == [
        Score(1.0, {"acc": 1.0, "format": 1.0}),
        Score(0.5, {"acc": 0.0, "passed": 0.5, "format": 1.0}),
        Score(0.0, {"acc": 0.0, "format": 1.0}),
    ]
