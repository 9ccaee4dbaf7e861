"""TensorBoard: event files under the run directory, written with TensorBoard's own records and without torch."""

import io
import os
import shlex
import socket
import time
from typing import Any, BinaryIO

from turnwise.config import Config
from turnwise.errors import StorageError
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.tracker import Point, foreign
from turnwise.system.files import cannot

FOLDER = "tensorboard"
_EVENT = "tensorboard.compat.proto.event_pb2"
_SUMMARY = "tensorboard.compat.proto.summary_pb2"
_RECORDS = "tensorboard.summary.writer.record_writer"


class TensorboardTracker:
    """One event file per process.

    Every point is written at once and whole, so that a full disk loses exactly the points that raised; the library's
    own writer collects them in a further thread and tells of an error only with a later point.
    """

    name = "tensorboard"

    def __init__(self, config: Config) -> None:
        self._event, self._summary, self._records = (foreign(self.name, part) for part in (_EVENT, _SUMMARY, _RECORDS))

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        """Open a new file; steps of earlier files after `resumed_at` are hidden, for they are done again."""
        stamp = f"{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        path = run.file(f"{FOLDER}/events.out.tfevents.{stamp}")
        again = any(path.parent.iterdir())
        try:
            self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115 (closed in finish)
        except OSError as error:
            raise cannot("write", path, error) from error
        self._write(file_version="brain.Event:2")
        if again:
            session = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=resumed_at + 1, session_log=session)
        return f"TensorBoard: tensorboard --logdir {shlex.quote(str(path.parent))}"

    def log(self, point: Point) -> None:
        """Write a point's values, the clock and the token count among them."""
        values = point.metrics | {"progress/seconds": point.seconds, "progress/tokens": float(point.tokens)}
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=point.step, summary=self._summary.Summary(value=scalars))

    def finish(self, state: State, reason: str) -> None:
        """Closes the event file."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        event = self._event.Event(wall_time=time.time(), **content)
        record = io.BytesIO()
        self._records.RecordWriter(record).write(event.SerializeToString())
        before = self._file.tell()
        try:
            if self._file.write(record.getvalue()) != record.tell():
                raise StorageError(f"cannot write {self._file.name}: the disk took only part of a point")
        except (OSError, StorageError):
            self._file.seek(before)  # half a record would hide all that follow from TensorBoard
            self._file.truncate()
            raise
