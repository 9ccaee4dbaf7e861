"""Weights & Biases: an online run when there is a key, otherwise offline files under the run directory."""

import netrc
import os
import secrets
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from turnwise.config import Config
from turnwise.config.environment import value
from turnwise.config.sections import section
from turnwise.ext.trackers.config import TrackersConfig
from turnwise.ext.trackers.environment import KEY, MODE
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.tracker import Point, foreign

FOLDER = "wandb"
ID_FILE = f"{FOLDER}/run_id.txt"
START_SECONDS, FINISH_SECONDS = 30.0, 15.0
"""Without these a server that does not answer would hold the process back when it wants to exit."""
_CLASSIC_HOST = "api.wandb.ai"
"""Keys for the public service may stand under this name, whatever address the library uses for it now."""


def load() -> ModuleType:
    """Import the library so that it neither prints, nor asks, nor reports its own errors over the network.

    These are its documented switches, and it reads them once: silence also switches off its prompt for a key, and
    without the second it looks up its server's address even when offline.
    """
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return foreign("wandb", "wandb")


class WandbTracker:
    """One run of wandb; a resumed run goes on under the same id.

    Each point is a row of its own with our `step` as the axis: wandb's internal step may never go back, so a resumed
    run's steps would be refused under it.
    """

    name = "wandb"

    def __init__(self, config: Config) -> None:
        self._project = section(config, TrackersConfig).project
        self._wandb = load()

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        """Open the run, offline unless there is a key or WANDB_MODE says otherwise."""
        wandb, identity = self._wandb, _identity(run)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, reinit="create_new",
            init_timeout=START_SECONDS, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True,
        )  # fmt: skip
        mode = value(MODE) or ("online" if _has_key(wandb, settings) else "offline")
        self._run = wandb.init(
            project=self._project, name=run.name, id=identity, resume="allow", dir=str(run.path.resolve()), mode=mode,
            config=config, settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        if self._run.disabled:
            return "wandb: switched off by WANDB_MODE"
        if self._run.offline:
            folder = shlex.quote(str(run.path / FOLDER))
            return f"wandb: offline; send it with: wandb sync {folder}/offline-run-*-{identity}"
        return f"wandb: {self._run.url}"

    def log(self, point: Point) -> None:
        """Sends the metrics of one point to wandb."""
        self._run.log(point.metrics | {"step": point.step, "seconds": point.seconds, "tokens": point.tokens})

    def finish(self, state: State, reason: str) -> None:
        """Close the run; what is not sent yet is sent now."""
        self._run.summary["state"], self._run.summary["reason"] = state.value, reason
        self._run.finish(exit_code=1 if state is State.FAILED else 0)


def _identity(run: RunDir) -> str:
    """The id kept in the run directory; made at the first start."""
    if not (run.path / ID_FILE).is_file():
        run.write_text(ID_FILE, secrets.token_hex(6) + "\n")
    return run.read_text(ID_FILE).strip()


def _has_key(wandb: ModuleType, settings: Any) -> bool:
    """Whether there is a key for the server that would be used; wandb itself checks whether it is right."""
    if value(KEY) or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    base_url = wandb.setup(settings).settings.base_url
    hosts = {urlsplit(base_url).netloc} | ({_CLASSIC_HOST} if base_url == wandb.Settings().base_url else set())
    named = os.environ.get("NETRC")
    for path in [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        if path.is_file():
            return any(netrc.netrc(path).authenticators(host) for host in hosts)
    return False
