"""Scoring a stored run again: the stored rewards exactly, and what another scorer would change, by hand."""

import argparse
import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.commands import rescore as command
from turnwise.config import ScoringConfig
from turnwise.config.choices import Advantage
from turnwise.config.sections import to_yaml
from turnwise.data.task import known_scorers
from turnwise.errors import ConfigError, ScoringFailed, StorageError
from turnwise.ext.judge.verdict import Verdict
from turnwise.reports.rescore import compare, rescore, with_scorer
from turnwise.scoring.service import Scoring
from turnwise.storage.trajectories.files import read_sources, read_trajectories, write_trajectories
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Message,
    Remark,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def trajectory(sample: str, sibling: int, answer: str, reward: float | None, failure: str | None = None) -> Trajectory:
    turn = Turn(0, Message(Role.ASSISTANT, answer), FinishReason.STOP, 0, 1, 1, scores={"old": 1.0})
    given = Sample(sample, (Message(Role.USER, "6*3?"),), "arithmetic", "18")
    made = Trajectory(given, sibling, 0, [], [turn], [], StopReason.ANSWERED, 0.0, failure)
    made.reward, made.parts, made.advantage = reward, {} if reward is None else {"acc": reward}, 0.5
    made.remarks = [Remark("judge", "old")]
    return made


async def longer(trajectory: Trajectory, *, unit: float = 1.0) -> dict[str, float]:
    """Not about being right at all: the number of letters, and the answer itself when it has digits."""
    text = trajectory.answers[-1].text
    if "?" in text:
        raise ScoringFailed("nobody there")
    return {"letters": unit * len(text), "form": float("####" in text)}


LONGER = f"{__file__}:longer"


def again(trajectories: list[Trajectory], config: ScoringConfig) -> list[Trajectory]:
    return asyncio.run(rescore(trajectories, Scoring.of(config, ["arithmetic"], task_scorers=known_scorers())))


def test_the_mean_of_no_rewards_is_no_number() -> None:
    before = [trajectory("a", 0, "?", 1.0), trajectory("b", 0, "18", None, "the endpoint died")]
    found = compare({"f": (before, again(before, ScoringConfig(scorers={"default": LONGER})))}, "x", Advantage.rloo)
    assert found.summary()["mean_reward"] is found.summary()["new_mean_reward"] is None
    assert "-" in list(found.tables()[0].columns[1].cells)


def test_what_would_change_by_hand() -> None:
    before = [
        trajectory("a", 0, "18", 1.0), trajectory("a", 1, "1234", 0.0),  # longer is better: the signs flip
        trajectory("b", 0, "18", 1.0), trajectory("b", 1, "19", 0.0),  # equally long: nothing left to learn
        trajectory("c", 0, "20", 0.0), trajectory("c", 1, "200", 0.0),  # now they differ
    ]  # fmt: skip
    after = again(before, ScoringConfig(scorers={"default": LONGER}))
    found = compare({"f": (before, after)}, "longer", Advantage.rloo)
    assert [change.new_reward for change in found.changes] == [2, 4, 2, 2, 2, 3]
    assert [change.advantage for change in found.changes] == [1, -1, 1, -1, 0, 0]
    assert [change.new_advantage for change in found.changes] == [-2, 2, 0, 0, -1, 1]
    assert [change.is_flipped for change in found.changes] == [True, True, False, False, False, False]
    assert [(group.sample, group.lost, group.rewards, group.new_rewards) for group in found.varied] == [
        ("b", True, [1, 0], [2, 2]), ("c", False, [0, 0], [2, 3]),
    ]  # fmt: skip
    counts = found.summary()
    assert (counts["flipped_signs"], counts["groups"]) == (2, 3)
    assert (counts["groups_that_lose_variance"], counts["groups_that_gain_variance"]) == (1, 1)
    assert (counts["higher"], counts["lower"], counts["same"]) == (6, 0, 0)
    assert (counts["mean_reward"], counts["new_mean_reward"]) == (2 / 6, 15 / 6)


