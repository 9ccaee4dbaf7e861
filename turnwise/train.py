"""THE loop: collect, learn, publish; evaluate, checkpoint and log when due."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from turnwise.chat.render_alignment import render_problem
from turnwise.config import Config
from turnwise.config.training import GREEDY
from turnwise.engines.learners.learner import NotFinite
from turnwise.errors import TurnwiseError
from turnwise.reports.alerts import Alerts
from turnwise.reports.evaluation import in_a_line, step_metrics
from turnwise.reports.evaluation_names import check_shipping
from turnwise.reports.evaluation_run import measure
from turnwise.reports.plan import plan_text
from turnwise.reports.task_metrics import declared_by
from turnwise.reports.training import TrainReport, train_report
from turnwise.rollout.collector import Collected, Groups
from turnwise.rollout.prepare import Prepared
from turnwise.rollout.tools.tool import Tool
from turnwise.rollout.users.user import UserLike
from turnwise.rollout.workers.players import workers_of
from turnwise.scoring.failures import check_scoring
from turnwise.scoring.scorer import Scorer
from turnwise.storage.run_dir import trajectory_file
from turnwise.system.stopping import run_stoppable
from turnwise.training.event_loop_lag import LoopLag
from turnwise.training.reward_shaping import count
from turnwise.training.run_engines import Engines, open_engines
from turnwise.training.runs.prepare_training import prepare_training
from turnwise.training.runs.run import console_or_stderr, printer
from turnwise.training.runs.train_run import TrainRun, open_train_run
from turnwise.training.sequences import to_sequences, trainable, write_back
from turnwise.types import Sample


def train(
    config: Config,
    *,
    samples: Iterable[Sample] | None = None,
    eval_samples: Iterable[Sample] | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
    interaction: UserLike | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train the configured model; everything is in the run directory at the end, also when the run is stopped.

    `samples` (to train on), `eval_samples` (held out), `tools`, `scorer` and `interaction` replace the configured ones,
    as in `evaluate`. A run that was given any is resumed only when it is given them again.
    """
    parts = prepare_training(config, samples, eval_samples, tools=tools, scorer=scorer, interaction=interaction)
    check_shipping(parts[1])
    return run_stoppable(train_prepared(*parts, console_or_stderr(console)))


async def train_prepared(
    prepared: Prepared, heldout: Prepared, replaced: Mapping[str, str], console: Console
) -> TrainReport:
    """The run from its first evaluation to its last; `replaced` tells what the caller gave in place of the config's."""
    from turnwise.reports.checks.run_checks import check_before_run

    await check_before_run(prepared, heldout, say=printer(console))
    with open_train_run(prepared.config, console, prepared.samples, replaced) as run:
        if run.is_over():
            return replace(train_report(run), reason=f"already finished: {run.status.reason}")
        run.refuse_policy_only()
        with run.active():
            run.show_plan(prepared, plan_text(prepared, training=True))
            # Both have the same services: one note is enough.
            here = not workers_of(prepared)
            services = prepared.running(run.note, episodes=here), heldout.running(lambda text: None, episodes=here)
            async with services[0], services[1], open_engines(run.config, prepared, run.note, heldout) as engines:
                run.resume(engines)
                run.progress.after = None
                with run.stop_on_signal():
                    async with run.checkpoint_on_failure(engines), LoopLag() as lag:
                        await play_and_learn(run, engines, prepared, heldout, lag)
        return train_report(run)


async def play_and_learn(run: TrainRun, engines: Engines, prepared: Prepared, heldout: Prepared, lag: LoopLag) -> None:
    """The steps, with what is due before, between and after them."""
    await engines.publish(run.progress.step)
    if run.progress.before is None:
        run.progress.before = await evaluate(run, engines, heldout, greedy=True)
    elif run.should_evaluate():  # a stop may have come before it
        await evaluate(run, engines, heldout, greedy=False)
        await run.keep_best(engines)
    alerts = Alerts(run.config, run.dir.path)
    groups = Groups(engines, prepared, run.loader, run.progress.prompt_batches)
    async with groups.collector:
        while run.should_continue():
            run.start_step()
            collected = await run.until_stopped(groups.next_step(run.progress.prompt_batches))
            if collected is None:
                continue
            await learn(run, engines, collected, alerts, lag)
            groups.allow(run.progress.prompt_batches)
            if run.should_evaluate():
                await evaluate(run, engines, heldout, greedy=False)
                await run.keep_best(engines, saves_next=run.should_save())
            if run.should_save():
                await run.save(engines)
    run.progress.after = await evaluate(run, engines, heldout, greedy=True)
    await run.save(engines)


async def learn(run: TrainRun, engines: Engines, collected: Collected, alerts: Alerts, lag: LoopLag) -> None:
    """Learn from a step's groups, publish the new weights, record everything."""
    config, groups, start = run.config, collected.groups, time.perf_counter()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    check_scoring(trajectories, config.scoring.max_failures)
    stats = count(groups)
    stats.stop_if_failing(config.rollout.max_failures)
    file = trajectory_file(run.progress.step + 1)  # the step that they make, as in metrics.jsonl
    if (problem := render_problem(trajectories)) is not None:
        await run.recorder.record(file, trajectories)
        raise TurnwiseError(f"{problem}; the episodes of the step are in {run.dir.path / file}")
    again = await run.reuse()
    sequences = to_sequences([*groups, *again.groups])
    metrics = stats.metrics() | collected.metrics | step_metrics(trajectories, declared_by(config.task))
    if trainable(sequences):
        if run.first_step:
            run.note(await engines.compare(sequences, config))
        run.mid_update = True
        try:
            baselines = collected.baselines | again.baselines(len(groups))
            metrics |= await engines.update(sequences, config, run.progress.step, baselines)
        except NotFinite as error:
            await run.recorder.record(file, trajectories)
            raise TurnwiseError(f"{error}; the episodes of the step are in {run.dir.path / file}") from error
        write_back(sequences, [*trajectories, *again.trajectories])
    await engines.publish(run.progress.step + 1)  # first: what is collected meanwhile comes from the new weights
    await run.record_step(trajectories, again)
    metrics |= run.finish_step(collected, trajectories, again)
    metrics |= run.timings(trajectories, time.perf_counter() - start) | engines.device_metrics()
    for text in alerts.after_step(metrics, trajectories):
        run.warn(text, run.progress.step)
    await run.recorder.do(run.log, metrics | lag.take())


async def evaluate(run: TrainRun, engines: Engines, heldout: Prepared, *, greedy: bool) -> dict[str, float] | None:
    """Accuracy on held-out samples as trained (and greedily, always where that is what weights are compared by);
    logged, and kept when it is the best.

    None when a signal came first: then the run evaluates when it is resumed.
    """
    greedy = greedy or run.config.training.metric.startswith(GREEDY)
    work = measure(heldout, engines.context, run.recorder, run.progress.step, greedy=greedy)
    numbers = await run.until_stopped(work)
    if numbers is None:
        run.should_continue()  # not, and the status says why
    else:
        await run.recorder.do(run.log_evaluation, numbers, in_a_line(numbers))
    return numbers
