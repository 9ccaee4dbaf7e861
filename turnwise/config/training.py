"""Knobs of learning: supervised fine-tuning, the training loop, the algorithm, the learner and the trackers."""

import re
from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.choices import (
    Advantage,
    Aggregation,
    Correction,
    Credit,
    Decay,
    Excess,
    KLEstimator,
    LearnerPlace,
    Offload,
    OldLogprobs,
    OptimizerName,
    PolicyLoss,
    Precision,
)
from turnwise.config.knobs import (
    any_number,
    at_least,
    choice_or_plugin,
    duration,
    harmless,
    knob,
    more_than,
    only,
    path,
    reaches,
    sends_away,
    share,
    was,
)
from turnwise.config.marks import changes_work, for_sft, may_change

OUR_SCRIPT = re.compile(r"turnwise\.(data\.tasks|ext)(\.\w+)+:script", re.ASCII)
BEST, LAST = "best", "last"
"""What `training.ship` may say beside the name of a number of evaluations."""
GREEDY = "greedy_"
"""How the files of greedy evaluations, and the names of their numbers, begin."""


def is_share(name: str) -> bool:
    """Whether a number of evaluations is a part of a whole; rewards and what tasks measure have any size."""
    return name.partition("/")[0].removeprefix(GREEDY) not in ("reward", "task")


@dataclass
class SftConfig:
    """Supervised fine-tuning on recorded or scripted trajectories."""

    EVERY_KNOB: ClassVar = (may_change(),)

    steps: int | None = knob(None, at_least(1))
    """Weight updates; null goes over the trajectories three times. Set it when the loss has settled earlier or still
    falls at the end."""
    batch_tokens: int = knob(8192, at_least(1))
    """Tokens of one weight update, those of prompts and tools included. Raise it for a smoother gradient; memory use
    depends on learner.token_budget."""
    lr: float = knob(2e-3, more_than(0))
    """Learning rate after warm-up. The default suits the bundled model; large pretrained models need about 1e-5."""
    warmup: int = knob(10, at_least(0))
    """Updates over which the learning rate rises; from there it falls to a tenth. Raise it when the loss jumps at the
    start."""
    script: str | None = knob(None, path(), reaches("code", lambda name: not OUR_SCRIPT.fullmatch(name)))
    """A function that writes the episodes to learn from, as FILE.py:script (docs/ext/conversations.md). Set it when
    there are no recorded ones."""
    traces: int = knob(2000, at_least(1))
    """Scripted episodes, one per training sample. Raise it when the loss is low and the policy still errs."""
    recorded: list[str] = knob([], path(), harmless())
    """Recorded trajectories to learn from instead of a script: runs, parquet files, or patterns of files. Set it to
    imitate good episodes, your own or another model's. A run stands for its training trajectories; a pattern is written
    runs/NAME/trajectories/*.parquet. Do not name evaluations on samples that you will test on."""
    min_reward: float | None = knob(None, any_number(), only("sft.recorded", "*"))
    """Leave out recorded trajectories below this reward. Set it to learn from the good ones only."""


