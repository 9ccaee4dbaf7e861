"""Tables with images in them, and the same tables with paths: images out into files, and back, row by row."""

import base64
import enum
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.images.cells import ROOT, ImageCells, RowImages, from_base64, is_array_of_bytes, last_name
from turnwise.data.images.files import ImageFolder, ImageForm, encoded
from turnwise.data.images.schemas import inferred, schema_of, with_cells, with_paths
from turnwise.data.row_formats import BATCH_ROWS
from turnwise.data.rows import Row, RowError, expand, read_rows
from turnwise.data.values import FieldError, join
from turnwise.errors import DataError
from turnwise.system.files import replacing
from turnwise.system.image_bytes import KINDS, media_type
from turnwise.system.image_sources import read_image

COLUMNS = ("images", "image")
"""Where images are, unless somebody says otherwise; data URLs are found in every column."""
FOLDER = "images"
"""Beside the table that is written."""


class Cell(enum.Enum):
    """How an image stands in a packed table."""

    object = "object"
    """`{"bytes": ..., "path": ...}`, as Hugging Face's datasets write it: the name is kept."""
    bytes = "bytes"
    base64 = "base64"
    data_url = "data_url"


@dataclass(frozen=True, slots=True)
class Done:
    """The result of packing or unpacking one table: its path, its rows and its images."""

    table: Path
    rows: int
    images: int
    """Cells."""
    written: int
    """Files, or bytes of them in a packed table."""


Step = Callable[[int], None]
"""Told how many rows were done."""


def count_rows(source: Path) -> int | None:
    """How many rows a parquet file has, for a bar; None where only reading it would tell."""
    if expand(source).suffix.lower() != ".parquet" or not expand(source).is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(expand(source)).num_rows)
    except (pa.ArrowException, OSError):  # whoever reads it says so
        return None


def extract(source: Path, out: Path, columns: tuple[str, ...], form: ImageForm, workers: int, step: Step) -> Done:
    """`out/TABLE` with paths in the place of images, and the images under `out/images`."""
    source, table = _places(source, out)
    schema = schema_of(source)
    named = _named(source, schema, columns)
    folder, readers = ImageFolder(table.parent / FOLDER), ImageCells()
    rows = images = written = 0
    paths = None if schema is None else with_paths(schema, named)
    with _writer(table, paths) as write, ThreadPoolExecutor(workers) as pool:
        for batch in _batches(source):
            cells: list[_Found] = []
            changed = [_taken(row, readers, named, cells) for row in batch]
            contents = pool.map(lambda cell: cell.encoded(form), cells)
            planned = [
                folder.plan(content, cell.name, form, cell.refuse)
                for content, cell in zip(contents, cells, strict=True)
            ]
            written += sum(pool.map(folder.write, {file.name: file for file in planned}.values()))
            for cell, file in zip(cells, planned, strict=True):
                cell.holder[cell.key] = f"{FOLDER}/{file.name}"
            write(changed)
            rows, images = rows + len(batch), images + len(cells)
            step(len(batch))
    return Done(table, rows, images, written)


def pack(source: Path, out: Path, columns: tuple[str, ...], cell: Cell, images_from: str | None, step: Step) -> Done:
    """`out/TABLE.parquet` with images in the place of paths; paths are looked for as a run looks for them."""
    source, table = _places(source, out, ".parquet")
    schema = schema_of(source)
    named = _named(source, schema, columns)
    packed_as = {Cell.object: "object", Cell.bytes: "bytes"}.get(cell, "text")
    schema = with_cells(inferred(source, named) if schema is None else schema, named, packed_as)
    rows = images = written = 0
    with _writer(table, schema) as write:
        for batch in _batches(source):
            changed, cells = [], ImageCells(images_from)  # which remembers what it read
            for row in batch:
                values = dict(row.values)
                root = values.pop(ROOT, None)
                try:
                    reader = cells.of_row(source, root)
                    for column in named:
                        values[column], sizes = _packed(values.get(column), column, reader, cell)
                        images, written = images + len(sizes), written + sum(sizes)
                    changed.append(_inline(values, reader))
                except (FieldError, DataError) as error:
                    raise _told(row, error) from error
            write([{name: record.get(name) for name in schema.names} for record in changed])
            rows += len(batch)
            step(len(batch))
    return Done(table, rows, images, written)


