"""What is new, told while it happens: one server-sent stream per open page, fed by looking at the runs' files."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from turnwise.errors import StorageError
from turnwise.ext.board.liveness import DisplayedState
from turnwise.ext.board.runs import NotFound, Runs

POLL_SECONDS = 1.0
PING_SECONDS = 15.0
GONE = "gone"
_RETRY_MS = 2000

News = dict[str, dict[str, Any]]


def poll_runs(runs: Runs, names: Sequence[str]) -> News:
    """The version, step and state of these runs, or of all if none is named; a run that is not there is `gone`."""
    now = time.time()
    states: News = {}
    for name in names or runs.names():
        try:
            run = runs.open(name)
            if run.has_table and run.table.pending:  # a page waits for the rest of it
                run.refresh()
            liveness = run.status(now)
            version = run.version(now)
        except NotFound:
            states[name] = {"run": name, "version": 0, "step": 0, "state": GONE}
            continue
        except StorageError:  # the pages say which file it is; the stream goes on
            states[name] = {"run": name, "version": 0, "step": 0, "state": DisplayedState.UNKNOWN.value}
            continue
        states[name] = {"run": name, "version": version, "step": liveness.step, "state": liveness.state.value}
    return states


def changed(before: News, after: News) -> list[dict[str, Any]]:
    """What to tell somebody who knows `before`."""
    lost = [{"run": name, "version": 0, "step": 0, "state": GONE} for name in before if name not in after]
    return [news for name, news in after.items() if before.get(name) != news] + lost


async def stream(
    runs: Runs,
    names: Sequence[str],
    closing: asyncio.Event,
    *,
    reconnected: bool = False,
    poll_seconds: float = POLL_SECONDS,
    ping_seconds: float = PING_SECONDS,
) -> AsyncIterator[str]:
    """The text of a stream: `change` for each run that changed, `ping` when nothing did for long; until `closing`.

    A page that comes back after a break is told of every run, since nobody knows what it missed.
    """
    yield f"retry: {_RETRY_MS}\nid: 0\n\n"
    states = await run_in_threadpool(poll_runs, runs, names)
    pending = list(states.values()) if reconnected else []
    last_sent = time.monotonic()
    while not closing.is_set():
        for news in pending:
            yield _event("change", news)
        if pending:
            last_sent = time.monotonic()
        elif time.monotonic() - last_sent >= ping_seconds:
            yield _event("ping", {})
            last_sent = time.monotonic()
        try:
            await asyncio.wait_for(closing.wait(), poll_seconds)
        except TimeoutError:
            now = await run_in_threadpool(poll_runs, runs, names)
            pending = changed(states, now)
            states = now


def _event(kind: str, data: dict[str, Any]) -> str:
    """One event; the id makes a browser say, when it comes back, that it was here before."""
    return f"id: {data.get('version', 0)}\nevent: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
