"""How a learner of the embedded task behaves before RL: scripted traces with honest mistakes and recoveries.

The mistakes are systematic (the wrong operation for a kind of problem), not noise: a model taught on them is wrong when
greedy, too, and reinforcement has something to mend. The format is right nearly always.
"""

import random
import re
from collections.abc import Callable

from turnwise.chat.formats import hermes
from turnwise.engines.scripted import Script, ScriptRequest
from turnwise.tasks.arithmetic import Problem, problem_at, write_out
from turnwise.types import ToolCall

STEPWISE = 0.25
"""Share of several-step problems worked out one call at a time."""
FIRST_MISTAKE = 0.8
"""Share of mistakes that take the family's most tempting wrong expression."""
MEND, SPOIL = 0.08, 0.08
"""After the user's doubt: how often a wrong expression is mended and a right one spoilt."""
BROKEN_CALL, BROKEN_JSON = 0.03, 0.015
"""How often a call is first written wrongly, and repaired after the tool's error."""

Action = Callable[[ScriptRequest], str]


def script(seed: int) -> Script:
    """A Script for samples of the arithmetic task; the noise key decides every choice."""

    def say(request: ScriptRequest) -> str:
        split, index = request.noise.sample.rsplit("/", 1)[-1].split(":")
        rng = random.Random(f"{request.noise.seed}/{request.noise.sample}/{request.noise.sibling}")
        actions = _actions(problem_at(split, seed, int(index)), rng)
        return actions[min(request.turn, len(actions) - 1)](request)

    return say


def _actions(problem: Problem, rng: random.Random) -> list[Action]:
    """What the assistant does, turn by turn: solve, answer, and after the doubt verify and answer again."""
    family = problem.family
    grasped = rng.random() < family.grasp
    first = family.right if grasped else _mistake(problem, rng)
    solve: list[Action]
    if grasped and len(family.steps) > 1 and rng.random() < STEPWISE:
        solve = [_step(write_out(step, problem.numbers)) for step in family.steps]
    else:
        solve = _calls("calculate", "expression", write_out(first, problem.numbers), rng)
    mended = rng.random() < (1 - SPOIL if grasped else MEND)
    second = family.right if mended else (_mistake(problem, rng) if grasped else first)
    verify = _calls("python", "code", f"print({write_out(second, problem.numbers)})", rng)
    return [*solve, _answer, *verify, _answer]


def _mistake(problem: Problem, rng: random.Random) -> str:
    wrong = problem.family.wrong
    return wrong[0] if rng.random() < FIRST_MISTAKE else rng.choice(wrong[1:])


def _calls(tool: str, argument: str, text: str, rng: random.Random) -> list[Action]:
    """One good call, sometimes after a broken one that the tool or the parser refuses."""
    good = hermes.render_call(ToolCall("", tool, {argument: text}))
    chance = rng.random()
    if chance < BROKEN_CALL:
        broken = text[:-1] if text.endswith(")") else text + " +"
        bad = hermes.render_call(ToolCall("", tool, {argument: broken}))
        return [lambda _: bad, lambda _: good]
    if chance < BROKEN_CALL + BROKEN_JSON:
        return [lambda _: good.replace("}}", "}"), lambda _: good]
    return [lambda _: good]


def _step(expression: str) -> Action:
    def act(request: ScriptRequest) -> str:
        filled = expression.replace("_", _last_result(request))
        return hermes.render_call(ToolCall("", "calculate", {"expression": filled}))

    return act


def _answer(request: ScriptRequest) -> str:
    return f"#### {_last_result(request)}"


def _last_result(request: ScriptRequest) -> str:
    """The newest tool response, without the .0 of an even division."""
    found = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", request.text, re.DOTALL)
    return re.sub(r"\.0$", "", str(found[-1])) if found else "0"
