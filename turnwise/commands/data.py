"""`turnwise data extract-images`, `turnwise data pack-images`: images of tables out into files, and back."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError

HELP = "take the images out of tables into files, or put files into tables"
EXTRACT, PACK = "extract-images", "pack-images"
FORMS, CELLS = ("keep", "jpeg", "png"), ("object", "bytes", "base64", "data_url")
ONLY = {"format": EXTRACT, "workers": EXTRACT, "cell": PACK, "images_from": PACK}
EPILOG = """\
extract-images writes DIR/TABLE with a path in the place of each image, and the images under DIR/images. Cells may be
bytes, {"bytes", "path"}, base64, data URLs or arrays of bytes, one or a list of them. An image file is named by
extra_info.image_file_name, else by its cell's path, else by its content. A different image with the same name gets
another name; no file is ever replaced. Run again, the command writes only the missing files.

pack-images writes DIR/TABLE.parquet with the images that paths name inside it.

examples:
  turnwise data extract-images train.parquet test.parquet --out data/photos
  turnwise train data.train_files=[data/photos/train.parquet]
  turnwise data pack-images data/photos/train.parquet --out data/packed
  turnwise data pack-images train.jsonl --images-from photos.tar --out data/packed

Exit code 0 when every table was written, 2 for a row, a name or a file that cannot be used; that table is not written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("action", choices=[EXTRACT, PACK], help="images out into files, or files into tables")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="parquet or jsonl files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--columns", metavar="A,B", help="columns of images (default images and image)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    extract = parser.add_argument_group(EXTRACT)
    extract.add_argument("--format", choices=FORMS, help="files as they are (keep, default), or all in one form")
    extract.add_argument("--workers", type=int, metavar="N", help="threads that write (default: one a core, at most 8)")
    pack = parser.add_argument_group(PACK)
    pack.add_argument("--cell", choices=CELLS, help='what an image becomes (default object: {"bytes", "path"})')
    pack.add_argument("--images-from", metavar="PLACE", help="a folder or a .tar that paths are looked for in")


def run(args: argparse.Namespace) -> int:
    """Tables one after the other; the first that cannot be written ends it."""
    for option, action in ONLY.items():
        if getattr(args, option) is not None and args.action != action:
            raise ConfigError(f"--{option.replace('_', '-')} is for {action}, not for {args.action}")
    workers = min(8, os.cpu_count() or 1) if args.workers is None else args.workers
    if not 1 <= workers <= 256:
        raise ConfigError(f"--workers {workers}: from 1 to 256")
    names = [path.stem if args.action == PACK else path.name for path in args.tables]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two tables are called {twice[0]}, and both would be written to {args.out}")
    columns = tuple(part.strip() for part in (args.columns or "").split(",") if part.strip())
    from rich.console import Console
    from rich.progress import Progress

    from turnwise.data.images.files import ImageForm
    from turnwise.data.images.tables import Cell, count_rows, extract, pack

    console = Console(stderr=True)
    results: list[dict[str, Any]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for path in args.tables:
            step = partial(progress.advance, progress.add_task(path.name, total=count_rows(path)))
            if args.action == EXTRACT:
                form = ImageForm(args.format or "keep")
                done = extract(path, args.out, columns, form, workers, step)
                size = f"{done.written} files written, the others were there or are equal"
            else:
                cell = Cell(args.cell or "object")
                done = pack(path, args.out, columns, cell, args.images_from, step)
                size = f"{done.written / 2**20:.1f} MiB"
            sys.stdout.write(f"wrote {done.table} ({done.rows} rows, {done.images} images: {size})\n")
            results.append(asdict(done) | {"table": str(done.table)})
    if args.json:
        sys.stdout.write(json.dumps({"tables": results}) + "\n")
    return 0
