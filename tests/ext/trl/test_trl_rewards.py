"""TRL's reward functions: the same call as TRL makes, from one trajectory and from a batch, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import evaluate
from turnwise.config import ScoringConfig
from turnwise.data.rows import as_row
from turnwise.data.sample_to_row import to_values
from turnwise.data.samples import to_sample
from turnwise.data.task_config import configure
from turnwise.errors import ConfigError, DataError, PluginError, ScoringFailed
from turnwise.reports.evaluation import EvalReport
from turnwise.scoring.runners.batch import make
from turnwise.scoring.scorer import ScorerSpec, as_scorer
from turnwise.scoring.scorer import evaluate as scored
from turnwise.types import FinishReason, Message, Origin, Role, StopReason, ToolCall, Trajectory, Turn

QUIET = Console(quiet=True)
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "What is 2+3?"}], "solution": "5", "level": 1},
    {"prompt": [{"role": "user", "content": "What is 4+4?"}], "solution": "8", "level": 2},
]


def said(text: str, row: dict[str, Any] | None = None, number: int = 0) -> Trajectory:
    row = ROWS[number] if row is None else row
    sample = to_sample(as_row(row, Path("f"), number, "f"), prompt_key="prompt", default_source="math")
    message = Message(Role.ASSISTANT, text)
    turn = Turn(0, message, FinishReason.STOP, 0, 1, 1)
    return Trajectory(sample, 0, 3, [*sample.prompt, message], [turn], [], StopReason.ANSWERED, 0.0)


def score(function: Any, trajectory: Trajectory, **options: Any) -> Any:
    return asyncio.run(scored(as_scorer(function, "mine.py:reward", options), trajectory))


def test_a_function_gets_what_trl_gives() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts, completions, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.5]

    assert score(reward, said("5")).reward == 0.5
    assert seen["prompts"] == [ROWS[0]["prompt"]]
    assert seen["completions"] == [[{"role": "assistant", "content": "5"}]]
    assert seen["solution"] == ["5"] and seen["level"] == [1] and seen["completion_ids"] == [[]]
    assert seen["trainer_state"].global_step == 3
    assert {"log_extra", "log_metric", "data_source", "ground_truth"} < set(seen) and "prompt" not in seen


def test_a_plain_prompt_makes_plain_completions() -> None:
    def reward(prompts, completions):
        return [float(prompts == ["2+3="] and completions == ["5"])]

    row = {"prompt": "2+3=", "solution": "5"}
    assert score(reward, said("5", row)).reward == 1.0
    assert to_values(said("5", row).sample) == {"prompt": "2+3=", "solution": "5", "data_source": "math"}


def test_calls_and_results_are_messages_of_the_completion() -> None:
    trajectory = said("It is 5.")
    call = ToolCall("c1", "add", {"a": 2, "b": 3})
    asked = Message(Role.ASSISTANT, "Hm. <call>", tool_calls=(call,), reasoning="a sum", answer="Hm.")
    reply = Message(Role.TOOL, "5", tool_call_id="c1", name="add")
    turn = Turn(0, asked, FinishReason.STOP, 0, 1, 1, replies=[reply])
    trajectory.messages[1:1] = [asked, reply]
    trajectory.turns.insert(0, turn)
    seen: list[Any] = []

    async def reward(completions, **kwargs):
        seen.extend(completions)
        return [1.0]

    assert score(reward, trajectory).reward == 1.0
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert seen == [[
        {"role": "assistant", "content": "Hm.", "reasoning_content": "a sum",
         "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "5", "name": "add"},
        {"role": "assistant", "content": "It is 5."},
    ]]  # fmt: skip


def correct(completions, solution, log_extra, log_metric, **kwargs):
    answers = [completion[-1]["content"] for completion in completions]
    log_extra("answer", answers)
    log_metric("batch", len(answers))
    return [float(answer == right) for answer, right in zip(answers, solution, strict=True)]


async def short(completions, **kwargs):
    return [None if len(completion[0]["content"]) > 3 else 1.0 for completion in completions]


REWARDS = [correct, short]
HERE = f"{Path(__file__)}:REWARDS"


def test_several_functions_have_weights_and_parts() -> None:
    both = score(REWARDS, said("5"), weights=[1.0, 0.5])
    assert both.reward == 1.5 and both.parts == {"correct": 1.0, "short": 1.0, "batch": 1.0}
    assert [(remark.by, remark.text) for remark in both.remarks] == [("answer", "5")]
    silent = score(REWARDS, said("long answer"), weights=[1.0, 0.5])
    assert silent.reward == 0.0 and silent.parts == {
        "correct": 0.0,
        "batch": 1.0,
    }  # None says nothing, and costs nothing


def test_nothing_said_is_no_zero() -> None:
    with pytest.raises(ScoringFailed, match="says nothing"):
        score(short, said("a long answer"))


@pytest.mark.parametrize(
    ("function", "options", "error", "text"),
    [
        (lambda completions, **kwargs: [1.0, 2.0], {}, PluginError, "returned 2 rewards for 1 completions"),
        (lambda completions, **kwargs: 1.0, {}, PluginError, "not a list of rewards"),
        (lambda completions, **kwargs: ["a"], {}, PluginError, "not a finite number"),
        (lambda completions, answer, **kwargs: [1.0], {}, PluginError, "wants the column 'answer'"),
        (correct, {"columns": {"solution": "solutoin"}}, ConfigError, "solution"),
        (REWARDS, {"weights": [1.0]}, ConfigError, "weights are 2 numbers"),
        (REWARDS, {"wieghts": [1.0]}, ConfigError, "weights"),
    ],
)
def test_mistakes_are_named(function: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        score(function, said("5"), **options)


def test_a_parameter_may_take_another_column() -> None:
    def graded(completions, answer):
        return [float(completions[0][0]["content"] == answer[0])]

    assert score(graded, said("5"), columns={"answer": "solution"}).reward == 1.0


def test_a_batch_is_one_call() -> None:
    runner = make(ScoringConfig(batch_size=3))
    scorer = runner.scorer(ScorerSpec(HERE, {"weights": [1.0, 2.0]}))
    silent = runner.scorer(ScorerSpec(HERE.replace("REWARDS", "short")))

    async def work() -> list[Any]:
        batch = [said("5"), said("8", number=1), said("9", number=1)]
        both = await asyncio.gather(*(scored(scorer, one) for one in batch))
        alone = await asyncio.gather(*(scored(silent, said(text)) for text in ("5", "fifty")), return_exceptions=True)
        await runner.stop()
        return [*both, *alone]

    *both, one, none = asyncio.run(work())
    assert [result.reward for result in both] == [3.0, 3.0, 2.0]
    assert {result.parts["batch"] for result in both} == {3.0}
    assert one.reward == 1.0 and isinstance(none, ScoringFailed)


def eval_file(folder: Path, *overrides: str) -> EvalReport:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = configure(
        "task=null",
        f"data.eval_files=[{file}]",
        f"runs_dir={folder}",
        "board.live=false",
        "eval.samples=null",
        *overrides,
    )
    return evaluate(config, console=QUIET)


def test_rows_without_a_data_source_are_refused_or_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data_source.*data\.default_source=NAME"):
        eval_file(tmp_path, "engine=scripted", "engine.script=['5']")
    report = eval_file(
        tmp_path, "engine=scripted", "engine.script=['5']", "data.default_source=math",
        f"scoring.scorers.math={HERE}",
    )  # fmt: skip
    assert [one.reward for one in report.trajectories] == [2.0, 1.0]
    assert set(report.sources) == {"math"}


def test_the_same_call_and_rewards_as_in_a_real_trainer(tmp_path: Path) -> None:
    """One step of GRPOTrainer with the bundled model, greedy, and our evaluation of the same rows, greedy too."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import turnwise.engines.bundled.tiny

    (recorder := tmp_path / "recorder.py").write_text(
        "CALLS = []\n"
        "def length(prompts, completions, completion_ids, trainer_state, solution, level, **kwargs):\n"
        "    rewards = [len(ids) + len(c[0]['content']) / 100 for ids, c in zip(completion_ids, completions)]\n"
        "    step = trainer_state.global_step\n"
        "    rows = zip(prompts, completions, completion_ids, solution, level, rewards)\n"
        "    CALLS.extend((step, sorted(kwargs), *row) for row in rows)\n"
        "    return rewards\n"
    )
    from turnwise.system.plugins import load

    length, calls = (load(f"{recorder}:{name}", "scorer") for name in ("length", "CALLS"))
    tiny = Path(turnwise.engines.bundled.tiny.__file__).parent
    arguments = trl.GRPOConfig(
        str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=2, max_completion_length=12, max_steps=1,
        top_k=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tiny), reward_funcs=[length], train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(tiny), args=arguments,
    )  # fmt: skip
    trainer.train()
    theirs = [json.loads(json.dumps(call)) for call in calls]
    calls.clear()
    report = eval_file(
        tmp_path, f"scoring.scorers.default={recorder}:length", "data.default_source=math", "rollout.agent=single_turn",
        "sampling.temperature=0", "sampling.max_tokens=12", "engine.threads=1", "rollout.interaction=null",
    )  # fmt: skip
    answers = [one.answers[-1].text for one in report.trajectories]  # a scorer is tried before the first episode too
    ours = [json.loads(json.dumps(call)) for call in calls if call[3][0]["content"] in answers]
    assert len(theirs) == 4 and {json.dumps(call[2]) for call in ours} == {json.dumps(call[2]) for call in theirs}
    by_prompt = {json.dumps(call[2]): call for call in theirs}
    for call in ours:
        step, kwargs, *rest = call
        their_step, their_kwargs, *their_rest = by_prompt[json.dumps(call[2])]
        assert rest == their_rest and step == their_step == 0
        assert set(their_kwargs) <= set(kwargs)
    assert sorted(one.reward or 0 for one in report.trajectories) == sorted({call[-1] for call in theirs})


