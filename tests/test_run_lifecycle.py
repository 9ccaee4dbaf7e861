"""The life of a run from outside: locks, resuming, damage, signals at any moment, and what a failure says."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import configure
from turnwise.commands.cli import main
from turnwise.config import Config
from turnwise.config.choices import Resume
from turnwise.errors import ConfigError, StorageError, TurnwiseError
from turnwise.reports.training import TrainReport
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, Status, read_status
from turnwise.train import train
from turnwise.training.runs.resume_config import resume_command

ROOT = Path(__file__).parent.parent
QUIET = Console(quiet=True)
TINY = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=2", "training.group_size=2",
    "training.samples=8", "eval.samples=2", "training.eval_every=0", "training.save_every=1", "engine.threads=1",
    "training.steps=2", "sampling.max_tokens=16", "training.max_lag=0",
)  # fmt: skip
MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a parent may have us ignore it
    "from turnwise.commands.cli import main; sys.exit(main())"
)


def run(folder: Path, *overrides: str) -> TrainReport:
    return train(configure(*TINY, f"runs_dir={folder}", *overrides), console=QUIET)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint of each."""
    return run(tmp_path_factory.mktemp("runs"), "run=r").run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    shutil.copytree(finished, tmp_path / "r")
    return tmp_path / "r"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def status_of(folder: Path) -> Status:
    status = read_status(RunDir.open(folder))
    assert status is not None
    return status


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- resuming -----------------------------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_nothing_is_touched(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(copy)
    assert main(["train", f"runs_dir={copy.parent}", "run=r", "resume=auto"]) == 0
    assert "already finished: all 2 steps done" in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert contents(copy) == before


def test_a_finished_run_goes_on_when_more_is_asked_of_it(copy: Path) -> None:
    assert main(["train", f"runs_dir={copy.parent}", "run=r", "resume=auto", "training.steps=3"]) == 0
    assert status_of(copy).reason == "all 3 steps done"
    trained = [line["step"] for line in metrics(copy) if "critic/score/mean" in line]
    assert trained == [1, 2, 3]
    evaluated = [line["step"] for line in metrics(copy) if "val/accuracy" in line]
    assert evaluated == [0, 2, 3]
    assert "changed: training.steps was 2 and is 3" in (copy / "log.txt").read_text()
    before = contents(copy)
    assert main(["train", f"runs_dir={copy.parent}", "run=r", "resume=auto"]) == 0, "the run's config has them now"
    assert contents(copy) == before


def test_a_resume_has_the_runs_own_config_and_what_is_given_anew(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", f"runs_dir={copy.parent}", "run=r", "resume=auto"]
    assert main([*given, "training.steps=3", "training.group_size=3"]) == 2
    assert "training.group_size was 2 and is 3" in capsys.readouterr().err
    recipe = copy.parent / "more.yaml"
    recipe.write_text("training: {steps: 3}\neval: {samples: 1}\n")
    assert main([*given, "--config", str(recipe), "board.port=7008"]) == 2, "asked for now, and never read"
    assert "board.port (command line) is never read" in capsys.readouterr().err
    assert main([*given, "--config", str(recipe), "eval.samples=3"]) == 0
    recorded = (copy / "config.yaml").read_text()
    assert "samples: 3" in recorded and "steps: 3" in recorded and "group_size: 2" in recorded
    assert "resume: never" in recorded, "read by itself it starts a run"


ODD = [
    "plain",
    "my run",
    "a,b",
    "a(b)",
    "a=b",
    "été",
    "it's",
    "a#b",
    "a[b]",
    "{a: b}",
    "null",
    "True",
    "12",
    "1e5",
    "a\\b",
    "a\\'b",
    "a\\",
]


@pytest.mark.parametrize("name", ODD)
def test_the_printed_command_names_the_run_whatever_it_is_called(name: str) -> None:
    words = shlex.split(resume_command(name, Config(runs_dir=f"/tmp/{name}")))
    assert words[:2] == ["turnwise", "train"]
    config = configure(*words[2:])
    assert (config.run, config.runs_dir, config.resume) == (name, f"/tmp/{name}", Resume.auto)


def test_the_printed_command_goes_on_with_everything_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["seed=7", "sampling.temperature=0.8", "learner.lr=1e-4", "runs_dir='my runs'", "run='it, again'"]
    assert main(["train", *TINY, *asked, "training.steps=1"]) == 0
    capsys.readouterr()
    assert main([*shlex.split(resume_command("it, again", Config(runs_dir="my runs")))[1:], "training.steps=2"]) == 0
    folder = tmp_path / "my runs" / "it, again"
    assert status_of(folder).reason == "all 2 steps done"
    log = (folder / "log.txt").read_text()
    assert log.count("changed: ") == 1, "all else is as it was"


@pytest.mark.parametrize("where", ["last", "middle"])
def test_one_torn_line_does_not_keep_a_run_from_going_on(copy: Path, where: str) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, b'{"step": 2, "cri']) if where == "last" else b'{"st\n' + b"".join(lines))
    run(copy.parent, "run=r", "resume=auto", "training.steps=3")
    assert [line["step"] for line in metrics(copy) if "critic/score/mean" in line] == [1, 2, 3]
    log = (copy / "log.txt").read_text()
    assert ("its last line is torn" if where == "last" else "line 1 cannot be read: kept in abandoned/") in log


