"""THE loop: collect, learn, publish; evaluate, checkpoint and log when due."""

import asyncio
import time

import torch
from rich.console import Console

from turnwise.assemble import Prepared, prepare
from turnwise.chat.selfcheck import tell
from turnwise.checks.start import refuse_faults
from turnwise.checks.training import check_enough_samples, check_training
from turnwise.config import Config
from turnwise.engines.learner import NotFinite
from turnwise.errors import TurnwiseError
from turnwise.eval import measure
from turnwise.plan_text import introduce
from turnwise.report import TrainReport, step_metrics
from turnwise.scoring.failures import check_scoring
from turnwise.storage.index import record
from turnwise.storage.trackers.choose import check_trackers
from turnwise.task_metrics import declared_by
from turnwise.trainer.collecting import Collected, Draws, Groups
from turnwise.trainer.run import TrainRun
from turnwise.trainer.stage import TrainingStage, open_training
from turnwise.training.advantages import by_trajectory
from turnwise.training.optimise import check_parity, optimise
from turnwise.training.sequences import remember, to_sequences, trainable
from turnwise.training.shaping import count


def train(config: Config, console: Console | None = None) -> TrainReport:
    """Train the configured model; everything is in the run directory at the end, also when the run is stopped."""
    check_training(config)
    check_trackers(config.tracking.to)
    prepared = prepare(config, "train", limit=config.training.samples)
    check_enough_samples(prepared)
    heldout = prepare(config, "test", limit=config.eval.samples, tools=prepared.toolbox.shared())
    return asyncio.run(train_prepared(prepared, heldout, console or Console(stderr=True)))


async def train_prepared(prepared: Prepared, heldout: Prepared, console: Console) -> TrainReport:
    """The run from its first evaluation to its last."""
    config = prepared.config
    await refuse_faults(prepared, heldout)
    run = TrainRun(config, prepared.samples, console)
    with run.watched():
        introduce(prepared, run.dir, console)
        after = await run_steps(run, prepared, heldout)
    return TrainReport(run.dir.path, run.reason, run.progress.step, run.seconds(), run.progress.before, after)


async def run_steps(run: TrainRun, prepared: Prepared, heldout: Prepared) -> dict[str, float]:
    """Every step that is left, between two evaluations; returns what the last one found."""
    config, after = run.config, dict[str, float]()
    services = prepared.running(run.note), heldout.running(run.note)
    async with services[0], services[1], open_training(config, prepared, run.note) as engines:
        with run.catching_signals():
            run.resume(engines)
            await engines.publish(run.progress.step)
            if not run.progress.before:
                run.progress.before = await evaluate(run, engines, heldout, greedy=True)
            draws = Draws(run.loader, run.progress.rounds, run.progress.rounds + 1 + config.training.max_lag)
            groups = Groups(engines, prepared, draws)
            async with groups.collector:
                while config.train and run.goes_on():
                    run.step_begins()
                    collected = await run.unless_stopped(groups.next_step(run.progress.rounds))
                    if collected is None:
                        continue
                    await learn(run, engines, collected)
                    groups.allow(run.progress.rounds)
                    last = run.progress.step == config.training.steps  # evaluated and saved below
                    if due(run.progress.step, config.training.eval_every) and not last:
                        await evaluate(run, engines, heldout, greedy=False)
                    if due(run.progress.step, config.training.save_every) and not last:
                        run.save(engines)
            if not run.stopping.is_set():
                after = await evaluate(run, engines, heldout, greedy=True)
            run.save(engines)
    return after


async def learn(run: TrainRun, engines: TrainingStage, collected: Collected) -> None:
    """Learn from a step's groups, publish the new weights, record everything."""
    config, groups, start = run.config, collected.groups, time.perf_counter()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    check_scoring(trajectories, config.scoring.max_failures)
    book = count(groups)
    book.stop_if_failing(config.rollout.max_failures)
    file = f"trajectories/step_{run.progress.step + 1:06d}.parquet"  # the step that they make, as in metrics.jsonl
    if (told := tell(trajectories)) is not None:
        record(run.dir, file, trajectories)
        raise TurnwiseError(f"{told}; the episodes of the step are in {run.dir.path / file}")
    sequences = to_sequences(groups)
    metrics = book.metrics() | collected.scoring | step_metrics(trajectories, declared_by(config.task))
    if trainable(sequences):
        if run.first_step:
            run.note(check_parity(engines.mind, sequences, config, exact=engines.invariant))

        def compute() -> dict[str, float]:
            torch.set_num_threads(engines.threads)  # the count belongs to the thread that computes
            return optimise(engines.mind, sequences, config, run.progress.step, collected.baselines)

        try:
            metrics |= await asyncio.to_thread(compute)
        except NotFinite as error:
            record(run.dir, file, trajectories)
            raise TurnwiseError(f"{error}; the episodes of the step are in {run.dir.path / file}") from error
        for number, advantage in by_trajectory(sequences).items():
            trajectories[number].advantage = advantage
        remember(sequences, trajectories, config.algorithm.old_logprobs)
    record(run.dir, file, trajectories)
    run.finish_step(collected.rounds, trajectories)
    await engines.publish(run.progress.step)
    metrics |= run.timings(trajectories, time.perf_counter() - start)
    gap = metrics.get("rollout_corr/abs_diff_mean", 0.0)
    if gap > config.training.drift:
        run.note(f"drift alarm: sampler and learner log-probs differ by {gap:.3g} on average")
    run.log(metrics)


async def evaluate(run: TrainRun, engines: TrainingStage, heldout: Prepared, *, greedy: bool) -> dict[str, float]:
    """Accuracy on held-out samples as trained (and greedily); recorded, and remembered when it is the best."""
    found = await measure(heldout, engines.stage, run.dir, run.progress.step, greedy=greedy)
    run.remember(found)
    return found


def due(step: int, every: int) -> bool:
    """Whether something done every so many steps is to be done now."""
    return every > 0 and step % every == 0