def test_rewards_that_trl_ships(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    think = eval_file(
        tmp_path, "engine=scripted", "engine.script=['<think>\n2 and 3\n</think>\n5']", "data.default_source=math",
        "scoring.scorers.math=trl.rewards:think_format_reward",
    )  # fmt: skip
    assert [one.reward for one in think.trajectories] == [1.0, 1.0]
    (tmp_path / "ids.py").write_text(
        "from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment\n"
        "repeats, overlong = get_repetition_penalty_reward(ngram_size=1), get_soft_overlong_punishment(4, 2)\n"
        "ALONE = [repeats]\n"
    )
    words = ["sampling.temperature=0", "sampling.max_tokens=4", "data.default_source=math"]
    for name in ("repeats", "overlong", "ALONE"):
        report = eval_file(tmp_path, *words, f"scoring.scorers.math={tmp_path}/ids.py:{name}")
        for one in report.trajectories:
            ids = [int(token) for token in one.segments[0].token_ids[one.segments[0].origins != Origin.PROMPT]]
            wanted = -max(0, len(ids) - 2) / 2 if name == "overlong" else len(set(ids)) / len(ids) - 1
            assert ids and one.reward == pytest.approx(max(-1.0, wanted))


@pytest.mark.parametrize("names", [["completion_ids"], ["prompts"], ["log_metric"], ["trainer_state", "solution"]])
def test_any_parameter_of_trls_makes_it_one(names: list[str]) -> None:
    seen: dict[str, Any] = {}
    call = f"seen.update(kwargs, {', '.join(f'{name}={name}' for name in names)})"
    function = eval(f"lambda {', '.join(names)}, **kwargs: {call} or [0.25]", {"seen": seen})
    assert score(function, said("5")).reward == 0.25
    assert score([function], said("5")).reward == 0.25
    assert seen["solution"] == ["5"] and seen["completion_ids"] == [[]]


def test_a_scorer_of_another_kind_with_such_an_option_is_none() -> None:
    def ours(trajectory, prompts=2):
        return float(prompts)

    def verls(data_source, solution_str, ground_truth, extra_info=None, completions=3):
        return float(completions)

    assert score(ours, said("5")).reward == 2.0 and score(verls, said("5")).reward == 3.0
    with pytest.raises(PluginError, match="a list of reward functions: ours takes none of prompts, completions"):
        score([lambda completions: [1.0], ours], said("5"))
