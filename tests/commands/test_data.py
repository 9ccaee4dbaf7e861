"""`turnwise data`: images out of tables of every kind and back, names that lead elsewhere, pictures that stay."""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from turnwise.chat.images.pixels import unpack
from turnwise.commands.cli import main
from turnwise.data.loader import load_samples
from turnwise.system.image_bytes import data_url
from turnwise.system.image_sources import read_image
from turnwise.types import Image


def png(colour: Any, mode: str = "RGB") -> bytes:
    held = io.BytesIO()
    Pillow.new(mode, (9, 7), colour).save(held, "PNG")
    return held.getvalue()


RED, BLUE, CLEAR = png("red"), png("blue"), png((0, 0, 0, 0), "RGBA")


def table(path: Path, cells: list[Any], kind: Any = None, **more: list[Any]) -> Path:
    """One row for each cell, with a prompt that has as many places."""
    many = [cell if isinstance(cell, list) and kind is None else [cell] for cell in cells]
    rows = {
        "data_source": ["x"] * len(cells),
        "prompt": [[{"role": "user", "content": "<image>" * len(one)}] for one in many],
        "images": pa.array(cells if kind is not None else many, kind),
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), path)
    return path


def essence(path: Path) -> Any:
    return [
        (one.id, [message.text for message in one.prompt], [read_image(image.source) for image in one.images], one.info)
        for one in load_samples([path], prompt_key="prompt")
    ]


def without_names(samples: Any) -> Any:
    return [(*one[:3], {key: value for key, value in one[3].items() if key != "image_names"}) for one in samples]


OBJECT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
KINDS: dict[str, tuple[list[Any], Any]] = {
    "bytes": ([RED, BLUE], None),
    "objects": ([{"bytes": RED, "path": "a.png"}, {"bytes": BLUE, "path": "b.png"}], None),
    "base64": ([base64.b64encode(RED).decode(), base64.b64encode(BLUE).decode()], None),
    "data URLs": ([data_url(RED), data_url(BLUE)], None),
    "arrays": ([list(RED), list(BLUE)], pa.list_(pa.uint8())),
    "several a row": ([[RED, BLUE], [BLUE]], None),
    "no list": ([{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "x/y.png"}], OBJECT),
    "transparent": ([CLEAR, RED], None),
    "one picture twice": ([RED, RED], None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_gives_the_same_samples(kind: str, tmp_path: Path, capsys: Any) -> None:
    source = table(tmp_path / "in/train.parquet", *KINDS[kind])
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"][0]
    out = tmp_path / "out/train.parquet"
    assert without_names(essence(out)) == without_names(essence(source))
    assert all(
        not image.source.startswith("data:") for one in load_samples([out], prompt_key="prompt") for image in one.images
    )
    assert (told["rows"], told["written"]) == (2, len(list((tmp_path / "out/images").iterdir())))

    assert main(["data", "pack-images", str(out), "--out", str(tmp_path / "packed")]) == 0
    assert without_names(essence(tmp_path / "packed/train.parquet")) == without_names(essence(source))

    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out/images").iterdir()}
    written, capsys_ = out.read_bytes(), capsys.readouterr()
    assert (
        main(["data", "extract-images", str(source), "--out", str(tmp_path / "out"), "--json", "--workers", "3"]) == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tables"][0]["written"] == 0, capsys_
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert out.read_bytes() == written


def test_paths_and_tool_images_move_with_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "canvas.png").write_bytes(BLUE)
    kwargs = {"tools_kwargs": {"look": {"create_kwargs": {"image": "canvas.png"}}}}
    row = {"data_source": "x", "prompt": "<image>?", "images": [{"path": "canvas.png"}], "extra_info": kwargs}
    shown = {"type": "image", "image": data_url(RED)}
    told = {"data_source": "x", "prompt": [{"role": "user", "content": [shown]}]}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(told) + "\n")
    assert main(["data", "extract-images", str(folder / "train.jsonl"), "--out", str(tmp_path / "out")]) == 0
    first, second = load_samples([tmp_path / "out/train.jsonl"], prompt_key="prompt")
    assert first.images == (Image(str(tmp_path / "out/images/canvas.png")),)
    assert first.tools_kwargs["look"]["create_kwargs"]["image"] == str(tmp_path / "out/images/canvas.png")
    assert read_image(second.images[0].source) == RED
    (tmp_path / "one.jsonl").write_text((tmp_path / "out/train.jsonl").read_text().splitlines()[0])
    assert main(["data", "pack-images", str(tmp_path / "one.jsonl"), "--out", str(tmp_path / "p")]) == 2  # not there
    (tmp_path / "out/one.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    assert main(["data", "pack-images", str(tmp_path / "out/one.jsonl"), "--out", str(tmp_path / "p")]) == 0
    (packed,) = load_samples([tmp_path / "p/one.parquet"], prompt_key="prompt")
    assert read_image(packed.images[0].source) == BLUE
    assert packed.tools_kwargs["look"]["create_kwargs"]["image"] == data_url(BLUE)


def names_of(*names: Any) -> dict[str, list[Any]]:
    return {"extra_info": [{"image_file_name": name} for name in names]}


def test_names_are_those_of_the_rows_and_no_picture_replaces_another(tmp_path: Path) -> None:
    source = table(tmp_path / "t.parquet", [RED, BLUE, RED, BLUE], **names_of("27.jpg", "27.jpg", "27.jpg", "A.png"))
    folder = tmp_path / "out/images"
    folder.mkdir(parents=True)
    (folder / "A.png").write_bytes(b"somebody's")
    for _ in range(2):
        assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "out")]) == 0
        names = [
            Path(one.images[0].source).name for one in load_samples([tmp_path / "out/t.parquet"], prompt_key="prompt")
        ]
        assert names[0] == names[2] == "27.jpg" and names[1].startswith("27-") and names[3].startswith("A-")
        assert (folder / "27.jpg").read_bytes() == RED and (folder / names[1]).read_bytes() == BLUE
        assert (folder / "A.png").read_bytes() == b"somebody's" and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "name", ["../a.png", "/tmp/a.png", "a/../../b.png", "..", ".hidden", "a\\..\\b.png", "a\nb.png", "", "x" * 300]
)
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path, capsys: Any) -> None:
    source = table(tmp_path / "t.parquet", [RED], **names_of(name))
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "t.parquet row 0: images[0]: the name" in said
    assert not (tmp_path / "out/t.parquet").exists() and list(tmp_path.rglob("*.png")) == []


