"""Supervised fine-tuning from end to end: scripted or recorded trajectories in, a Hugging Face folder out."""

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from turnwise.assemble import Prepared, make_renderer, model_folder, open_context, prepare
from turnwise.choices import Precision
from turnwise.config import Config
from turnwise.config_check import check_config
from turnwise.engines.scripted import Script
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.files import check_folder
from turnwise.plugins import call, load
from turnwise.rollout.collector import Collector
from turnwise.rollout.group import run_group
from turnwise.stopping import run_stoppable
from turnwise.storage.lock import holding
from turnwise.storage.trajectories import read_trajectories
from turnwise.training.sequences import to_sequences
from turnwise.types import Group, Sample, Trajectory


def run_sft(config: Config, console: Console | None = None) -> Path:
    """Train `model.path` on trajectories and write the result to `sft.out`; returns that folder."""
    check_config(config)
    check_folder(Path(config.sft.out), "sft.out")
    console, out = console or Console(stderr=True), Path(config.sft.out)
    with holding(out, "sft", lambda text: console.print(text, markup=False, soft_wrap=True)):
        _fine_tune(config, console, out)
    return out


def _fine_tune(config: Config, console: Console, out: Path) -> None:
    import torch

    from turnwise.engines.decoder import Decoder
    from turnwise.engines.policy_folder import PolicyFolder
    from turnwise.training.sft import train_sft

    if config.model.precision is not Precision.float32:
        raise ConfigError(
            f"model.precision={config.model.precision.value} is the format a sampler computes in; supervised "
            "fine-tuning has none and trains in float32"
        )
    torch.set_num_threads(max(1, config.engine.threads))  # more than one is slower on small models and busy machines
    source = model_folder(config.model.path)
    renderer = make_renderer(config)
    policy = PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids)
    decoder = Decoder.load(source, torch.float32)
    with Progress(console=console, transient=False) as progress:
        trajectories = _recorded(config) if config.sft.recorded else run_stoppable(_scripted(config, progress))
        bar = progress.add_task("training", total=config.sft.steps)

        def report(step: int, loss: float) -> None:
            progress.update(bar, advance=1, description=f"training, loss {loss:.3f}")

        train_sft(decoder, to_sequences(trajectories), config.sft, config.seed, report)
    out.mkdir(parents=True, exist_ok=True)
    policy.save(out, decoder)


def _recorded(config: Config) -> list[Trajectory]:
    found = [entry for name in config.sft.recorded for entry in read_trajectories(Path(name))]
    least = config.sft.min_reward
    kept = [t for t in found if least is None or (t.reward is not None and t.reward >= least)]
    if not kept:
        raise DataError(f"none of {len(found)} recorded trajectories is left to learn from")
    return kept


async def _scripted(config: Config, progress: Progress) -> list[Trajectory]:
    """One scripted episode per training sample; a trace that fails is a bug of the script."""
    if config.sft.script is None:
        raise ConfigError("nothing to learn from: set sft.script=module:function or sft.recorded=[FILE]")
    spec = config.sft.script
    script: Script = call(load(spec, "script"), spec, "script", config.seed)
    if not callable(script):
        raise PluginError(f"script {spec!r} must give a function that speaks, not {type(script).__name__}")
    prepared: Prepared = prepare(config, "train", limit=config.sft.traces)
    bar = progress.add_task("scripted episodes", total=len(prepared.samples))
    async with open_context(prepared, script) as context:

        async def run(sample: Sample) -> Group:
            group = await run_group(sample, size=1, step=0, context=context)
            progress.update(bar, advance=1)
            return group

        running = config.rollout.concurrency
        async with Collector(prepared.samples, run, running=running, ahead=len(prepared.samples)) as collector:
            groups = await collector.next_groups(len(prepared.samples))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        if trajectory.failure is not None:
            raise DataError(f"scripted episode {trajectory.sample.id} failed: {trajectory.failure}")
    return trajectories