# --- damage -------------------------------------------------------------------------------------------------------


def damage_all(folder: Path) -> None:
    for path in folder.glob("checkpoints/step_*/learner.safetensors"):
        os.truncate(path, 100)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_by_name(copy: Path) -> None:
    damage_all(copy)
    before = contents(copy)
    with pytest.raises(StorageError) as caught:
        run(copy.parent, "run=r", "resume=auto", "training.steps=3")
    for step in (1, 2):
        assert f"step_00000{step}: learner.safetensors is damaged" in str(caught.value)
    assert contents(copy) == before, "nothing of it is touched"


def reseal(folder: Path) -> None:
    """Make the manifest agree with the files, as if they had been written so."""
    import hashlib

    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.blake2b((folder / name).read_bytes()).hexdigest()[:32]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edited(change: str, state: Any) -> Any:
    progress = state["progress"]
    match change:
        case "extra":
            progress["mood"] = "good"
        case "extra at the top":
            state["mood"] = "good"
        case "missing":
            del state["loader"]
        case "mistyped":
            progress["step"] = "2"
        case "negative":
            progress["prompt_batches"] = -1
        case "learner":
            state["learner"] = {}
        case "kl":
            state["kl"] = {"kind": "fixed"}
        case "format":
            state["format"] = 99
        case "no format":
            del state["format"]
        case "before":
            progress["before"] = {"accuracy": "high"}
        case "list":
            return []
    return state


@pytest.mark.parametrize(
    "change",
    ["extra", "extra at the top", "missing", "mistyped", "negative", "learner", "kl", "format", "no format", "before",
     "list"],
)  # fmt: skip
def test_a_state_that_cannot_be_used_is_a_damaged_checkpoint(copy: Path, change: str) -> None:
    newest = copy / "checkpoints" / "step_000002"
    state = edited(change, json.loads((newest / "state.json").read_text()))
    (newest / "state.json").write_text(json.dumps(state))
    reseal(newest)
    shutil.rmtree(copy / "checkpoints" / "step_000001")
    with pytest.raises(StorageError, match=r"all its checkpoints are damaged: step_000002: state.json cannot be used"):
        run(copy.parent, "run=r", "resume=auto")


def test_a_folder_without_config_is_refused_and_an_empty_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"r is not a run directory: it has no config\.yaml"):
        run(tmp_path, "run=r", "resume=auto")
    assert contents(tmp_path / "r") == {"notes.txt": b"mine"}
    (tmp_path / "r" / "notes.txt").unlink()
    assert run(tmp_path, "run=r", "resume=auto", "training.steps=1").steps == 1
    with pytest.raises(ConfigError, match="path separator"):
        run(tmp_path, "run=../r", "resume=auto")


