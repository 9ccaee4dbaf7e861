"""Supervised fine-tuning from end to end: scripted or recorded trajectories in, a run with a policy folder out."""

import asyncio
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich import console as rich_console
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.config.sections import value_of
from turnwise.engines.devices import choose as choose_devices
from turnwise.engines.devices import device_of
from turnwise.engines.learners.threads import computing
from turnwise.engines.memory_plan import Training, memory_here
from turnwise.engines.open_configured import open_tuned
from turnwise.engines.opener import LearnerParts, model_source
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.scripted import Script
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.extensions import named
from turnwise.ledger import Media
from turnwise.reports.evaluation import Printable
from turnwise.reports.learned_tokens import LearnedTokens
from turnwise.reports.plan import plan_text
from turnwise.rollout.collector import Collector, run_group
from turnwise.rollout.prepare import Prepared, open_context, prepare
from turnwise.storage.images.copies import prepare_again
from turnwise.storage.run_dir import TOKENIZER, RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.choose import check_trackers
from turnwise.storage.trackers.notebook import progress_bars
from turnwise.storage.transcript import visible
from turnwise.system.plugins import call, load
from turnwise.system.stopping import run_stoppable
from turnwise.training.checks import check_fine_tuning
from turnwise.training.demonstrations import Demonstrations, gather, held_out, keep, kept, learned_from
from turnwise.training.endpoint_episodes import Student
from turnwise.training.runs.resume_config import existing_run, resume_command
from turnwise.training.runs.run import console_or_stderr, printer
from turnwise.training.runs.sft_run import SftRun, open_sft_run
from turnwise.training.sequences import TrainSequence, to_sequences
from turnwise.training.sft import (
    Imitation,
    Lesson,
    check_sequences,
    count_updates,
    fingerprint,
    heldout_loss,
    learner_config,
    shuffled,
)
from turnwise.types import Group, Sample, Trajectory

POLICY, ADAPTER = "policy", "policy_adapter"
PREVIEWED = 3
"""Conversations that a dry run shows."""
ENDLESS = 1 << 20
"""Tokens of a context whose end no config names."""


