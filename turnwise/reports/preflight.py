"""`turnwise check`: everything that can go wrong before a model is loaded, tried now, with an exit code for CI."""

import itertools

from turnwise import extensions
from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.config.check import DEFAULT
from turnwise.config.choices import EvalSplit, Precision
from turnwise.config.compose import Composed, unread
from turnwise.config.environment import uses
from turnwise.config.evaluation_sampling import evaluation_sampling, longest_turn
from turnwise.data.files import Split, data_files
from turnwise.data.lint import LintSeverity, lint
from turnwise.data.task import load_task
from turnwise.engines.devices import choose as choose_devices
from turnwise.engines.disk_plan import check_disk, checkpoints
from turnwise.engines.host_memory import host_memory
from turnwise.engines.memory_plan import memory_here
from turnwise.engines.opener import model_source
from turnwise.engines.rendering import choose_model
from turnwise.errors import TurnwiseError
from turnwise.reports.checks.findings import Outcome as Outcome
from turnwise.reports.checks.findings import Report as Report
from turnwise.reports.checks.run_checks import run_checks
from turnwise.reports.evaluation_names import check_shipping
from turnwise.reports.plan import plan_text, trusted_code
from turnwise.rollout.placement import placement_of
from turnwise.rollout.prepare import Prepared, measured_images, prepare
from turnwise.storage.trackers.choose import check_trackers
from turnwise.system.stopping import run_stoppable
from turnwise.training.checks import check_enough_samples, check_training
from turnwise.training.optimise import beside_policy

MOST_SAMPLES = 256


def preflight(composed: Composed) -> Report:
    """Run all checks; a check that needs the result of a failed one is left out."""
    config, report = composed.config, Report()
    for text in unread(composed):
        report.add("unread keys", Outcome.ERROR, text)
    if not report.findings:
        report.add("unread keys", Outcome.OK, "every key that was set is read")
    with report.recording("environment"):
        for use in uses(config):
            report.add("environment", Outcome.OK if use.used else Outcome.WARNING, str(use))
    _lint(config, report)
    with report.recording("trackers"):
        check_trackers(config.tracking.to, config)
        report.add("trackers", Outcome.OK, ", ".join(config.tracking.to) or "none but metrics.jsonl")
    every = []
    with report.recording("names and plug-ins"):
        placement_of(config).check(training=_trains(config))  # the whole sum: `prepare` knows of samplers only
        every.append(prepare(config, config.eval.split.value, limit=_limit(_evaluated(config), config.eval.samples)))
    if every and _trains(config):
        every += _training(composed, every[0], report)
    if not every:
        return report
    report.plan = plan_text(every[0])
    report.add("names and plug-ins", Outcome.OK, "tools, interactions, loops and scorers were found and fit")
    if config.model.trust_remote_code:
        report.add("model", Outcome.WARNING, trusted_code(config))
    if (choice := every[0].implementation) is not None:
        report.add("model", Outcome.OK, str(choice))
        for notice in choice.notices:
            report.add("model", Outcome.WARNING, notice)
    for notice in (notice for prepared in every for notice in prepared.plan.notices):
        report.add("plan", Outcome.WARNING, notice)
    renderer = every[0].renderer
    if renderer is None:
        report.add("chat template", Outcome.WARNING, "the endpoint renders messages itself; tokens cannot be checked")
    run_stoppable(_run_checks(every, report))
    if renderer is not None:
        with report.recording("forecast"):
            _forecast(every[0], renderer, report)
    return report


async def _run_checks(every: list[Prepared], report: Report) -> None:
    """What a cluster has room for is told first: an episode that is tried out would wait for a node."""
    config = every[0].config
    lacking: str | None = None
    with report.recording("cluster"):
        where = placement_of(config)
        layout, lacking = await where.layout(training=len(every) > 1), await where.no_services()
        if layout is not None:
            report.add("cluster", Outcome.OK, "; ".join(layout.nodes))
        if layout is not None and (short := layout.lacking) is not None:
            report.add("cluster", Outcome.WARNING, f"no room now, the run would wait for nodes: {short}")
    await run_checks(every, report, play=lacking is None)
    if lacking is not None:
        report.add("cluster", Outcome.ERROR, f"no room to try out scorers and sandboxes: {lacking}")


def _trains(config: Config) -> bool:
    """Whether there is something to train on: files, or a task that makes samples and is not replaced by files."""
    files, generated = config.data, config.task is not None and load_task(config.task).rows is not None
    return extensions.engine(config.engine.name).trains and bool(
        files.train_files or (generated and not files.eval_files)
    )


