"""Every choice a knob offers, by name, with what it means."""

import enum


class Overlong(enum.Enum):
    """What happens to prompts longer than `data.max_prompt_tokens`."""

    filter = "filter"
    """Left out and counted."""
    error = "error"
    """The command stops and names the first."""


class HistoryPolicy(enum.Enum):
    """What happens when the chat template would rewrite earlier messages."""

    auto = "auto"
    """`segment` where the template changes words of the policy, `verbatim` where only empty thoughts of the
    template's own are added or removed; the plan says which one it takes."""
    refuse = "refuse"
    """Stop with an error that shows the difference: a run that starts matches the template token by token."""
    verbatim = "verbatim"
    """Keep every token as it was sampled and take only the template's suffix."""
    segment = "segment"
    """Follow the template: a second sequence starts from the rewritten history."""


class EvalSplit(enum.Enum):
    """Which rows `turnwise eval` plays."""

    test = "test"
    """Those to evaluate on."""
    train = "train"
    """Those to train on: their episodes may be learned from (`sft.recorded`), their accuracy says little."""


class Keep(enum.Enum):
    """Which part of an over-long tool reply is kept."""

    head = "head"
    """The beginning."""
    tail = "tail"
    """The end."""
    both = "both"
    """Both ends, with a mark where the middle is missing."""


class Lifecycle(enum.Enum):
    """How long an instance of a tool class lives."""

    per_call = "per_call"
    """Made for each call and released after it."""
    per_trajectory = "per_trajectory"
    """Made at the first call of an episode and released at its end: it keeps state between calls."""


class Precision(enum.Enum):
    """Number format of weights and activations."""

    float32 = "float32"
    """Four bytes; exact enough that sampler and learner agree."""
    bfloat16 = "bfloat16"
    """Two bytes and three digits; half the memory."""


class ModelImplementation(enum.Enum):
    """Whose code computes the model."""

    auto = "auto"
    """`native` where it computes all that the model's config asks for, else `transformers`; the plan says why."""
    native = "native"
    """Our own decoder of the Llama family: exact on the CPU and fast."""
    transformers = "transformers"
    """Any causal language model of the installed transformers."""


class Resume(enum.Enum):
    """What to do when the run directory exists."""

    never = "never"
    """Refuse: no run is ever overwritten."""
    auto = "auto"
    """Go on from its newest whole checkpoint."""


class Advantage(enum.StrEnum):
    """What a reward is compared with; `module:function` is one of your own (training/custom_advantage.py)."""

    gae = "gae"
    """A critic's value of every token, by generalised advantage estimation."""
    grpo = "grpo"
    """The mean of its group, in units of the group's sample standard deviation."""
    dr_grpo = "dr_grpo"
    """The mean of its group; advantages are not rescaled by group."""
    rloo = "rloo"
    """The mean of the other episodes of its group."""
    reinforce_pp = "reinforce_pp"
    """The whole batch: discounted returns, whitened over all policy tokens."""
    remax = "remax"
    """The reward of a greedy rollout of the same sample."""


class Credit(enum.Enum):
    """Which tokens of a trajectory answer for what."""

    uniform = "uniform"
    """All its tokens share its reward."""
    turn = "turn"
    """The same, and each turn's tokens also get that turn's own score; see turnwise/training/turn_credit.py."""


class PolicyLoss(enum.StrEnum):
    """How an advantage becomes a loss; r is the probability ratio to the policy before the step's first update.

    `module:function` is one of your own (training/custom_advantage.py).
    """

    ppo_clip = "ppo_clip"
    """-min(r A, clip(r) A) per token; a token outside the clip in the wanted direction has no gradient."""
    gspo = "gspo"
    """The same with one ratio per trajectory, the geometric mean of its tokens'; made for sequence_mean_token_mean."""
    cispo = "cispo"
    """-stop_gradient(clip(r)) A logprob: the weight is clipped, no token loses its gradient."""
    reinforce = "reinforce"
    """-A logprob, no ratio: for one update per step."""


