"""One optimisation step: score what was collected, assign credit, and change the weights.

Legend: N policy tokens of a packed batch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from turnwise.config import Config
from turnwise.config.choices import Advantage, Correction, Credit, OldLogprobs, PolicyLoss, Precision
from turnwise.config.knobs import is_plugin
from turnwise.engines.devices import choose as choose_devices
from turnwise.engines.devices import gpus_for_learner, learner_here
from turnwise.engines.learners.learner import Learner, Objective, Who
from turnwise.errors import TurnwiseError
from turnwise.training import importance, kl
from turnwise.training.advantages import assign
from turnwise.training.packing import fill, minibatches, pack, tokens_by_trajectory, write
from turnwise.training.reward_shaping import shape_overlong
from turnwise.training.sequences import TrainSequence, trainable
from turnwise.training.staleness import measure, oldest_allowed, treatment
from turnwise.training.turn_credit import add_turn_credit

if TYPE_CHECKING:
    from turnwise.engines.memory_plan import Training

GAP_SEQUENCES = 32
GAP_FLOAT32, GAP_BFLOAT16 = 1e-3, 0.05
"""Mean differences of log-probs that rounding explains in float32 and in bfloat16."""
GAP_TAIL = 10.0
"""The 99th percentile may be this many times the mean: most tokens are sure and hardly differ. The largest is no
measure: it grows with the number of tokens, and bfloat16 alone makes it 0.1 and more."""


def needs_reference(config: Config) -> bool:
    """Whether anything compares the policy with where it started."""
    return config.algorithm.kl_loss > 0 or config.algorithm.kl_reward > 0


def needs_critic(config: Config) -> bool:
    """Only token-level credit wants a value for every token."""
    return config.algorithm.advantage == Advantage.gae


def beside_policy(config: Config) -> "Training":
    """What a learner of this config has beside the policy, for the memory plan."""
    from turnwise.engines.memory_plan import Training

    return Training(critic=needs_critic(config), reference=needs_reference(config))


def optimise(
    learner: Learner,
    sequences: Sequence[TrainSequence],
    config: Config,
    step: int,
    *,
    kl_controller: kl.KLController | None = None,
    baselines: dict[int, float | None] | None = None,
) -> dict[str, float]:
    """Fill in what the algorithm needs, then update `epochs` times over; returns the step's metrics.

    A KL penalty in the reward needs its `kl_controller`, remax its `baselines`; a learner that keeps no reference or
    critic where the algorithm needs one says so.
    """
    metrics = measure(trainable(sequences), step, oldest_allowed(config))
    metrics |= replayed(trainable(sequences)) if config.learner.routing_replay else {}
    metrics |= score_sequences(learner, sequences, config)
    metrics |= assign_credit(sequences, config, kl_controller, baselines)
    chosen = trainable(sequences)
    objective, together = Objective.of(config.algorithm), _by_trajectory(config)
    budget = config.learner.token_budget or learner.token_budget
    updates: dict[str, list[float]] = defaultdict(list)
    # Failures may have left fewer trajectories than there are to be updates; the step goes on with those.
    parts = min(config.training.minibatches, len({sequence.trajectory for sequence in chosen}))
    for epoch in range(config.training.epochs):
        for part in minibatches(chosen, parts, seed=config.seed + step, epoch=epoch):
            whole, batches = tokens_by_trajectory(part), fill(_active(part, config), budget, together=together)
            result = learner.update([pack(batch, whole) for batch in batches], objective)
            for batch, outputs in zip(batches, result.outputs, strict=True):
                write(batch, "new_logprobs", outputs.logprobs)
                write(batch, "entropies", outputs.entropies)
            for name, value in _named(result.metrics).items():
                updates[name].append(value)
            if len(updates["loss"]) == 1 and treatment(config).old_logprobs is OldLogprobs.sampler:
                metrics |= _first_gap(part)
    return metrics | {name: sum(values) / len(values) for name, values in updates.items()}


def replayed(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Of how many tokens the experts are known that the sampler chose, and what they take a token to hold and send."""
    noted = [sequence.experts for sequence in sequences if sequence.experts is not None]
    known = sum(int((experts[:, 0, 0] != np.iinfo(experts.dtype).max).sum()) for experts in noted)
    tokens = max(1, sum(len(sequence.token_ids) for sequence in sequences))
    held = sum(experts.nbytes for experts in noted) / tokens
    return {"routing/replayed": known / tokens, "routing/bytes_per_token": held}


def _active(part: Sequence[TrainSequence], config: Config) -> list[TrainSequence]:
    """The sequences of a minibatch that have a gradient; what has none is not computed.

    By trajectory, since gspo's ratio is over all of one. An idle step is a step: the optimizer counts it and its
    metrics are there.
    """
    moving = {sequence.trajectory for sequence in part if _has_gradient(sequence, config)} or {part[0].trajectory}
    return [sequence for sequence in part if sequence.trajectory in moving]


def _by_trajectory(config: Config) -> bool:
    """Whether the loss looks at whole trajectories, or may: a user's own is given all segments of each."""
    return config.algorithm.loss == PolicyLoss.gspo or is_plugin(config.algorithm.loss)


def _first_gap(part: Sequence[TrainSequence]) -> dict[str, float]:
    """How far the sampler is from the learner as it was before its first update, from what that update computed."""
    computed = [sequence for sequence in part if sequence.new_logprobs is not None]
    for sequence in computed:
        sequence.first_logprobs = sequence.new_logprobs
    return importance.mismatch(computed, "first_logprobs")


