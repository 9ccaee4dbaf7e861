"""Images of rows: the same samples whatever the storage, and nothing that leads out of a folder or a tar."""

import base64
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from turnwise.data.lint import lint
from turnwise.data.loader import load_samples
from turnwise.data.rows import as_row
from turnwise.data.samples import to_sample
from turnwise.errors import DataError
from turnwise.storage.images.copies import images_for
from turnwise.system.image_bytes import data_url, digest_of
from turnwise.system.image_sources import members, open_source, read_image
from turnwise.types import Image, Sample


def png(colour: str, size: tuple[int, int] = (9, 7), mode: str = "RGB") -> bytes:
    held = io.BytesIO()
    Pillow.new(mode, size, colour).save(held, "PNG")
    return held.getvalue()


CATS, DOG = [png("red"), png("blue")], png("green")
NAMES = ["cats/1.png", "cats/2.png", "dog.png"]
CONTENT = [*CATS, DOG]


def rows(first: list[Any], second: list[Any]) -> list[dict[str, Any]]:
    return [
        {"data_source": "x", "prompt": "<image> and <image>?", "images": first, "reward_model": {"ground_truth": "2"}},
        {"data_source": "x", "prompt": "<image> what?", "images": second, "reward_model": {"ground_truth": "dog"}},
    ]


def as_jsonl(folder: Path, values: list[dict[str, Any]]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in values))
    return path


def as_parquet(folder: Path, values: list[dict[str, Any]]) -> Path:
    path = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(values), path)
    return path


