"""Supervised fine-tuning from end to end: scripted or recorded trajectories in, a run with a policy folder out."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from turnwise.assemble import Prepared, make_renderer, open_context, prepare
from turnwise.chat.renderer import Renderer
from turnwise.choices import Precision
from turnwise.config import Config
from turnwise.config_check import check_config
from turnwise.demonstrations import Demonstrations, choose, read_demonstrations
from turnwise.engines.opening import model_source
from turnwise.engines.samplers.scripted import Script
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.plugins import call, load
from turnwise.rollout.collector import Collector
from turnwise.rollout.group import run_group
from turnwise.run import Run, new_run, printer
from turnwise.stopping import Stopped, run_stoppable
from turnwise.storage.run_dir import TOKENIZER, check_free
from turnwise.types import Group, Sample, Trajectory

POLICY = "policy"


@dataclass(frozen=True, slots=True)
class SftReport:
    """One fine-tuning: what was learned from, how the loss went, and where the policy is."""

    run: Path
    policy: Path
    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    tokens: int
    """Policy tokens learned from, each as often as it came up."""
    trajectories: int
    """Read or played."""
    used: int
    dropped: dict[str, int]
    """How many were left out, by reason."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"run": str(self.run), "policy": str(self.policy), "seconds": round(self.seconds, 3)}

    def table(self) -> Table:
        """One row per number."""
        table = Table("", "", title=f"fine-tuning, {self.steps} steps, {self.seconds:.0f} s", show_header=False)
        table.add_row("trajectories", f"{self.trajectories}, {self.used} used")
        for reason, count in self.dropped.items():
            table.add_row("left out", f"{count} {reason}")
        table.add_row("policy tokens", f"{self.tokens:,}")
        table.add_row("loss, first -> last step", f"{self.first_loss:.4f} -> {self.last_loss:.4f}")
        return table

    def __rich__(self) -> Table:
        return self.table()


def fine_tune(
    config: Config,
    *,
    samples: Iterable[Sample] | None = None,
    trajectories: Sequence[Trajectory] | None = None,
    console: Console | None = None,
) -> SftReport:
    """Train `model.path` on trajectories; the result is the folder `policy` of a new run.

    They are those given here, else those of `sft.recorded`, else `sft.script` plays `samples` (the configured training
    samples by default). Progress goes to `console` (standard error by default).
    """
    check_config(config)
    check_free(Path(config.runs_dir), config.run)
    if config.model.precision is not Precision.float32:
        raise ConfigError(
            f"model.precision={config.model.precision.value} is the format a sampler computes in; supervised "
            "fine-tuning has none and trains in float32"
        )
    console = console or Console(stderr=True)
    script: tuple[Script, Prepared] | None = None
    found: Demonstrations | None = None
    if trajectories is None and not config.sft.recorded:
        script = _load_script(config), prepare(config, "train", samples=samples, limit=config.sft.traces)
        renderer = script[1].renderer or make_renderer(config)
    else:
        renderer = make_renderer(config)
        found = _demonstrations(config, renderer, trajectories, console)
    trackers = [name for name in config.tracking.to if name != "console"]  # the progress bar shows as much
    with new_run(config, "sft", console, steps=config.sft.steps, trackers=trackers) as run:
        if script is not None:
            run.show_plan(script[1])
            found = run_stoppable(_play(*script, console))
        assert found is not None
        run.dir.write_text(TOKENIZER, renderer.tokenizer.as_json())
        run.note(str(found))
        return _train(run, renderer, found)


def _demonstrations(
    config: Config, renderer: Renderer, trajectories: Sequence[Trajectory] | None, console: Console
) -> Demonstrations:
    from turnwise.engines.model.loading import choose_implementation, model_facts

    source = model_source(config)
    facts = model_facts(source, choose_implementation(source, config.model.implementation))
    note, vocabulary = printer(console), facts.vocab_size
    if trajectories is not None:
        return choose(trajectories, config, vocabulary, note)
    return read_demonstrations(config, renderer.tokenizer.as_json(), vocabulary, note)


def _train(run: Run, renderer: Renderer, found: Demonstrations) -> SftReport:
    import torch

    from turnwise.engines.model.loading import choose_implementation, read_model
    from turnwise.engines.model.policy_folder import PolicyFolder
    from turnwise.training.sequences import to_sequences
    from turnwise.training.sft import SftStep, train_sft

    config, policy = run.config, run.dir.path / POLICY
    torch.set_num_threads(max(1, config.engine.threads))  # more than one is slower on small models and busy machines
    source = model_source(config)
    companions = PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids)
    decoder = read_model(source, choose_implementation(source, config.model.implementation), torch.float32)
    losses: list[float] = []
    tokens, every = 0, max(1, config.sft.steps // 20)
    run.start_trackers()
    with _progress(run.console) as progress:
        bar = progress.add_task("training", total=config.sft.steps)

        def report(step: SftStep) -> None:
            nonlocal tokens
            losses.append(step.loss)
            tokens += step.policy_tokens
            run.log_metrics(step.number, tokens, step.metrics())
            progress.update(bar, advance=1, description=f"training, loss {step.loss:.3f}")
            if not run.console.is_terminal and step.number % every == 0:  # a bar is drawn on a terminal only
                run.note(f"step {step.number}/{config.sft.steps}: loss {step.loss:.3f}")

        try:
            epochs = train_sft(decoder, to_sequences(found.used), config.sft, config.seed, report)
        except Stopped:
            run.note(f"stopped after {len(losses)} of {config.sft.steps} steps: no policy was written; see sft.steps")
            raise
    companions.save(policy, decoder)
    run.status.reason = f"all {config.sft.steps} steps done"
    run.note(f"{config.sft.steps} steps were {epochs:.3g} passes over the trajectories")
    run.note(f"train the policy further with: turnwise train model.path={shlex.quote(_short(policy))}")
    return SftReport(
        run.dir.path, policy, len(losses), run.seconds(), losses[0], losses[-1], tokens,
        found.read, len(found.used), found.dropped,
    )  # fmt: skip


def _short(path: Path) -> str:
    """As one would type it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _load_script(config: Config) -> Script:
    if config.sft.script is None:
        raise ConfigError("nothing to learn from: set sft.recorded=[runs/NAME] or sft.script=module:function")
    spec = config.sft.script
    script: Script = call(load(spec, "script"), spec, "script", config.seed)
    if not callable(script):
        raise PluginError(f"script {spec!r} must give a function that speaks, not {type(script).__name__}")
    return script


async def _play(script: Script, prepared: Prepared, console: Console) -> Demonstrations:
    """One scripted episode per sample; a trace that fails is a bug of the script."""
    config, count = prepared.config, len(prepared.samples)
    with _progress(console) as progress:
        bar = progress.add_task("scripted episodes", total=count)
        async with open_context(prepared, script) as context:

            async def play(sample: Sample) -> Group:
                group = await run_group(sample, size=1, step=0, context=context)
                progress.update(bar, advance=1)
                return group

            running = config.rollout.concurrency
            async with Collector(prepared.samples, play, running=running, ahead=count) as collector:
                groups = await collector.next_groups(count)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        if trajectory.failure is not None:
            raise DataError(f"scripted episode {trajectory.sample.id} failed: {trajectory.failure}")
    return Demonstrations(trajectories, len(trajectories), {}, "scripted")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