def _has_gradient(sequence: TrainSequence, config: Config) -> bool:
    """Siblings that all got the same reward have advantage 0: without other terms in the loss, computing them is idle.

    They still count in the denominators, so leaving them out changes no gradient.
    """
    algorithm = config.algorithm
    if algorithm.entropy or algorithm.kl_loss or algorithm.advantage == Advantage.gae or is_plugin(algorithm.loss):
        return True
    return sequence.advantages is not None and bool(sequence.advantages.any())


def score_sequences(learner: Learner, sequences: Sequence[TrainSequence], config: Config) -> dict[str, float]:
    """What models say of the tokens before the first update: old and reference log-probs, and the critic's values."""
    budget, chosen = config.learner.token_budget or learner.token_budget, trainable(sequences)
    metrics: dict[str, float] = {}
    if treatment(config).old_logprobs is OldLogprobs.learner:
        score(learner, Who.POLICY, chosen, "old_logprobs", budget)
        for sequence in chosen:
            sequence.first_logprobs = sequence.old_logprobs
        metrics |= importance.mismatch(chosen)
    else:
        for sequence in chosen:
            sequence.old_logprobs = sequence.logprobs
    if needs_reference(config):
        score(learner, Who.REFERENCE, chosen, "ref_logprobs", budget)
    if needs_critic(config):
        score(learner, Who.CRITIC, chosen, "values", budget)
    return metrics


def assign_credit(
    sequences: Sequence[TrainSequence],
    config: Config,
    kl_controller: kl.KLController | None,
    baselines: dict[int, float | None] | None,
) -> dict[str, float]:
    """From rewards to what each token answers for: penalties, advantages, and the weights that correct staleness."""
    algorithm, chosen = config.algorithm, trainable(sequences)
    metrics: dict[str, float] = {}
    if algorithm.overlong_tokens and config.rollout.max_tokens is not None:
        limit, buffer = config.rollout.max_tokens, algorithm.overlong_tokens
        metrics |= shape_overlong(chosen, limit=limit, buffer=buffer, factor=algorithm.overlong_penalty)
    if algorithm.kl_reward > 0:
        if kl_controller is None:
            raise ValueError("algorithm.kl_reward needs the controller of its coefficient")
        measured = kl.penalise(chosen, algorithm.kl_reward_estimator, kl_controller.value)
        kl_controller.update(measured.kl, measured.trajectories)
        metrics |= measured.metrics()
    metrics |= assign(
        sequences, algorithm.advantage, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda, baselines=baselines
    )
    if algorithm.credit is Credit.turn:
        metrics |= add_turn_credit(chosen, algorithm.turn_weight, algorithm.turn_gamma)
    if (correction := treatment(config).correction) is not Correction.none:
        excess, threshold = algorithm.correction_mode, algorithm.correction_threshold
        metrics |= importance.correct(chosen, importance.ImportanceCorrection(correction, excess, threshold))
    return metrics


def score(learner: Learner, who: Who, sequences: Sequence[TrainSequence], name: str, token_budget: int) -> None:
    """Let one of the learner's models score every policy token and write the result into the sequences."""
    for part in fill(sequences, token_budget):
        write(part, name, learner.score(pack(part, tokens_by_trajectory(part)), who))


def check_logprob_gap(learner: Learner, sequences: Sequence[TrainSequence], config: Config, *, exact: bool) -> str:
    """Before the first update, learner and sampler must agree about the same tokens.

    `exact` computes with the sampler's own arithmetic, where the difference must be zero to the last bit. Otherwise
    the mean and the 99th percentile are judged; see `training.max_logprob_gap`.
    """
    new = [sequence for sequence in trainable(sequences) if not sequence.reused]  # others are of older weights
    checked = [replace(sequence) for sequence in new[:GAP_SEQUENCES]]
    if not checked:
        return "sampler and learner are not compared: no new episode can be trained on"
    budget = config.learner.token_budget or learner.token_budget
    score(learner, Who.SAMPLER if exact else Who.POLICY, checked, "old_logprobs", budget)
    gaps = importance.mismatch(checked)
    mean, tail, most = (gaps[f"rollout_corr/abs_diff_{name}"] for name in ("mean", "p99", "max"))
    tokens = sum(sequence.policy_tokens for sequence in checked)
    size = f"{tokens:,} tokens of {len(checked)} sequences"
    gap = f"{mean:.2g} on average, the 99th percentile {tail:.2g}, the largest {most:.2g} ({size})"
    formats = learner_here(config.learner, gpus_for_learner(config)).precision, choose_devices(config).precision
    accepted = config.training.max_logprob_gap
    if accepted is None:
        accepted = GAP_BFLOAT16 if Precision.bfloat16 in formats else GAP_FLOAT32
    if most == 0.0 if exact else (mean <= accepted and tail <= GAP_TAIL * accepted):
        verdict = f"are bitwise equal, {size}" if most == 0.0 else f"differ by {gap}"
        return f"sampler and learner log-probs {verdict}"
    limits = "no difference, since both are proven to compute the same" if exact else f"a mean of {accepted:g}"
    raise TurnwiseError(
        f"sampler and learner disagree: their log-probs differ by {gap}; accepted is {limits}, and training would "
        "silently be off-policy (learner.precision=float32 is closest; training.max_logprob_gap sets what is accepted "
        "where nothing is proven)"
    )


def _named(reported: dict[str, float]) -> dict[str, float]:
    """What an optimizer reports, by the names of metrics.jsonl."""
    homes = {"grad_norm": "actor/grad_norm", "lr": "actor/lr"}
    return {homes.get(name, name.replace("critic_", "critic/")): value for name, value in reported.items()}