def test_what_is_given_is_not_changed_and_nothing_old_is_carried_over() -> None:
    before = [trajectory("a", 0, "18", 1.0)]
    (after,) = again(before, ScoringConfig(scorers={"default": LONGER}, weights={"letters": 0.5}))
    assert (after.reward, after.parts, after.advantage) == (1.0, {"letters": 2.0, "form": 0.0}, None)
    assert after.turns[0].scores == {} and before[0].turns[0].scores == {"old": 1.0}
    assert (before[0].reward, before[0].advantage) == (1.0, 0.5)
    assert after.remarks == [] and before[0].remarks == [Remark("judge", "old")]


def test_failed_episodes_stay_out_and_failed_scoring_is_tried_again() -> None:
    before = [
        trajectory("a", 0, "#### 18", None, "the endpoint died"),
        trajectory("a", 1, "#### 18", None, "scoring: the judge is down"),
        trajectory("a", 2, "?", 1.0),
    ]
    after = again(before, ScoringConfig(scorers={"default": LONGER}))
    assert [(t.reward, t.failure) for t in after] == [
        (None, "the endpoint died"), (8.0, None), (None, "scoring: nobody there"),
    ]  # fmt: skip
    counts = compare({"f": (before, after)}, "longer", Advantage.gae).summary()
    assert (counts["newly_scored"], counts["no_longer_scored"], counts["advantage"]) == (1, 1, "dr_grpo")


def test_a_mistake_in_the_scorer_stops_with_its_own_message() -> None:
    with pytest.raises(ConfigError, match="scoring.weights.*unknown part 'leters': did you mean 'letters'"):
        again([trajectory("a", n, "18", 1.0) for n in range(3)], ScoringConfig(scorers={"default": LONGER}, weights={"leters": 1.0}))  # fmt: skip


def test_siblings_are_those_of_one_file_and_step() -> None:
    first, second = trajectory("a", 0, "18", 1.0), trajectory("a", 0, "18", 0.0)
    later = replace(second, step=1)
    found = compare({"f": ([first, later], [first, later]), "g": ([second], [second])}, "x", Advantage.rloo)
    assert found.groups == 3 and [change.advantage for change in found.changes] == [0, 0, 0]


def test_another_scorer_takes_the_place_of_all_recorded_ones() -> None:
    recorded = ScoringConfig(scorers={"a": "gsm8k"}, options={"gsm8k": {"x": 1}}, weights={"acc": 2.0})
    chosen = with_scorer(recorded, recorded, "exact_match")
    assert (chosen.scorers, chosen.options, chosen.weights) == ({"default": "exact_match"}, {}, {})
    asked = replace(recorded, options={"gsm8k": {"x": 1}, "tapo": {"view": "full_trace"}}, weights={"tool": 0.1})
    chosen = with_scorer(recorded, asked, "tapo")
    assert (chosen.options, chosen.weights) == ({"tapo": {"view": "full_trace"}}, {"tool": 0.1})
    with pytest.raises(ConfigError, match="scoring.options.tapo: every trajectory is scored with exact_match"):
        with_scorer(recorded, asked, "exact_match")
    assert with_scorer(recorded, asked, None) is asked


# --- the command on a real run ------------------------------------------------------------------------------------


