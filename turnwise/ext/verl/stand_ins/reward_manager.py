"""Stand-ins for verl's reward managers: the base classes of both kinds and their registry.

`turnwise/ext/verl/rewards.py` runs such classes; they are known by what they have.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

Manager = TypeVar("Manager", bound=type)

RawRewardFn = Callable[..., Any] | None
"""What managers take as compute_score."""
REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register(name: str) -> Callable[[Manager], Manager]:
    """Decorate a class; scoring.scorers names it as FILE.py:Class."""

    def decorator(cls: Manager) -> Manager:
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return decorator


def get_reward_manager_cls(name: str) -> type:
    """The reward manager registered under a name; ValueError where there is none."""
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(f"no reward manager is called {name!r}")
    return REWARD_MANAGER_REGISTRY[name]


class AbstractRewardManager(ABC):
    """A manager that scores a whole batch: `__call__(data, return_dict)`."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any: ...


class RewardManagerBase(ABC):
    """A manager of the reward loop: `run_single(data)`."""

    _class_initialized = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.loop = asyncio.get_running_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Work that all managers of the class share."""
        cls._class_initialized = True

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """A tensor shaped as the responses, with each score on its response's last token."""
        import torch

        responses, start = data.batch["responses"], data.batch["prompts"].shape[1]
        rewards = torch.zeros_like(responses, dtype=torch.float32)
        last = data.batch["attention_mask"][:, start:].sum(1) - 1
        rewards[torch.arange(len(rewards)), last] = rewards.new_tensor(scores)
        return rewards

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]:
        """What one trajectory is worth: reward_score and reward_extra_info."""


RewardLoopManagerBase = RewardManagerBase
