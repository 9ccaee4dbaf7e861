"""Images among recorded tokens: in a run's files by digest and place, read back without a processor, prepared again."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import vision_processors as made
from pyarrow import parquet

from turnwise.chat.images.blocks import place_images
from turnwise.chat.images.processor import ImageProcessor, find_image_processor
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import StorageError
from turnwise.ledger import Ledger, Media, Origin
from turnwise.storage.images.copies import Album, prepare_again
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_rows, read_trajectories, write_trajectories
from turnwise.storage.trajectories.rows import from_row, to_row
from turnwise.storage.trajectories.schema import SCHEMAS
from turnwise.system.image_bytes import digest_of
from turnwise.types import FinishReason, Image, Message, Role, Sample, StopReason, Text, Trajectory, Turn


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = made.build("smolvlm", tmp_path_factory.mktemp("smolvlm"))
    found = find_image_processor(folder, Tokenizer(folder), 40 * 40)
    assert found is not None
    return found


def trajectory(images: ImageProcessor, *contents: bytes, **fields: Any) -> Trajectory:
    ledgers = [Ledger(), Ledger()]
    for ledger in ledgers[: 2 if contents else 1]:
        for content in contents:
            media = images.prepare(content)
            ledger.append([1, 2], Origin.PROMPT, 0)
            ledger.append(media.token_ids, Origin.PROMPT, 0)
            place_images(ledger, [media])
        ledger.append([3, 4], Origin.POLICY, 0, [-0.5, -0.25], 0)
    return Trajectory(
        sample=Sample("s", (Message(Role.USER, "?"),), "d"), sibling=0, step=0, messages=[], turns=[],
        segments=ledgers, stop_reason=StopReason.ANSWERED, seconds=1.0, **fields,
    )  # fmt: skip


def test_images_are_kept_by_digest_and_come_back_at_their_places(images: ImageProcessor, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    large = made.encoded(made.picture(90, 60))
    shown = [trajectory(images, large, made.encoded(made.picture(seed=2), "jpeg")), trajectory(images)]
    Album(run).keep(shown)
    write_trajectories(tmp_path / "a.parquet", shown)
    first = shown[0].segments[0].media
    assert {path.name for path in (tmp_path / "images").iterdir()} == {
        f"{first[0].media.digest}.png", f"{first[1].media.digest}.jpg"
    }  # fmt: skip
    for read in (read_trajectories(tmp_path / "a.parquet"), read_rows(tmp_path / "a.parquet", [0, 1])):
        assert read == shown and read[0].artifacts == {}
        assert read[0].segments[0].media[0].media.content == b""
        with pytest.raises(RuntimeError, match="without having been prepared"):
            dict(read[0].segments[0].media[0].media.arrays)
    assert from_row(to_row(shown[0])) == shown[0]
    prepare_again(tmp_path, read, images.prepare)
    for ledger, before in zip(read[0].segments, shown[0].segments, strict=True):
        assert [span.media for span in ledger.media] == [span.media for span in before.media], "the same objects"
    write_trajectories(tmp_path / "b.parquet", read)
    assert read_trajectories(tmp_path / "b.parquet") == shown


def test_a_file_that_is_gone_changed_or_shown_otherwise_is_named(images: ImageProcessor, tmp_path: Path) -> None:
    run, shown = RunDir(tmp_path), [trajectory(images, made.encoded(made.picture(33, 21)))]
    Album(run).keep(shown)
    write_trajectories(tmp_path / "a.parquet", shown)
    (file,) = (tmp_path / "images").iterdir()

    def again(prepare: Any) -> None:
        prepare_again(tmp_path, read_trajectories(tmp_path / "a.parquet"), prepare)

    with pytest.raises(StorageError, match="the model reads text only"):
        again(None)
    with pytest.raises(StorageError, match="does not show an image as it was shown then"):
        again(lambda content: Media(digest_of(content), content, np.array([1]), np.array([True]), {}))
    file.write_bytes(made.encoded(made.picture(33, 21, seed=9)))
    with pytest.raises(StorageError, match=f"images/{file.stem} of an episode is gone or damaged"):
        again(images.prepare)
    file.unlink()
    with pytest.raises(StorageError, match="gone or damaged"):
        again(images.prepare)


@pytest.mark.parametrize("entry", [["../../etc", 0, 2], ["a" * 32, 0, 99], ["a" * 32, -1, 2], ["a" * 32, 0], "a", 3])
def test_hostile_places_are_refused(images: ImageProcessor, entry: Any, tmp_path: Path) -> None:
    row = to_row(trajectory(images)) | {"artifacts": json.dumps({"turnwise:media": [[entry], []]})}
    parquet.write_table(pa.Table.from_pylist([row], schema=SCHEMAS["6"]), tmp_path / "a.parquet")
    with pytest.raises(StorageError, match="damaged"):
        read_trajectories(tmp_path / "a.parquet")


def test_text_only_rows_are_what_they_were(images: ImageProcessor) -> None:
    row = to_row(trajectory(images))
    assert row["media"] == []
    assert np.array_equal(from_row(row).segments[0].token_ids, [3, 4])


def test_siblings_that_hold_the_same_image_keep_it_once(tmp_path: Path) -> None:
    shown = Image(f"data:image/png;base64,{base64.b64encode(np.random.default_rng(0).bytes(300_000)).decode()}")
    asked = Message(Role.USER, (shown, Text("?")))
    drawn = Turn(0, Message(Role.ASSISTANT, "a"), FinishReason.STOP, 0, 1, 1, replies=[Message(Role.TOOL, (shown,))])
    kwargs = {"look": {"create_kwargs": {"image": shown.source}}}
    sample = Sample("s", (asked,), "x", images=(shown,), tools_kwargs=kwargs)
    group = [Trajectory(sample, at, 0, [asked], [drawn], [], StopReason.ANSWERED, 1.0) for at in range(16)]
    write_trajectories(tmp_path / "a.parquet", group)
    assert (tmp_path / "a.parquet").stat().st_size < 6 * 300_000, "once a column, not once an episode"
    assert read_trajectories(tmp_path / "a.parquet") == group