def invoke(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scripted evaluation of four samples, two tries each; half of the samples have the answer that is given."""
    folder = tmp_path_factory.mktemp("runs")
    config = configure(
        "engine=scripted", "engine.script=['#### 18']", "eval.group_size=2", f"runs_dir={folder}", "rollout.tools=[]",
        "rollout.interaction=null", "run=r", "scoring.scorers.arithmetic=gsm8k_flexible",
    )  # fmt: skip
    samples = [Sample(f"s{n}", (Message(Role.USER, "?"),), "arithmetic", str(17 + n % 2)) for n in range(4)]
    found: Path = evaluate(config, samples=samples, console=Console(quiet=True)).run
    return found


def test_the_runs_own_config_gives_the_stored_rewards_exactly(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "eval/step_000000.parquet").read_bytes()
    assert invoke(str(run), "--name", "own", "--json") == 0
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert counts["trajectories"] == counts["same"] == 8 and counts["scorer"] == "gsm8k_flexible"
    assert counts["mean_reward"] == counts["new_mean_reward"] == 0.5
    assert (run / "eval/step_000000.parquet").read_bytes() == before
    stored, written = (read_trajectories(run / place / "eval/step_000000.parquet") for place in ("", "rescored/own"))
    assert [(t.sample, t.reward, t.parts, t.segments) for t in stored] == [
        (t.sample, t.reward, t.parts, t.segments) for t in written
    ]
    with pytest.raises(StorageError, match="exists; nothing recorded is overwritten"):
        invoke(str(run), "--name", "own")


def test_another_scorer_with_options_and_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert invoke(str(run), "--scorer", LONGER, "--options", "unit=2", "--weights", "letters=0.5", "form=-1") == 0  # fmt: skip
    places = sorted(path.name for path in (run / "rescored").iterdir() if "longer" in path.name)
    assert [name[-2:] for name in places] == ["-1", "-2"], "a second time goes beside the first"
    found: dict[str, Any] = json.loads((run / "rescored" / places[0] / "comparison.json").read_text())
    assert {change["new_reward"] for change in found["changes"]} == {0.5 * 2 * len("#### 18") - 1}
    assert found["changes"][0]["new_parts"] == {"letters": 14.0, "form": 1.0}
    assert "scored again with" in capsys.readouterr().out


def test_weights_and_options_that_are_none_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="--options belong to the scorer that --scorer names"):
        invoke(str(run), "--options", "unit=2")
    with pytest.raises(ConfigError, match="unknown option 'units': did you mean 'unit'"):
        invoke(str(run), "--scorer", LONGER, "--options", "units=2")
    for text in ("letters", "=1", "letters=much"):
        with pytest.raises(ConfigError, match="write PART=NUMBER"):
            invoke(str(run), "--weights", text)


def test_a_run_without_trajectories_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(configure()))
    with pytest.raises(StorageError, match="holds no trajectories"):
        invoke(str(tmp_path))
    (tmp_path / "eval").mkdir()
    write_trajectories(tmp_path / "eval/step_000000.parquet", [trajectory("a", 0, "#### 18", 1.0)])
    assert invoke(str(tmp_path)) == 0


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


class Looking:
    """A judge that says how many images it was shown, and of which kind."""

    async def verdict(self, question: str, evidence: str, rubric: str, *, images: tuple[Image, ...]) -> Verdict:
        return Verdict(1.0, replies=(f"{len(images)} {images[0].source[:22]}",))


def test_verdicts_are_written_again_and_drawings_are_there_to_look_at(tmp_path: Path) -> None:
    from turnwise.storage.index import record
    from turnwise.storage.run_dir import RunDir

    call = ToolCall("c", "python", {"code": "show(img0)"})
    drawing = {"images": [{"data": f"data:image/png;base64,{PIXEL}", "source": None}]}
    looked = Turn(0, Message(Role.ASSISTANT, "", (call,)), FinishReason.STOP, 0, 1, 1,
                  calls=[CallRecord(call, CallStatus.OK, 0.1, info=drawing)],
                  replies=[Message(Role.TOOL, "[image 1]", tool_call_id="c")])  # fmt: skip
    made = trajectory("a", 0, "18", 1.0)
    made.turns = [looked, replace(made.turns[0], index=1)]
    run = RunDir.create(tmp_path, "r", "eval")
    options = {"tapo": {"judge": f"{__file__}:Looking"}}
    config = configure("run=r", f"runs_dir={tmp_path}", "scoring.scorers.default=tapo")
    config.scoring.options = options
    run.write_text("config.yaml", to_yaml(config))
    record(run, "eval/step_000000.parquet", [made])
    before = (run.path / "eval/step_000000.parquet").read_bytes()
    assert "data" not in drawing["images"][0], "it lies in a file of the run now"
    for name in ("first", "second"):
        assert invoke(str(run.path), "--trust-run", "--name", name) == 0
        (after,) = read_trajectories(run.path / f"rescored/{name}/eval/step_000000.parquet")
        assert after.remarks == [Remark(f"{__file__}:Looking", "1 data:image/png;base64,", 1.0, 0)]
        assert after.turns[0].calls[0].info == {"images": [{"source": None, "file": drawing["images"][0]["file"]}]}
    assert (run.path / "eval/step_000000.parquet").read_bytes() == before


def recorded(folder: Path, *files: list[Trajectory]) -> Path:
    (folder / "config.yaml").write_text(to_yaml(configure()))
    (folder / "trajectories").mkdir()
    for number, trajectories in enumerate(files):
        write_trajectories(folder / f"trajectories/step_{number:06d}.parquet", trajectories)
    return folder


def test_a_run_is_rescored_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is in memory at a time: it is written before the next is read."""
    folder = recorded(tmp_path, *([trajectory(f"s{n}", 0, "#### 18", 1.0)] for n in range(3)))
    done: list[str] = []

    def spied(name: str, real: Any) -> Any:
        return lambda path, *rest, **more: done.append(f"{name} {path.stem[-1]}") or real(path, *rest, **more)

    monkeypatch.setattr("turnwise.reports.rescore.read_trajectories", spied("read", read_trajectories))
    monkeypatch.setattr("turnwise.reports.rescore.write_trajectories", spied("write", write_trajectories))
    assert invoke(str(folder), "--name", "x") == 0
    assert done == ["read 0", "write 0", "read 1", "write 1", "read 2", "write 2"]
    found = json.loads((folder / "rescored/x/comparison.json").read_text())
    assert found["trajectories"] == found["groups"] == 3 and len(found["changes"]) == 3


def test_a_rescoring_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path, [trajectory("a", 0, "18", 1.0)], [trajectory("b", 0, "18", 1.0)])

    def full(path: Path, trajectories: list[Trajectory]) -> None:
        if "step_000001" in path.name:
            raise StorageError("the disk is full")
        write_trajectories(path, trajectories)

    monkeypatch.setattr("turnwise.reports.rescore.write_trajectories", full)
    with pytest.raises(StorageError, match="the disk is full"):
        invoke(str(folder), "--name", "x")
    assert not (folder / "rescored").exists()


def test_the_data_sources_of_a_file_are_read_without_the_rest(tmp_path: Path) -> None:
    made = [trajectory(f"s{n}", 0, "18", 1.0) for n in range(100)]
    made[7] = replace(made[7], sample=replace(made[7].sample, data_source="other"))
    write_trajectories(tmp_path / "a.parquet", made)
    assert read_sources(tmp_path / "a.parquet") == {"arithmetic", "other"}


def test_every_row_of_the_changes_can_be_told_apart_on_a_narrow_terminal() -> None:
    before = [trajectory("train.jsonl:1234567", sibling, "18", 0.0) for sibling in range(2)]
    after = again(before, ScoringConfig(scorers={"default": LONGER}))
    files = {f"{name}.parquet": (before, after) for name in ("trajectories/step_000012", "eval/greedy_step_000040")}
    out = io.StringIO()
    Console(file=out, width=80).print(compare(files, "longer", Advantage.rloo).tables()[1])
    text = out.getvalue()
    assert "…" not in text and text.count("train.jsonl:1234567") == 4
    assert text.count("step 12") == text.count("eval greedy 40") == 2 and "0 -> 2" in text
