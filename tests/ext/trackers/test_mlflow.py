"""What is written for MLflow, read back with MLflow's own client."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.task_config import configure
from turnwise.ext.trackers import mlflow as mlflow_store
from turnwise.ext.trackers.mlflow import MlflowTracker, name_for
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.choose import Trackers
from turnwise.storage.trackers.tracker import Point

for library in ("mlflow", "sqlalchemy", "alembic"):
    pytest.importorskip(library, reason=f"{library} is not installed")
mlflow_store.load()

CONFIG = {"seed": 3, "training": {"steps": 5, "target": None}, "data": {"files": ["a", "b"]}, "long": "x" * 9000}
ODD = {"val/accuracy/a:b": 0.1, "val/accuracy/a;b": 0.2, "val/accuracy/a_b": 0.3, "é//x": 0.4, "n" * 300: 0.5}


def session(run: RunDir, steps: range, resumed_at: int, state: State) -> list[str]:
    said = list[str]()
    trackers = Trackers([MlflowTracker(configure("trackers.project=a project"))], said.append, last_seconds=120)
    trackers.start(run, CONFIG, resumed_at=resumed_at)
    for step in steps:
        trackers.log(Point(step, step * 2.0, step * 10, {"critic/score/mean": step / 4} | ODD))
    trackers.finish(state, f"ended {state}")
    assert trackers.metrics()["tracking/mlflow/lost"] == 0, said
    return said


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, list[str]]:
    """A stopped run and its resumption: MLflow's client, the run's id there, and what was said."""
    from mlflow.tracking import MlflowClient

    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = RunDir.create(tmp_path_factory.mktemp("mlflow"), "my run", "train")
    said = session(run, range(1, 4), 0, State.STOPPED) + session(run, range(3, 5), 2, State.FAILED)
    patch.undo()
    uri = f"sqlite:///{run.path}/mlflow/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("a project")
    (found,) = client.search_runs([experiment.experiment_id])
    assert sorted(path.name for path in run.path.iterdir()) == ["mlflow"]
    return client, found.info.run_id, said


def test_metrics_are_read_back(resumed: tuple[Any, str, list[str]]) -> None:
    client, run_id, _ = resumed
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "critic/score/mean")]
    assert sorted(history) == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
    last = client.get_run(run_id).data.metrics
    assert last["progress/tokens"] == 40 and last["progress/seconds"] == 8.0


def test_names_that_it_refuses_do_not_fall_together(resumed: tuple[Any, str, list[str]]) -> None:
    client, run_id, _ = resumed
    last = client.get_run(run_id).data.metrics
    assert {name: last[name_for(name)] for name in ODD} == ODD
    assert last["val/accuracy/a_b"] == 0.3


def test_config_state_and_reason(resumed: tuple[Any, str, list[str]]) -> None:
    client, run_id, said = resumed
    found = client.get_run(run_id)
    params = found.data.params
    assert (params["seed"], params["training.steps"], params["training.target"]) == ("3", "5", "null")
    assert params["data.files"] == '["a", "b"]' and params["long"] == "x" * 6000
    assert found.info.status == "FAILED" and found.data.tags["turnwise.reason"] == "ended failed"
    assert found.info.run_name == "my run"
    assert len(said) == 2 and all(f"MLflow: run {run_id} of experiment 'a project': mlflow ui" in line for line in said)


def test_the_store_named_by_the_environment_is_used(
    resumed: tuple[Any, str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, run_id, _ = resumed  # its database stands for a shared one: making another takes seconds
    uri = client.tracking_uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = RunDir.create(tmp_path, "another", "train")
    (line,) = session(run, range(1, 2), 0, State.FINISHED)
    identity = json.loads(run.read_text("mlflow/run.json"))["run_id"]
    assert line == f"MLflow: run {identity} of experiment 'a project': {uri}" and identity != run_id
    assert [path.name for path in (run.path / "mlflow").iterdir()] == ["run.json"]
    found = client.get_run(identity)
    assert found.info.status == "FINISHED" and found.data.metrics["critic/score/mean"] == 0.25


def test_a_path_it_cannot_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, said = RunDir.create(tmp_path, "50%", "train"), list[str]()
    trackers = Trackers([MlflowTracker(configure("trackers.project=p"))], said.append)
    trackers.start(run, {}, resumed_at=0)
    trackers.log(Point(1, 0.0, 0, {"loss": 1.0}))
    trackers.finish(State.FINISHED, "")
    assert "switched off: it could not start: MLflow cannot keep a database at" in said[0]
    assert trackers.metrics()["tracking/mlflow/lost"] == 1


@given(st.lists(st.text(max_size=300), min_size=2, max_size=2, unique=True))
def test_every_name_is_accepted_and_stays_apart(names: list[str]) -> None:
    from mlflow.utils.validation import _validate_length_limit, _validate_metric_name

    for name in names:
        _validate_metric_name(name_for(name))
        _validate_length_limit("Metric name", 250, name_for(name))
    assert name_for(names[0]) != name_for(names[1])


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/", "a/../b", "../x", "a/", "/a", "a//b", "./a", "a:b", "x\n", "..a", " "]
)
def test_names_with_a_meaning_for_paths(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(name_for(name))  # raises for a name that mlflow would refuse
    assert name_for(name).strip("/") and ".." not in name_for(name).split("/")


@pytest.mark.parametrize("name", ["critic/score/mean", "val/accuracy", "timing_s/agent_loop/tool_calls/max", "a.b-c d"])
def test_good_names_stay(name: str) -> None:
    assert name_for(name) == name
