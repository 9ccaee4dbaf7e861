"""What training asks of a config and its samples, before anything is rolled out."""

from turnwise import extensions
from turnwise.config import ONE_MACHINE, AlgorithmConfig, Config
from turnwise.config.check import check_config
from turnwise.config.choices import Advantage, Decay, EvalSplit, ModelImplementation, PolicyLoss, Precision
from turnwise.config.knobs import is_plugin
from turnwise.engines.devices import gpus_for_learner, rank_devices
from turnwise.engines.disk_plan import check_disk
from turnwise.engines.host_memory import check_host_memory
from turnwise.engines.memory_plan import Training, memory_here
from turnwise.engines.opener import opener_of
from turnwise.errors import ConfigError, DataError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout.placement import placement_of
from turnwise.rollout.prepare import Prepared
from turnwise.training.advantages import check
from turnwise.training.optimise import beside_policy
from turnwise.training.staleness import check_correction


def check_training(config: Config) -> None:
    """Refuse a config that cannot be trained with."""
    algorithm, training = config.algorithm, config.training
    if not extensions.engine(config.engine.name).trains:
        raise ConfigError(f"training needs token ids and weights: engine={config.engine.name} gives neither")
    if config.eval.split is not EvalSplit.test:
        raise ConfigError("eval.split=train is for turnwise eval: a training run is measured on rows it does not learn")
    check_choices(algorithm)
    check(
        algorithm.advantage,
        group_size=training.group_size,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        credit=algorithm.credit,
        turn_gamma=algorithm.turn_gamma,
    )
    check_correction(config)
    if algorithm.overlong_tokens and config.rollout.max_tokens is None:
        raise ConfigError("algorithm.overlong_tokens needs rollout.max_tokens, which is not set")
    if training.minibatches > training.groups * training.group_size:
        raise ConfigError(
            f"training.minibatches={training.minibatches}: a step has {training.groups * training.group_size} episodes"
        )
    if config.learner.decay is not Decay.constant and total_updates(config) <= config.learner.warmup:
        raise ConfigError(
            f"learner.warmup={config.learner.warmup}: the {config.learner.decay.value} decay after it must end within "
            f"{total_updates(config)} updates (training.steps x epochs x minibatches)"
        )
    if training.target is not None and not training.eval_every:
        raise ConfigError(
            "training.target ends a run after an evaluation, and training.eval_every=0 has none between first and last"
        )
    if config.engine.sleep and training.max_lag:
        raise ConfigError(
            f"engine.sleep=true: a sampler that runs ahead (training.max_lag={training.max_lag}) writes while the "
            "learner learns and cannot sleep; set training.max_lag=0"
        )
    alone = config.cluster == ONE_MACHINE
    placement_of(config).check(training=True)
    rank_devices(config, None if alone else gpus_for_learner(config), samples=alone)
    opener_of(config).check_beside_learner(config)
    memory_here(config, beside_policy(config))
    check_host_memory(config, beside_policy(config))
    _check_routers(config)
    tuple(check_disk(config, beside_policy(config)))  # what it warns of is in the plan


def _check_routers(config: Config) -> None:
    """The models of our own decoder have no experts; of others only their weights tell."""
    from turnwise.engines.rendering import choose_model

    asked = [name for name in ("routing_replay", "router_loss") if getattr(config.learner, name)]
    chosen = choose_model(config) if asked else None
    if chosen is not None and chosen[0].implementation is ModelImplementation.native:
        raise ConfigError(f"learner.{asked[0]}: this model has no routers that choose experts ({chosen[0]})")


def check_choices(algorithm: AlgorithmConfig) -> None:
    """Refuse a name nobody offers, and a function that does not keep its contract on a tiny batch."""
    for key, name, offered in (
        ("advantage", algorithm.advantage, list(Advantage)),
        ("loss", algorithm.loss, list(PolicyLoss)),
    ):
        if not is_plugin(name) and name not in offered:
            hint = unknown("choice", name, [choice.value for choice in offered])
            raise ConfigError(f"algorithm.{key}: {hint} Your own is written as module:function.")
    if is_plugin(algorithm.advantage):
        from turnwise.training.custom_advantage import try_advantage

        try_advantage(algorithm.advantage)
    if is_plugin(algorithm.loss):
        from turnwise.engines.learners.custom_loss import try_loss

        try_loss(algorithm.loss)


def check_fine_tuning(config: Config) -> None:
    """Refuse a config that cannot be fine-tuned with."""
    check_config(config)
    if not extensions.engine(config.engine.name).trains:
        raise ConfigError(f"fine-tuning needs weights: engine={config.engine.name} gives none")
    if config.cluster != ONE_MACHINE:
        raise ConfigError(f"fine-tuning runs on this machine only, not with cluster={config.cluster}")
    if config.model.precision not in (None, Precision.float32):
        raise ConfigError(
            f"model.precision={config.model.precision.value} is the format a sampler computes in; supervised "
            "fine-tuning has none (the learner's is learner.precision)"
        )
    rank_devices(config, samples=False)
    memory_here(config, Training(), samples=False)
    check_host_memory(config, Training(), samples=False)
    tuple(check_disk(config, Training(), tunes=True))


def total_updates(config: Config) -> int:
    """How often a whole run changes the weights."""
    return config.training.steps * config.training.epochs * config.training.minibatches


def check_enough_samples(prepared: Prepared) -> None:
    """A step's samples are all different."""
    groups = prepared.config.training.groups
    if groups > len(prepared.samples):
        raise DataError(f"training.groups: a step of {groups} samples cannot be made from {len(prepared.samples)}")
