"""Choosing a scorer, reading its result, scoring earlier answers."""

import asyncio
import dataclasses
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.data.task import known_scorers
from turnwise.errors import ConfigError, DataError, PluginError, ScoringFailed
from turnwise.scoring.rules.gsm8k import gsm8k
from turnwise.scoring.rules.text_match import exact_match
from turnwise.scoring.scorer import (
    Score,
    ScorerSpec,
    apply,
    apply_all,
    as_scorer,
    cut,
    evaluate,
    score_answer,
    turns_before_feedback,
)
from turnwise.scoring.service import spec_for
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Ledger,
    Message,
    Origin,
    Remark,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def episode() -> Trajectory:
    """A tool turn, a wrong answer, the user's protest, the right answer; the prompt holds an example answer."""
    prompt = (Message(Role.USER, "1+1?"), Message(Role.ASSISTANT, "#### 2"), Message(Role.USER, "6*3?"))
    call = ToolCall("c0", "calculate", {"expression": "6*3"})
    record = CallRecord(call, CallStatus.OK, 0.1, score=0.5)
    turns = [
        Turn(0, Message(Role.ASSISTANT, "let me see", (call,)), FinishReason.STOP, 0, 3, 2, 0, 3, [record],
             [Message(Role.TOOL, "#### 18", tool_call_id="c0")]),
        Turn(1, Message(Role.ASSISTANT, "#### 17"), FinishReason.STOP, 0, 6, 1, 0, 6,
             replies=[Message(Role.USER, "Wrong, #### 18!")], user_score=0.0),
        Turn(2, Message(Role.ASSISTANT, "#### 18"), FinishReason.STOP, 0, 9, 1, 0, 9, user_score=1.0),
    ]  # fmt: skip
    ledger = Ledger()
    ledger.append([1, 2, 3], Origin.PROMPT, 0)
    ledger.append([4, 5], Origin.POLICY, 0, [-0.1, -0.2], 0)
    ledger.append([6], Origin.TOOL, 0)
    ledger.append([7], Origin.POLICY, 1, [-0.3], 0)
    ledger.append([8, 9], Origin.USER, 1)
    ledger.append([10], Origin.POLICY, 2, [-0.4], 0)
    messages = [*prompt, *(said for turn in turns for said in (turn.message, *turn.replies))]
    sample = Sample("s", prompt, "arithmetic", "18", info={"extra_info": {"index": 4}})
    return Trajectory(sample, 1, 0, messages, turns, [ledger], StopReason.ANSWERED, 1.0)


def reward_of(result: Any) -> Trajectory:
    async def mine(trajectory: Trajectory) -> Any:
        return result

    trajectory = episode()
    asyncio.run(apply(mine, trajectory))
    return trajectory


def test_numbers_and_parts_become_reward() -> None:
    assert (reward_of(0.5).reward, reward_of(0.5).parts) == (0.5, {})
    assert reward_of(True).reward == 1.0
    assert (reward_of({"a": 1, "b": 0.5}).reward, reward_of({"a": 1, "b": 0.5}).parts) == (1.5, {"a": 1.0, "b": 0.5})
    scored = reward_of({"score": 2.0, "acc": True})
    assert (scored.reward, scored.parts) == (2.0, {"acc": 1.0})


