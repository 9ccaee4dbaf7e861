"""Learning from a stronger model: episodes of an endpoint, and a teacher that is a script."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_eval_endpoint import call, endpoint

from turnwise import configure, evaluate
from turnwise.data.tasks.arithmetic import problem_at, write_out
from turnwise.errors import ConfigError, DataError
from turnwise.sft import fine_tune
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.training.checks import check_training
from turnwise.types import CallStatus, Role, Trajectory

QUIET = Console(quiet=True)
SHORT = ("sft.steps=1", "sft.warmup=1", "engine.threads=1", "rollout.interaction=null", "eval.samples=4")


def expert(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Asks the calculator for what the problem's numbers make, twice where it is the first of all problems."""
    *_, question = (message["content"] for message in messages if message["role"] == "user")
    problem = next(p for p in (problem_at("train", 0, n) for n in range(8)) if p.question == question)
    if messages[-1]["role"] == "tool" and "rror" not in messages[-1]["content"]:
        return {"content": f"#### {problem.answer}"}
    right = write_out(problem.family.right, problem.numbers)
    first = len(messages) == 1 and problem == problem_at("train", 0, 0)
    return {"content": "", "tool_calls": [call("calculate", {"expression": f"{right} +" if first else right})]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an endpoint on training rows; its last answer is wrong by the reward of another row."""
    folder = tmp_path_factory.mktemp("expert")
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": problem_at("train", 0, number).question}],
            "reward_model": {"ground_truth": str(problem_at("train", 0, number).answer + (number == 3))},
        }
        for number in range(4)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with endpoint(expert) as (url, _):
        rows_to_learn = ("eval.split=train", f"data.train_files=[{folder}/train.jsonl]")
        asked = ("engine=openai", f"engine.base_url={url}", *rows_to_learn)
        return evaluate(configure(*SHORT, *asked, f"runs_dir={folder}", "run=expert"), console=QUIET).run


def taught(recorded: Path, folder: Path, *overrides: str) -> tuple[Any, list[Trajectory]]:
    config = configure(*SHORT, f"sft.recorded=[{recorded}]", f"runs_dir={folder}", "run=taught", *overrides)
    report = fine_tune(config, console=QUIET)
    return report, read_trajectories(report.run / "trajectories" / "step_000000.parquet")


def test_an_endpoint_s_episodes_are_learned_as_the_policy_would_have_written_them(
    recorded: Path, tmp_path: Path
) -> None:
    report, learned = taught(recorded, tmp_path, "sft.min_reward=1")
    assert (report.trajectories, report.used, report.dropped) == (4, 3, {"with reward < 1": 1})
    trajectory = learned[0]
    assert {entry.reward for entry in learned} == {1.0}
    (ledger,) = trajectory.segments
    assert trajectory.render_check is not None and trajectory.render_check.exact
    roles = [Role.USER, *[Role.ASSISTANT, Role.TOOL] * 2, Role.ASSISTANT]
    assert [message.role for message in trajectory.messages] == roles
    statuses = [record.status for record in trajectory.calls]
    assert statuses == [CallStatus.ERROR, CallStatus.OK] and [len(turn.calls) for turn in trajectory.turns] == [1, 1, 0]
    assert int(ledger.loss_mask.sum()) == sum(turn.completion_tokens for turn in trajectory.turns)


def test_episodes_of_rows_to_train_on_are_learned_without_a_warning(recorded: Path, tmp_path: Path) -> None:
    assert "eval.split=train: rows to train on" in (recorded / "plan.txt").read_text()
    taught(recorded, tmp_path, "sft.min_reward=1")
    assert "recorded by an evaluation" not in (tmp_path / "taught" / "log.txt").read_text()
    with pytest.raises(ConfigError, match="eval.split=train is for turnwise eval"):
        check_training(configure("eval.split=train"))


def test_failed_calls_of_an_endpoint_can_be_left_out(recorded: Path, tmp_path: Path) -> None:
    _, learned = taught(recorded, tmp_path, "conversations.leave_out_failed_calls=true")
    (ledger,) = learned[0].segments
    assert sorted(set(ledger.turns[ledger.loss_mask].tolist())) == [1, 2]


def test_an_endpoint_s_calls_need_their_tools_and_its_rows_must_be_no_test(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="4 of an endpoint that calls 'calculate', which this config does not offer"):
        taught(recorded, tmp_path, "rollout.tools=[python]")
    with pytest.raises(DataError, match="samples that this config evaluates on"):
        taught(recorded, tmp_path, f"data.eval_files=[{recorded.parent}/train.jsonl]")


def test_a_scripted_teacher_gets_the_sample_the_messages_and_the_tools(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "teacher.py").write_text(
        "def script(seed):\n"
        "    def say(turn):\n"
        "        assert [tool['function']['name'] for tool in turn.tools] == ['calculate', 'python']\n"
        "        newest = turn.messages[-1]\n"
        "        assert newest.text in turn.text and turn.messages[0].role == 'user'\n"
        "        if newest.role == 'tool':\n"
        "            return f'#### {newest.text}'\n"
        "        return turn.call('calculate', expression=turn.sample.ground_truth)\n"
        "    return say\n"
    )
    console = Console(record=True, file=(tmp_path / "out").open("w"), width=300)
    asked = (
        f"sft.script={tmp_path}/teacher.py:script", "sft.traces=5", "rollout.interaction=code_verify",
        f"data.train_files=[{recorded.parent}/train.jsonl]", "run=scripted",
    )  # fmt: skip
    report = fine_tune(configure(*SHORT, *asked, f"runs_dir={tmp_path}"), console=console)
    assert "sft.traces=5, and there are 4 samples: each is played once" in console.export_text()
    learned = read_trajectories(report.run / "trajectories" / "step_000000.parquet")
    answers = [message.text for trajectory in learned for message in trajectory.answers if not message.tool_calls]
    assert len(learned) == 4 and answers == [
        f"#### {trajectory.sample.ground_truth}" for trajectory in learned for _ in range(2)
    ]