def test_a_failure_of_what_is_around_saves_the_last_good_state(tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(
        "import pathlib\n"
        "async def score(trajectory):\n"
        "    if trajectory.step >= 1 and pathlib.Path(__file__).with_name('down').exists():\n"
        "        raise RuntimeError('the service went away')\n"
        "    return float(trajectory.sibling)\n"
    )
    (tmp_path / "down").touch()
    asked = (f"scoring.scorers={{default: '{tmp_path}/moody.py:score'}}", "training.save_every=0", "run=r")
    with pytest.raises(TurnwiseError, match=r"could not be scored .* raised RuntimeError: the service went away"):
        run(tmp_path, *asked)
    status = status_of(tmp_path / "r")
    assert status.state is State.FAILED and "\n" not in status.reason and "the service went away" in status.reason
    log = (tmp_path / "r" / "log.txt").read_text()
    assert "checkpoints/step_000001" in log and "resume with: turnwise train run=r" in log
    assert "Traceback" in log and "moody.py" in log and "ExceptionGroup" not in log
    (tmp_path / "down").unlink()
    assert run(tmp_path, *asked, "resume=auto").steps == 2
    assert "resumed from step_000001: 1 steps done" in (tmp_path / "r" / "log.txt").read_text()


# --- locks --------------------------------------------------------------------------------------------------------


def start(folder: Path, verb: str, *overrides: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, verb, *overrides],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(path: Path, text: str, process: "subprocess.Popen[str]") -> None:
    for _ in range(3000):
        if path.is_file() and text in path.read_text():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never appeared in {path}")


@pytest.mark.long  # tests/storage/test_lock.py refuses a second process
def test_a_second_process_in_a_run_is_refused_and_the_first_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(tmp_path, "train", *TINY, "run=r", "training.steps=500")
    folder = tmp_path / "runs" / "r"
    try:
        wait_for(folder / "log.txt", "step 1/500", process)
        assert main(["train", f"runs_dir={folder.parent}", "run=r", "resume=auto"]) == 2
        told = capsys.readouterr().err
        assert f"is being written by process {process.pid} on " in told and "turnwise train, since" in told
        assert main(["show", str(folder)]) == 0, "readers are not locked out"
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    steps = [line["step"] for line in metrics(folder) if "critic/score/mean" in line]
    assert steps == sorted(set(steps)) and not (folder / ".lock").exists()


# --- signals ------------------------------------------------------------------------------------------------------
# Each place that can be interrupted is tried with one signal and one command; the long tail has the other pairs.

TERMINATED = pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
DURING_START = pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("eval", signal.SIGTERM),
        pytest.param("eval", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("train", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("train", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
WHILE_STARTING = pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("train", signal.SIGINT),
        pytest.param("train", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("eval", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("eval", signal.SIGTERM, marks=pytest.mark.long),
    ],
)

SLOW = (
    "import asyncio, pathlib\n"
    "async def slow(trajectory):\n"
    "    if pathlib.Path('runs/r').exists() or pathlib.Path('r').exists():\n"  # not when it is tried out
    "        pathlib.Path('reached').touch()\n"
    "        await asyncio.sleep(600)\n"
    "    return 0.0\n"
)
SLOW_IMPORT = "import pathlib, time\npathlib.Path('reached').touch()\ntime.sleep(600)\n"


def check_stopped(folder: Path, process: "subprocess.Popen[str]", number: int, verb: str) -> str:
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    name = signal.Signals(number).name
    assert process.returncode == 128 + number, out
    assert "Traceback" not in out and out.rstrip().endswith(f"turnwise {verb}: stopped by {name}"), out
    assert not list((folder / "tmp").glob("turnwise-*")), "no sandbox folder is left"
    return out


@DURING_START
def test_a_signal_during_the_start_is_one_line(tmp_path: Path, verb: str, number: int) -> None:
    (tmp_path / "plug.py").write_text(SLOW_IMPORT)
    process = start(tmp_path, verb, "run=r", "scoring.scorers={default: 'plug.py:score'}")
    wait_for(tmp_path / "reached", "", process)
    check_stopped(tmp_path, process, number, verb)
    assert not (tmp_path / "runs").exists(), "nothing had begun"


SLOW_WORKER = (
    "import os, pathlib, time\n"
    "first = pathlib.Path('first')\n"
    "first.exists() or first.write_text(str(os.getpid()))\n"
    "if first.read_text() != str(os.getpid()) and pathlib.Path('runs/r').exists():\n"  # a worker, not when tried out
    "    pathlib.Path('reached').touch()\n"
    "    time.sleep(600)\n"
    "def score(trajectory):\n    return 1.0\n"
)


@WHILE_STARTING
def test_a_signal_while_things_are_started_leaves_a_stopped_run(tmp_path: Path, verb: str, number: int) -> None:
    (tmp_path / "plug.py").write_text(SLOW_WORKER)
    asked = ("scoring.scorers={default: 'plug.py:score'}", "scoring.run=pool", "scoring.workers=1", "eval.samples=2")
    process = start(tmp_path, verb, "run=r", *asked, "rollout.tools=[python]", "rollout.interaction=null")
    wait_for(tmp_path / "reached", "", process)
    check_stopped(tmp_path, process, number, verb)
    status = status_of(tmp_path / "runs" / "r")
    assert (status.state, status.reason) == (State.STOPPED, f"stopped by {signal.Signals(number).name}")
    assert not (tmp_path / "runs" / "r" / ".lock").exists()


@TERMINATED
def test_a_signal_during_eval_leaves_a_stopped_run_and_no_folders(tmp_path: Path, number: int) -> None:
    (tmp_path / "plug.py").write_text(SLOW)
    asked = ("eval.samples=4", "sampling.max_tokens=16", "rollout.tools=[python]", "rollout.interaction=null")
    process = start(tmp_path, "eval", "run=r", *asked, "scoring.scorers={default: 'plug.py:slow'}")
    wait_for(tmp_path / "reached", "", process)
    check_stopped(tmp_path, process, number, "eval")
    status = status_of(tmp_path / "runs" / "r")
    assert (status.state, status.reason) == (State.STOPPED, f"stopped by {signal.Signals(number).name}")


@pytest.mark.long  # before it things are started, after it steps are made (tests/test_train.py): both are interrupted
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_first_evaluation_stops_it_and_the_run_can_go_on(tmp_path: Path, number: int) -> None:
    (tmp_path / "plug.py").write_text(SLOW)
    process = start(tmp_path, "train", *TINY, "run=r", "scoring.scorers={default: 'plug.py:slow'}")
    wait_for(tmp_path / "reached", "", process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in out, out
    assert "resume with: turnwise train run=r resume=auto" in out
    status = status_of(tmp_path / "runs" / "r")
    assert (status.state, status.reason) == (State.STOPPED, "stopped by a signal")


@TERMINATED
def test_a_signal_during_rescoring_leaves_nothing_and_during_fine_tuning_what_was_learned(
    tmp_path: Path, copy: Path, number: int
) -> None:
    (tmp_path / "plug.py").write_text(SLOW)
    before = contents(copy)
    process = start(tmp_path, "rescore", "r", "--scorer", "plug.py:slow")
    wait_for(tmp_path / "reached", "", process)
    assert (copy / "rescored" / ".lock").is_file()
    check_stopped(tmp_path, process, number, "rescore")
    assert contents(copy) == before and not (copy / "rescored").exists()
    (tmp_path / "reached").unlink()
    (tmp_path / "plug.py").write_text(SLOW_IMPORT)
    process = start(tmp_path, "sft", "sft.script=plug.py:script", "run=tuned")
    wait_for(tmp_path / "reached", "", process)
    check_stopped(tmp_path, process, number, "sft")
    assert not (tmp_path / "runs" / "tuned").exists()
    process = start(tmp_path, "sft", "sft.recorded=[r]", "sft.steps=100000", "sft.batch_tokens=64", "run=tuned")
    wait_for(tmp_path / "runs" / "tuned" / "metrics.jsonl", "sft/loss", process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in out, out
    assert "resume with: turnwise sft run=tuned resume=auto" in out
    tuned = tmp_path / "runs" / "tuned"
    status = status_of(tuned)
    assert status.state is State.STOPPED and status.step > 0 and (tuned / "policy" / "model.safetensors").is_file()
    assert (tuned / "checkpoints" / f"step_{status.step:06d}" / "learner.safetensors").is_file()


def test_a_signal_that_the_parent_has_us_ignore_stays_ignored(tmp_path: Path) -> None:
    """As in the background of a script; SIGTERM ends it all the same."""
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from turnwise.system.stopping import Stopped, stoppable\n"
        "try:\n"
        "    with stoppable():\n"
        "        os.kill(os.getpid(), signal.SIGINT); print('still here')\n"
        "        os.kill(os.getpid(), signal.SIGTERM); print('not here')\n"
        "except Stopped as stop:\n"
        "    print(stop, stop.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["still here", "stopped by SIGTERM 143"]


# --- what a failure says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["eval", "train"])
def test_a_scorer_that_raises_is_one_line_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (tmp_path / "plug.py").write_text(
        "import pathlib\n"
        "def score(trajectory):\n"
        "    return 1 / (not pathlib.Path(__file__).with_name('r').exists())\n"  # not when it is tried out
    )
    asked = [*TINY, f"runs_dir={tmp_path}", "run=r", f"scoring.scorers={{default: '{tmp_path}/plug.py:score'}}"]
    assert main([verb, *asked]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "ZeroDivisionError" in line]
    status = status_of(tmp_path / "r")
    assert line == f"turnwise {verb}: {status.reason}" and status.state is State.FAILED
    assert re.search(r"plug.py:score raised ZeroDivisionError: .* \(plug.py, line 3\)", status.reason)
    assert "TaskGroup" not in (tmp_path / "r" / "log.txt").read_text()


@pytest.mark.parametrize("verb", ["check", "eval", "train"])
def test_a_scorer_that_always_raises_is_found_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (tmp_path / "plug.py").write_text("def score(trajectory):\n    return 1 / 0\n")
    asked = [*TINY, f"runs_dir={tmp_path}", "run=r", f"scoring.scorers={{default: '{tmp_path}/plug.py:score'}}"]
    assert main([verb, *asked]) == (1 if verb == "check" else 2)
    told = capsys.readouterr()
    assert "ZeroDivisionError" in told.out + told.err and "Traceback" not in told.out + told.err
    assert not (tmp_path / "r").exists()


def test_a_users_loop_that_raises_fails_its_episodes_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "calls = 0\n"
        "async def sometimes(chat):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 2 and calls % 2:\n"  # both splits are tried out first
        "        raise ValueError('not this one')\n"
        "    await chat.generate()\n"
    )
    report = run(tmp_path, "run=r", f"rollout.agent={tmp_path}/loops.py:sometimes", "rollout.tools=[]")
    assert report.steps == 2
    failed = [line.get("trajectories/failed") for line in metrics(report.run)]
    assert any(failed)


def test_too_many_failed_episodes_stop_a_training_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "calls = 0\n"
        "async def mostly(chat):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 4 and calls % 4:\n"  # the evaluation goes well; of each group of four one survives
        "        raise ValueError('not this one')\n"
        "    await chat.generate()\n"
    )
    asked = (f"rollout.agent={tmp_path}/loops.py:mostly", "rollout.tools=[]", "training.group_size=4")
    with pytest.raises(TurnwiseError, match=r"of 8 episodes failed \(rollout.max_failures=0.5\).*not this one"):
        run(tmp_path, "run=r", *asked)


def test_the_accuracy_of_nothing_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "import pathlib\n"
        "async def never(chat):\n"
        "    if pathlib.Path(__file__).with_name('r').exists():\n"  # not when it is tried out
        "        raise ValueError('not this one')\n"
        "    await chat.generate()\n"
    )
    asked = (f"rollout.agent={tmp_path}/loops.py:never", "rollout.tools=[]", "rollout.max_failures=1")
    report = run(tmp_path, "run=r", *asked, "training.steps=1", "training.target=0.0", "training.eval_every=1")
    assert report.before == report.after == {} and report.steps == 1, "nothing has reached the target"
    assert not [name for line in metrics(report.run) for name in line if "accuracy" in name]
    assert json.loads((report.run / "eval" / "step_000000.json").read_text()) == {}
    assert "step 0: no episode was scored" in (report.run / "log.txt").read_text()
    from turnwise.ext.board.runs import Runs

    assert Runs([report.run]).open("r").details(time.time())["accuracy"] is None


def test_a_run_that_was_sent_imports_nothing_when_it_goes_on_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "imported"
    plugin = f"import pathlib\nasync def fair(trajectory):\n    pathlib.Path({str(marker)!r}).touch()\n    return 1.0\n"
    (tmp_path / "mine.py").write_text(plugin)
    named = "scoring.scorers.default=mine.py:fair"
    assert main(["train", *TINY, "run=a", "training.steps=1", named]) == 0
    marker.unlink()
    capsys.readouterr()
    assert "--trust-run" not in resume_command("a", configure(*TINY, named)), "it is one's own"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    again = shlex.split(resume_command("a", configure(*TINY, named)))[1:]
    assert again == ["train", "run=a", "resume=auto", "--trust-run"]
    assert main([*again[:-1], "training.steps=2"]) == 2
    told = capsys.readouterr().err
    assert "mine.py:fair" in told and "--trust-run" in told and told.count("\n") == 1
    assert not marker.exists() and status_of(tmp_path / "runs" / "a").reason == "all 1 steps done"
    assert main([*again, "training.steps=2"]) == 0
    assert marker.exists()


@pytest.mark.parametrize("verb", ["eval", "train"])
def test_a_name_that_is_taken_is_said_before_anything_is_tried_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (tmp_path / "plug.py").write_text("import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n")
    (tmp_path / "r").mkdir()
    plug = f"scoring.scorers={{default: '{tmp_path}/plug.py:score'}}"
    assert main([verb, *TINY, f"runs_dir={tmp_path}", "run=r", plug]) == 2
    assert "run 'r' exists" in capsys.readouterr().err
    (tmp_path / "r" / "notes.txt").touch()
    asked = ["train", *TINY, f"runs_dir={tmp_path}", "run=r", "resume=auto", plug]
    assert main(asked) == 2 and "is not a run directory" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
