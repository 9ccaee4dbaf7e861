"""Causal probes: one that looks falls when its images are spoilt, one that guesses does not; and what a run keeps."""

import asyncio
import base64
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_eval_endpoint import endpoint

from turnwise import configure
from turnwise.commands.cli import main
from turnwise.data.rows import as_row
from turnwise.data.samples import to_sample
from turnwise.errors import ConfigError, EpisodeError
from turnwise.ext.tinylook.canvas import Sizes
from turnwise.ext.tinylook.language import Puzzle
from turnwise.ext.tinylook.rows import png_url, row_of
from turnwise.ext.tinylook.scenes import draw
from turnwise.ext.tinylook.traces import guesser_says, looker_says
from turnwise.reports.probe import FILE, ProbeReport, compare, file_of, probe_model
from turnwise.rollout.image_ablations import Donors, Probe, probed, read_probes, tool_reply_images
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Image, Sample, StopReason, Trajectory

QUIET = Console(quiet=True)
SCENES = [
    draw(puzzle, "test", random.Random(f"{puzzle}{number}"), Sizes())
    for puzzle, count in ((Puzzle.READ, 9), (Puzzle.PRIOR, 7), (Puzzle.NONE, 2))
    for number in range(count)
]


def samples() -> list[Sample]:
    rows = [row_of(scene, "test", 0, number, Sizes()) for number, scene in enumerate(SCENES)]
    return [to_sample(as_row(row, Path("test"), n, "test"), prompt_key="prompt") for n, row in enumerate(rows)]


def probe(folder: Path, says: Any, probes: list[Probe]) -> ProbeReport:
    """Of a policy behind an endpoint, which knows a sample by the view it is shown."""
    given = samples()
    known = {sample.images[0].source: number for number, sample in enumerate(given)}

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        urls = [part["image_url"]["url"] for parts in contents for part in parts if part["type"] == "image_url"]
        turn = sum(message["role"] == "assistant" for message in messages)
        images = [base64.b64decode(url.partition(",")[2]) for url in urls]
        return {"content": says(SCENES[known[urls[0]]], turn, images, random.Random(urls[0]))}

    with endpoint(answer) as (url, _):
        config = configure("task=tinylook", "engine=openai", f"engine.base_url={url}", f"runs_dir={folder}")
        return probe_model(config, probes, samples=given, console=QUIET)


def test_one_that_looks_falls_to_chance_and_its_run_keeps_both_sides(tmp_path: Path) -> None:
    report = probe(tmp_path, looker_says, list(Probe))
    for kind in Probe:
        read = report.of("tinylook/read", kind)
        assert (read.before, read.n, read.looked) == (1.0, 9, 9)
        assert read.after <= 0.4 and read.change == read.after - 1 and read.answers_changed >= 0.6
        assert read.change_stderr is not None and 0 <= read.change_stderr < 0.2
        none = report.of("tinylook/none", kind)
        assert (none.before, none.after, none.looked, none.change) == (1.0, 1.0, 0, 0.0)
        assert report.of("tinylook/prior", kind).change < -0.4
    run = RunDir.open(report.run)
    kept = json.loads(run.read_text(FILE))
    assert kept["probes"] == {
        "blank": "probes/blank.parquet",
        "swap": "probes/swap.parquet",
        "noise": "probes/noise.parquet",
    }
    assert len(kept["results"]) == 9 and kept["results"][0]["data_source"] == "tinylook/none"
    before, after = (read_trajectories(run.path / file) for file in (kept["baseline"], kept["probes"]["blank"]))
    assert [(one.sample.id, one.sibling) for one in before] == [(one.sample.id, one.sibling) for one in after]
    assert after[0].artifacts["probe"] == {"probe": "blank", "images": 1}
    # The same call, and the tool gave the same; only what the model was shown is another.
    assert before[0].calls[0].info["images"][0]["file"] == after[0].calls[0].info["images"][0]["file"]
    assert list(tool_reply_images(before[0])) != list(tool_reply_images(after[0]))
    assert "tinylook/read" in str(report) and "100.0 ±" in str(report)


