"""verl's reward functions: what they are given, what becomes of what they return, and its own rules by source."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import ScoringConfig
from turnwise.data.task import known_scorers
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.scoring.runners.batch import make
from turnwise.scoring.scorer import ScorerSpec, apply, as_scorer, evaluate
from turnwise.scoring.service import check_truths, spec_for
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Remark,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def episode() -> Trajectory:
    """A tool turn, a wrong answer, the user's protest, the right answer."""
    prompt = (Message(Role.USER, "6*3?"),)
    call = ToolCall("c0", "calculate", {"expression": "6*3"})
    record = CallRecord(call, CallStatus.OK, 0.1, score=0.5)
    turns = [
        Turn(0, Message(Role.ASSISTANT, "let me see", (call,)), FinishReason.STOP, 0, 3, 2, 0, 3, [record],
             [Message(Role.TOOL, "#### 18", tool_call_id="c0")]),
        Turn(1, Message(Role.ASSISTANT, "#### 17"), FinishReason.STOP, 0, 6, 1, 0, 6,
             replies=[Message(Role.USER, "Wrong, #### 18!")], user_score=0.0),
        Turn(2, Message(Role.ASSISTANT, "#### 18"), FinishReason.STOP, 0, 9, 1, 0, 9, user_score=1.0),
    ]  # fmt: skip
    messages = [*prompt, *(message for turn in turns for message in (turn.message, *turn.replies))]
    sample = Sample("s", prompt, "arithmetic", "18", info={"extra_info": {"index": 4}})
    return Trajectory(sample, 1, 0, messages, turns, [], StopReason.ANSWERED, 1.0)


def test_words_beside_a_verl_score_are_remarks() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": 0.5, "acc": 1, "critique": "too long", "empty": "", "list": [1]}

    trajectory = episode()
    asyncio.run(apply(as_scorer(compute_score, "m:compute_score"), trajectory))
    assert (trajectory.reward, trajectory.parts) == (0.5, {"acc": 1.0})
    assert trajectory.remarks == [Remark("critique", "too long")]


def test_verl_functions_see_the_last_answer_only() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kw: Any) -> Any:
        seen.update(locals())
        return {"score": float(ground_truth in solution_str), "acc": True, "pred": "18"}

    trajectory = episode()
    asyncio.run(apply(as_scorer(compute_score, "m:compute_score"), trajectory))
    assert (trajectory.reward, trajectory.parts) == (1.0, {"acc": 1.0})
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"]) == ("arithmetic", "#### 18", "18")
    assert seen["extra_info"].pop("rollout_reward_scores") == {}
    assert seen["extra_info"] == {"index": 4, "num_turns": 6, "turn_scores": [0.0, 1.0], "tool_rewards": [0.5]}
    assert trajectory.sample.info == {"extra_info": {"index": 4}}


def test_a_verl_dict_without_score_is_refused() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> Any:
        return {"acc": 1.0}

    with pytest.raises(PluginError, match="m:compute_score"):
        asyncio.run(apply(as_scorer(compute_score, "m:compute_score"), episode()))


BATCH = """
def verl(data_sources, solution_strs, ground_truths, extra_infos, *, scale=1.0, **kwargs):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": scale * said.endswith(truth), "n": info["num_turns"], "pred": said} for _, said, truth, info in rows]


def without_score(data_sources, solution_strs, ground_truths):
    return [{"acc": 1.0} for _ in data_sources]
"""


def batch_score(tmp_path: Path, name: str, **options: Any) -> list[Any]:
    (tmp_path / "own.py").write_text(BATCH)

    async def main() -> list[Any]:
        runner = make(ScoringConfig())
        scorer = runner.scorer(ScorerSpec(f"{tmp_path}/own.py:{name}", options))
        await runner.start()
        try:
            return await asyncio.gather(*(evaluate(scorer, episode()) for _ in range(2)), return_exceptions=True)
        finally:
            await runner.stop()

    return asyncio.run(main())


def test_the_batch_signature(tmp_path: Path) -> None:
    scores = batch_score(tmp_path, "verl", scale=0.5)
    assert [(score.reward, score.parts) for score in scores] == [(0.5, {"n": 6.0})] * 2
    assert all("a dict without 'score'" in str(error) for error in batch_score(tmp_path, "without_score"))
    with pytest.raises(ConfigError, match="unknown option 'solution_strs'"):
        batch_score(tmp_path, "verl", solution_strs=[])
    with pytest.raises(
        PluginError, match=r"a reward function of verl's takes .*it takes a batch: set scoring.run=batch"
    ):
        ScorerSpec(f"{tmp_path}/own.py:verl").make()


def test_options_are_the_parameters_after_the_four() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, bonus: float) -> float:
        return bonus

    trajectory = episode()
    asyncio.run(apply(as_scorer(compute_score, "m:compute_score", {"bonus": 2.0}), trajectory))
    assert trajectory.reward == 2.0
    with pytest.raises(PluginError, match=r"a reward function of verl's takes \(data_source, solution_str"):
        as_scorer(compute_score, "m:compute_score")
    with pytest.raises(PluginError, match="m:bad"):
        as_scorer(lambda solution_str, ground_truth: 0.0, "m:bad")
    with pytest.raises(ConfigError, match="did you mean 'bonus'"):
        as_scorer(compute_score, "m:compute_score", {"bonus": 2.0, "bonnus": 1.0})


VERLS_SOURCES = [
    "openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "math",
    "math_dapo_reasoning", "aime2024", "aime_2025", "aime", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime",
    "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads", "codecontests", "apps", "codeforces", "taco", "hiyouga/geometry3k",
    "searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa", "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle",
]  # fmt: skip
"""All that verl's default_compute_score has a rule for, in 0.6.1, 0.7.0 and its main branch of August 2026."""


def test_every_source_that_verl_scores_by_default_is_scored_here() -> None:
    for source in VERLS_SOURCES:
        ScorerSpec(spec_for(source, {}, known_scorers())).make()


@pytest.mark.parametrize(
    ("source", "answer", "reward", "parts"),
    [
        ("math_dapo", "So.\nAnswer: 34", 1.0, {"acc": 1.0}),
        ("math_dapo", "So.\nAnswer: 35", -1.0, {"acc": 0.0}),
        ("math_dapo", "I do not know.", -1.0, {"acc": 0.0}),
        ("aime2024", "It is \\boxed{34}", 1.0, {"acc": 1.0}),
        ("aime_2025", "Answer: $34$", 1.0, {"acc": 1.0}),
        ("hiyouga/geometry3k", "<think>hm</think> \\boxed{34}", 1.0, {}),
        ("hiyouga/geometry3k", "\\boxed{34}", 0.9, {}),
        ("hiyouga/geometry3k", "<think>hm</think> \\boxed{35}", 0.1, {}),
    ],
)
def test_verls_rules_are_the_default_of_its_sources(
    source: str, answer: str, reward: float, parts: dict[str, float]
) -> None:
    sample = dataclasses.replace(episode().sample, data_source=source, ground_truth="34")
    turn = Turn(0, Message(Role.ASSISTANT, answer), FinishReason.STOP, 0, 3, 2)
    trajectory = dataclasses.replace(episode(), sample=sample, turns=[turn])
    found = asyncio.run(evaluate(ScorerSpec(spec_for(source, {})).make(), trajectory))
    assert found.reward == pytest.approx(reward) and found.parts == parts
    with pytest.raises(DataError, match="needs reward_model.ground_truth"):
        check_truths(ScorerSpec("verl_default"), [dataclasses.replace(sample, ground_truth=None)])