# --- cells --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    """An image in a row, and where its path goes."""

    row: Row
    field: str
    content: bytes
    name: str | None
    holder: Any
    key: Any

    def encoded(self, form: ImageForm) -> bytes:
        if media_type(self.content) is None:
            raise self.refuse(f"these bytes are not a {KINDS} image; --columns names the columns that hold images")
        try:
            return encoded(self.content, form)
        except DataError as error:
            raise self.refuse(str(error)) from error

    def refuse(self, text: str) -> RowError:
        return RowError(self.row, self.field, text)


def _taken(row: Row, readers: ImageCells, named: tuple[str, ...], cells: list[_Found]) -> dict[str, Any]:
    """The row, in which `cells` are to be replaced."""
    values = dict(row.values)
    start = len(cells)
    try:
        walk = _Walk(row, readers.of_row(row.file, values.pop(ROOT, None)), cells)
        for column in values:
            walk.into(column, values, column, column in named)
    except (FieldError, DataError) as error:
        raise _told(row, error) from error
    extra = values.get("extra_info")
    file_names = extra.get("image_file_name") if isinstance(extra, dict) else None
    names = [file_names] if isinstance(file_names, str) else file_names
    if isinstance(names, list):
        own = [cell for cell in cells[start:] if cell.field.split("[")[0].split(".")[0] in named]
        for cell, name in zip(own, names, strict=False):
            cell.name = name if isinstance(name, str) else cell.name
    return values


@dataclass(slots=True)
class _Walk:
    """Finds the images of a row: any in the columns of images, elsewhere data URLs and what stands under `image`."""

    row: Row
    reader: RowImages
    cells: list[_Found]

    def into(self, field: str, holder: Any, key: Any, here: bool) -> None:
        """Note the images in one value."""
        match holder[key]:
            case bytes() as content if here:
                self._note(field, content, None, holder, key)
            case str() as text:
                self._text(field, text, holder, key, here)
            case list() as numbers if here and is_array_of_bytes(numbers):
                self._note(field, bytes(numbers), None, holder, key)
            case {"bytes": str() | bytes() as inner, **rest} if here:
                decoded = from_base64(inner, certain=True) if isinstance(inner, str) else inner
                self._note(field, decoded or b"", _name(rest.get("path")), holder, key)
            case {"bytes": list() as numbers, **rest} if here and is_array_of_bytes(numbers):
                self._note(field, bytes(numbers), _name(rest.get("path")), holder, key)
            case {"path": str() as path} if here:
                self._text(field, path, holder, key, here)
            case list() as many:
                holder[key] = copied = list(many)
                for index in range(len(copied)):
                    self.into(f"{field}[{index}]", copied, index, here)
            case dict() as members:
                holder[key] = inside = dict(members)
                for name in inside:
                    self.into(join(field, name), inside, name, here)

    def _text(self, field: str, text: str, holder: Any, key: Any, here: bool) -> None:
        if text.startswith("data:image/"):
            self._note(field, read_image(text), None, holder, key)
        elif text.startswith(("http:", "https:", "data:")) or not (here or key == "image"):
            return
        elif (content := from_base64(text) if here else None) is not None:
            self._note(field, content, None, holder, key)
        elif (path := self.reader.placed(text, field)) != text or here:
            self._note(field, read_image(path), _name(text), holder, key)

    def _note(self, field: str, content: bytes, name: str | None, holder: Any, key: Any) -> None:
        self.cells.append(_Found(self.row, field, content, name, holder, key))


