"""Evaluation end to end with the embedded model and with scripted ones: report, records, failures."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import Message, Role, Sample, ToolError, Trajectory, evaluate, tool
from turnwise.data.task_config import configure
from turnwise.errors import ConfigError, DataError, PluginError, StorageError, TurnwiseError
from turnwise.ext.board.runs import Runs
from turnwise.reports.evaluation import grade_all
from turnwise.reports.evaluation_run import Failures
from turnwise.reports.plan import plan_text
from turnwise.rollout.collector import run_group
from turnwise.rollout.prepare import open_context, prepare
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import FinishReason, Image, Origin, StopReason, Turn

QUIET = Console(quiet=True)
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'


@tool
async def double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


async def correct(trajectory: Trajectory) -> float:
    return float(bool(trajectory.answers) and trajectory.answers[-1].visible == trajectory.sample.ground_truth)


def samples(count: int = 3) -> list[Sample]:
    return [
        Sample(f"q{n}", (Message(Role.USER, f"Twice 21? ({n})"),), "doubles", ground_truth="42") for n in range(count)
    ]


def script_config(folder: Path, *said: str, overrides: tuple[str, ...] = ()) -> Any:
    config = configure("task=null", "engine=scripted", f"runs_dir={folder}", *overrides)
    config.engine.script = list(said)
    return config


def test_the_embedded_model_goes_through_the_whole_flow(tmp_path: Path) -> None:
    config = configure("eval.samples=12", "seed=5", f"runs_dir={tmp_path}")
    report = evaluate(config, console=QUIET)
    (source,) = report.sources.values()
    assert source.data_source == "arithmetic" and source.episodes == 12 and source.failed == 0
    assert source.episodes_with_valid_call is not None and source.episodes_with_valid_call >= 0.9
    assert source.user_turns == 1.0
    for trajectory in report.trajectories:
        assert trajectory.stop_reason is StopReason.USER_ENDED
        (ledger,) = trajectory.segments
        policy = sum(len(ids) for origin, _, ids in ledger.spans() if origin is Origin.POLICY)
        assert policy == sum(turn.completion_tokens for turn in trajectory.turns) == ledger.loss_mask.sum()
        assert {Origin.PROMPT, Origin.POLICY, Origin.TOOL, Origin.USER, Origin.TEMPLATE} == set(ledger.origins.tolist())
        assert any(
            message.text == "Are you sure? Can you write Python code to verify?" for message in trajectory.messages
        )
    stored = read_trajectories(report.run / "eval" / "step_000000.parquet")
    assert stored == report.trajectories
    assert json.loads((report.run / "eval" / "step_000000.json").read_text()) == json.loads(
        json.dumps(report.as_json())
    )
    assert {"config.yaml", "plan.txt"} <= {path.name for path in report.run.iterdir()}
    shown = Runs([report.run]).open(report.run.name).details(time.time())
    assert shown["problems"] == [] and shown["state"] == "finished" and shown["trajectories"] == 12
    assert shown["accuracy"] == report.accuracy == report.sources["arithmetic"].accuracy


def test_results_do_not_depend_on_concurrency_or_group(tmp_path: Path, exact_engine: None) -> None:
    """The same trajectories, bit by bit, whether episodes run alone or side by side, in a group or not."""

    def play(*overrides: str) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        config = configure("eval.samples=3", "rollout.tools=[calculate]", f"runs_dir={tmp_path}", *overrides)
        report = evaluate(config, console=QUIET)
        return {
            (t.sample.id, t.sibling): (t.segments[0].token_ids.tolist(), t.segments[0].logprobs.tolist())
            for t in report.trajectories
        }

    alone = play("rollout.concurrency=1", "eval.group_size=2")
    together = play("rollout.concurrency=64", "eval.group_size=2")
    narrow = play("rollout.concurrency=64", "eval.group_size=2", "engine.max_batch=3")
    single = play("rollout.concurrency=64", "eval.group_size=1")
    assert alone == together == narrow
    assert all(alone[key] == value for key, value in single.items())
    assert alone[("arithmetic/test:0", 0)] != alone[("arithmetic/test:0", 1)], "siblings must differ"
    assert play("seed=1", "eval.group_size=1") != single


def test_a_task_in_plain_python(tmp_path: Path) -> None:
    config = script_config(tmp_path, CALL, "42", overrides=("rollout.interaction=code_verify",))
    report = evaluate(config, samples=samples(), tools=[double], scorer=correct, console=QUIET)
    (source,) = report.sources.values()
    assert (source.accuracy, source.first_accuracy, source.num_turns) == (1.0, 1.0, 3.0)
    assert source.calls_by_status == {"ok": 3}
    assert source.render_exact == 1.0


def test_flips_are_counted_against_the_answer_before_the_feedback(tmp_path: Path) -> None:
    mends = evaluate(
        script_config(tmp_path, "41", "42", overrides=("rollout.interaction=code_verify",)),
        samples=samples(), scorer=correct, console=QUIET,
    ).sources["doubles"]  # fmt: skip
    spoils = evaluate(
        script_config(tmp_path, "42", "41", overrides=("rollout.interaction=code_verify",)),
        samples=samples(), scorer=correct, console=QUIET,
    ).sources["doubles"]  # fmt: skip
    assert (mends.first_accuracy, mends.accuracy, mends.wrong_to_right, mends.right_to_wrong) == (0.0, 1.0, 3, 0)
    assert (spoils.first_accuracy, spoils.accuracy, spoils.wrong_to_right, spoils.right_to_wrong) == (1.0, 0.0, 0, 3)


def test_text_of_tools_and_users_is_never_taken_as_the_answer(tmp_path: Path) -> None:
    @tool
    async def leak() -> str:
        """Say the answer."""
        return "#### 42"

    call = '<tool_call>\n{"name": "leak", "arguments": {}}\n</tool_call>'
    config = script_config(tmp_path, call, "I do not know.", overrides=("scoring.scorers={default: gsm8k}",))
    report = evaluate(config, samples=samples(), tools=[leak], console=QUIET)
    assert any("#### 42" in message.text for message in report.trajectories[0].messages)
    assert report.sources["doubles"].accuracy == 0.0


def test_a_run_that_mostly_fails_stops_and_says_why_but_keeps_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "plug"
    folder.mkdir()
    (folder / "users.py").write_text(
        "from turnwise import BaseInteraction\n"
        "class Broken(BaseInteraction):\n"
        "    asked = 0\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        Broken.asked += 1\n"
        "        if Broken.asked > 1:\n"  # it was there when it was tried out
        "            raise RuntimeError('the simulator is down')\n"
        "        return True, '', None, {}\n"
    )
    config = script_config(tmp_path, "42", overrides=(f"rollout.interaction={folder}/users.py:Broken", "run=broken"))
    with pytest.raises(TurnwiseError, match="20 of 20 episodes failed|of .* episodes failed.*the simulator is down"):
        evaluate(config, samples=samples(20), scorer=correct, console=QUIET)
    kept = read_trajectories(tmp_path / "broken" / "eval" / "step_000000.parquet")
    assert kept and all(t.reward is None and "the simulator is down" in (t.failure or "") for t in kept)


def test_a_few_failures_are_counted_and_left_out_of_the_average(tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(
        "from turnwise import BaseInteraction\n"
        "class Moody(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        if '(3)' in messages[0]['content']:\n"  # not the first, which is tried out before the run
        "            raise RuntimeError('no')\n"
        "        return True, '', None, {}\n"
    )
    config = script_config(tmp_path, "42", overrides=(f"rollout.interaction={tmp_path}/moody.py:Moody",))
    report = evaluate(config, samples=samples(10), scorer=correct, console=QUIET)
    (source,) = report.sources.values()
    assert (source.episodes, source.failed, source.accuracy) == (10, 1, 1.0)
    assert source.stop_reasons == {"user_ended": 9, "failed": 1}


def test_the_failure_share_is_judged_only_on_enough_episodes() -> None:
    def failed(count: int) -> list[Trajectory]:
        return [
            Trajectory(samples(1)[0], 0, 0, [], [], [], StopReason.FAILED, 0.0, failure="down") for _ in range(count)
        ]

    half = Failures(0.5)
    half.check(failed(7))
    with pytest.raises(TurnwiseError, match="8 of 8 episodes failed .*down"):
        half.check(failed(1))
    Failures(1.0).check(failed(8))


def test_every_episode_is_looked_at_once_for_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr("turnwise.reports.evaluation_run.is_failed", lambda t: bool(looked.append(t.sample.id)))
    evaluate(script_config(tmp_path, "42"), samples=samples(20), scorer=correct, console=QUIET)
    assert len(looked) == len(set(looked)) == 20


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rollout.tools": "[calculat]"}, PluginError, "did you mean 'calculate'?"),
        ({"rollout.interaction": "code_verfy"}, PluginError, "did you mean 'code_verify'?"),
        ({"rollout.agent": "tool_caling"}, PluginError, "did you mean 'tool_calling'?"),
        ({"chat.tool_format": "hermse"}, PluginError, "did you mean 'hermes'?"),
        ({"model.path": "tinny"}, ConfigError, "did you mean 'tiny'?"),
        ({"model.path": "/no/such/folder"}, ConfigError, "no such folder"),
        ({"scoring.scorers": "{arithmetic: gsm8kk}"}, ConfigError, "did you mean 'gsm8k'?"),
        ({"scoring.scorers": "{arithmetics: gsm8k}"}, ConfigError, "did you mean 'arithmetic'?"),
        ({"data.eval_files": "nothing.parquet"}, DataError, "nothing.parquet"),
        ({"data.max_prompt_tokens": "5"}, DataError, ""),
        ({"data.max_prompt_tokens": "5", "data.overlong": "error"}, DataError, ""),
        ({"chat.template": "nope"}, TurnwiseError, "chatml_hermes"),
        ({"task": "null"}, ConfigError, "nothing to read"),
        ({"eval.samples": "null"}, ConfigError, "eval.samples"),
        ({"rollout.interaction_kwargs.max_trns": "2"}, ConfigError, "did you mean 'max_turns'?"),
        ({"verl.interactions_file": "no.yaml"}, ConfigError, "no.yaml"),
    ],
)
def test_wrong_names_and_files_are_found_before_a_model_is_loaded(
    tmp_path: Path, change: dict[str, str], error: type[Exception], text: str
) -> None:
    config = configure(f"runs_dir={tmp_path}", "eval.samples=4", *(f"{key}={value}" for key, value in change.items()))
    with pytest.raises(error) as caught:
        evaluate(config, console=QUIET)
    assert text in str(caught.value)
    assert not list(tmp_path.iterdir()), "no run directory for a run that never began"


def test_prompts_that_are_too_long_are_left_out_with_a_count() -> None:
    config = configure("eval.samples=40", "data.max_prompt_tokens=96")
    prepared = prepare(config, "test", limit=40)
    assert prepared.dropped > 0 and len(prepared.samples) + prepared.dropped == 40
    assert f"{prepared.dropped} left out" in plan_text(prepared)


def test_images_for_a_text_model_are_refused(tmp_path: Path) -> None:
    picture = Sample("p", (Message(Role.USER, "What is it?"),), "arithmetic", images=(Image("cat.png"),))
    with pytest.raises(DataError, match="reads text only"):
        evaluate(configure(f"runs_dir={tmp_path}"), samples=[picture], console=QUIET)


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    config = script_config(tmp_path, "42", overrides=("run=mine",))
    evaluate(config, samples=samples(), scorer=correct, console=QUIET)
    with pytest.raises((ConfigError, StorageError), match="exists"):
        evaluate(config, samples=samples(), scorer=correct, console=QUIET)


def test_a_tool_error_is_told_to_the_model_and_counted(tmp_path: Path) -> None:
    @tool
    async def double(number: int) -> str:  # the name the script calls
        """Double a number."""
        raise ToolError("the machine is tired")

    report = evaluate(
        script_config(tmp_path, CALL, "42"), samples=samples(1), tools=[double], scorer=correct, console=QUIET
    )
    assert report.sources["doubles"].calls_by_status == {"error": 1}
    assert report.warnings == ["tool double failed in 1 of 1 calls, most often: Error: the machine is tired"]
    said = str(report)
    assert f"warning: {report.warnings[0]}" in said and "1 calls, 100% failed (1 error)" in said
    assert "100.0% ± 25.0 (n=1)" in said and "one standard error" in said and str(report.run) in said
    assert any("the machine is tired" in message.text for message in report.trajectories[0].messages)


def test_two_groups_of_one_sample_share_nothing(tmp_path: Path) -> None:
    """Siblings of one group have their own ledgers, messages and turns."""
    config = configure("eval.samples=1", "rollout.tools=[calculate]", f"runs_dir={tmp_path}")
    prepared = prepare(config, "test", limit=1)

    async def play() -> list[Trajectory]:
        async with open_context(prepared) as context:
            return (await run_group(prepared.samples[0], range(3), step=0, context=context)).trajectories

    first, second, third = asyncio.run(play())
    assert first.segments[0] is not second.segments[0] and first.messages is not third.messages
    assert len({tuple(t.segments[0].token_ids.tolist()) for t in (first, second, third)}) > 1


class Meeting:
    """A scorer that answers only when so many wait for it at once."""

    def __init__(self, count: int) -> None:
        self.count, self.waiting, self.met = count, 0, asyncio.Event()

    async def __call__(self, trajectory: Trajectory) -> float:
        self.waiting += 1
        if self.waiting >= self.count:
            self.met.set()
        await asyncio.wait_for(self.met.wait(), 60)
        return float(trajectory.sample.ground_truth)


def test_first_answers_are_scored_together_and_stay_in_order() -> None:
    def talked(number: int) -> Trajectory:
        first = Turn(
            0, Message(Role.ASSISTANT, "no"), FinishReason.STOP, 0, 1, 1, replies=[Message(Role.USER, "sure?")]
        )
        last = Turn(1, Message(Role.ASSISTANT, "yes"), FinishReason.STOP, 0, 1, 1)
        sample = Sample(f"s{number}", (), "x", ground_truth=number % 2)
        said = [first.message, *first.replies, last.message]
        return Trajectory(sample, 0, 0, said, [first, last], [], StopReason.ANSWERED, 0.0, reward=1.0)

    many = [talked(number) for number in range(9)]
    found = asyncio.run(grade_all(many, {"x": Meeting(9)}))
    assert [entry.trajectory for entry in found] == many
    assert [entry.first_right for entry in found] == [bool(number % 2) for number in range(9)]


async def raising(trajectory: Trajectory) -> float:
    raise KeyError("answer")


async def wordless(trajectory: Trajectory) -> Any:
    return None


def test_a_scorer_that_raises_stops_an_evaluation_with_its_cause_on_one_line(tmp_path: Path) -> None:
    config = script_config(tmp_path, "42", overrides=("run=r",))
    with pytest.raises(TurnwiseError, match=r"raising cannot score: .* raised KeyError: 'answer' \(test_eval"):
        evaluate(config, samples=samples(), scorer=raising, console=QUIET)
    assert not (tmp_path / "r").exists(), "it is tried out before anything is written"

    async def tiring(trajectory: Trajectory) -> float:
        return await raising(trajectory) if (tmp_path / "r").exists() else 0.0

    with pytest.raises(TurnwiseError, match=r"3 of 3 .* raised KeyError: 'answer' \(test_eval") as caught:
        evaluate(config, samples=samples(), scorer=tiring, console=QUIET)
    assert "\n" not in str(caught.value)
    recorded = read_trajectories(tmp_path / "r/eval/step_000000.parquet")
    assert [one.reward for one in recorded] == [None] * 3, "what was played is kept, and nothing counts as a zero"


def test_a_scorer_that_returns_no_score_is_named_alone(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"scorer wordless returned None \(NoneType\) as a score"):
        evaluate(script_config(tmp_path, "42"), samples=samples(), scorer=wordless, console=QUIET)


def test_a_sample_without_a_ground_truth_is_named_before_anything_is_written(tmp_path: Path) -> None:
    given = [*samples(), Sample("q9", (Message(Role.USER, "?"),), "doubles")]
    config = script_config(tmp_path, "42", overrides=("scoring.scorers.doubles=gsm8k",))
    with pytest.raises(DataError, match="scorer gsm8k: sample 'q9': the ground truth of 'doubles' must be a number"):
        evaluate(config, samples=given, console=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_whose_zygote_is_killed_while_the_run_starts_is_one_line(tmp_path, monkeypatch) -> None:
    from turnwise.ext.sandbox.pool import SandboxPool

    prove = SandboxPool._prove

    async def killed_first(pool, level, refusals):
        pool._zygote.process.kill()
        return await prove(pool, level, refusals)

    monkeypatch.setattr(SandboxPool, "_prove", killed_first)
    config = script_config(tmp_path, "42", overrides=("rollout.tools=[python]", "sandbox.preload=[]"))
    with pytest.raises(TurnwiseError) as caught:
        evaluate(config, samples=samples(), scorer=correct, console=QUIET)
    assert "\n" not in str(caught.value) and "sandbox" in str(caught.value)


def test_a_sandbox_lost_in_a_scorer_of_the_users_leaves_the_episode_without_a_reward(tmp_path) -> None:
    from turnwise.ext.sandbox.zygote_process import SandboxLost

    async def careless(trajectory: Trajectory) -> float:
        if trajectory.sample.id == "q1":
            raise SandboxLost("the session was lost")
        return 1.0

    config = script_config(tmp_path, "42", overrides=("scoring.max_failures=0.5", "scoring.retries=0"))
    report = evaluate(config, samples=samples(), scorer=careless, console=QUIET)
    assert [one.reward for one in report.trajectories] == [1.0, None, 1.0]
