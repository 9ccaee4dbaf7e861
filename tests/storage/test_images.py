"""Images are kept with the run: files copied by content, drawings moved out of the calls, everything else left alone."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image as Picture

from turnwise.storage.images.copies import (
    IMAGES,
    STORED_NAME,
    Album,
    images_for,
    recalled,
    session_name,
    stored_name,
    with_copies,
)
from turnwise.storage.index import record
from turnwise.storage.run_dir import RunDir
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Message,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)


def png(colour):
    buffer = io.BytesIO()
    Picture.new("RGB", (4, 3), colour).save(buffer, "PNG")
    return buffer.getvalue()


def episode(images=(), parts=(), info=None):
    message = Message(Role.USER, (*parts, Text("what?"))) if parts else Message(Role.USER, "what?")
    call = CallRecord(ToolCall("c", "python", {}), CallStatus.OK, 0.1, info=info or {})
    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1, calls=[call])
    sample = Sample("a", (message,), "s", images=tuple(Image(str(image)) for image in images))
    return Trajectory(sample, 0, 0, [message], [turn], [], StopReason.ANSWERED, 0.1)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "a", "eval")


def kept(run):
    return sorted(path.name for path in (run.path / "images").glob("*.png")) if (run.path / "images").is_dir() else []


def test_files_are_copied_once_under_the_name_of_their_content(run, tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    (tmp_path / "same.png").write_bytes(png("red"))
    (tmp_path / "blue.png").write_bytes(png("blue"))
    first = episode([tmp_path / "red.png", tmp_path / "same.png"])
    second = episode(parts=(Image(str(tmp_path / "blue.png")),))
    Album(run).keep([first, second])
    Album(run).keep([first])
    assert len(kept(run)) == 2
    lines = run.read_jsonl("images/index.jsonl")
    assert [line["source"] for line in lines] == [str(tmp_path / f"{name}.png") for name in ("red", "same", "blue")]
    assert (run.path / lines[2]["file"]).read_bytes() == png("blue")
    assert lines[0]["file"] == lines[1]["file"]


@pytest.mark.parametrize("line", ["[1]", "{}", "half a li", '{"source": 3}', "[" * 100_000])
def test_a_list_of_images_that_is_broken_stops_nothing(run, tmp_path, line):
    (tmp_path / "red.png").write_bytes(png("red"))
    run.write_text("images/index.jsonl", line + "\n")
    Album(run).keep([episode([tmp_path / "red.png"])])
    assert kept(run)


def test_what_is_no_image_stays_where_it_is(run, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_text("root:x:0")
    Album(run).keep([episode([secret, tmp_path / "gone.png", tmp_path, "data:image/png;base64,xx", "http://x/y.png"])])
    assert not (run.path / "images").exists()


def test_what_a_tool_drew_becomes_a_file(run):
    data = "data:image/png;base64," + base64.b64encode(png("green")).decode()
    info = {"images": [{"name": "show", "data": data}, {"name": "broken", "data": "data:image/png;base64,é?"}, "odd"]}
    trajectory = episode(info=info)
    Album(run).keep([trajectory])
    drawn, broken, odd = trajectory.calls[0].info["images"]
    assert "data" not in drawn and (run.path / drawn["file"]).read_bytes() == png("green")
    assert broken["data"].endswith("?") and odd == "odd"


def test_one_rule_names_the_images_of_a_run_and_of_a_session():
    assert STORED_NAME.fullmatch(stored_name(png("red"))) and stored_name(png("red")) != stored_name(png("blue"))
    assert stored_name(b"<svg") is None and not STORED_NAME.fullmatch("images/../config.yaml")
    names = ("a/cat.jpg", "data:image/gif;base64,AA==", "data:,x", "data:image/../../etc;base64,AA==")
    named = [session_name(Image(name), n) for n, name in enumerate(names)]
    assert named == ["cat.jpg", "image_1.gif", "image_2.png", "image_3.png"]


@pytest.mark.parametrize("kwargs", [5, [1], {"create_kwargs": "x"}, {"create_kwargs": [1]}, {"create_kwargs": {}}])
def test_a_row_of_somebody_elses_that_makes_no_sense_gives_its_own_images(kwargs):
    sample = Sample("a", (), "s", images=(Image("a/cat.png"),), tools_kwargs={"t": kwargs}, info={"extra_info": [1]})
    assert images_for(sample, kwargs) == {"cat.png": Image("a/cat.png")}


def test_the_index_is_read_once_however_many_steps_are_written(run, tmp_path, monkeypatch):
    read = []
    real = RunDir.read_text
    monkeypatch.setattr(RunDir, "read_text", lambda self, name: read.append(name) or real(self, name))
    (tmp_path / "old.png").write_bytes(png("red"))
    Album(run).keep([episode([tmp_path / "old.png"])])
    read.clear()
    album = Album(run)
    for step in range(5):
        (tmp_path / f"{step}.png").write_bytes(png((step, 0, 0)))
        record(
            run,
            f"trajectories/step_{step:06d}.parquet",
            [episode([tmp_path / f"{step}.png", tmp_path / "old.png"])],
            album,
        )
    assert read.count(IMAGES) == 1
    sources = [line["source"] for line in run.read_jsonl(IMAGES)]
    assert len(sources) == len(set(sources)) == 6


def test_a_drawing_is_recalled_for_a_scorer_and_put_back(run):
    url = "data:image/png;base64," + base64.b64encode(png("red")).decode()
    made = episode(info={"images": [{"data": url, "size": [4, 3]}, "odd"]})
    Album(run).keep([made])
    (picture, _), before = made.calls[0].info["images"], dict(made.calls[0].info["images"][0])
    with pytest.raises(RuntimeError), recalled(run, [made]):
        assert picture["data"] == url and "file" not in picture
        raise RuntimeError
    assert picture == before


@pytest.mark.parametrize(
    "name", ["images/../../secret.png", "/etc/hostname", "images/none.png", "images/text.png", 5, None]
)
def test_only_images_of_the_run_are_recalled(run, tmp_path, name):
    (tmp_path / "secret.png").write_bytes(png("red"))
    run.write_text("images/text.png", "no image")
    made = episode(info={"images": [{"file": name}]})
    with recalled(run, [made]):
        assert made.calls[0].info["images"] == [{"file": name}]


def test_a_scorer_sees_the_runs_copies_and_no_other_files(run, tmp_path):
    (tmp_path / "cat.png").write_bytes(png("red"))
    made = episode([tmp_path / "cat.png", tmp_path / "secret.png"])
    Album(run).keep([made])
    (tmp_path / "secret.png").write_bytes(png("blue"))
    (tmp_path / "cat.png").unlink()
    (shown,) = with_copies(run, [made])
    first, second = (image.source for image in shown.sample.images)
    assert first.startswith(str(run.path / "images")) and Path(first).read_bytes() == png("red")
    assert str(tmp_path / "secret.png") not in second and second.endswith("secret.png")
    assert made.sample.images[0].source == str(tmp_path / "cat.png"), "the record stays"


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_in_a_run_that_was_sent_shows_no_file_of_the_readers(run, tmp_path, linked):
    (tmp_path / "cat.png").write_bytes(png("red"))
    drawn = {"images": [{"data": "data:image/png;base64," + base64.b64encode(png("red")).decode()}]}
    made = episode([tmp_path / "cat.png"], info=drawn)
    Album(run).keep([made])
    (name,) = kept(run)
    if linked == "file":
        (tmp_path / "secret.png").write_bytes(png("blue"))
        (run.path / "images" / name).unlink()
        (run.path / "images" / name).symlink_to(tmp_path / "secret.png")
    else:
        (run.path / "images").rename(tmp_path / "elsewhere")
        (run.path / "images").symlink_to(tmp_path / "elsewhere")
    (shown,) = with_copies(run, [made])
    assert not Path(shown.sample.images[0].source).exists()
    with recalled(run, [made]):
        assert "data" not in made.turns[0].calls[0].info["images"][0]