def _training(composed: Composed, heldout: Prepared, report: Report) -> list[Prepared]:
    """What `train` asks for. Who set nothing of training only evaluates, and is warned."""
    config, sections = composed.config, ("training.", "algorithm.", "learner.", "data.train_files")
    meant = any(key.startswith(sections) and origin != DEFAULT for key, origin in composed.origins.items())
    try:
        check_training(config)
        check_shipping(heldout)
        limit = _limit(config.data.train_files, config.training.samples, config.training.groups)
        training = prepare(config, "train", limit=limit, beside=heldout)
        check_enough_samples(training)
    except TurnwiseError as error:
        report.add("training", Outcome.ERROR if meant else Outcome.WARNING, str(error))
        return []
    report.add("training", Outcome.OK, f"algorithm, batch, device and {len(training.samples)} samples fit")
    return [training]


def _evaluated(config: Config) -> list[str]:
    return config.data.eval_files if config.eval.split is EvalSplit.test else config.data.train_files


def _limit(files: list[str], wanted: int | None, needed: int = 0) -> int | None:
    """Files are read whole; of a generator's samples enough are made."""
    enough = max(MOST_SAMPLES, needed)
    return None if files else min(wanted or enough, enough)


def _lint(config: Config, report: Report) -> None:
    files = [*config.data.train_files, *config.data.eval_files]
    if not files:
        if config.task is not None and config.data.dataset is None:  # else the samples are asked for, and say it
            report.add("dataset", Outcome.OK, f"generated by the task {config.task}")
        return
    if config.data.dataset is not None:
        report.add("dataset", Outcome.OK, f"read by {config.data.dataset}")
        return
    try:
        data = config.data
        summary = lint(
            [*data_files(data.train_files, Split.TRAIN), *data_files(data.eval_files, Split.EVAL)],
            prompt_key=data.prompt_key,
            default_source=data.default_source,
            images_from=data.images_from,
        )
    except TurnwiseError as error:
        report.add("dataset", Outcome.ERROR, str(error))
        return
    for finding in summary.findings:
        outcome = Outcome.ERROR if finding.severity is LintSeverity.ERROR else Outcome.WARNING
        report.add("dataset", outcome, str(finding).removeprefix(f"{finding.severity.value}: "))
    sources = ", ".join(f"{count} {source}" for source, count in summary.data_sources.items())
    report.add("dataset", Outcome.OK, f"{summary.rows} rows read: {sources}")


# --- the forecast -------------------------------------------------------------------------------------------------


def _forecast(prepared: Prepared, renderer: Renderer, report: Report) -> None:
    """Memory and tokens, from the model's files and the prompts; an upper bound where a budget is the only limit."""
    config = prepared.config
    prompts = [
        len(
            renderer.prompt(
                sample.prompt,
                prepared.toolbox.schemas(prepared.plan.route(sample).tools),
                measured_images(sample, config, renderer),
            ).ids
        )
        for sample in itertools.islice(prepared.samples, MOST_SAMPLES)
    ]
    samples = len(prepared.samples)  # every row of a file was looked at; an evaluation takes eval.samples of them
    episodes = min(samples, config.eval.samples or samples) * config.eval.group_size
    mean = sum(prompts) / len(prompts)
    turns = config.rollout.max_assistant_turns
    text = f"{episodes} episodes, prompts {mean:.0f} tokens on average and {max(prompts)} at most"
    if turns is not None:
        most = min(turns * evaluation_sampling(config).max_tokens, config.rollout.max_tokens or 1 << 60)
        text += f", at most {episodes * most:,} policy tokens"
    report.add("forecast", Outcome.OK, text)
    if extensions.engine(config.engine.name).here:
        report.add("forecast", Outcome.OK, _memory(config, max(prompts)))
        report.memory = memory_here(config, beside_policy(config) if _trains(config) else None)
        for line in () if report.memory is None else report.memory.lines():
            report.add("memory", Outcome.OK, line)
    trains = _trains(config)
    if (host := host_memory(config, beside_policy(config) if trains else None)) is not None:
        for line in host.lines():
            report.add("memory", Outcome.OK, line)
    if trains and (forecast := checkpoints(config, beside_policy(config))) is not None:
        report.add("disk", Outcome.OK, forecast.line())
        for line in check_disk(config, beside_policy(config)):
            report.add("disk", Outcome.WARNING, line)


def _memory(config: Config, prompt: int) -> str:
    chosen = choose_model(config)
    assert chosen is not None
    _, facts = chosen
    weights = f"weights {model_source(config).weight_bytes / 1e6:.1f} MB on disk"
    if facts.cached_numbers is None:
        return f"{weights}; config.json does not tell what its cache holds"
    here = choose_devices(config)
    per_token = facts.cached_numbers * (4 if here.precision is Precision.float32 else 2)
    length = prompt + (config.rollout.max_tokens or 4 * longest_turn(config))
    length = length if facts.context_length is None else min(length, facts.context_length)
    cache = per_token * length * here.max_batch
    return (
        f"{weights}, KV cache {per_token / 1e3:.1f} kB a token, "
        f"about {cache / 1e6:.0f} MB for {here.max_batch} sequences of {length} tokens"
    )
