"""Records that differ from a full render for no declared reason: a warning in evaluation, a stop in training."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.chat.render_alignment import Walk
from turnwise.errors import TurnwiseError
from turnwise.reports.checks.rollouts import ANSWER
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.train import train

QUIET = Console(quiet=True)
LATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' (old)' if loop.first and messages | length > 16 else '' }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Rewrites only what nobody tries beforehand: the beginning of a conversation of more than sixteen messages."""
STUBBORN = (
    "from turnwise import BaseInteraction\n"
    "class Stubborn(BaseInteraction):\n"
    "    async def generate_response(self, instance_id, messages, **kwargs):\n"
    "        return len(messages) > 20 or messages[-1]['content'] == CONTENT, 'Are you sure?', 0.0, {}\n"
)
"""Goes on asking, except whom the start tries out with."""


@pytest.fixture
def rewriting(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "late.jinja").write_text(LATE)
    (tmp_path / "users.py").write_text(f"CONTENT = {ANSWER!r}\n{STUBBORN}")
    return (
        f"chat.template={tmp_path}/late.jinja",
        f"rollout.interaction={tmp_path}/users.py:Stubborn",
        "rollout.tools=[]",
        f"runs_dir={tmp_path}/runs",
        "run=late",
    )


def test_evaluation_warns_once_with_a_count_and_the_first_place(rewriting: tuple[str, ...], tmp_path: Path) -> None:
    config = configure("engine=scripted", "eval.samples=3", *rewriting)
    config.engine.script = ["It is 42."]
    console = Console(record=True, quiet=False, file=(tmp_path / "out.txt").open("w"), width=2000)
    report = evaluate(config, console=console)
    warnings = [line for line in (tmp_path / "runs" / "late" / "log.txt").read_text().splitlines() if "warning" in line]
    assert len(warnings) == 1 and "3 of 3 checked episodes hold other tokens than one full render" in warnings[0]
    assert "at token 0 (turn 0)" in warnings[0] and "(old)" in warnings[0] and "chatml_hermes" in warnings[0]
    assert "3 of 3 checked episodes" in console.export_text()
    problems = [one.render_check.problem for one in read_trajectories(report.run / "eval" / "step_000000.parquet")]
    assert ["(old)" in problem for problem in problems] == [True] * 3


def test_the_scripted_rollout_finds_what_it_can(rewriting: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(f"CONTENT = ''\n{STUBBORN}")
    with pytest.raises(TurnwiseError, match=r"scripted rollout.*differ from a full render at token 0.*\(old\)"):
        evaluate(configure("eval.samples=3", *rewriting), console=QUIET)
    assert not (tmp_path / "runs").exists()


def test_declared_rewriting_is_not_warned_about(rewriting: tuple[str, ...], tmp_path: Path) -> None:
    config = configure("engine=scripted", "eval.samples=1", "chat.history=verbatim", *rewriting)
    config.engine.script = ["It is 42."]
    evaluate(config, console=QUIET)
    log = tmp_path / "runs" / "late" / "log.txt"
    assert not log.exists() or "warning" not in log.read_text()


def test_training_stops_and_keeps_the_episodes(rewriting: tuple[str, ...], tmp_path: Path) -> None:
    small = ("training.groups=1", "training.group_size=2", "training.samples=4", "training.steps=1", "eval.samples=2")
    more = ("training.minibatches=1", "training.eval_every=0", "training.max_lag=0", "engine.threads=1")
    with pytest.raises(TurnwiseError, match="episodes hold other tokens than one full render"):
        train(configure(*small, *more, "sampling.max_tokens=64", *rewriting), console=QUIET)
    kept = [path for path in (tmp_path / "runs" / "late").rglob("*.parquet") if read_trajectories(path)]
    assert kept and not (tmp_path / "runs" / "late" / "checkpoints").exists()
    status = json.loads((tmp_path / "runs" / "late" / "status.json").read_text())
    assert status["state"] != "running"


def test_white_space_beside_the_policys_words_may_differ_and_none_elsewhere() -> None:
    walk = Walk("ask:\n It is  so. <end>\nnext:")
    assert walk.pass_given("ask:\n") is None
    assert walk.pass_written("It is so.\n\n", "") is None
    walk.ended("<other>")
    assert walk.pass_given("<end>\nnext:") is None and walk.place == len(walk.rendered)
    strict = Walk("ask: <end>\n\nnext:")
    found = strict.pass_given("ask: <end>\nnext:")
    assert found is not None and "'ask: <end>\\nnext:'" in found and "'ask: <end>\\n\\nnext:'" in found


def test_words_that_a_render_lacks_are_shown_with_what_stands_there() -> None:
    found = Walk("It is not.").pass_written("It is so.", "")
    assert found is not None and "'so.'" in found and "'not.'" in found
    assert Walk("It is").pass_written("It is so.", "") is not None


def test_a_jump_never_goes_back() -> None:
    walk = Walk("one two three", place=8)
    assert walk.jump("one") is not None and walk.place == 8
    assert walk.jump("one two th") is None and walk.place == 10