@dataclass
class TrainingConfig:
    """The training loop: how much, how often, when to stop."""

    steps: int = knob(40, at_least(1), may_change())
    """Steps of the run; each collects episodes and updates the weights. Raise it while the reward still climbs."""
    groups: int = knob(12, at_least(1))
    """Samples per step. Raise it for a smoother gradient; a step takes longer by as much."""
    group_size: int = knob(8, at_least(1), changes_work())
    """Episodes per sample; the others of its group are an episode's baseline. Raise it when most groups are all right
    or all wrong and so teach nothing."""
    epochs: int = knob(1, at_least(1), changes_work())
    """Passes over a step's episodes. Raise it when episodes are expensive; more than a few overfit them."""
    minibatches: int = knob(1, at_least(1), changes_work())
    """Weight updates per pass. Raise it for faster learning from the same episodes; the clip bounds how far."""
    max_lag: int = knob(0, at_least(0), changes_work())
    """Steps by which collection may run ahead of the weights; 0 is on-policy. With 0 every episode is written by the
    newest weights; with 1 the next step's episodes are collected while this step's are trained on, so that a step takes
    the longer of the two and not their sum. Raise it to 1 when training waits for slow tools, users or scorers, or
    where sampler and learner run in processes of their own (several GPUs, a cluster); on one GPU they share an
    interpreter, and 1 made a step 1.4 times as long as 0. Each further step makes episodes staler (staleness/* on the
    board); see algorithm.correction. Lower it when the reward falls or the log-prob gap grows."""
    replay_groups: int = knob(0, at_least(0))
    """Recorded groups that later steps may train on again (a replay buffer); 0 keeps none. Those whose rewards differ
    most are kept. Set it, a few times training.groups, when episodes are expensive."""
    replay_share: float = knob(0.25, more_than(0, 0.9), only("training.replay_groups", "*"))
    """The share of a step's groups that comes from the buffer, beside the training.groups new ones. Lower it when the
    reward falls or the log-prob gap grows."""
    replay_age: int = knob(4, at_least(1), only("training.replay_groups", "*"))
    """Steps after which a kept group is forgotten. Lower it when few of its tokens survive the correction
    (rollout_corr/rollout_is_eff_sample_size)."""
    replay_uses: int = knob(1, at_least(1), only("training.replay_groups", "*"))
    """How often a group is trained on again at most. Raise it when the buffer runs empty (replay/kept)."""
    samples: int | None = knob(4096, at_least(1))
    """Samples to train on, from the start of the files or the generator; null takes all. Lower it for a quick trial."""
    shuffle: bool = True
    """Shuffle the samples anew each epoch, from `seed`. Switch it off for a curriculum that the files' order gives."""
    eval_every: int = knob(10, at_least(0), may_change())
    """Steps between evaluations; 0 evaluates before and after only. Lower it to see where learning turns."""
    save_every: int = knob(10, at_least(0), may_change(), for_sft())
    """Steps between checkpoints; 0 saves at the end only. The plan says what they take of the disk, and a run whose
    disk cannot hold one is refused. Lower it when a lost hour would hurt."""
    save_last: bool = knob(True, may_change(), for_sft())
    """Whether the checkpoint after the last step holds the learner's state too. Without it there is the policy only: it
    can be used, evaluated and trained further as a new run, but the run cannot be made longer. A run that is stopped
    before its end is saved whole either way. Switch it off where the disk is small: a state of all weights takes six
    times as many bytes as a bfloat16 policy."""
    keep: int = knob(2, at_least(1), may_change(), for_sft())
    """Checkpoints kept. Raise it to be able to go back further; each has the size of the model and its optimizer."""
    ship: str = knob(BEST, harmless(), may_change())
    """Which weights are left in RUN/policy for use: `best` (by accuracy), `last`, or those best by the number of
    evaluations that is named. Such are greedy_accuracy, reward, pass@4 and task/SOURCE/NAME (docs/training.md); where
    no evaluation was clearly better, the last weights are left. A run that is resumed goes on from its last ones either
    way. Set `last` to compare runs, since the best of several evaluations is a little too high, or where a second copy
    of the policy has no room on the disk."""
    target: float | None = knob(None, any_number(), may_change())
    """Accuracy of an evaluation, or the number that training.ship names, at which the run ends early. Set it to stop
    when it is good enough."""
    max_minutes: float | None = knob(None, more_than(0), may_change(), for_sft())
    """Wall time after which the run ends cleanly. Set it for machines that are taken back at a known time."""
    max_tokens: int | None = knob(None, at_least(1), may_change())
    """Policy tokens after which the run ends cleanly. Set it to compare runs at equal cost."""
    drop_constant_groups: bool = knob(False, changes_work())
    """Draw on until the step has enough groups whose rewards differ (dynamic sampling). At most three times
    `training.groups` samples are drawn. Switch it on when many groups are all right or all wrong."""
    max_logprob_gap: float | None = knob(None, at_least(0), was("training.parity"))
    """Mean difference between the sampler's and the learner's log-probs accepted before the first update; 99 % of the
    tokens may differ by ten times as much. Null takes 0.001, and 0.05 where products are in bfloat16: a small model
    that is unsure of most tokens has 0.03 there, one that is sure 0.007. Where both are proven to compute the same, any
    difference stops the run. Raise it only when you know where the gap comes from."""
    warn_logprob_gap: float = knob(0.05, at_least(0), was("training.drift"))
    """Mean sampler-learner log-prob gap above which a step warns; measured on each step's first minibatch. Raise it
    when stale episodes (max_lag) make the gap expected."""

    @property
    def metric(self) -> str:
        """The number of evaluations by which weights are better than others."""
        return "accuracy" if self.ship in (BEST, LAST) else self.ship


