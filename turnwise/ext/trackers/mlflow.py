"""MLflow: a run in the store that MLFLOW_TRACKING_URI names, otherwise in a database under the run directory."""

import hashlib
import json
import logging
import os
import posixpath
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.errors import StorageError
from turnwise.errors.address_passwords import has_userinfo, without_userinfo
from turnwise.ext.trackers.config import TrackersConfig
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.tracker import Point, foreign

FOLDER = "mlflow"
RUN_FILE = f"{FOLDER}/run.json"
_LONGEST_NAME, _LONGEST_VALUE, _METRICS_AT_ONCE, _PARAMS_AT_ONCE = 250, 6000, 1000, 100
_REFUSED = re.compile(r"[^A-Za-z0-9_\-./ ]")
_STATES = {State.FINISHED: "FINISHED", State.STOPPED: "KILLED", State.FAILED: "FAILED", State.RUNNING: "RUNNING"}


def load() -> Any:
    """Import the client and what its database store needs, without its usage reports and its messages."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read once, at import
    client = foreign("mlflow", "mlflow.tracking", "mlflow.entities", "sqlalchemy", "alembic")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what matters is raised, and told by the guard
    return client


class MlflowTracker:
    """One MLflow run; a resumed run goes on in it. Steps done again are then there twice: MLflow forgets nothing."""

    name = "mlflow"

    def __init__(self, config: Config) -> None:
        self._project = section(config, TrackersConfig).project
        self._tracking, self._entities = load(), foreign("mlflow", "mlflow.entities")

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        """Find or make the experiment and the run; a new one gets the config as its parameters."""
        variable = os.environ.get("MLFLOW_TRACKING_URI")
        if variable and variable.lower().startswith("http") and has_userinfo(variable):
            variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            raise StorageError(f"MLFLOW_TRACKING_URI: no name or password in an address: set {variables}")
        uri = variable or _database(run)
        public_uri = without_userinfo(uri, alone=True)  # a database's has its password in it
        # The client asks for a model registry too, which is never used; without a name it would look for another one.
        self._client = self._tracking.MlflowClient(tracking_uri=uri, registry_uri=uri)
        before = json.loads(run.read_text(RUN_FILE)) if (run.path / RUN_FILE).is_file() else {}
        if before.get("uri") == public_uri:
            self._run_id: str = before["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._create(
                run, config, artifacts=None if variable else (run.path / FOLDER / "artifacts").resolve().as_uri()
            )
            run.write_json(RUN_FILE, {"uri": public_uri, "run_id": self._run_id})
        where = public_uri if variable else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        return f"MLflow: run {self._run_id} of experiment {self._project!r}: {where}"

    def log(self, point: Point) -> None:
        """Send a point's values, the clock and the token count among them."""
        now = int(time.time() * 1000)
        values = point.metrics | {"progress/seconds": point.seconds, "progress/tokens": float(point.tokens)}
        metrics = [self._entities.Metric(name_for(name), value, now, point.step) for name, value in values.items()]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def finish(self, state: State, reason: str) -> None:
        """Close the run with its state and the reason as a tag."""
        self._client.set_tag(self._run_id, "turnwise.reason", reason[:_LONGEST_VALUE])
        self._client.set_terminated(self._run_id, _STATES[state])

    def _create(self, run: RunDir, config: dict[str, Any], artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(self._project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._project, artifacts)
        tags = {"turnwise.run": str(run.path)}
        run_id: str = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        params = [self._entities.Param(key, value[:_LONGEST_VALUE]) for key, value in _flat(config)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_AT_ONCE])
        return run_id


def _database(run: RunDir) -> str:
    path = run.file(f"{FOLDER}/mlflow.db").resolve()
    if set("%?#") & set(str(path)):
        # Such a path must be escaped, and MLflow reads the escapes in one place and not in another.
        raise StorageError(f"MLflow cannot keep a database at {path} for its %, ? or #: set MLFLOW_TRACKING_URI")
    return f"sqlite:///{path}"


def name_for(name: str) -> str:
    """The name as MLflow accepts it. A changed one ends with a digest of the original, so no two become the same."""
    normal = posixpath.normpath(name)
    unique = normal == name and name != "." and not name.startswith(("..", "/"))
    if unique and len(name) <= _LONGEST_NAME and not _REFUSED.search(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:10]
    parts = [part for part in _REFUSED.sub("_", name).split("/") if part.strip(".")]
    return f"{'/'.join(parts).lstrip('.')[: _LONGEST_NAME - 11]}-{digest}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield name_for(f"{prefix}{key}"), value if isinstance(value, str) else json.dumps(value, default=str)
