"""Questions of published files as rows: `test.parquet`, and the images beside it, each once."""

from pathlib import Path
from typing import Any

from turnwise.data.rows import expand
from turnwise.data.write import write_rows
from turnwise.errors import DataError
from turnwise.ext.vision_bench.published import BenchQuestion, Reader
from turnwise.system.files import replacing
from turnwise.system.image_bytes import digest_of, file_ending

IMAGES = "images"
"""The folder of the images, beside the rows."""


def write_bench(read: Reader, source: str | None, out: Path, env_name: str | None) -> dict[Path, int]:
    """Write `out`; the rows appear when all of them could be made, the images as they are read."""
    if source is None or not source.strip():
        raise DataError("--source must name the folder of the published files; nothing is downloaded")
    folder, out = expand(source), expand(out)
    if not folder.is_dir():
        raise DataError(f"{source}: is not a folder")
    if folder.resolve() == out.resolve():
        raise DataError(f"{out}: is the source itself; give another folder for the prepared files")
    rows, images = list[dict[str, Any]](), dict[str, str]()
    for question in read(folder):
        if question.id in images:
            raise DataError(f"{source}: the question {question.id} is there twice")
        if question.image is None and question.image_of not in images:
            raise DataError(f"{source}: the question {question.id}: no earlier row has the index {question.image_of!r}")
        images[question.id] = images[question.image_of] if question.image is None else _kept(question.image, out)
        rows.append(_row(question, images[question.id], env_name))
    return {out / "test.parquet": write_rows(rows, out / "test.parquet")}


def _kept(content: bytes, out: Path) -> str:
    """The image's file, as rows name it: by what it holds, which says nothing about the answer."""
    name = f"{IMAGES}/{digest_of(content)}.{file_ending(content)}"
    if not (out / name).exists():
        with replacing(out / name) as file:
            file.write(content)
    return name


def _row(question: BenchQuestion, image: str, env_name: str | None) -> dict[str, Any]:
    mark = "" if "<image>" in question.prompt else "<image>\n"
    row = {
        "data_source": question.data_source,
        "prompt": [{"role": "user", "content": f"{mark}{question.prompt}"}],
        "images": [image],
        "reward_model": {"style": "rule", "ground_truth": question.truth},
        "extra_info": {
            "index": question.id,
            "split": "test",
            "answer_kind": question.kind.value,
            "options": list(question.options),
            "precision": question.precision,
            **question.info,
        },
    }
    return row if env_name is None else row | {"env_name": env_name}
