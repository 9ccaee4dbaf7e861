"""What a run's own pages show besides its line in the list: headline, warnings, plan, log, files."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from turnwise.ext.board.headline import headline
from turnwise.ext.board.probes import is_probe
from turnwise.ext.board.results import results
from turnwise.ext.board.run_warnings import run_warnings
from turnwise.storage.file_tail import end_of_text
from turnwise.storage.run_dir import LOG, PLAN, TOKENIZER, RunDir
from turnwise.system.files import cannot

if TYPE_CHECKING:
    from turnwise.ext.board.runs import BoardRun

_LOG_BYTES, _LOG_LINES, _PLAN_CHARS = 100_000, 200, 200_000


def run_details(run: "BoardRun") -> dict[str, Any]:
    """Of a run that was read on just now."""
    table, names = run.table, run.series.names()
    shards, evaluated = table.shards(), results(run.dir)
    tokens_per_second = evaluated["tokens_per_second"] if evaluated else None
    return {
        "headline": headline(run.series, table.snapshot, run.newest(), tokens_per_second),
        "warnings": [asdict(warning) for warning in run_warnings(run.dir)],
        "plan": _end_of(run.dir, PLAN, _PLAN_CHARS),
        "log": "".join(_end_of(run.dir, LOG, _LOG_BYTES).splitlines(keepends=True)[-_LOG_LINES:]),
        "sources": _sources(names),
        "metrics": names,
        "constant": run.series.constants(),
        "shards": [
            {"shard": entry.shard, "split": entry.split, "step": entry.step, "size": entry.size} for entry in shards
        ],
        "trajectories": sum(entry.size for entry in shards),
        "checkpoints": sorted(path.name for path in (run.dir.path / "checkpoints").glob("step_*") if path.is_dir()),
        "results": evaluated,
        "probe": is_probe(run.dir),
        "has_tokenizer": (run.dir.path / TOKENIZER).is_file(),
        "pending": table.pending,
        "left_out": table.left_out,
        "damaged": [f"{entry['file']}: {entry['reason']}" for entry in table.damaged],
    }


def _end_of(run: RunDir, name: str, size: int) -> str:
    try:
        return end_of_text(run.path / name, size)
    except OSError as error:
        raise cannot("read", run.path / name, error) from error


def _sources(metrics: Sequence[str]) -> list[str]:
    """The data sources that metrics name."""
    heads = ("train/accuracy/", "val/accuracy/")
    return sorted({name.removeprefix(head) for name in metrics for head in heads if name.startswith(head)})
