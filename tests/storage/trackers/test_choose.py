"""Names in the config become trackers; what is missing is found before anything starts."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from turnwise.config import Config
from turnwise.data.task_config import configure
from turnwise.errors import ConfigError
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.choose import check_trackers, open_trackers
from turnwise.storage.trackers.tracker import Point, foreign


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboard")])
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    for loaded in [entry for entry in sys.modules if entry.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)  # what Python itself uses for "not there"
    with pytest.raises(ConfigError, match=rf"tracking.to={name} needs .*pip install 'turnwise\[{name}\]'"):
        check_trackers(["console", name], Config())


def test_a_library_that_breaks_at_import_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [entry for entry in sys.modules if entry.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, loaded)
    (tmp_path / "wandb.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="TypeError: Descriptors cannot be created directly"):
        check_trackers(["wandb"], Config())


def test_a_mere_folder_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_left_over_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="folder without code"):
        foreign("wandb", "some_left_over_folder")
    sys.modules.pop("some_left_over_folder")


def test_unknown_and_repeated_names_are_refused_by_every_command() -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        configure("tracking.to=[tensorbord]")
    with pytest.raises(ConfigError, match="names 'console' more than once"):
        configure("tracking.to=[console, console]")


def test_none_and_one(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path, "a", "train"), io.StringIO()
    for names, text in (([], ""), (["console"], "step 1/2: seconds 1\n")):
        trackers = open_trackers(names, Config(), steps=2, console=Console(file=out), say=out.write)
        trackers.start(run, {}, resumed_at=0)
        trackers.log(Point(1, 0.0, 0, {"timing_s/step": 1.0}))
        trackers.finish(State.FINISHED, "")
        assert out.getvalue() == text
