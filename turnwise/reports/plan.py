"""The resolved plan as text: what each data source gets, printed before step 1 and kept in the run directory."""

from typing import TYPE_CHECKING

from turnwise.config import ONE_MACHINE, Config, RolloutConfig, SamplingConfig
from turnwise.config.choices import Aggregation, Correction, EvalSplit, Excess, LearnerPlace, PolicyLoss
from turnwise.config.environment import told
from turnwise.config.evaluation_sampling import evaluation_sampling
from turnwise.engines.devices import learner_place, rank_devices
from turnwise.engines.opener import opener_of, sharded_learners
from turnwise.engines.rendering import format_of
from turnwise.rollout.placement import placement_of
from turnwise.rollout.prepare import Prepared, history_forecasts, spelled_warning
from turnwise.rollout.workers.players import workers_line
from turnwise.training.optimise import beside_policy
from turnwise.training.replay_buffer import replayed_per_step
from turnwise.training.staleness import treatment, unbounded
from turnwise.types import Role

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer


def config_warnings(config: Config) -> list[str]:
    """Choices that can be made together but seldom should be: what each does, and what to set instead."""
    algorithm = config.algorithm
    warnings = [] if (stale := unbounded(config)) is None else [stale]
    if algorithm.loss == PolicyLoss.gspo and algorithm.aggregation is not Aggregation.sequence_mean_token_mean:
        warnings.append(
            f"gspo gives every token of a trajectory one ratio and algorithm.aggregation={algorithm.aggregation.value} "
            "weighs trajectories by their length; gspo is defined with sequence_mean_token_mean"
        )
    truncated = algorithm.correction_mode is Excess.truncate
    if treatment(config).correction is Correction.geometric and truncated:
        warnings.append(
            "the geometric mean of ratios is made for rejecting: truncated, it neither corrects as a weight "
            "does nor leaves anything out; set algorithm.correction_mode=reject, or algorithm.correction=token"
        )
    return warnings


def trusted_code(config: Config) -> str:
    """What model.trust_remote_code lets happen."""
    return f"model.trust_remote_code=true: Python files that come with {config.model.path} are run, if it has any"


def plan_text(prepared: Prepared, *, training: bool = False) -> str:
    """Who plays, with what, scored by whom, within which budgets."""
    config = prepared.config
    lines = [] if config.profile is None else [f"profile      {config.profile}"]
    lines += [*told(config), f"engine       {opener_of(config).describe(config)}"]
    lines += placement_of(config).plan_lines(training=training)
    if training and (shared := opener_of(config).check_beside_learner(config)) is not None:
        lines.append(f"warning      {shared}")
    if prepared.implementation is not None:
        lines.append(f"model        {prepared.implementation}")
        lines += [f"             {notice}" for notice in prepared.implementation.notices]
        lines += _memory(config, training)
        lines += _learner(config) if training else []
    if prepared.renderer is not None and config.model.trust_remote_code:
        lines.append(f"warning      {trusted_code(config)}")
    if prepared.renderer is not None:
        renderer = prepared.renderer
        written = format_of(config, renderer.tokenizer)
        shape = "as text" if renderer.call_form == "raw" else "as tool_calls"
        lines.append(
            f"chat         {config.chat.template or 'the model’s own template'}, {written.name} calls "
            f"{shape}, chat.history={config.chat.history.value}"
        )
        if written.reason:
            sure = written.is_known and written.problem is None
            lines.append(f"{'' if sure else 'warning':<13}{written.name} calls: {written.reason}")
        lines += [f"warning      {spelled_warning(renderer)}"] if renderer.spelled_marks else []
        lines += _history(prepared, renderer)
        lines += _images(config, renderer)
    lines.append(f"sampling     {_drawn(config.sampling)}, seed {config.seed}")
    lines += [f"evaluations  {_drawn(evaluation_sampling(config))} (eval.sampling)"] if config.eval.sampling else []
    lines.append(f"budgets      {_budgets(config.rollout)}")
    lines += [f"workers      {workers}"] if (workers := workers_line(prepared)) is not None else []
    lines.append(
        f"samples      {len(prepared.samples)} ({_limit(prepared, training)}), {prepared.dropped} left out with "
        f"prompts over {config.data.max_prompt_tokens} tokens"
    )
    if not training and config.eval.split is EvalSplit.train:
        lines.append("             eval.split=train: rows to train on; their accuracy says little")
    if training:
        algorithm = config.algorithm
        lines.append(
            f"algorithm    advantage {algorithm.advantage}, loss {algorithm.loss}, {algorithm.aggregation.value}, "
            f"{config.training.groups} groups of {config.training.group_size} a step"
        )
        lines += _staleness(config)
    lines += [f"warning      {choice}" for choice in config_warnings(config)]
    for route, count in sorted(prepared.plan.routes.items(), key=lambda item: (item[0].data_source, -item[1])):
        lines.append(f"data source  {route.data_source} ({count} samples)")
        options = config.rollout.agent_options if route.why == "rollout.agent" else {}
        listed_options = "".join(f", {name}={value!r}" for name, value in options.items())
        lines.append(f"  loop         {route.agent} ({route.why}{listed_options})")
        lines.append(f"  tools        {', '.join(route.tools) or 'none'}")
        lines.append(f"  interaction  {route.interaction or 'none'}")
        lines.append(f"  scorer       {_scorer(prepared, route.data_source)}")
    lines += [f"notice       {notice}" for notice in prepared.plan.notices]
    return "\n".join(lines) + "\n"


