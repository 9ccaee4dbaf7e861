"""What wandb writes offline, read back with its own protocol; it never connects, prints or asks. TensorBoard beside it."""

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed")
pytest.importorskip("tensorboard", reason="tensorboard is not installed")

ACCURACY = "val/accuracy/vstar/direct_attributes"
"""A number by data source, as an evaluation has it."""
SCRIPT = """
import json, os, sys
from pathlib import Path
from turnwise.data.task_config import configure
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.ext.trackers import wandb as wandb_run
from turnwise.ext.trackers.tensorboard import TensorboardTracker
from turnwise.storage.trackers.choose import Trackers
from turnwise.storage.trackers.tracker import Point

run, said, ACCURACY = RunDir(Path(sys.argv[1])), [], sys.argv[2]
wandb, netrc = wandb_run.load(), Path(os.environ["NETRC"])

def has_key(text):
    netrc.write_text(text)
    return wandb_run._has_key(wandb, wandb.Settings(silent=True))

netloc = os.environ["WANDB_BASE_URL"].removeprefix("http://")
keys = {
    "none": has_key(""),
    "ours": has_key(f"machine {netloc} login user password secret"),
    "another": has_key("machine api.wandb.ai login user password secret"),
}
netrc.unlink()

def session(steps, resumed_at, state):
    config = configure("trackers.project=a project")
    both = [wandb_run.WandbTracker(config), TensorboardTracker(config)]
    trackers = Trackers(both, said.append, last_seconds=100)
    trackers.start(run, {"training": {"steps": 5}, "seed": 3}, resumed_at=resumed_at)
    for step in steps:
        trackers.log(Point(step, step * 2.0, step * 10, {"critic/score/mean": step / 4, ACCURACY: step / 8}))
    trackers.finish(state, "because")
    return sum(trackers.metrics()[f"tracking/{one.name}/lost"] for one in both)

lost = [session([1, 2, 3], 0, State.STOPPED), session([3, 4], 2, State.FAILED)]
os.environ["WANDB_MODE"] = "disabled"
lost.append(session([5], 4, State.FINISHED))
(run.path / "result.json").write_text(json.dumps({"keys": keys, "said": said, "lost": lost}))
"""


@dataclass
class Session:
    """What two offline runs and a disabled one left behind."""

    run: Path
    output: str
    connections: int
    result: dict[str, Any]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """The library in a process of its own, every way to the outside leading to a socket that counts."""
    folder = tmp_path_factory.mktemp("wandb")
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    listener, came = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def count() -> None:
        while True:
            try:
                came.append(listener.accept()[0])
            except OSError:  # closed below
                return

    threading.Thread(target=count, daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WANDB_") and "proxy" not in name.lower()
    }
    environment = kept | {
        "HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_BASE_URL": address,
        "HTTP_PROXY": address, "HTTPS_PROXY": address, "http_proxy": address, "https_proxy": address,
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(run), ACCURACY]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    socket.create_connection(listener.getsockname()).close()  # the counter works: this one is seen
    listener.close()
    return Session(run, done.stdout + done.stderr, len(came), json.loads((run / "result.json").read_text()))


def records(file: Path) -> list[Any]:
    """The records of an offline file: a LevelDB log (blocks of 32 KiB, chunks with a 7-byte head) of messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, found = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if kind == 0:  # the padding at the end of a block
            position += 32768 - position % 32768
            continue
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            found.append(Record.FromString(parts))
            parts = b""
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
    return found


def rows(file: Path) -> list[dict[str, Any]]:
    def name(item: Any) -> str:
        return str(item.key or "/".join(item.nested_key))

    histories = [record.history for record in records(file) if record.WhichOneof("record_type") == "history"]
    return [{name(item): json.loads(item.value_json) for item in history.item} for history in histories]


def offline_files(session: Session) -> list[Path]:
    return sorted((session.run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def test_rows_are_read_back(session: Session) -> None:
    names = ("step", "seconds", "tokens", "critic/score/mean")
    first, second = ([[row[name] for name in names] for row in rows(file)] for file in offline_files(session))
    assert first == [[1, 2.0, 10, 0.25], [2, 4.0, 20, 0.5], [3, 6.0, 30, 0.75]]
    assert second == [[3, 6.0, 30, 0.75], [4, 8.0, 40, 1.0]]


def test_tensorboard_beside_it_has_the_same_accuracy_by_data_source(session: Session) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulators

    found = accumulators.EventAccumulator(str(session.run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    kept = {event.step: event.value for event in found.Scalars(ACCURACY)}
    assert kept == {1: 0.125, 2: 0.25, 3: 0.375, 4: 0.5, 5: 0.625}
    sent = {row["step"]: row[ACCURACY] for file in offline_files(session) for row in rows(file)}
    assert sent == {step: value for step, value in kept.items() if step < 5}, "wandb was switched off at step 5"


def test_a_resumed_run_has_the_same_id_name_and_project(session: Session) -> None:
    identity = (session.run / "wandb" / "run_id.txt").read_text().strip()
    files = offline_files(session)
    assert len(files) == 2
    for file in files:
        run = next(record.run for record in records(file) if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.display_name, run.project) == (identity, "mine", "a project")
        config = {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in run.config.update}
        assert config["seed"] == 3 and config["training"] == {"steps": 5}


def test_a_failed_run_says_so(session: Session) -> None:
    exits = [
        record.exit.exit_code
        for file in offline_files(session)
        for record in records(file)
        if record.WhichOneof("record_type") == "exit"
    ]
    assert exits == [0, 1]


def test_without_a_key_it_is_offline_and_says_how_to_send(session: Session) -> None:
    identity = (session.run / "wandb" / "run_id.txt").read_text().strip()
    line = f"wandb: offline; send it with: wandb sync {session.run}/wandb/offline-run-*-{identity}"
    said = [text for text in session.result["said"] if not text.startswith("TensorBoard: ")]
    assert said == [line, line, "wandb: switched off by WANDB_MODE"]
    assert session.result["lost"] == [0, 0, 0]
    assert len(offline_files(session)) == 2


def test_it_never_connects_and_never_prints(session: Session) -> None:
    assert session.connections <= 1  # the fixture's own
    assert session.output == ""


def test_a_key_counts_only_for_the_server_in_use(session: Session) -> None:
    assert session.result["keys"] == {"none": False, "ours": True, "another": False}