def test_numpy_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert reward_of(numpy.float32(0.25)).reward == 0.25


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (None, "returned None (NoneType) as a score"),
        ("1.0", "returned '1.0' (str) as a score"),
        (math.nan, "returned nan (float) as a score"),
        (math.inf, "returned inf (float) as a score"),
        (10**400, "(int) as a score"),
        ({}, "returned an empty dict, {}"),
        ({"a": "x"}, "returned 'x' (str) as part 'a'"),
        ({"a": math.nan}, "returned nan (float) as part 'a'"),
        ({"a": 1e308, "b": 1e308}, "the sum of its parts"),
        ([1.0], "returned [1.0] (list) as a score"),
        (Score(1.0, None), "a Score whose parts are None"),  # type: ignore[arg-type]
        (Score(1.0, {}, [0.5]), "a Score whose turns are [0.5]"),  # type: ignore[arg-type]
        (Score(1.0, remarks=("well done",)), "returned 'well done' as a remark"),  # type: ignore[arg-type]
        (Score(1.0, remarks=(Remark("me", "well done", turn=9),)), "as a remark: it must be"),
        (Score(1.0, remarks=(Remark("me", "well done", math.inf),)), "returned inf (float) as the value of a remark"),
    ],
)
def test_results_that_are_no_score_name_the_scorer(result: Any, complaint: str) -> None:
    with pytest.raises(PluginError, match="mine") as caught:
        reward_of(result)
    assert complaint in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_failed_trajectory_keeps_no_reward() -> None:
    async def never(trajectory: Trajectory) -> float:
        raise AssertionError("asked about a failed trajectory")

    trajectory = episode()
    trajectory.stop_reason, trajectory.failure = StopReason.FAILED, "the endpoint went away"
    asyncio.run(apply(never, trajectory))
    assert trajectory.reward is None and trajectory.parts == {}
    assert asyncio.run(score_answer(never, trajectory, 1)) is None


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("answer"), "raised KeyError: 'answer'"),
        (ValueError("two\nlines"), "raised ValueError: two lines"),
        (ValueError("x" * 5000), "raised ValueError: " + "x" * 300 + " ("),
        (AssertionError(), "raised AssertionError ("),
        (SystemExit(3), "raised SystemExit: 3"),
        (asyncio.CancelledError(), "raised CancelledError"),
        (Untold(), "raised Untold: (its text cannot be read: RuntimeError)"),
    ],
)
def test_what_a_scorer_raises_is_a_failure_on_one_line_and_never_a_reward(error: BaseException, said: str) -> None:
    async def broken(trajectory: Trajectory) -> float:
        raise error

    trajectory = episode()
    asyncio.run(apply(broken, trajectory))
    assert trajectory.reward is None and trajectory.failure is not None
    assert trajectory.failure.startswith("scoring: scorer ") and "broken " + said in trajectory.failure
    assert "(test_scorer.py, line " in trajectory.failure and "\n" not in trajectory.failure


def test_one_of_many_that_raises_what_stops_a_run_is_raised_alone() -> None:
    async def picky(trajectory: Trajectory) -> float:
        if trajectory.sibling == 2:
            raise DataError("sample 's': no truth")
        await asyncio.sleep(60)
        return 1.0

    many = [dataclasses.replace(episode(), sibling=number) for number in range(4)]
    with pytest.raises(DataError, match="no truth"):
        asyncio.run(apply_all(picky, many))
    assert all(one.reward is None for one in many)


def test_remarks_come_with_the_reward_and_do_not_stay_with_an_earlier_answer() -> None:
    said = (Remark("me", "wordy", 0.5), Remark("me", "y" * 20_000, turn=1))
    trajectory = reward_of(Score(0.5, remarks=said))
    assert trajectory.remarks[0] == said[0]
    assert len(trajectory.remarks[1].text) < 10_100 and trajectory.remarks[1].text.endswith("(20000 characters)")
    assert cut(trajectory, 1).remarks == []


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1", [1.0], {}], ids=repr)
def test_a_wrong_result_among_siblings_is_one_plain_error(value: object) -> None:
    async def wrong(trajectory: Trajectory) -> object:
        return value

    with pytest.raises(PluginError, match="wrong returned"):
        asyncio.run(apply_all(wrong, [episode(), episode()]))  # type: ignore[arg-type]


