"""Stand-ins for verl.experimental.agent_loop: the base class of agent loops, their output and their registry.

`turnwise/ext/verl/loops.py` runs such classes; they are known by what they have.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from turnwise.ext.verl.loops import ServerManager

Loop = TypeVar("Loop", bound=type)


AsyncLLMServerManager = LLMServerClient = ServerManager
"""What `generate` belongs to, as 0.6.1 and as 0.9 call it; a loop is given one."""


class TokenOutput(BaseModel):
    """What the server manager's `generate` gives."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class AgentLoopMetrics(BaseModel):
    """The seconds that the parts of an agent loop took."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What an agent loop's `run` returns."""

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

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        remove_system_prompt: bool = False,
        **media: Any,
    ) -> list[int]:
        """Ids of messages, with the words that ask for a reply; as in 0.7."""
        text = self._render(messages, tools, reply=True)
        if remove_system_prompt:
            text = text.removeprefix(self._render([], None, reply=False))
        return self._ids(text)

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **media: Any
    ) -> list[int]:
        """Ids of the first prompt; as in 0.9."""
        return self._ids(self._render(messages, tools, reply=True))

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Any:
        """What the policy wrote goes behind what there was; as in 0.9."""
        merged = SimpleNamespace(token_ids=[*runtime_token_ids, *assistant_token_ids])
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [])]
        return merged, [*response_mask, *[1] * len(assistant_token_ids)], logprobs

    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[Any] | None = None,
    ) -> Any:
        """New messages of tools or users go behind what there was, and the policy is asked to reply; as in 0.9."""
        before = self._render(previous_messages, tools, reply=False)
        after = self._render(updated_messages, tools, reply=True)
        if not after.startswith(before):
            raise ValueError("the chat template rewrites earlier messages: these loops cannot be used with it")
        added, end = after[len(before) :], self.tokenizer.eos_token or ""
        if end and runtime_token_ids[-1:] == [self.tokenizer.eos_token_id]:
            added = before[before.rfind(end) + len(end) :] + added  # what the template puts behind the end token
        ids = self._ids(added)
        merged = SimpleNamespace(token_ids=[*runtime_token_ids, *ids])
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(ids)]
        return merged, [*response_mask, *[0] * len(ids)], logprobs

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Nothing: the engine reads text only."""
        return {}

    process_vision_info = process_multi_modal_info

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, reply: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=reply, tokenize=False, **self.apply_chat_template_kwargs
        )
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Plays one episode; a subclass does it."""


_registered: dict[str, type] = {}


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Decorate a class: rows whose agent_name is this one get it, once its file is named in rollout.agent or
    verl.agents_file."""

    def decorator(subclass: Loop) -> Loop:
        _registered[agent_name] = subclass
        subclass.verl_agent_name = agent_name  # type: ignore[attr-defined]
        return subclass

    return decorator