def put_files(folder: Path) -> None:
    for name, content in zip(NAMES, CONTENT, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def put_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in zip(NAMES, CONTENT, strict=True):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def files_beside(folder: Path) -> tuple[Path, str | None]:
    put_files(folder)
    return as_jsonl(folder, rows(NAMES[:2], NAMES[2:])), None


def files_in_a_folder(folder: Path) -> tuple[Path, str | None]:
    put_files(folder / "pictures")
    return as_jsonl(folder, rows(NAMES[:2], NAMES[2:])), str(folder / "pictures")


def a_tar(folder: Path) -> tuple[Path, str | None]:
    put_tar(folder / "pictures.tar")
    return as_jsonl(folder, rows(NAMES[:2], NAMES[2:])), str(folder / "pictures.tar")


def a_tar_by_column(folder: Path) -> tuple[Path, str | None]:
    put_tar(folder / "pictures.tar")
    values = [one | {"images_from": "pictures.tar"} for one in rows(NAMES[:2], NAMES[2:])]
    return as_parquet(folder, values), None


def a_tar_in_the_path(folder: Path) -> tuple[Path, str | None]:
    put_tar(folder / "pictures.tar")
    named = [f"pictures.tar!/{name}" for name in NAMES]
    return as_jsonl(folder, rows(named[:2], named[2:])), None


def plain_bytes(folder: Path) -> tuple[Path, str | None]:
    return as_parquet(folder, rows(CATS, [DOG])), None


def objects(folder: Path) -> tuple[Path, str | None]:
    cells = [{"bytes": content, "path": name} for content, name in zip(CONTENT, NAMES, strict=True)]
    return as_parquet(folder, rows(cells[:2], cells[2:])), None


def objects_with_paths(folder: Path) -> tuple[Path, str | None]:
    put_files(folder)
    cells = [{"bytes": None, "path": name} for name in NAMES]
    return as_parquet(folder, rows(cells[:2], cells[2:])), None


def base64_text(folder: Path) -> tuple[Path, str | None]:
    cells = [base64.b64encode(content).decode() for content in CONTENT]
    return as_jsonl(folder, rows(cells[:2], cells[2:])), None


def base64_in_objects(folder: Path) -> tuple[Path, str | None]:
    cells = [{"bytes": base64.encodebytes(content).decode()} for content in CONTENT]
    return as_jsonl(folder, rows(cells[:2], cells[2:])), None


def data_urls(folder: Path) -> tuple[Path, str | None]:
    cells = [data_url(content) for content in CONTENT]
    return as_jsonl(folder, rows(cells[:2], cells[2:])), None


def arrays_of_bytes(folder: Path) -> tuple[Path, str | None]:
    cells = [numpy.frombuffer(content, numpy.uint8) for content in CONTENT]
    values = rows(cells[:2], cells[2:])
    column = pa.array([one["images"] for one in values], pa.list_(pa.list_(pa.uint8())))
    table = pa.Table.from_pylist([{key: one[key] for key in one if key != "images"} for one in values])
    pq.write_table(table.append_column("images", column), folder / "train.parquet")
    return folder / "train.parquet", None


STORAGES = (
    *(files_beside, files_in_a_folder, a_tar, a_tar_by_column, a_tar_in_the_path, plain_bytes, objects),
    *(objects_with_paths, base64_text, base64_in_objects, data_urls, arrays_of_bytes),
)


def essence(sample: Sample) -> Any:
    """What a sample is, without where its images lie."""
    parts = [
        [digest_of(read_image(part.source)) if isinstance(part, Image) else part for part in message.content]
        for message in sample.prompt
    ]
    info = {key: value for key, value in sample.info.items() if key != "image_names"}
    images = [digest_of(read_image(image.source)) for image in sample.images]
    return sample.id.replace(".parquet", ".jsonl"), parts, images, sample.ground_truth, sample.data_source, info


@pytest.mark.parametrize("store", STORAGES)
def test_samples_are_the_same_whatever_the_storage(store: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "wanted").mkdir()
    (tmp_path / "here").mkdir()
    wanted = [essence(one) for one in load_samples([files_beside(tmp_path / "wanted")[0]], prompt_key="prompt")]
    file, images_from = store(tmp_path / "here")
    samples = load_samples([file], prompt_key="prompt", images_from=images_from)
    assert lint([file], prompt_key="prompt", images_from=images_from).errors == 0
    monkeypatch.chdir("/")  # what was found does not depend on where it is read
    assert [essence(one) for one in samples] == wanted
    assert wanted[0][2] == [digest_of(one) for one in CATS]


def test_names_of_bytes_are_those_that_the_files_have(tmp_path: Path) -> None:
    for folder, store in (("a", objects), ("b", files_beside), ("c", a_tar)):
        (tmp_path / folder).mkdir()
        file, root = store(tmp_path / folder)
        first, second = load_samples([file], prompt_key="prompt", images_from=root)
        assert (list(images_for(first, {})), list(images_for(second, {}))) == (["1.png", "2.png"], ["dog.png"]), store
    row = as_row({"prompt": "<image><image>", "images": [{"bytes": DOG, "path": "a/1.png"}] * 2}, Path("x"), 0, "x")
    assert list(images_for(to_sample(row, prompt_key="prompt", default_source="x"), {})) == ["1.png", "1_1.png"]


def test_one_image_needs_no_list() -> None:
    row = as_row({"prompt": "<image>", "images": {"bytes": DOG}}, Path("x"), 0, "x")
    assert to_sample(row, prompt_key="prompt", default_source="x").images == (Image(data_url(DOG) or ""),)


@pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "a/../../secret.png", "out.png", "no.png", "."])
def test_a_folder_of_images_is_not_left(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.png").write_bytes(DOG)
    (tmp_path / "in/out.png").symlink_to(tmp_path / "secret.png")
    file = as_jsonl(tmp_path, rows([name, name], [name]))
    with pytest.raises(DataError, match=r"train.jsonl row 0: images\[0\]: .*(leads out of|there is no file)"):
        load_samples([file], prompt_key="prompt", images_from=str(tmp_path / "in"))


def hostile_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("../up.png", "/abs.png", "good.png"):
            member = tarfile.TarInfo(name)
            member.size = len(DOG)
            tar.addfile(member, io.BytesIO(DOG))
        for name, kind in (
            ("link.png", tarfile.SYMTYPE),
            ("hard.png", tarfile.LNKTYPE),
            ("pipe.png", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)


def test_a_tar_gives_its_plain_files_only(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    hostile_tar(path)
    assert list(members(path)) == ["good.png"]
    assert read_image(f"{path}!/good.png") == DOG
    for name in ("../up.png", "/abs.png", "link.png", "hard.png", "pipe.png", "no.png"):
        with pytest.raises(DataError):
            read_image(f"{path}!/{name}")
    with pytest.raises(DataError, match="more than"):
        read_image(f"{path}!/good.png", most=len(DOG) - 1)


def test_a_tar_that_lies_or_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    put_tar(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:600])
    with pytest.raises(DataError, match="ends within|not a readable tar"):
        read_image(f"{path}!/{NAMES[0]}")
    path.write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match="not a readable tar"):
        read_image(f"{path}!/{NAMES[0]}")
    back = bytearray(tarfile.TarInfo("a.png").tobuf())
    back[124:136] = b"\xff" * 10 + struct.pack(">h", -512)  # whoever goes on behind it comes by again
    back[148:156] = b" " * 8
    back[148:156] = b"%06o\0 " % sum(back)
    path.write_bytes(bytes(back) + bytes(2048))
    with pytest.raises(DataError, match="ends within|not a readable tar"):
        read_image(f"{path}!/a.png")
    path.write_bytes(whole)  # looked at anew, since it changed
    assert read_image(f"{path}!/{NAMES[0]}") == CATS[0]


@pytest.mark.parametrize(
    "source",
    ["http://x/a.png", "data:image/png;base64,AAAA", "/dev/null", "/no/such.png", "a\0b", "\ud800.png", "x" * 5000],
)
def test_what_cannot_be_read_is_one_line(source: str) -> None:
    with pytest.raises(DataError) as error:
        read_image(source)
    assert "\n" not in str(error.value)
    if not source.endswith("AAAA"):  # whose head can be had, and is none
        with pytest.raises(DataError), open_source(source):
            pass


def test_images_in_rows_may_not_fill_the_memory(tmp_path: Path) -> None:
    file, _ = plain_bytes(tmp_path)
    assert len(load_samples([file], prompt_key="prompt", most_inline=10_000)) == 2
    with pytest.raises(DataError, match="turnwise data extract-images"):
        load_samples([file], prompt_key="prompt", most_inline=300)


def test_equal_images_are_kept_once(tmp_path: Path) -> None:
    first, second = load_samples([as_parquet(tmp_path, rows([DOG, DOG], [DOG]))], prompt_key="prompt")
    assert first.images[0].source is first.images[1].source is second.images[0].source


def test_a_canvas_for_a_tool_is_found_beside_the_file(tmp_path: Path) -> None:
    put_files(tmp_path)
    kwargs = {"tools_kwargs": {"look": {"create_kwargs": {"image": "dog.png"}}}}
    values = [one | {"extra_info": kwargs} for one in rows(NAMES[:2], NAMES[2:])]
    sample = load_samples([as_jsonl(tmp_path, values)], prompt_key="prompt")[0]
    (found,) = images_for(sample, sample.tools_kwargs["look"]).items()
    assert found == ("dog.png", Image(str(tmp_path / "dog.png")))
    assert list(images_for(sample, {"create_kwargs": {"image": {"bytes": DOG}}})) == ["canvas_0.png"]
