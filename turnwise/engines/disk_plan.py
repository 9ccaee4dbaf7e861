"""What checkpoints take of a disk, known before a run: one that has no room for what it ends with is refused."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.config import Config
from turnwise.config.choices import OptimizerName, Precision
from turnwise.config.training import LAST
from turnwise.engines.devices import device_of, gpus_for_learner
from turnwise.engines.memory_plan import ModelSize, Training, facts_of, in_words, size_of
from turnwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Bytes on disk of one checkpoint, and how many are there at once."""

    policy: int
    """The Hugging Face folder."""
    state: int
    """float32 weights and moments of what is trained."""
    most: int
    """How many with the learner's state are there at once; 0 where the policy alone is saved, at the end."""
    best: int = 0
    """A second copy of the policy: of the best evaluation (training.ship), or the one that a fine-tuning leaves."""

    @property
    def total(self) -> int:
        """Bytes of all that may be there at once."""
        return max(self.each * self.most, self.policy) + self.best

    @property
    def each(self) -> int:
        """The bytes of one checkpoint: the policy's and the learner's state."""
        return self.policy + self.state

    @property
    def least(self) -> int:
        """The bytes of the largest that a run without a stop writes."""
        return self.each if self.most else self.policy

    def line(self) -> str:
        """The line of `turnwise plan` about the size and number of checkpoints."""
        best = " beside another copy of the policy" if self.best else ""
        if not self.most:
            return (
                f"the run ends with its policy alone, {in_words(self.policy)} (training.save_last=false){best}; one "
                f"that is stopped saves {in_words(self.each)}"
            )
        return (
            f"a checkpoint takes about {in_words(self.each)} ({in_words(self.policy)} the policy, "
            f"{in_words(self.state)} the learner's state), and up to {self.most} exist at once{best}: "
            f"{in_words(self.total)}"
        )


def checkpoints(config: Config, training: Training, *, tunes: bool = False) -> Checkpoints | None:
    """What a run with this config writes, a training or (`tunes`) a fine-tuning. None where config.json does not tell
    the model's size."""
    size = size_of(facts_of(config))
    if size is None:
        return None
    options = config.training
    steps = config.sft.steps if tunes else options.steps
    between = 0 if not options.save_every else options.keep if steps is None else (steps - 1) // options.save_every
    written = min(options.keep + 1, between + options.save_last)  # a new one is written before an old one goes
    policy = _policy(config, size)
    best = policy if tunes or options.ship != LAST else 0
    return Checkpoints(policy, _state(config, size, training), written, best)


def _policy(config: Config, size: ModelSize) -> int:
    learner = config.learner
    on_gpu = device_of(learner.device, gpus_for_learner(config)) != "cpu"
    narrow = on_gpu and (learner.precision or Precision.bfloat16) is Precision.bfloat16 and not learner.lora_rank
    return size.weights * (2 if narrow else 4)


def _state(config: Config, size: ModelSize, training: Training) -> int:
    learner = config.learner
    each = 4 + (2 if learner.optimizer is OptimizerName.adamw8bit else 8)
    critic = size.trainable(learner) if training.critic and not learner.shared_critic else 0
    return each * (size.trained(learner) + critic)


def check_disk(config: Config, training: Training, free: int | None = None, *, tunes: bool = False) -> Iterator[str]:
    """Refuse a run whose disk (`free`: as measured) has no room for one checkpoint; a warning where there is none for
    all that it keeps, or for one of a run that is stopped."""
    needed = checkpoints(config, training, tunes=tunes)
    if needed is None:
        return
    folder = Path.cwd() / config.runs_dir
    free = (
        shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        if free is None
        else free
    )
    room = f"{folder} has {in_words(free)} left"
    advice = "what helps: training.save_every=0 (the last one only), learner.lora_rank, runs_dir on another disk"
    if needed.least > free:
        policy = "" if not needed.most else ", training.save_last=false with training.save_every=0 (the policy alone)"
        kind = "a checkpoint" if needed.most else "a policy"
        raise ConfigError(f"{room}, and a run ends with {kind} of {in_words(needed.least)}; {advice}{policy}")
    if needed.total > free:
        held = f" ({needed.most} checkpoints of {in_words(needed.each)})" if needed.most else ""
        yield (
            f"{room}, and the run may hold {in_words(needed.total)} at once{held}; {advice}, training.ship=last, or a "
            "smaller training.keep"
        )
    elif needed.each > free:
        yield f"{room}: a run that is stopped could not save the {in_words(needed.each)} that it would go on from"