def test_scorers_are_found_by_source_then_default_then_known() -> None:
    table = {"arithmetic": "exact_match", "default": "gsm8k_strict"}
    assert spec_for("arithmetic", table) == "exact_match"
    assert spec_for("other", table) == "gsm8k_strict"
    assert spec_for("openai/gsm8k", table) == "gsm8k_strict"
    assert spec_for("openai/gsm8k", {"other": "exact_match"}, known_scorers()) == "gsm8k"
    assert spec_for("arithmetic", {}, known_scorers()) == "gsm8k"
    assert spec_for("HuggingFaceH4/MATH-500", {}) == "math"


@pytest.mark.parametrize("score", [{5: 1.0}, {None: 1.0, "score": 1.0}, {"": 1.0}, Score(1.0, {5: 1.0}), Score(1.0, {}, {0: {5: 1.0}})])  # type: ignore[dict-item]  # fmt: skip
def test_a_part_whose_name_is_no_text_is_refused(score: Any) -> None:
    """After the run is read back it would have another name, or the run could not be written at all."""
    with pytest.raises(PluginError, match="names of parts are texts"):
        asyncio.run(evaluate(as_scorer(lambda trajectory: score, "odd"), episode()))


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'openai/gsm8k'"):
        spec_for("openai/gsm8", {}, known_scorers())
    with pytest.raises(ConfigError, match="did you mean 'gsm8k_strict'"):
        ScorerSpec("gsm8k_strikt").make()


def test_options_are_the_parameters_after_the_trajectory() -> None:
    async def half(trajectory: Trajectory, *, share: float = 0.5) -> float:
        return share

    trajectory = episode()
    asyncio.run(apply(as_scorer(half, "m:half", {"share": 0.25}), trajectory))
    assert trajectory.reward == 0.25
    with pytest.raises(ConfigError, match="did you mean 'share'"):
        as_scorer(half, "m:half", {"shar": 1})


def test_turns_get_scores_and_a_turn_that_is_not_there_is_an_error() -> None:
    async def by_turn(trajectory: Trajectory) -> Score:
        return Score(1.0, {"a": 1.0}, {turn.index: {"tool": 0.5} for turn in trajectory.turns})

    async def beyond(trajectory: Trajectory) -> Score:
        return Score(1.0, {}, {99: {"tool": 0.5}})

    trajectory = episode()
    asyncio.run(apply(by_turn, trajectory))
    assert [turn.scores for turn in trajectory.turns] == [{"tool": 0.5}] * len(trajectory.turns)
    with pytest.raises(PluginError, match="scored turns"):
        asyncio.run(apply(beyond, episode()))


def test_a_failure_of_the_machinery_is_not_a_zero() -> None:
    async def down(trajectory: Trajectory) -> float:
        raise ScoringFailed("the judge is down")

    trajectory = episode()
    asyncio.run(apply(down, trajectory))
    assert trajectory.reward is None and trajectory.failure == "scoring: the judge is down"


def test_plain_functions_async_or_not() -> None:
    class Judge:
        async def __call__(self, trajectory: Trajectory) -> float:
            return float(len(trajectory.turns))

    async def score(scorer: Any) -> float | None:
        trajectory = episode()
        await apply(as_scorer(scorer, "my.module:scorer"), trajectory)
        return trajectory.reward

    assert asyncio.run(score(lambda trajectory: 0.25)) == 0.25
    assert asyncio.run(score(Judge())) == 3.0
    with pytest.raises(PluginError, match=r"my\.module:scorer"):
        asyncio.run(score(lambda trajectory: "high"))


