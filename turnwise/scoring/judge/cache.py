"""Replies of a judge on disk, found by the content of the request; safe to share between processes and to kill."""

import hashlib
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

from turnwise.errors import StorageError

FILE = "verdicts.sqlite"
WAIT_SECONDS = 30.0
"""For another process that writes."""


def cache_key(body: dict[str, Any], vote: int) -> str:
    """The fingerprint of a request: model, messages, seed and whatever else it says, and which vote it is."""
    text = json.dumps([vote, body], sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class ReplyCache:
    """One SQLite file in a folder. A process that dies leaves a whole file; a write that was cut off never was."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.expanduser() / FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)
            self._keep_a_log()
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise self._cannot("open", error) from error

    def _keep_a_log(self) -> None:
        """A log beside the file: readers and one writer at once, and no wait for the disk on each verdict.

        SQLite does not wait for its turn here, whatever the timeout: of several processes that start at once one wins.
        """
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def get(self, key: str) -> str | None:
        """The reply to an equal request, if there was one."""
        try:
            found = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._cannot("read", error) from error
        return None if found is None else str(found[0])

    def put(self, key: str, reply: str) -> None:
        """Keep a reply. When two processes asked the same, the first one stays, so that all read one verdict."""
        text = reply.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be stored
        try:
            self._database.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, text))
        except sqlite3.Error as error:
            raise self._cannot("write", error) from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _cannot(self, verb: str, error: Exception) -> StorageError:
        return StorageError(f"cannot {verb} the judge's cache {self.path}: {error}")