def test_one_that_guesses_does_not_notice(tmp_path: Path) -> None:
    report = probe(tmp_path, lambda scene, turn, images, rng: guesser_says(scene, turn, rng), [Probe.BLANK])
    prior = report.of("tinylook/prior", Probe.BLANK)
    assert prior.before >= 0.4 and prior.looked == prior.n == 7
    assert all(one.change == 0 and one.answers_changed == 0 for one in report.results)


def pixels(image: Image) -> np.ndarray:
    from turnwise.rollout.sample_images import opened

    return np.asarray(opened(image, "it"))


def trajectory(sample: Sample, reward: float | None, images: tuple[Image, ...] = ()) -> Trajectory:
    from turnwise.types import FinishReason, Message, Role, Text, Turn

    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1)
    turn.replies = [Message(Role.TOOL, (Text("seen"), *images))] if images else []
    made = Trajectory(sample, 0, 0, [], [turn], [], StopReason.ANSWERED, 0.0)
    made.reward = reward
    return made


def test_images_are_spoilt_the_same_way_each_time() -> None:
    one, other, third = samples()[:3]
    picture = Image(png_url(SCENES[0].pixels[:64, :64]))
    donors = Donors.of([trajectory(other, 1.0, (picture,)), trajectory(third, 1.0)])

    def shown(probe: Probe, number: int = 0, sample: Sample = one) -> Image:
        return asyncio.run(probed(probe, donors)(sample, number, (picture,)))[0]

    blank = pixels(shown(Probe.BLANK))
    assert blank.shape == (64, 64, 3) and blank.std() == 0
    assert shown(Probe.NOISE) == shown(Probe.NOISE) != shown(Probe.NOISE, 1)
    assert pixels(shown(Probe.NOISE)).std() > 60
    assert shown(Probe.SWAP) == picture
    with pytest.raises(EpisodeError, match="no other sample was shown"):
        shown(Probe.SWAP, sample=other)


def test_swapped_images_come_from_a_sample_with_another_answer() -> None:
    def with_truth(number: int, truth: str) -> Sample:
        return dataclasses.replace(samples()[0], id=f"s{number}", ground_truth=truth)

    pictures = [Image(f"data:image/png;base64,{number}") for number in range(3)]
    given = [with_truth(0, "7"), with_truth(1, "7"), with_truth(2, "3")]
    donors = Donors.of(trajectory(one, 1.0, (picture,)) for one, picture in zip(given, pictures, strict=True))
    assert {donors.image_for(given[0], number) for number in range(8)} == {pictures[2]}
    assert {donors.image_for(given[2], number) for number in range(20)} == set(pictures[:2])


def test_only_pairs_that_were_both_scored_count() -> None:
    given = samples()[:3]
    before = [trajectory(given[0], 1.0), trajectory(given[1], 1.0), trajectory(given[2], None)]
    after = [trajectory(given[0], 0.0), trajectory(given[1], 1.0), trajectory(given[2], 1.0)]
    found = compare("tinylook/read", Probe.BLANK, before, after)
    assert found is not None and (found.n, found.before, found.after, found.change) == (2, 1.0, 0.5, -0.5)
    assert found.change_stderr == pytest.approx(0.5)
    alone = compare("tinylook/read", Probe.BLANK, before[:1], after[:1])
    assert alone is not None and alone.change_stderr is None
    assert compare("other", Probe.BLANK, before, after) is None


def test_probes_are_named_as_they_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_probes("blank, noise") == [Probe.BLANK, Probe.NOISE]
    assert file_of(Probe.SWAP) == "probes/swap.parquet"
    for given in ("", "blank,blank"):
        with pytest.raises(ConfigError, match="once each"):
            read_probes(given)
    assert main(["probe", "--with", "blnk"]) == 2
    assert "did you mean 'blank'" in capsys.readouterr().err