@dataclass
class AlgorithmConfig:
    """From rewards to the gradient."""

    advantage: str = knob(Advantage.grpo.value, choice_or_plugin(Advantage), path(), changes_work())
    """What a reward is compared with. Start with grpo; take gae when single tokens or turns should be told apart and a
    critic can be afforded, rloo or dr_grpo when groups differ much in difficulty."""
    credit: Credit = Credit.uniform
    """Which tokens of a trajectory answer for what. Take `turn` when the scorer scores turns."""
    turn_weight: float = knob(0.5, at_least(0), only("algorithm.credit", "turn"))
    """What a turn's own score is worth beside the reward. Lower it when turn scores rise and the reward does not."""
    turn_gamma: float = knob(0.0, share(), only("algorithm.credit", "turn"))
    """How much a turn answers for the scores of those after it: 0 for its own only, 1 for all. Raise it when early
    turns prepare later ones."""
    loss: str = knob(PolicyLoss.ppo_clip.value, choice_or_plugin(PolicyLoss), path())
    """How an advantage becomes a loss. Keep ppo_clip unless a recipe says otherwise; gspo wants
    algorithm.aggregation=sequence_mean_token_mean."""
    aggregation: Aggregation = Aggregation.token_mean
    """How losses of tokens become one number. Change it when long answers weigh too much or too little."""
    aggregation_length: int = knob(1024, at_least(1), only("algorithm.aggregation", "sequence_sum_norm"))
    """The constant that sums are divided by. Set it to the longest answer you allow, as Dr. GRPO does."""
    clip_low: float = knob(0.2, at_least(0), only("algorithm.loss", "ppo_clip", "gspo", "cispo"))
    """How far below 1 the probability ratio may fall before it is clipped. gspo needs far smaller values (about
    3e-4)."""
    clip_high: float = knob(0.2, at_least(0), only("algorithm.loss", "ppo_clip", "gspo", "cispo"))
    """How far above 1 the ratio may rise. Raise it alone (about 0.28) when entropy falls too early; gspo: about
    4e-4."""
    clip_dual: float | None = knob(3.0, more_than(1), only("algorithm.loss", "ppo_clip"))
    """With a negative advantage the loss is at most this times its size; null sets no bound. Rarely needs a change."""
    gamma: float = knob(1.0, share(), only("algorithm.advantage", "gae", "reinforce_pp"))
    """Discount per token. Lower it only when early tokens should answer less for what comes much later."""
    gae_lambda: float = knob(1.0, share(), only("algorithm.advantage", "gae"))
    """How far advantages look past the critic: 1 waits for the reward, less trusts the critic sooner. Lower it (0.95)
    once the critic is good."""
    entropy: float = knob(0.0, any_number())
    """Coefficient of the entropy bonus. Raise it a little (1e-3) when the policy stops trying other answers."""
    kl_loss: float = knob(0.0, at_least(0), changes_work())
    """Coefficient of a KL loss against the reference policy; 0 needs no reference. Set it (1e-3) when the model drifts
    from what it could do before; it costs a second copy of the model."""
    kl_loss_estimator: KLEstimator = knob(KLEstimator.k3, only("algorithm.kl_loss", "*"), changes_work())
    """How the KL of algorithm.kl_loss is estimated at a token. Keep k3 unless a recipe names another."""
    kl_reward: float = knob(0.0, at_least(0), changes_work())
    """Coefficient of a KL penalty in the reward; 0 needs no reference. Set it instead of kl_loss when following a
    recipe that does."""
    kl_reward_estimator: KLEstimator = knob(KLEstimator.k1, only("algorithm.kl_reward", "*"), changes_work())
    """How the KL of algorithm.kl_reward is estimated at a token. Keep k1 unless a recipe names another."""
    kl_target: float | None = knob(None, more_than(0), only("algorithm.kl_reward", "*"), changes_work())
    """The KL that the coefficient is steered to: it grows while the measured KL is above, and shrinks below; null keeps
    it as it is. Set it (0.1) when no fixed coefficient suits the whole run."""
    value_loss: float = knob(1.0, at_least(0), only("algorithm.advantage", "gae"))
    """Coefficient of the critic's loss. Lower it with learner.shared_critic when the critic's gradient drowns the
    policy's."""
    value_clip: float | None = knob(0.5, more_than(0), only("algorithm.advantage", "gae"))
    """How far a new value may lie from the old one before it is pulled back in the loss; null never. Raise it when
    rewards are much larger than 1."""
    old_logprobs: OldLogprobs | None = knob(None, changes_work())
    """Whose log-probs the ratio of the policy loss is taken against; null takes the learner's where
    algorithm.correction weighs the difference, else the sampler's. Take `learner` when sampler and learner differ, as
    in bfloat16; it costs one more forward pass. With stale episodes and ppo_clip, `sampler` learns better."""
    correction: Correction | None = knob(None, only("algorithm.old_logprobs", "learner", "null"))
    """Importance weight for the gap between the sampler's log-probs and the learner's. Null takes `none` when all
    episodes are of the current weights (training.max_lag=0 and no replay), or when the loss itself compares with the
    sampler's log-probs (ppo_clip, or algorithm.old_logprobs=sampler); else `token`. Set `none` to ignore the gap."""
    correction_mode: Excess = knob(
        Excess.truncate, only("algorithm.correction", "token", "sequence", "geometric", "null")
    )
    """What happens to importance ratios outside the threshold. Take `reject` with geometric."""
    correction_threshold: float = knob(
        2.0, at_least(1), only("algorithm.correction", "token", "sequence", "geometric", "null")
    )
    """The largest importance ratio used as it is. Lower it when single tokens rule the gradient."""
    overlong_tokens: int = knob(0, at_least(0))
    """Length of the zone before `rollout.max_tokens` in which the reward falls; 0 switches it off. Set it when many
    episodes run into that limit."""
    overlong_penalty: float = knob(1.0, at_least(0), only("algorithm.overlong_tokens", "*"))
    """The reward lost at the end of the zone of algorithm.overlong_tokens. Set it to the size of your reward."""


