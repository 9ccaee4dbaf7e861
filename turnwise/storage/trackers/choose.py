"""From the names in the config to trackers; a library that is missing is found here, before the run starts."""

from collections.abc import Callable, Sequence

from rich.console import Console

from turnwise.errors import ConfigError
from turnwise.storage.trackers import event_files, mlflow_store, wandb_run
from turnwise.storage.trackers.console import ConsoleTracker
from turnwise.storage.trackers.event_files import TensorboardTracker
from turnwise.storage.trackers.guard import Trackers
from turnwise.storage.trackers.mlflow_store import MlflowTracker
from turnwise.storage.trackers.tracker import Tracker
from turnwise.storage.trackers.wandb_run import WandbTracker

_LOADERS: dict[str, Callable[[], object]] = {
    "tensorboard": event_files.load,
    "wandb": wandb_run.load,
    "mlflow": mlflow_store.load,
}


def check_trackers(names: Sequence[str]) -> None:
    """Import what these trackers need; ConfigError says what to install."""
    for name in names:
        if name not in _LOADERS:
            continue
        try:
            _LOADERS[name]()
        # A foreign library's import runs its code, and a broken or clashing installation raises all kinds of errors
        # (protobuf: TypeError, numpy: AttributeError); each means that it cannot be used.
        except Exception as error:
            raise ConfigError(
                f"tracking.to={name} needs a library that cannot be imported ({type(error).__name__}: {error}); "
                f"install it with: pip install 'turnwise[{name}]'"
            ) from error


def open_trackers(
    names: Sequence[str], *, project: str, steps: int, console: Console, say: Callable[[str], None]
) -> Trackers:
    """The trackers of a run of so many steps, checked and not started."""
    check_trackers(names)

    def tracker(name: str) -> Tracker:
        match name:
            case "console":
                return ConsoleTracker(console, steps)
            case "tensorboard":
                return TensorboardTracker()
            case "wandb":
                return WandbTracker(project)
            case _:
                return MlflowTracker(project)

    return Trackers([tracker(name) for name in names], say)
