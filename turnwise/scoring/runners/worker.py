"""A process of the scoring pool: it reads trajectories from a socket, scores one after the other, and answers.

The host ends it by closing the socket or by killing its process group; it also ends when the host does.
"""

import asyncio
import functools
import json
import os
import socket
import struct
import sys
from typing import Any

from turnwise.scoring.runners.wire import WireResult, error_to_json, score_to_wire
from turnwise.scoring.scorer import KEPT_SCORERS, Scorer, ScorerSpec
from turnwise.storage.trajectories.rows import from_row
from turnwise.system.children import end_with_parent

FRAME = struct.Struct(">QI")
"""Before each message: the number of the job, which its answer repeats, and the bytes that follow."""


def main(channel_number: int) -> None:
    """Serve the socket with this number until it is closed."""
    end_with_parent()
    channel = socket.socket(fileno=channel_number)
    channel.set_inheritable(False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a scorer prints must not get into the host's output
    with asyncio.Runner() as runner:  # one loop for all jobs: a scorer may keep its connections
        while (message := _receive(channel)) is not None:
            number, job = message
            reply = _prepare(job) if "path" in job else runner.run(_score(job))
            content = json.dumps(reply).encode()
            channel.sendall(FRAME.pack(number, len(content)) + content)


def _prepare(job: dict[str, Any]) -> WireResult:
    """Look for modules where the host does, and make the scorers known so far: no trajectory's time pays for that."""
    sys.path[:] = job["path"]
    try:
        for spec in job["scorers"]:
            _scorer(json.dumps(spec))
    except Exception as error:
        return {"error": error_to_json(error)}
    return {"reward": 0.0}


async def _score(job: dict[str, Any]) -> WireResult:
    try:
        scorer = _scorer(json.dumps(job["scorer"]))
    except Exception as error:
        return {"error": error_to_json(error)}
    return await score_to_wire(scorer, from_row(job["trajectory"]))


@functools.lru_cache(KEPT_SCORERS)
def _scorer(spec: str) -> Scorer:
    values = json.loads(spec)
    return ScorerSpec(values["name"], values["options"]).make()


def _receive(channel: socket.socket) -> tuple[int, dict[str, Any]] | None:
    head = _exactly(channel, FRAME.size)
    if head is None:
        return None
    number, length = FRAME.unpack(head)
    content = _exactly(channel, length)
    return None if content is None else (number, json.loads(content))


def _exactly(channel: socket.socket, length: int) -> bytearray | None:
    """So many bytes, or None when the host hung up."""
    content = bytearray(length)
    view = memoryview(content)
    while view:
        got = channel.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return content
