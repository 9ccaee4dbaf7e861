"""Inline images stand in trajectory files as names of the run's copies, and come back; no name leads out of images/."""

import base64
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image as Picture
from pyarrow import parquet

from turnwise.commands.cli import main
from turnwise.errors import DataError, StorageError
from turnwise.reports.replay import Recorded
from turnwise.storage.images.copies import Album, is_kept, with_copies
from turnwise.storage.images.reader import stored_name
from turnwise.storage.index import record
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_rows, read_texts, read_trajectories, write_trajectories
from turnwise.storage.trajectories.rows import to_row
from turnwise.storage.trajectories.schema import SCHEMAS
from turnwise.system.image_sources import kept_name, read_image, unread
from turnwise.types import Branch, FinishReason, Image, Message, Role, Sample, StopReason, Text, Trajectory, Turn

FILE = "eval/step_000000.parquet"


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Picture.new("RGB", (4, 3), colour).save(buffer, "PNG")
    return buffer.getvalue()


def url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


VIEW, CANVAS, CROP, BESIDE = (url(png(colour)) for colour in ("red", "blue", "green", "white"))


def episode(*views: str, name: str = "a") -> Trajectory:
    prompt = Message(Role.USER, (*map(Image, views or (VIEW,)), Text("what?")))
    reply = Message(Role.TOOL, (Text("seen"), Image(CROP)), tool_call_id="c")
    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1, replies=[reply])
    beside = Branch("reviewer", [Message(Role.USER, (Image(BESIDE),))], [])
    kwargs = {"look": {"create_kwargs": {"image": [CANVAS, {"image": CANVAS}]}}, "odd": {"create_kwargs": 3}}
    sample = Sample(
        name,
        (prompt,),
        "s",
        images=tuple(map(Image, views or (VIEW,))),
        tools_kwargs=kwargs,
        info={"extra_info": {"tools_kwargs": kwargs}},
    )
    said = [prompt, turn.message, reply]
    return Trajectory(sample, 0, 0, said, [turn], [], StopReason.ANSWERED, 0.1, branches=[beside], reward=1.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path, "a", "eval")
    made.write_text("config.yaml", "{}\n")
    return made


def in_the_file(path: Path) -> str:
    return json.dumps(parquet.read_table(path).to_pylist())


def test_inline_images_are_kept_once_and_come_back(run: RunDir) -> None:
    told = episode()
    before = replace(told)
    record(run, FILE, [told, told])
    record(run, "eval/step_000001.parquet", [told])
    assert told == before, "who played it still holds its images"
    assert "base64" not in in_the_file(run.path / FILE)
    assert len(list((run.path / "images").iterdir())) == 4
    assert read_trajectories(run.path / FILE) == [told, told]
    assert read_rows(run.path / FILE, [1]) == [told]
    (named,) = read_rows(run.path / FILE, [1], unread=True)
    assert named.turns[0].replies[0].images == (Image(unread(stored_name(png("green")))),)
    assert read_texts(run.path / FILE)[0] == ["what?", "x", "seen"]
    RunDir(run.path / "rescored/x").write_text("config.yaml", "{}\n")
    write_trajectories(run.path / "rescored/x" / FILE, [named])
    assert "base64" not in in_the_file(run.path / "rescored/x" / FILE)
    assert read_trajectories(run.path / "rescored/x" / FILE) == [told]
    assert with_copies(run, [named]) == [told]
    (run.path / "abandoned/eval").mkdir(parents=True)
    (run.path / "eval/step_000001.parquet").rename(run.path / "abandoned/eval/step_000001.parquet")
    assert read_trajectories(run.path / "abandoned/eval/step_000001.parquet") == [told]


def test_only_a_runs_own_folder_is_looked_in(run: RunDir, tmp_path: Path) -> None:
    """Copies beside the run, or above a folder that only has the name of one inside it, are not the run's."""
    record(run, FILE, [episode()])
    (run.path / "images").rename(tmp_path / "images")
    other = tmp_path / "rescored" / "x"
    other.mkdir(parents=True)
    (run.path / "eval").rename(other / "eval")
    (read,) = read_trajectories(other / FILE)
    assert kept_name(read.sample.images[0].source) == stored_name(png("red"))


def test_another_run_that_records_it_keeps_its_own_copies(run: RunDir, tmp_path: Path) -> None:
    record(run, FILE, [episode()])
    other = RunDir.create(tmp_path, "b", "eval")
    record(other, FILE, read_trajectories(run.path / FILE))
    assert sorted(os.listdir(other.path / "images")) == sorted(os.listdir(run.path / "images"))
    assert read_trajectories(other.path / FILE) == [episode()]


