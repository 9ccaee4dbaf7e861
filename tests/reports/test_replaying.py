"""Recorded episodes played again: the same tokens, and what follows from an edit."""

import json
from pathlib import Path

import pytest

from turnwise.commands import cli
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Origin


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of four episodes with tools and a user, not drawn as training would."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = ["eval.samples=4", "engine.threads=1", "run=first", f"runs_dir={runs}", "--no-transcript"]
    drawn = ["eval.sampling={temperature: 0.7, max_tokens: 96}", "sampling.max_tokens=4"]
    assert cli.main(["eval", *arguments, *drawn, "--out", str(runs / "out.jsonl")]) == 0
    assert len((runs / "out.jsonl").read_text().splitlines()) == 4
    return runs / "first"


def replayed(capsys, run, *arguments):
    capsys.readouterr()
    assert cli.main(["replay", str(run), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def trajectories(run):
    return read_trajectories(Path(run) / "eval/step_000000.parquet")


def test_an_episode_is_played_again_token_by_token(recorded, capsys):
    found = replayed(capsys, recorded, "--sample", "2")
    assert found["differences"]["same_tokens"] and found["differences"]["logprob_gap"] == 0.0
    assert found["notes"] == [] and found["of"]["row"] == 2
    (again,) = trajectories(found["written"])
    before = trajectories(recorded)[2]
    assert again.reward == before.reward and len(again.turns) == len(before.turns) > 1
    assert "evaluations  temperature 0.7, top_p 1, top_k 0, 96 tokens" in (recorded / "plan.txt").read_text()
    assert max(turn.completion_tokens for turn in before.turns) > 4, "not training's limit"


def test_an_edited_tool_result_is_what_the_policy_reads(recorded, capsys):
    before = trajectories(recorded)
    row = next(n for n, one in enumerate(before) if one.turns[0].calls)
    found = replayed(capsys, recorded, "--sample", str(row), "--edit", "turn=0", "--with", "987654")
    (after,) = trajectories(found["written"])
    assert after.turns[0].replies[0].text == "987654" != before[row].turns[0].replies[0].text
    place = found["differences"]["parted"]
    assert (
        after.segments[0].token_ids[: place["token"]].tolist()
        == before[row].segments[0].token_ids[: place["token"]].tolist()
    )
    assert after.segments[0].origins[place["token"]] == Origin.TOOL
    assert after.artifacts["edited"] == {"turn": 0, "assistant": False}


def test_a_user_may_speak_where_nobody_had(recorded, capsys):
    last = len(trajectories(recorded)[0].turns) - 1
    found = replayed(capsys, recorded, "--edit", f"turn={last}", "--with", "Try again.")
    (after,) = trajectories(found["written"])
    assert after.turns[last].replies[0].text == "Try again." and len(after.turns) > last + 1


def test_the_policys_own_words_may_be_edited(recorded, capsys):
    found = replayed(capsys, recorded, "--edit", "turn=0,assistant", "--with", "#### 17")
    (after,) = trajectories(found["written"])
    assert after.turns[0].message.text == "#### 17" and not after.turns[0].calls
    assert after.artifacts["edited"]["assistant"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--edit", "turn=0"], "give both"),
        (["--edit", "step=0", "--with", "x"], "write turn=2"),
        (["--edit", "turn=99", "--with", "x"], "turns 0 to"),
        (["--edit", "turn=0,call=7", "--with", "x"], "replies"),
        (["--sample", "99"], "trajectories 0 to 3"),
        (["--file", "../x.parquet"], "has no file"),
    ],
)
def test_a_place_that_is_not_there_is_refused(recorded, capsys, arguments, says):
    before = sorted(path.name for path in recorded.parent.iterdir())
    assert cli.main(["replay", str(recorded), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert sorted(path.name for path in recorded.parent.iterdir()) == before, "nothing is written"


def test_weights_that_were_not_kept_are_asked_for(tmp_path, capsys):
    small = ["training.steps=2", "training.groups=2", "training.group_size=2", "eval.samples=2", "engine.threads=1"]
    drawn = ["eval.sampling.temperature=0.5", "eval.group_size=2", "training.max_lag=0"]
    assert cli.main(["train", *small, *drawn, "run=t", f"runs_dir={tmp_path}"]) == 0
    run = tmp_path / "t"
    assert replayed(capsys, run, "--file", "trajectories/step_000001.parquet")["differences"]["same_tokens"]
    assert cli.main(["replay", str(run), "--file", "trajectories/step_000002.parquet"]) == 2
    assert "weights of version 1" in capsys.readouterr().err
    assert replayed(capsys, run, "--file", "eval/greedy_step_000002.parquet")["differences"]["same_tokens"]
    chosen = replayed(capsys, run)
    assert chosen["of"]["file"].startswith("eval/") and chosen["differences"]["same_tokens"], "the newest that can be"
