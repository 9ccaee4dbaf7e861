"""Stand-ins for verl.experimental.agent_loop: the base class of agent loops, their output and their registry.

`turnwise/rollout/verl_loops.py` runs such classes; they are known by what they have.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, Field

Loop = TypeVar("Loop", bound=type)


class TokenOutput(BaseModel):
    """What the server manager's `generate` gives."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class AgentLoopMetrics(BaseModel):
    """Seconds of a loop's parts."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What a loop's `run` gives."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class DictConfigWrap:
    """The config as loops are given it."""

    def __init__(self, config: Any) -> None:
        self.config = config


class AgentLoopBase(ABC):
    """An agent loop of either release: `run(sampling_params, **row) -> AgentLoopOutput`."""

    _class_initialized = False

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.loop = asyncio.get_running_loop()
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Heavy work that all loops of the class share, as in 0.6.1."""
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """One episode."""


_registered: dict[str, type] = {}


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Decorate a class: rows whose agent_name is this one get it, once its file is named in rollout.agent or
    rollout.agents_file."""

    def decorator(subclass: Loop) -> Loop:
        _registered[agent_name] = subclass
        subclass.verl_agent_name = agent_name  # type: ignore[attr-defined]
        return subclass

    return decorator
