"""One run of a command: its folder, held against other writers, and all that is said and written about it meanwhile."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from turnwise.config import Config
from turnwise.config.choices import Resume
from turnwise.config.sections import flat, to_yaml
from turnwise.errors import ConfigError, StorageError
from turnwise.extensions import named
from turnwise.rollout.prepare import Prepared
from turnwise.storage.lock import holding
from turnwise.storage.own_runs import remember
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import CONFIG, METRICS, PLAN, TOKENIZER, WARNINGS, RunDir, inside_run
from turnwise.storage.status import StatusWriter, how_it_ended
from turnwise.storage.trackers.choose import open_trackers
from turnwise.storage.trackers.tracker import Point
from turnwise.system.plugins import load


class Run:
    """What `eval`, `train` and `sft` share: `with new_run(config, "eval", console) as run: run.note("hello")`."""

    def __init__(
        self,
        config: Config,
        directory: RunDir,
        command: str,
        console: Console,
        *,
        steps: int | None = None,
        trackers: Sequence[str] = (),
    ) -> None:
        self.config, self.dir, self.command, self.console = config, directory, command, console
        self.recorder = Recorder(directory)
        self.status = StatusWriter(directory, command, steps)
        self.trackers = open_trackers(trackers, config, steps=steps or 0, console=console, say=self.note)
        self._started = time.perf_counter()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Whoever looks sees how the run is doing: status.json, its trackers, and what extensions start beside it."""
        with inside_run(self.dir.path), self.status, self.recorder, ExitStack() as beside:
            for spec in named("beside").values():
                service = load(spec, "service")(self.config, self.dir.path.parent, self.command)
                if service is not None:
                    self.note(beside.enter_context(service).note)
            try:
                yield
            except BaseException as error:
                with suppress(StorageError):  # the error itself is the news, also when the disk is full
                    self.trackers.finish(*how_it_ended(error))
                raise
            self.trackers.finish(self.status.end, self.status.reason)

    def start_trackers(self, resumed_at: int = 0) -> None:
        """From here on they are sent every line of metrics."""
        self.trackers.start(self.dir, flat(self.config), resumed_at=resumed_at)

    def note(self, text: str) -> None:
        """Say something to the person and to the log."""
        self.dir.log(text)
        printer(self.console)(text)

    def warn(self, text: str, step: int = 0) -> None:
        """Note a warning, and keep it apart from the log, where other lines may look like one."""
        self.dir.append_jsonl(WARNINGS, {"step": step, "text": text})
        self.note(f"warning: {text}")

    def show_plan(self, prepared: Prepared, plan: str) -> None:
        """Tell the person what is about to happen, and the run's readers how to read its tokens."""
        self.dir.write_text(PLAN, plan)
        if prepared.renderer is not None:
            self.dir.write_text(TOKENIZER, prepared.renderer.tokenizer.as_json())
        self.console.print(plan, markup=False, highlight=False)

    def log_metrics(self, step: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """Add a line to metrics.jsonl, and send it to the trackers; the run is at this step now."""
        point = Point(step, round(self.seconds(), 3), tokens, {name: float(value) for name, value in metrics.items()})
        line = {name: value if math.isfinite(value) else None for name, value in point.metrics.items()}
        self.dir.append_jsonl(METRICS, {"step": point.step, "seconds": point.seconds, "tokens": point.tokens} | line)
        self.trackers.log(point)
        self.status.at(step)

    def seconds(self) -> float:
        """Wall time of the run so far, in seconds."""
        return time.perf_counter() - self._started

    def write_config(self) -> None:
        """Keep the config that the run is now done with; read back by itself it starts a run and resumes none."""
        self.dir.write_text(CONFIG, to_yaml(replace(self.config, resume=Resume.never)))
        remember(self.dir)


@contextmanager
def new_run(
    config: Config, command: str, console: Console, *, steps: int | None = None, trackers: Sequence[str] = ()
) -> Iterator[Run]:
    """A run in a folder of its own, active until the block ends; no other is ever overwritten."""
    directory = RunDir.create(Path(config.runs_dir), config.run, command)
    run = Run(config, directory, command, console, steps=steps, trackers=trackers)
    with holding(directory.path, command, run.note):
        run.write_config()
        with run.active():
            yield run


def console_or_stderr(console: Console | None) -> Console:
    """The console that a run reports to: the given one, else standard error."""
    if not isinstance(console, Console | None):
        raise ConfigError(f"console is a rich.console.Console, not {type(console).__name__}")
    return console or Console(stderr=True)


def printer(console: Console) -> Callable[[str], None]:
    """Prints lines as they are: no markup, no colours, no line breaks of its own."""
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
