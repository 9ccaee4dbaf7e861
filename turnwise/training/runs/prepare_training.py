"""What a training run is made of, before it has a folder: checked, resolved, and the same again when it is resumed."""

from collections.abc import Callable, Iterable, Sequence

from turnwise.config import Config
from turnwise.config.check import check_config
from turnwise.rollout.prepare import Prepared, prepare
from turnwise.rollout.tools.tool import Tool
from turnwise.rollout.users.user import UserLike
from turnwise.rollout.workers.players import check_workers
from turnwise.scoring.scorer import Scorer
from turnwise.storage.trackers.choose import check_trackers
from turnwise.training.runs.python_arguments import check_given, describe
from turnwise.training.runs.resume_config import existing_run
from turnwise.types import Sample


def prepare_training(
    config: Config,
    samples: Iterable[Sample] | None,
    eval_samples: Iterable[Sample] | None,
    *,
    tools: Sequence[Tool | Callable[..., object]] | None,
    scorer: Scorer | None,
    interaction: UserLike | None,
) -> tuple[Prepared, Prepared, dict[str, str]]:
    """(to train on, to evaluate on, a description of what the caller gave in place of what the config names)."""
    from turnwise.data.python_samples import program_samples
    from turnwise.training.checks import check_enough_samples, check_training

    check_config(config)
    check_training(config)
    check_trackers(config.tracking.to, config)
    samples = None if samples is None else program_samples(samples)
    eval_samples = None if eval_samples is None else program_samples(eval_samples, name="eval_samples")
    parts = describe(samples=samples, eval_samples=eval_samples, tools=tools, scorer=scorer, interaction=interaction)
    check_given(existing_run(config, "train"), parts, eval_files=config.data.eval_files)
    prepared = prepare(
        config,
        "train",
        samples=samples,
        limit=config.training.samples if samples is None else None,
        tools=tools,
        scorer=scorer,
        interaction=interaction,
    )
    check_enough_samples(prepared)
    heldout = prepare(
        config,
        "test",
        samples=eval_samples,
        limit=config.eval.samples if eval_samples is None else None,
        tools=tools,
        scorer=scorer,
        interaction=interaction,
        beside=prepared,
    )
    check_workers(prepared)
    return prepared, heldout, parts