@dataclass(frozen=True, slots=True, repr=False)
class SftReport(Printable):
    """One fine-tuning: what was learned from, how the loss went, and where the policy is; it prints as its table."""

    run: Path
    policy: Path
    adapter: Path | None
    """peft's, with LoRA; `policy` has it merged."""
    reason: str
    """Why it ended."""
    steps: int
    seconds: float
    first_loss: float | None
    """None when it was stopped before the first step."""
    last_loss: float | None
    heldout_losses: tuple[float, float] | None
    """Of conversations that were not learned, before the first step and after the last; None without any."""
    tokens: int
    """Policy tokens learned from, each as often as it came up."""
    trajectories: int
    """Read or played."""
    used: int
    dropped: dict[str, int]
    """How many were left out, by reason."""
    resume: str | None
    """The command that resumes the run; None when there is nothing left to do."""

    def as_json(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        places = {name: None if path is None else str(path) for name, path in self._places().items()}
        return asdict(self) | places | {"seconds": round(self.seconds, 3)}

    def _places(self) -> dict[str, Path | None]:
        return {"run": self.run, "policy": self.policy, "adapter": self.adapter}

    def table(self) -> Table:
        """The report as a table with one row per number."""
        title = f"fine-tuning, {self.steps} steps, {self.seconds:.0f} s: {self.reason}"
        table = Table("", "", title=title, show_header=False)
        table.add_row("trajectories", f"{self.trajectories}, {self.used} used")
        for reason, count in self.dropped.items():
            table.add_row("left out", f"{count} {reason}")
        table.add_row("policy tokens", f"{self.tokens:,}")
        if self.first_loss is not None and self.last_loss is not None:
            table.add_row("loss, first -> last step", f"{self.first_loss:.4f} -> {self.last_loss:.4f}")
        if self.heldout_losses is not None:
            before, after = self.heldout_losses
            table.add_row("loss of held-out conversations", f"{before:.4f} -> {after:.4f}")
        return table

    def __rich__(self) -> rich_console.Group:
        places = {"policy": self.policy, "LoRA adapter": self.adapter, "resume with": self.resume}
        lines = [f"{name}: {value}" for name, value in places.items() if value is not None]
        return rich_console.Group(self.table(), *(Text(visible(line)) for line in lines))


def fine_tune(
    config: Config,
    *,
    samples: Iterable[Sample] | None = None,
    trajectories: Sequence[Trajectory] | None = None,
    console: Console | None = None,
) -> SftReport:
    """Train `model.path` on trajectories; the result is the folder `policy` of the run, also when it is stopped.

    They are those given here, else those of `sft.recorded`, else `sft.script` plays `samples` (the configured training
    samples by default). A run keeps them and is resumed with its own. Progress goes to `console` (standard error by
    default).
    """
    check_fine_tuning(config)
    check_trackers(config.tracking.to, config)
    _check_trajectories(trajectories)
    directory, console = existing_run(config, "sft"), console_or_stderr(console)
    renderer = make_renderer(config)
    own = None if directory is None else kept(directory)
    student = _student(config, renderer)
    heldout = to_sequences(held_out(config, student, printer(console)))
    if own is not None and directory is not None and trajectories is not None:
        _refuse_others(directory, own, gather(config, student, trajectories, printer(console)))
    source = own or _source(config, student, samples, trajectories, console)
    return run_stoppable(_run(config, console, renderer, source, heldout))


def _check_trajectories(trajectories: object) -> None:
    """DataError for what is no list of them."""
    if trajectories is None:
        return
    if not isinstance(trajectories, list | tuple):
        raise DataError(f"trajectories is a list of Trajectory, not {type(trajectories).__name__}")
    for number, value in enumerate(trajectories):
        if not isinstance(value, Trajectory):
            raise DataError(f"trajectories[{number}] is not a Trajectory but {type(value).__name__}")


def preview(config: Config, *, console: Console | None = None) -> LearnedTokens:
    """What `fine_tune` would learn from, token by token, in the first of its conversations; nothing is written."""
    check_fine_tuning(config)
    console = console_or_stderr(console)
    if existing_run(config, "sft") is not None:
        raise ConfigError(
            f"run {config.run!r} has its trajectories: `turnwise show` shows them; --dry-run is for new ones"
        )
    renderer = make_renderer(config)
    played = replace(config, sft=replace(config.sft, traces=min(config.sft.traces, PREVIEWED)))
    source = _source(played, _student(config, renderer), None, None, console)
    demonstrations = source if isinstance(source, Demonstrations) else run_stoppable(_play(*source, console))
    sequences = _lesson(config).sequences(demonstrations.used)
    check_sequences(sequences)
    plan = _plan(config, count_updates(sequences, config.sft, config.seed), sequences)
    return LearnedTokens(
        str(demonstrations),
        plan if isinstance(source, Demonstrations) else f"{config.sft.traces} are played at most; these are the first",
        demonstrations.used[:PREVIEWED],
        renderer.tokenizer.decode,
    )


def _source(
    config: Config,
    student: Student,
    samples: Iterable[Sample] | None,
    trajectories: Sequence[Trajectory] | None,
    console: Console,
) -> Demonstrations | tuple[Script, Prepared]:
    """What there is to learn from, or who will play it."""
    demonstrations = gather(config, student, trajectories, printer(console))
    if demonstrations is not None:
        return demonstrations
    script, prepared = _load_script(config), prepare(config, "train", samples=samples, limit=config.sft.traces)
    return script, prepared


def _lesson(config: Config) -> Lesson:
    """To imitate, or what an extension is asked to teach instead."""
    specs = {spec for key, spec in named("lessons").items() if value_of(config, key)}
    if len(specs) > 1:
        raise ConfigError(f"one lesson at a time, not {' and '.join(sorted(specs))}")
    lesson: Lesson = load(specs.pop(), "lesson")(config) if specs else Imitation()
    return lesson


def _student(config: Config, renderer: Renderer) -> Student:
    from turnwise.engines.model.loading import choose_implementation, model_facts

    source = model_source(config)
    facts = model_facts(source, choose_implementation(source, config.model.implementation))
    return Student(renderer, facts.vocab_size, facts.context_length or ENDLESS)


def _prepare(renderer: Renderer) -> Callable[[bytes], Media] | None:
    return None if renderer.images is None else renderer.images.prepare


def _refuse_others(run: RunDir, own: Demonstrations, offered: Demonstrations | None) -> None:
    if offered is None or fingerprint(to_sequences(own.used)) != fingerprint(to_sequences(offered.used)):
        raise ConfigError(f"run {run.name!r} was started with other trajectories: resume it without trajectories")


async def _run(
    config: Config,
    console: Console,
    renderer: Renderer,
    source: Demonstrations | tuple[Script, Prepared],
    heldout: list[TrainSequence],
) -> SftReport:
    with open_sft_run(config, console) as run:
        if isinstance(source, Demonstrations) and run.is_over():
            return replace(_report(run, source), reason=f"already finished: {run.status.reason}")
        run.refuse_policy_only()
        with run.active():
            if isinstance(source, Demonstrations):
                demonstrations = source
            else:
                run.show_plan(source[1], plan_text(source[1]))
                if (count := len(source[1].samples)) < config.sft.traces:
                    run.note(f"sft.traces={config.sft.traces}, and there are {count} samples: each is played once")
                demonstrations = await _play(*source, console)
            run.dir.write_text(TOKENIZER, renderer.tokenizer.as_json())
            run.note(str(demonstrations))
            if kept(run.dir) is None:
                await keep(run.recorder, demonstrations)
            await run.recorder.do(prepare_again, run.dir.path, demonstrations.used, _prepare(renderer))
            await _train(run, renderer, demonstrations, heldout)
        return _report(run, demonstrations)


async def _train(run: SftRun, renderer: Renderer, demonstrations: Demonstrations, heldout: list[TrainSequence]) -> None:
    """Every step that is left, then the policy and a checkpoint, also when a signal or the clock ends it."""
    config, progress, lesson = run.config, run.progress, _lesson(run.config)
    sequences = lesson.sequences(demonstrations.used)
    check_sequences(sequences)
    steps = count_updates(sequences, config.sft, config.seed)
    # Tokens are learned as they are, whatever temperature they were sampled at.
    sampling = replace(config.sampling, temperature=1.0)
    taught = replace(config, learner=learner_config(config.learner, config.sft), sampling=sampling)
    memory = memory_here(config, Training(), samples=False)
    opened = open_tuned(taught, renderer, LearnerParts(updates=steps), memory, run.note)
    with closing(opened) as learner:
        # more threads are slower on small models and busy machines
        in_threads, budget = computing(max(1, config.engine.threads), learner.device), config.learner.token_budget
        await asyncio.to_thread(in_threads(lesson.prepare), learner, sequences, budget)
        run.begin(learner, steps, fingerprint(sequences))
        run.note(_plan(config, steps, sequences))
        for line in () if memory is None else memory.lines():
            run.note(line)
        batches = islice(shuffled(sequences, config.sft.batch_tokens, config.seed), progress.step, None)
        update, measure = in_threads(lesson.learn), in_threads(heldout_loss)
        if heldout and progress.first_heldout is None:
            progress.first_heldout = await asyncio.to_thread(measure, learner, heldout, budget)
            run.note(f"loss of {len(heldout)} held-out conversations: {progress.first_heldout:.3f}")
        with run.stop_on_signal(), progress_bars(run.console) as bars:
            bar = bars.add_task("training", total=steps, completed=progress.step)
            while run.should_continue():
                step = await asyncio.to_thread(update, learner, next(batches), budget)
                is_due = heldout and run.should_evaluate()
                run.finish_step(step, await asyncio.to_thread(measure, learner, heldout, budget) if is_due else None)
                bars.update(bar, advance=1, description=f"training, loss {progress.last_loss:.3f}")
                if run.should_save():
                    await run.recorder.do(in_threads(run.save), learner)
            await run.recorder.do(in_threads(learner.save_policy), run.dir.path)
            await run.recorder.do(in_threads(run.save), learner)
    policy = shlex.quote(_short(run.dir.path / POLICY))
    if run.status.end is State.STOPPED:
        run.note(f"{run.status.reason} after {progress.step} of {steps} steps; the policy so far is {policy}")
        run.note(f"resume with: {resume_command(run.dir.name, config, 'sft')}")
    else:
        task = "" if config.task == Config.task else f"task={shlex.quote(config.task or 'null')} "
        run.note(f"train the policy further with: turnwise train {task}model.path={policy}")


def _plan(config: Config, steps: int, sequences: list[TrainSequence]) -> str:
    sft, learner = config.sft, config.learner
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    learned = sum(sequence.policy_tokens for sequence in sequences)
    passes = sum(map(len, islice(shuffled(sequences, sft.batch_tokens, config.seed), steps))) / len(sequences)
    trained = f"LoRA of rank {learner.lora_rank}" if learner.lora_rank else "all weights"
    early = f"; the warm-up (sft.warmup={sft.warmup}) takes the whole run" if sft.warmup >= steps else ""
    return (
        f"{tokens:,} tokens, {learned:,} of them the policy's; {steps} steps of at most {sft.batch_tokens} tokens are "
        f"{passes:.3g} passes over all tokens; {trained} on {device_of(learner.device)}, lr {sft.lr:g}{early}"
    )


def _report(run: SftRun, demonstrations: Demonstrations) -> SftReport:
    progress, adapter = run.progress, run.dir.path / ADAPTER
    over = progress.step >= progress.steps
    return SftReport(
        run=run.dir.path,
        policy=run.dir.path / POLICY,
        adapter=adapter if adapter.is_dir() else None,
        reason=run.status.reason,
        steps=progress.step,
        seconds=run.seconds(),
        first_loss=progress.first_loss,
        last_loss=progress.last_loss,
        heldout_losses=_both(progress.first_heldout, progress.last_heldout),
        tokens=progress.tokens,
        trajectories=demonstrations.read,
        used=len(demonstrations.used),
        dropped=demonstrations.dropped,
        resume=None if over else resume_command(run.dir.name, run.config, "sft"),
    )


def _both(first: float | None, last: float | None) -> tuple[float, float] | None:
    return None if first is None or last is None else (first, last)


def _short(path: Path) -> str:
    """The path as one would type it in the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _load_script(config: Config) -> Script:
    if config.sft.script is None:
        raise ConfigError(
            "nothing to learn from: set conversations.files=[FILE], sft.recorded=[runs/NAME] or "
            "sft.script=module:function"
        )
    spec = config.sft.script
    script: Script = call(load(spec, "script"), spec, "script", config.seed)
    if not callable(script):
        raise PluginError(f"script {spec!r} must return a function that writes the turns, not {type(script).__name__}")
    return script


async def _play(script: Script, prepared: Prepared, console: Console) -> Demonstrations:
    """One scripted episode per sample; a trace that fails is a bug of the script."""
    config, count = prepared.config, len(prepared.samples)
    with progress_bars(console) as progress:
        bar = progress.add_task("scripted episodes", total=count)
        async with open_context(prepared, script) as context:

            async def play(sample: Sample) -> Group:
                group = await run_group(sample, [0], step=0, context=context)
                progress.update(bar, advance=1)
                return group

            running = choose_devices(config).episodes
            async with Collector(prepared.samples, play, running=running, ahead=count) as collector:
                groups = await collector.next_groups(count)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        if trajectory.failure is not None:
            raise DataError(f"scripted episode {trajectory.sample.id} failed: {trajectory.failure}")
    return learned_from(Demonstrations(trajectories, len(trajectories), {}, "scripted"), config)