class Aggregation(enum.Enum):
    """How losses of tokens become one number; every choice divides by counts of the whole minibatch.

    A sequence is a trajectory here, also one whose rewritten history made several segments of it.
    """

    token_mean = "token_mean"
    """Mean over policy tokens: long sequences weigh more."""
    sequence_mean_token_sum = "sequence_mean_token_sum"
    """Sum over a sequence's tokens, mean over sequences."""
    sequence_mean_token_mean = "sequence_mean_token_mean"
    """Mean over a sequence's tokens, mean over sequences: every sequence weighs the same."""
    sequence_sum_norm = "sequence_sum_norm"
    """Sum over a sequence's tokens divided by the constant `norm_length`, mean over sequences (Dr. GRPO)."""


class KLEstimator(enum.Enum):
    """How KL(policy, reference) is estimated at one sampled token; d = logprob - reference logprob."""

    k1 = "k1"
    """d: unbiased, noisy, may be negative."""
    abs = "abs"
    """|d|: biased, never negative; as a loss it pulls equally hard however far the two are apart."""
    k2 = "k2"
    """d^2 / 2: biased, low variance; its gradient is that of the true KL."""
    k3 = "k3"
    """exp(-d) + d - 1: unbiased, never negative. At most 10 per token, without gradient beyond."""


class OldLogprobs(enum.Enum):
    """Whose log-probs the ratio of the policy loss is taken against."""

    sampler = "sampler"
    """Those recorded with the tokens: no further forward pass."""
    learner = "learner"
    """The learner's own, computed before the step's first update; `algorithm.correction` weighs the difference."""


class Correction(enum.Enum):
    """Importance-sampling correction between sampler and learner."""

    none = "none"
    """No weight: the difference is ignored."""
    token = "token"
    """Each token by its own ratio: biased, low variance."""
    sequence = "sequence"
    """Each token by the product of its trajectory's ratios: unbiased, high variance."""
    geometric = "geometric"
    """Each token by the geometric mean of its trajectory's ratios; made for `reject`."""


class Excess(enum.Enum):
    """What happens to importance ratios outside the thresholds."""

    truncate = "truncate"
    """The weight is the ratio, at most the upper threshold."""
    reject = "reject"
    """The weight is the ratio inside the thresholds and 0 outside: those tokens are not trained."""


class OptimizerName(enum.Enum):
    """In which format AdamW keeps its two moments."""

    adamw = "adamw"
    """Four bytes each."""
    adamw8bit = "adamw8bit"
    """One byte each, scaled block by block: a quarter of their memory, and a little noise."""


class Offload(enum.Enum):
    """What the learner keeps in the CPU's memory instead of the GPU's."""

    none = "none"
    """Nothing."""
    optimizer = "optimizer"
    """The float32 weights and the optimizer's moments: twelve bytes a weight less on the GPU and a slower step. The
    machine's own memory holds these twelve bytes, and two page-locked buffers of at most 256 MiB through which
    gradients come down and weights go up (7 B: 86 GiB). The plan says how much, and what does not fit is refused."""


class LearnerPlace(enum.Enum):
    """Which process a learner of one process computes in."""

    auto = "auto"
    """A process of its own where sampler and learner share a GPU and training.max_lag lets them work at the same time,
    this one elsewhere."""
    here = "here"
    """The process of the run, with the sampler and the episodes. While they compute too, all wait for one Python
    interpreter."""
    process = "process"
    """One of its own on this machine, on the same device. It has its own weights and CUDA context, and takes a fresh
    interpreter's time and memory."""


class Decay(enum.Enum):
    """How the learning rate falls after warm-up."""

    constant = "constant"
    """It does not fall."""
    linear = "linear"
    """In a straight line, to the last step."""
    cosine = "cosine"
    """Along a half cosine, to the last step: slowly, fast, slowly."""


class ScoringRun(enum.Enum):
    """How scorers are run; what they say is the same."""

    inline = "inline"
    """In this process, one after the other."""
    pool = "pool"
    """In processes of their own, with a timeout each."""
    http = "http"
    """By a reward server (SWE-Dev's protocol, for any scorer)."""
    batch = "batch"
    """One call of a function for many trajectories."""