def _drawn(sampling: SamplingConfig) -> str:
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"{sampling.max_tokens} tokens a turn"
    )


def _limit(prepared: Prepared, training: bool) -> str:
    config, count = prepared.config, len(prepared.samples)
    key, most = ("training", config.training.samples) if training else ("eval", config.eval.samples)
    if most is None or count + prepared.dropped < most:
        return "all"
    if count > most:  # `check` looks at all of them
        return f"the first {most} are used: {key}.samples"
    return f"{key}.samples={most}"


def _history(prepared: Prepared, renderer: "Renderer") -> list[str]:
    """What the template makes of the history, and what is done about it; `check` refuses what cannot be done."""
    forecasts = [
        forecast
        for forecast in history_forecasts(prepared, renderer).values()
        if forecast.refused is None and forecast.tried
    ]
    lines = {forecast.text: forecast.warns for forecast in forecasts}
    return [f"{'warning' if warns else '':<13}{text}" for text, warns in lines.items()]


def _images(config: Config, renderer: "Renderer") -> list[str]:
    """Whose images a model that sees is shown, and how many."""
    if renderer.images is None:
        return [f"warning      the model reads text only: {renderer.text_only}"] if renderer.text_only else []
    if not renderer.image_roles:
        return ["warning      the chat template shows no images: the model reads text only"]
    roles = " and ".join(f"{role}s" for role in (Role.USER, Role.TOOL) if role in renderer.image_roles)
    most, pixels = config.rollout.max_images, config.chat.max_pixels
    line = f"images       of {roles}, {'any number' if most is None else f'at most {most}'} an episode"
    return [line if pixels is None else f"{line}, made smaller above {pixels:,} pixels"]


def _budgets(rollout: RolloutConfig) -> str:
    budgets = {
        "assistant turns": rollout.max_assistant_turns,
        "user turns": rollout.max_user_turns,
        "tokens": rollout.max_tokens,
        "seconds": rollout.max_seconds,
        "parallel calls": rollout.max_parallel_calls,
    }
    return ", ".join(f"{value:g} {name}" for name, value in budgets.items() if value is not None)


def _staleness(config: Config) -> list[str]:
    """How old what is learned from may be, and what is done about it."""
    training, chosen = config.training, treatment(config)
    again = ""
    if training.replay_groups:
        again = (
            f"; of {training.replay_groups} kept groups {replayed_per_step(training)} a step are trained on again, "
            f"{training.replay_uses} time(s) within {training.replay_age} step(s)"
        )
    weighed = chosen.correction is not Correction.none
    weights = f"importance weights: {chosen.correction.value}, {config.algorithm.correction_mode.value}"
    return [
        f"staleness    max_lag {training.max_lag}{again}",
        f"             {weights if weighed else 'no importance weights'}; the loss compares with the "
        f"{chosen.old_logprobs.value}'s log-probs ({chosen.why})",
    ]


def _learner(config: Config) -> list[str]:
    """Which processes it computes in, where that is not this one."""
    if learner_place(config) is LearnerPlace.process:
        why = ""
        if config.learner.place is LearnerPlace.auto:
            why = " (auto: the sampler writes ahead on the same GPU; learner.place=here keeps it in this process)"
        return [f"learner      in a process of its own{why}"]
    if config.learner.processes == 1 or config.cluster != ONE_MACHINE:
        return []
    devices = rank_devices(config)
    where = "on the CPU (gloo)" if devices[0] == "cpu" else f"on {devices[0]} to {devices[-1]} (nccl)"
    return [f"learner      {len(devices)} processes {where}: {sharded_learners().how_shared(config)}"]


def _memory(config: Config, training: bool) -> list[str]:
    """Who gets what of the GPU, where one is used."""
    from turnwise.engines.host_memory import host_memory
    from turnwise.engines.memory_plan import memory_here

    gpu = memory_here(config, beside_policy(config) if training else None)
    table = [] if gpu is None else list(gpu.lines())
    if (host := host_memory(config, beside_policy(config) if training else None)) is not None:
        table += [host.in_all()] if gpu is None else list(host.lines())
    lines = [f"{'' if number else 'memory':13}{line}" for number, line in enumerate(table)]
    return [*lines, *(_disk(config) if training else [])]


def _disk(config: Config) -> list[str]:
    """What checkpoints take, where that is known."""
    from turnwise.engines.disk_plan import check_disk, checkpoints

    forecast = checkpoints(config, beside_policy(config))
    short = [f"warning      {line}" for line in check_disk(config, beside_policy(config))]
    return short if forecast is None else [f"disk         {forecast.line()}", *short]


def _scorer(prepared: Prepared, data_source: str) -> str:
    scorer = prepared.scoring.scorers[data_source]
    name: str = getattr(scorer, "__qualname__", type(scorer).__name__)
    how = prepared.config.scoring.run.value
    return f"{name.rpartition('<locals>.')[2]}, {how}"
