"""Runs are found, told apart, and seen as alive or not."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from turnwise.errors import ConfigError, StorageError
from turnwise.ext.board.liveness import GONE, DisplayedState
from turnwise.ext.board.run_summary import MetricsReader, RunSummary, summarise_run
from turnwise.ext.board.runs import NotFound, Runs
from turnwise.storage.configs import diff, read_config
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, Status, write_status


def a_run(folder, name="a", steps=0, seconds=10.0):
    run = RunDir.create(folder, name, "train")
    run.write_text("config.yaml", "task: arithmetic\nmodel:\n  path: tiny\ntraining:\n  steps: 38\n")
    for step in range(1, steps + 1):
        values = {"step": step, "seconds": seconds * step, "tokens": step, "critic/score/mean": step / steps}
        run.append_jsonl("metrics.jsonl", values)
    return run


def a_status(run, now, state=State.RUNNING, **changes):
    """A status, and the metrics as old as it says."""
    known = {"pid": os.getpid(), "host": socket.gethostname(), "started": now, "updated": now, "step": 3, "steps": 38}
    status = Status(state, "train", **known | changes)
    write_status(run, status)
    for path in run.path.glob("metrics.jsonl"):
        os.utime(path, (status.updated, status.updated))
    return status


# --- which runs there are -------------------------------------------------------------------------------------------


def test_a_place_is_a_folder_of_runs_or_a_run(tmp_path):
    first, second = a_run(tmp_path / "runs", "first"), a_run(tmp_path / "elsewhere", "second")
    (tmp_path / "runs" / "no run").mkdir()
    a_run(tmp_path / "runs", "hidden").path.rename(tmp_path / "runs" / ".hidden")
    runs = Runs([tmp_path / "runs", second.path])
    assert runs.names() == ["first", "second"]
    assert runs.open("first").dir.path == first.path.resolve()
    third = a_run(tmp_path / "runs", "third")
    assert runs.open("third").dir.path == third.path.resolve()


def test_a_missing_place_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="no folder.*nowhere"):
        Runs([tmp_path / "nowhere"])


def test_two_runs_with_one_name_are_told_apart(tmp_path):
    for place in ("one", "two"):
        a_run(tmp_path / place, "same")
    runs = Runs([tmp_path / "one", tmp_path / "two", tmp_path / "one" / "same"])
    assert runs.names() == ["same", "same (two)"]
    assert runs.open("same (two)").dir.path == (tmp_path / "two" / "same").resolve()


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "a/../a", "/etc", "a\0", "b", "%2e%2e"])
def test_only_names_of_the_list_open(tmp_path, name):
    a_run(tmp_path, "outside")
    a_run(tmp_path / "runs", "a")
    with pytest.raises(NotFound):
        Runs([tmp_path / "runs"]).open(name)


def test_links_that_lead_out_are_not_followed(tmp_path):
    outside = a_run(tmp_path / "outside", "private")
    a_run(tmp_path / "runs", "a")
    (tmp_path / "runs" / "link").symlink_to(outside.path)
    (tmp_path / "runs" / "alias").symlink_to("a")
    (tmp_path / "runs" / "nothing").symlink_to("gone")
    runs = Runs([tmp_path / "runs"])
    assert runs.names() == ["a"]
    assert Runs([tmp_path / "runs" / "link"]).names() == ["private"]  # named by the user: meant


def test_a_run_whose_file_is_a_link_that_leads_out_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("private")
    run = a_run(tmp_path / "runs")
    (run.path / "log.txt").symlink_to(secret)
    opened = Runs([tmp_path / "runs"]).open("a")
    with pytest.raises(StorageError, match=r"log.txt is a link"):
        opened.check()
    assert "log.txt is a link" in opened.summary(time.time())["reason"]


def test_a_pipe_in_place_of_a_file_does_not_hang_the_board(tmp_path):
    run, now = a_run(tmp_path), time.time()
    a_status(run, now, updated=now - 5000)
    os.mkfifo(run.path / "metrics.jsonl")
    summary = Runs([tmp_path]).open("a").summary(now)
    assert "metrics.jsonl is no file" in summary["reason"] and summary["reward"] is None


def test_a_run_that_was_removed_is_gone(tmp_path):
    run = a_run(tmp_path / "runs")
    runs = Runs([tmp_path / "runs"])
    runs.open("a")
    run.path.rename(tmp_path / "moved")
    with pytest.raises(NotFound):
        runs.open("a")
    assert runs.names() == []


# --- how they are doing ---------------------------------------------------------------------------------------------


def status_of(run, now):
    return Runs([run.path]).open(run.name).status(now)


@pytest.mark.parametrize("state", [State.FINISHED, State.STOPPED, State.FAILED])
def test_a_run_that_said_how_it_ended_is_believed(tmp_path, state):
    run, now = a_run(tmp_path), time.time()
    a_status(run, now - 9999, state, reason="so it was", pid=999_999_999)
    life = status_of(run, now)
    assert (life.state.value, life.reason) == (state.value, "so it was")


def test_running_becomes_stalled_after_two_minutes_or_ten_steps(tmp_path):
    run, now = a_run(tmp_path, steps=5, seconds=30.0), time.time()
    for quiet, state in (
        (0, DisplayedState.RUNNING),
        (119, DisplayedState.RUNNING),
        (299, DisplayedState.RUNNING),
        (301, DisplayedState.STALLED),
    ):
        a_status(run, now, updated=now - quiet)
        assert status_of(run, now).state is state, quiet
    quick = a_run(tmp_path, "quick", steps=5, seconds=1.0)
    for quiet, state in ((119, DisplayedState.RUNNING), (121, DisplayedState.STALLED)):
        a_status(quick, now, updated=now - quiet)
        assert status_of(quick, now).state is state, quiet
    assert "no sign of life for 121 s" in status_of(quick, now).reason
    fresh = a_run(tmp_path, "fresh")  # no step yet: it loads a model, or plays an evaluation
    for quiet, state in ((1700, DisplayedState.RUNNING), (1900, DisplayedState.STALLED)):
        a_status(fresh, now, updated=now - quiet)
        assert status_of(fresh, now).state is state, quiet


def test_metrics_written_just_now_are_a_word_too(tmp_path):
    run, now = a_run(tmp_path), time.time()
    a_status(run, now, updated=now - 500)
    run.append_jsonl("metrics.jsonl", {"step": 1, "seconds": 1.0})
    assert status_of(run, now).state is DisplayedState.RUNNING


def test_a_process_that_was_killed_is_noticed(tmp_path):
    run, now = a_run(tmp_path), time.time()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    a_status(run, now, pid=child.pid)
    try:
        assert status_of(run, now).state is DisplayedState.RUNNING
    finally:
        child.kill()
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is None:
        pass
    assert (status_of(run, now).state, status_of(run, now).reason) == (DisplayedState.FAILED, GONE)  # a zombie by now
    child.wait()
    run.log("step 3: collecting")
    run.log("the sampler needs 9 GB more than there are\n")
    assert status_of(run, now).state is DisplayedState.FAILED
    assert status_of(run, now).reason.startswith(GONE)
    assert status_of(run, now).reason.endswith("the sampler needs 9 GB more than there are")


def test_another_process_with_its_number_is_not_taken_for_it(tmp_path):
    run, now = a_run(tmp_path), time.time()
    a_status(run, now, started=now - 30 * 24 * 3600)  # long before this process began
    assert status_of(run, now).state is DisplayedState.FAILED


def test_a_process_of_another_host_is_not_looked_for(tmp_path):
    run, now = a_run(tmp_path), time.time()
    a_status(run, now, pid=999_999_999, host="another-host")
    assert status_of(run, now).state is DisplayedState.RUNNING


def test_a_run_without_status_is_unknown_and_as_old_as_its_files(tmp_path):
    run, now = a_run(tmp_path, steps=1), time.time()
    os.utime(run.path / "config.yaml", (1000.0, 1000.0))
    os.utime(run.path / "metrics.jsonl", (2000.0, 2000.0))
    life = status_of(run, now)
    assert (life.state, life.started, life.updated) == (DisplayedState.UNKNOWN, 1000.0, 2000.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}', '{"state": "odd", "command": "train"}',
    '{"state": "running", "command": "train", "started": "x", "updated": 1, "pid": 1, "host": "h"}',
    '{"state": "running", "command": "train", "started": 1, "updated": 1, "pid": "1", "host": "h"}'])  # fmt: skip
def test_a_damaged_status_is_unknown_with_the_reason(tmp_path, text):
    run = a_run(tmp_path)
    (run.path / "status.json").write_text(text)
    life = status_of(run, time.time())
    assert life.state is DisplayedState.UNKNOWN and "status.json" in life.reason


# --- what is told about them ----------------------------------------------------------------------------------------


def test_a_summary_has_the_newest_numbers(tmp_path):
    run, now = a_run(tmp_path / "runs", steps=4), time.time()
    run.append_jsonl(
        "metrics.jsonl",
        {"step": 4, "seconds": 45.0, "val/accuracy": 0.75, "val/accuracy/arithmetic": 0.1, "val/accuracy_stderr": 0.2},
    )
    a_status(run, now, step=4)
    opened = Runs([tmp_path / "runs"]).open("a")
    summary = opened.summary(now)
    wanted = {"name": "a", "state": "running", "reason": "", "command": "train", "step": 4, "steps": 38, "seconds": 45.0,
              "task": "arithmetic", "model": "tiny", "reward": 1.0, "accuracy": 0.75, "accuracy_error": 0.2, "accuracy_step": 4}  # fmt: skip
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["spark"] == [0.25, 0.5, 0.75, 1.0]
    run.append_jsonl("metrics.jsonl", {"step": 5, "seconds": 55.0, "critic/score/mean": 0.5})
    assert opened.summary(now)["reward"] == 0.5 and opened.summary(now)["accuracy"] == 0.75


def test_a_run_through_an_endpoint_shows_the_model_that_answered(tmp_path):
    run = a_run(tmp_path / "runs")
    opened = Runs([tmp_path / "runs"]).open("a")
    head = "model: {path: tiny}\nengine: {name: openai, base_url: 'http://there/v1', model: "
    run.write_text("config.yaml", head + "Qwen3-8B}\n")
    assert opened.summary(0.0)["model"] == "Qwen3-8B"
    run.write_text("config.yaml", head + "null, retries: 3}\n")
    assert opened.summary(0.0)["model"] == "the model of http://there/v1"


def test_a_long_runs_reward_is_picked_out_evenly(tmp_path):
    run = a_run(tmp_path, steps=0)
    lines = []
    for step in range(2000):
        if step % 10 == 0:
            lines.append(json.dumps({"step": step, "seconds": 1.0, "val/accuracy": 0.5}) + "\n")
        lines.append(json.dumps({"step": step, "seconds": 3.0 * step, "critic/score/mean": step / 2000}) + "\n")
    run.write_text("metrics.jsonl", "".join(lines) + '{"step": 2001, "critic/sc')
    found = summarise_run(run)
    assert 50 <= len(found.spark) <= 60
    assert list(found.spark) == sorted(found.spark) and found.spark[0] < 0.02 and found.spark[-1] > 0.96
    assert max(later - earlier for earlier, later in zip(found.spark, found.spark[1:], strict=False)) < 0.04
    assert (found.step, found.reward, found.accuracy, found.step_seconds) == (1999, 1999 / 2000, 0.5, 3.0)


def test_what_was_read_of_the_metrics_is_not_read_again(tmp_path):
    """Lines of the same length in place of some in the middle: a look that read them again would find them."""
    run = a_run(tmp_path, steps=0)
    reader, path = MetricsReader(run), run.path / "metrics.jsonl"
    line = '{{"step": {step}, "seconds": 1.0, "critic/score/mean": {reward}}}\n'
    path.write_text("".join(line.format(step=1000 + n, reward=0.25) for n in range(1000)))
    assert set(summarise_run(run, reader).spark) == {0.25}
    with path.open("r+") as file:
        file.seek(100 * len(line.format(step=1000, reward=0.25)))
        file.write("".join(line.format(step=1000 + n, reward=0.75) for n in range(100, 900)))
        file.seek(0, 2)
        file.write(line.format(step=2000, reward=0.5))
        file.write('{"step": 2001, "critic/score/mean": 0.')
    found = summarise_run(run, reader)
    assert set(found.spark) == {0.25, 0.5} and (found.reward, found.step) == (0.5, 2000)
    with path.open("a") as file:
        file.write("125}\n")
    assert (summarise_run(run, reader).reward, summarise_run(run, reader).step) == (0.125, 2001)
    path.unlink()
    run.append_jsonl("metrics.jsonl", {"step": 1, "critic/score/mean": 1e-05})
    assert summarise_run(run, reader).spark == (1e-05,), "a file written anew is another"


@pytest.mark.parametrize("value", ["null", "NaN", "true", '"0.5"', "1e999", "[1]", "-"])
def test_what_is_no_number_is_no_reward(tmp_path, value):
    run = a_run(tmp_path, steps=0)
    (run.path / "metrics.jsonl").write_text(f'{{"step": 1, "critic/score/mean": {value}, "loss": 2}}\n')
    assert summarise_run(run).reward is None


def test_an_evaluations_accuracy_is_in_its_report(tmp_path):
    run = a_run(tmp_path)
    assert summarise_run(run).accuracy is None
    sources = {
        "a": {"accuracy": 1.0, "reward": 2.0, "episodes": 10},
        "b": {"accuracy": 0.0, "reward": 0.0, "episodes": 30},
    }
    run.write_json("eval/step_000000.json", {"sources": sources})
    assert summarise_run(run) == RunSummary(accuracy=0.25, reward=0.5)
    run.write_json("eval/step_000010.json", {"accuracy": 0.5, "accuracy_stderr": 0.1})
    assert summarise_run(run) == RunSummary(accuracy=0.5, accuracy_error=0.1)


def test_one_damaged_run_does_not_hide_the_others(tmp_path):
    a_run(tmp_path, "good", steps=2)
    bad = a_run(tmp_path, "bad")
    (bad.path / "config.yaml").write_text("task: [")
    (bad.path / "metrics.jsonl").write_text("nonsense\n")
    found = {one["name"]: one for one in Runs([tmp_path]).summaries(time.time())}
    assert found["good"]["reward"] == 1.0
    assert "config.yaml" in found["bad"]["reason"] and found["bad"]["reward"] is None


def test_the_version_changes_when_a_file_or_the_state_does(tmp_path):
    run, now = a_run(tmp_path), time.time()
    a_status(run, now)
    opened = Runs([tmp_path]).open("a")
    seen = [opened.version(now)]
    assert opened.version(now + 1) == seen[0]
    run.append_jsonl("metrics.jsonl", {"step": 1, "seconds": 1.0})
    seen.append(opened.version(now))
    run.write_text("trajectories/step_000001.parquet", "")
    seen.append(opened.version(now))
    seen.append(opened.version(now + 2000))  # stalled
    assert len(set(seen)) == 4


# --- configs --------------------------------------------------------------------------------------------------------


def test_a_config_is_flattened_as_yaml_would_show_it(tmp_path):
    run = a_run(tmp_path)
    run.write_text("config.yaml", "a: 1\nb: {c: [x, 2.5, null], d: {}, e: true}\nf: null\n")
    _, values = read_config(run)
    assert values == {"a": "1", "b.c": "[x, 2.5, null]", "b.d": "{}", "b.e": "true", "f": "null"}


def test_only_keys_that_differ_are_told():
    found = diff({"one": {"a": "1", "b": "2"}, "two": {"a": "1", "b": "3", "c": "4"}})
    assert found == [
        {"key": "b", "values": {"one": "2", "two": "3"}},
        {"key": "c", "values": {"one": None, "two": "4"}},
    ]


def test_a_small_file_cannot_become_a_huge_tree(tmp_path):
    run = a_run(tmp_path)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    run.write_text("config.yaml", "\n".join(lines))
    with pytest.raises(StorageError, match="more than"):
        read_config(run)