def _name(path: Any) -> str | None:
    """The name in a cell's path, which says where the file once lay."""
    return (last_name(path) or None) if isinstance(path, str) else None


def _packed(value: Any, field: str, reader: RowImages, cell: Cell) -> tuple[Any, list[int]]:
    """The cell with its images inside, and how many bytes each has."""
    if value is None:
        return None, []
    if isinstance(value, list) and not is_array_of_bytes(value):
        parts = [_packed(item, f"{field}[{number}]", reader, cell) for number, item in enumerate(value)]
        return [item for item, _ in parts], [size for _, sizes in parts for size in sizes]
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    image = reader.read(value, field)
    content = read_image(image.source)
    name = reader.names.get(image.source)
    if name is None and not image.source.startswith("data:"):
        name = last_name(image.source)
    packed: Any = content
    match cell:
        case Cell.object:
            packed = {"bytes": content, "path": name}
        case Cell.base64:
            packed = base64.b64encode(content).decode()
        case Cell.data_url:
            packed = _url(content)
    return packed, [len(content)]


def _inline(values: dict[str, Any], reader: RowImages) -> dict[str, Any]:
    """The row with what it gives its tools as images, and shows in its messages, inside it too."""
    for holder in (values, values.get("extra_info") or {}):
        kwargs = holder.get("tools_kwargs") if isinstance(holder, dict) else None
        for tool in (kwargs or {}).values() if isinstance(kwargs, dict) else ():
            hook = tool.get("create_kwargs") if isinstance(tool, dict) else None
            if isinstance(hook, dict) and hook.get("image") is not None:
                hook["image"] = _inlined(hook["image"], "create_kwargs.image", reader)
    prompt = values.get("prompt")
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("image"), str):
                part["image"] = _inlined(part["image"], "prompt", reader)
    return values


def _inlined(value: Any, field: str, reader: RowImages) -> Any:
    if isinstance(value, list):
        return [_inlined(item, field, reader) for item in value]
    if not isinstance(value, str) or value.startswith(("data:", "http:", "https:")):
        return value
    return _url(read_image(reader.source(value, field)))


def _url(content: bytes) -> str:
    return f"data:{media_type(content)};base64,{base64.b64encode(content).decode()}"


def _told(row: Row, error: FieldError | DataError) -> DataError:
    if isinstance(error, FieldError):
        return RowError(row, error.field, error.problem)
    return error if isinstance(error, RowError) else RowError(row, "", str(error))


# --- tables -------------------------------------------------------------------------------------------------------


def _places(source: Path, out: Path, suffix: str | None = None) -> tuple[Path, Path]:
    source = expand(source)
    table = expand(out) / (source.name if suffix is None else source.stem + suffix)
    if table.exists() and source.exists() and table.samefile(source):
        raise DataError(f"{table} is the input file: choose another folder with --out")
    return source, table


def _batches(source: Path) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in read_rows(source):
        batch.append(row)
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _named(source: Path, schema: Any, columns: tuple[str, ...]) -> tuple[str, ...]:
    existing = list(next(iter(read_rows(source))).values) if schema is None else list(schema.names)
    for column in columns:
        if column not in existing:
            raise DataError(f"{source}: there is no column {column!r}; there are {', '.join(existing)[:300]}")
    return columns or tuple(column for column in COLUMNS if column in existing)


def _line(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can say; whoever reads the row tells
        return json.dumps(row).encode() + b"\n"


@contextmanager
def _writer(table: Path, schema: Any) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Writes rows to a table that appears whole or not at all: parquet with a schema, JSON lines without."""
    with replacing(table) as file:
        if schema is None:
            yield lambda rows: file.writelines(_line(row) for row in rows)
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, schema) as writer:

            def write(rows: list[dict[str, Any]]) -> None:
                try:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                except (pa.ArrowException, TypeError, ValueError) as error:
                    raise DataError(f"{table}: the rows do not fit one table: {str(error)[:200]}") from error

            yield write