def test_the_own_contract_comes_first_then_trls_then_verls() -> None:
    """Each is known by its parameters; a name of another contract among the options changes nothing."""

    async def own(trajectory: Trajectory, *, completions: float = 1.0, ground_truth: str = "") -> float:
        return completions

    def annotated(it: Trajectory, *, solution_str: float = 2.0) -> float:
        return solution_str if it.turns else 0.0

    def trl(completions: list[Any], **columns: Any) -> list[float]:
        return [3.0 for _ in completions]

    def verl(data_source: str, solution_str: str, ground_truth: str, prompts: float = 4.0) -> float:
        return prompts

    def any_name(it: Any) -> float:
        return 5.0 if isinstance(it, Trajectory) else 0.0

    scorers = [as_scorer(function, "m:f") for function in (own, annotated, trl, verl, any_name)]
    assert [asyncio.run(evaluate(scorer, episode())).reward for scorer in scorers] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_no_contract_fits_is_told_ours() -> None:
    def two(one: Any, other: Any) -> float:
        return 0.0

    with pytest.raises(
        PluginError, match=r"m:two takes \(one: Any, other: Any\); it must take \(trajectory\), and after"
    ):
        as_scorer(two, "m:two")


def test_wrong_signatures_are_refused() -> None:
    def one_with_options(trajectory: Trajectory, weight: float = 2.0) -> float:
        return weight

    def keyword_only(*, trajectory: Trajectory) -> float:
        return 0.0

    as_scorer(one_with_options, "m:one")
    for bad in (lambda: 0.0, lambda a, b: 0.0, keyword_only, 3):
        with pytest.raises(PluginError, match="m:bad"):
            as_scorer(bad, "m:bad")


def test_a_scorer_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_scorers_for_test.py").write_text("async def half(trajectory):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    trajectory = episode()
    asyncio.run(apply(ScorerSpec("my_scorers_for_test:half").make(), trajectory))
    sys.modules.pop("my_scorers_for_test")
    assert trajectory.reward == 0.5


def test_cutting_leaves_what_came_before() -> None:
    whole = episode()
    first = cut(whole, 1)
    assert [message.text for message in first.messages] == ["1+1?", "#### 2", "6*3?", "let me see", "#### 18"]
    assert first.segments[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    second = cut(whole, 2)
    assert second.messages[-1].text == "Wrong, #### 18!" and second.turns == whole.turns[:2]
    assert second.segments[0].token_ids.tolist() == list(range(1, 10)) and len(second.segments[0].logprobs) == 9
    assert cut(whole, 3).messages == whole.messages and cut(whole, 3).segments == whole.segments
    assert cut(whole, 0).messages == list(whole.sample.prompt) and cut(whole, 0).turns == []
    assert len(whole.turns) == 3 and len(whole.segments[0]) == 10
    for turns in (-1, 4):
        with pytest.raises(ValueError, match="cannot cut"):
            cut(whole, turns)


def test_the_answer_before_feedback_is_scored_apart() -> None:
    whole = episode()
    assert turns_before_feedback(whole) == 2
    before = asyncio.run(score_answer(gsm8k, whole, turns_before_feedback(whole)))
    final = asyncio.run(score_answer(gsm8k, whole, len(whole.turns)))
    assert before is not None and final is not None
    assert (before.reward, final.reward) == (0.0, 1.0)
    assert whole.reward is None
    assert turns_before_feedback(cut(whole, 1)) == 1


def test_exact_match_is_exact() -> None:
    trajectory = episode()
    assert asyncio.run(exact_match(trajectory)) == 0.0
    trajectory.turns[-1].message = Message(Role.ASSISTANT, " 18\n")
    assert asyncio.run(exact_match(trajectory)) == 1.0
    trajectory.turns.clear()
    assert asyncio.run(exact_match(trajectory)) == 0.0
    with pytest.raises(DataError):
        asyncio.run(exact_match(Trajectory(Sample("s", (), "x"), 0, 0, [], [], [], StopReason.ANSWERED, 0.0)))


def test_a_scorer_that_waits_can_still_be_cancelled() -> None:
    async def main() -> Trajectory:
        async def forever(trajectory: Trajectory) -> float:
            await asyncio.sleep(3600)
            return 1.0

        trajectory = episode()
        task = asyncio.ensure_future(apply(forever, trajectory))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return trajectory

    assert asyncio.run(main()).failure is None