@pytest.mark.parametrize("how", ["gone", "changed", "a link", "the folder is a link", "a pipe", "no folder"])
def test_a_copy_that_is_not_there_is_named_where_it_is_needed(run: RunDir, tmp_path: Path, how: str) -> None:
    record(run, FILE, [episode()])
    copy, elsewhere = run.path / stored_name(png("green")), tmp_path / "elsewhere"
    content = copy.read_bytes()
    if how == "the folder is a link":
        copy.parent.rename(elsewhere)
        copy.parent.symlink_to(elsewhere)
    elif how == "no folder":
        copy.parent.rename(elsewhere)
    else:
        copy.unlink()
    if how == "changed":
        copy.write_bytes(png("black"))
    elif how == "a link":
        elsewhere.write_bytes(content)
        copy.symlink_to(elsewhere)
    elif how == "a pipe":
        os.mkfifo(copy)
    (read,) = read_trajectories(run.path / FILE)
    (source,) = (image.source for image in read.turns[0].replies[0].images)
    assert kept_name(source) == stored_name(png("green")) and read.sample.id == "a"
    with pytest.raises(DataError, match=rf"the image images/{copy.stem}.png cannot be read: .* gone or damaged"):
        read_image(source)
    with pytest.raises(StorageError, match=rf"{run.path}: the image images/\w+.png of an episode of a is gone"):
        Recorded.find(run, 0)
    rows, needed = tmp_path / "rows.jsonl", "folder" in how  # else only a crop is gone, which no row has
    assert main(["filter", str(run.path), "--out", str(rows)]) == (2 if needed else 0)
    assert rows.exists() != needed
    assert main(["show", str(run.path)]) == 0
    record(run, "eval/step_000001.parquet", [read])
    (named,) = read_trajectories(run.path / "eval/step_000001.parquet", unread=True)
    assert named.turns[0].replies == read_trajectories(run.path / FILE, unread=True)[0].turns[0].replies


def test_a_path_of_the_same_shape_stays_a_path(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"images/{'0' * 32}.png"
    (tmp_path / "images").mkdir()
    (tmp_path / name).write_bytes(png("black"))
    told = episode(name, f"./{name}", f"././{name}", f"images/{'1' * 32}.png")
    record(run, FILE, [told])
    assert read_trajectories(run.path / FILE) == [told]
    shown = with_copies(run, read_trajectories(run.path / FILE, unread=True))[0].sample.images
    assert [Path(image.source).is_file() for image in shown] == [True, True, True, False]
    assert all(Path(image.source).read_bytes() == png("black") for image in shown[:3])


def test_an_older_file_is_read_as_it_is(run: RunDir) -> None:
    told = episode(VIEW, f"images/{'0' * 32}.png", stored_name(png("red")))
    Album(run).keep([told])
    row = to_row(told)
    row["artifacts"] = json.dumps({"turnwise:branches": row["branches"]})
    parquet.write_table(pa.Table.from_pylist([row], schema=SCHEMAS["5"]), run.file(FILE))
    assert read_trajectories(run.path / FILE) == [told] == read_trajectories(run.path / FILE, unread=True)


@pytest.mark.parametrize(
    "source",
    [
        VIEW.replace("image/png", "image/jpeg"), VIEW.replace("data:", "DATA:"), VIEW + "=", "data:image/png;base64,é",
        "data:image/svg+xml,<svg/>", "data:text/plain,images/x.png", "http://host/x.png", unread(f"images/{'0' * 32}.png"),
    ],
)  # fmt: skip
def test_what_would_not_come_back_to_the_letter_stays_where_it_is(run: RunDir, source: str) -> None:
    record(run, FILE, [episode(source)])
    assert read_trajectories(run.path / FILE) == [episode(source)]


def test_a_link_among_the_copies_vouches_for_no_file(run: RunDir, tmp_path: Path) -> None:
    """Else a run that was sent would have a file of the reader's shown to its model and its scorers."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png("red"))
    (run.path / "images").mkdir()
    name = "images/" + "a" * 32 + ".png"
    (run.path / name).symlink_to(secret)
    run.append_jsonl("images/index.jsonl", {"source": str(secret), "file": name})
    assert not is_kept(run, str(secret))
    (shown,) = with_copies(run, [episode(str(secret))])
    assert not Path(shown.sample.images[0].source).exists()