@dataclass
class LearnerConfig:
    """How the learner changes the weights: learning rates, schedule and optimizer."""

    lr: float = knob(1e-5, at_least(0))
    """Learning rate of the policy. The first to lower when a run collapses; about 1e-6 for models of billions of
    weights, ten times as much with LoRA."""
    critic_lr: float = knob(1e-4, at_least(0), only("algorithm.advantage", "gae"))
    """Learning rate of the critic. Raise it when the explained variance of its values stays low."""
    shared_critic: bool = knob(False, only("algorithm.advantage", "gae"), changes_work())
    """Put the value head on the policy's own trunk instead of a copy. Switch it on when a second model does not fit."""
    weight_decay: float = knob(0.0, at_least(0))
    """AdamW's decay of matrices. Set it (0.01) for long runs on little data."""
    beta2: float = knob(0.999, at_least(0, 0.9999))
    """How slowly AdamW forgets the size of gradients. Lower it (0.95 to 0.98) for runs of a few hundred updates."""
    warmup: int = knob(0, at_least(0))
    """Updates of linear warm-up. Raise it (10) when the first steps do harm."""
    decay: Decay = Decay.constant
    """How the learning rate falls after warm-up, until training.steps. A run that has one cannot be made longer."""
    min_lr_ratio: float = knob(0.0, share(), only("learner.decay", "linear", "cosine"))
    """The share of the learning rate at which that fall ends. Set it (0.1) when the last steps learn nothing."""
    grad_clip: float = knob(1.0, more_than(0), for_sft())
    """Largest norm of a gradient; a larger one is scaled down to it. Lower it when the norm on the board has spikes."""
    token_budget: int | None = knob(None, at_least(1), changes_work(), for_sft())
    """Tokens of one forward pass; a batch is split into as many as it needs. Null takes 8192 on the CPU, and on a
    GPU as many as its memory has room for. Lower it when memory is short: the gradient stays the same."""
    gradient_checkpointing: bool | None = knob(None, changes_work(), for_sft())
    """Recompute activations instead of keeping them; null does so on a GPU whose memory is too small for them.
    Switch it on when memory is short; a step takes longer."""
    device: str = knob("auto", harmless(), changes_work(), for_sft())
    """Where gradients are computed: cpu, cuda, one GPU such as cuda:0, or auto, which takes a GPU where PyTorch sees
    one. Set it to cpu to leave a GPU to others."""
    precision: Precision | None = knob(None, changes_work(), for_sft())
    """Format of the learner's matrix products; null takes bfloat16 on a GPU and float32 elsewhere. Set float32 when the
    log-prob gap to the sampler is too large."""
    optimizer: OptimizerName = knob(OptimizerName.adamw, changes_work(), for_sft())
    """How AdamW keeps its moments. Take adamw8bit when the optimizer's state does not fit beside the model."""
    offload: Offload = knob(Offload.none, changes_work(), for_sft())
    """What lies in the CPU's memory instead of the GPU's. Set it to `optimizer` for models too large for the GPU, on a
    machine with twelve bytes of free memory for every trained weight and a few GiB more; try
    `learner.optimizer=adamw8bit` first."""
    processes: int = knob(1, at_least(1, 1024), may_change(), changes_work(), for_sft())
    """Processes that the learner's weights, gradients and moments are shared out over (FSDP2), with a GPU each or all
    on the CPU; 1 learns in this process. Raise it when a model does not fit one GPU, or for shorter updates."""
    place: LearnerPlace = knob(LearnerPlace.auto, only("learner.processes", "1"), may_change(), changes_work())
    """Whether a training's learner computes in this process or in one of its own. Set it to process when learning gets
    slower while the sampler writes ahead on the same machine (training.max_lag); to here if two processes cannot share
    your GPU. On a cluster the learner is elsewhere anyway."""
    hang_seconds: float = knob(1800.0, duration(), was("fsdp.hang_seconds"), may_change(), for_sft())
    """Seconds within which a learner in other processes must make progress and each of them give a sign of life. Else
    it counts as hung and is ended; a pass, a weight, the model read are progress. Raise it when reading the model takes
    longer."""
    lora_rank: int = knob(0, at_least(0, 65536), changes_work(), for_sft())
    """Rank of LoRA adapters; 0 trains all weights. Set it (16 to 64) when the optimizer's state does not fit."""
    lora_alpha: float = knob(32.0, more_than(0), only("learner.lora_rank", "*"), for_sft())
    """LoRA's scale; updates are multiplied by alpha / rank. Usually once or twice the rank."""
    train_vision: bool = knob(False, only("learner.lora_rank", "0"), changes_work(), for_sft())
    """Also train the vision tower and projector of a vision model. Set it when images are unlike those that the
    model was trained with; every pass then encodes its images again."""


@dataclass
class TrackingConfig:
    """Where a training's numbers go beside metrics.jsonl, which has them always."""

    EVERY_KNOB: ClassVar = (may_change(),)

    to: list[str] = knob(["console"], reaches("network", sends_away))
    """Any of console, tensorboard, wandb, mlflow, or what an extension brings; one that fails is switched off and never
    stops training. Set it to where your team looks."""