@pytest.mark.parametrize("names", [("a/b.png", "a"), ("a.png", "a.png/b.png")])
def test_a_name_that_is_a_folder_for_another_loses_no_picture(
    names: tuple[str, str], tmp_path: Path, capsys: Any
) -> None:
    source = table(tmp_path / "t.parquet", [RED, BLUE], **names_of(*names))
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out/t.parquet").exists()


def test_half_a_character_is_kept_in_a_row_and_is_no_name(tmp_path: Path, capsys: Any) -> None:
    row = {"images": ["data:image/png;base64," + base64.b64encode(RED).decode()], "prompt": "?"}
    source = tmp_path / "t.jsonl"
    command = ["data", "extract-images", str(source), "--out", str(tmp_path / "out")]
    source.write_text(json.dumps(row | {"note": "\ud800"}))
    assert main(command) == 0
    assert json.loads((tmp_path / "out/t.jsonl").read_text())["note"] == "\ud800"
    source.write_text(json.dumps(row | {"extra_info": {"image_file_name": "\ud800.png"}}))
    capsys.readouterr()
    assert main(command) == 2 and "is not a plain file name" in capsys.readouterr().err


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path, capsys: Any) -> None:
    source = table(tmp_path / "t.parquet", [RED, BLUE], **names_of("a.png", "sub/deeper/b.png"))
    (tmp_path / "out/images").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/images/a.png").symlink_to(tmp_path / "elsewhere/a.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "out/images/sub")
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "leads out of" in capsys.readouterr().err and list((tmp_path / "elsewhere").iterdir()) == []


