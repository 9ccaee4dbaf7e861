"""Replays on the board: what one found, and starting another as a process of its own where that was allowed."""

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import StorageError
from turnwise.storage.run_dir import REPLAY, RunDir

LARGEST = 16 * 2**20
_END_SECONDS = 5.0


class ReplayRequest(BaseModel):
    """What a page asks for: the place of a trajectory, and what is said where instead."""

    model_config = ConfigDict(extra="forbid", strict=True)

    shard: Annotated[str, Field(max_length=200)]
    row: Annotated[int, Field(ge=0, le=10_000_000)]
    edit: Annotated[str, Field(pattern=r"^turn=\d{1,6}(,call=\d{1,4}|,assistant)?$")] | None = None
    text: Annotated[str, Field(max_length=100_000)] | None = None


def replay_of(run: RunDir) -> dict[str, Any] | None:
    """What a replay recorded about itself; None for any other run."""
    path = run.path / REPLAY
    if not path.is_file():
        return None
    if path.stat().st_size > LARGEST:
        raise StorageError(f"{path} is larger than any replay's")
    try:
        record = json.loads(run.read_text(REPLAY))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("differences"), dict):
        raise StorageError(f"{path} is not a replay's")
    of = record.get("of")
    named = of.get("run") if isinstance(of, dict) else None
    return record | {"of_run": Path(named).name if isinstance(named, str) else None}


@dataclass(slots=True)
class Replays:
    """Starts replays, one after the other: each loads a model."""

    trust_runs: bool = False
    """Whether what a run's own config names may be imported and reached, as `turnwise replay --trust-run` does."""
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, run: RunDir, request: ReplayRequest) -> dict[str, Any]:
        """Play a trajectory again; StorageError with the command's own words when that fails. Ends with its caller."""
        async with self._busy:
            process = await asyncio.create_subprocess_exec(
                *self._command(run, request),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                out, errors = await process.communicate()
            finally:
                await _end(process)
        if process.returncode:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            raise StorageError(lines[-1] if lines else f"the replay ended with {process.returncode}")
        result: dict[str, Any] = json.loads(out.decode("utf-8", "replace").strip().splitlines()[-1])
        return result | {"run": Path(result["written"]).name}

    def _command(self, run: RunDir, request: ReplayRequest) -> list[str]:
        target = ["--sample", str(request.row), f"--file={request.shard}"]
        edit = [] if request.edit is None else [f"--edit={request.edit}", f"--with={request.text or ''}"]
        trust = ["--trust-run"] if self.trust_runs else []
        return [
            sys.executable,
            "-m",
            "turnwise.commands.cli",
            "replay",
            str(run.path),
            "--json",
            *target,
            *edit,
            *trust,
        ]


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    if process.returncode is None:
        process.kill()
        await process.wait()