def test_transparent_pictures_lie_on_white_in_jpeg_and_stay_as_they_are_elsewhere(tmp_path: Path) -> None:
    source = table(tmp_path / "t.parquet", [CLEAR], **names_of("a.png"))
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "j"), "--format", "jpeg"]) == 0
    with Pillow.open(tmp_path / "j/images/a.jpg") as found:
        assert (found.format, found.getpixel((3, 3))) == ("JPEG", (255, 255, 255))
    for form in ("keep", "png"):
        assert main(["data", "extract-images", str(source), "--out", str(tmp_path / form), "--format", form]) == 0
        assert (tmp_path / form / "images/a.png").read_bytes() == CLEAR


@pytest.mark.parametrize("cell", ["object", "bytes", "base64", "data_url"])
def test_packed_cells_are_read_alike(cell: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").write_bytes(RED)
    (tmp_path / "t.jsonl").write_text(json.dumps({"data_source": "x", "prompt": "<image>", "images": ["a.png"]}) + "\n")
    given = ["data", "pack-images", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "p"), "--cell", cell]
    assert main([*given, "--images-from", str(tmp_path / "photos")]) == 0
    (sample,) = load_samples([tmp_path / "p/t.parquet"], prompt_key="prompt")
    assert read_image(sample.images[0].source) == RED


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["extract-images", "no.parquet"], "does not exist"),
        (["extract-images", "t.parquet", "--columns", "pictures"], "there is no column 'pictures'"),
        (["extract-images", "t.parquet", "--columns", "data"], "these bytes are not a"),
        (["extract-images", "t.parquet", "--cell", "bytes"], "--cell is for pack-images"),
        (["extract-images", "t.parquet", "--workers", "0"], "--workers 0: from 1 to 256"),
        (["extract-images", "t.parquet", "t.parquet"], "two tables are called"),
        (["extract-images", "broken.parquet"], "not a readable parquet file"),
        (["pack-images", "t.parquet", "--format", "png"], "--format is for extract-images"),
        (["pack-images", "paths.jsonl"], "paths.jsonl row 0: the image gone.png cannot be read"),
        (["pack-images", "paths.jsonl", "--images-from", "no.tar"], "is neither a folder nor a .tar"),
        (["sort-images", "t.parquet"], "sort-images"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(
    given: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "t.parquet", [RED], data=pa.array([b"no image"]))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "paths.jsonl").write_text(json.dumps({"data_source": "x", "prompt": "<image>", "images": ["gone.png"]}))
    assert main(["data", *given, "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not list(tmp_path.glob("out/*.parquet"))


def test_a_table_is_never_its_own_target(tmp_path: Path, capsys: Any) -> None:
    source = table(tmp_path / "t.parquet", [RED])
    before = source.read_bytes()
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path)]) == 2
    assert "is the input file" in capsys.readouterr().err and source.read_bytes() == before


def test_help_says_how(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    said = capsys.readouterr().out
    assert "examples:" in said and "--images-from" in said and "extra_info.image_file_name" in said


@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_another_form_shows_the_same_picture(form: str, tmp_path: Path) -> None:
    """Upright though the new file does not note how it lies, and not white for its 16 bits a pixel."""
    lying = Pillow.linear_gradient("L").resize((40, 20))
    notes = lying.getexif()
    notes[0x0112] = 6
    wide = Pillow.fromarray(np.linspace(0, 60_000, 400).astype(np.uint16).reshape(20, 20))
    contents = []
    for picture, options in ((lying, {"format": "WEBP", "exif": notes, "lossless": True}), (wide, {"format": "PNG"})):
        held = io.BytesIO()
        picture.save(held, **options)
        contents.append(held.getvalue())
    source = table(tmp_path / "t.parquet", contents, **names_of("a.webp", "b.png"))
    assert main(["data", "extract-images", str(source), "--out", str(tmp_path / "o"), "--format", form]) == 0
    files = sorted((tmp_path / "o/images").iterdir())
    assert len(files) == 2
    for content, file in zip(contents, files, strict=True):
        before, after = (np.asarray(unpack(one, None).picture, np.float64) for one in (content, file.read_bytes()))
        assert before.shape == after.shape and np.abs(before - after).max() < 16
