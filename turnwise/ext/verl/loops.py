"""verl's agent loops as loops of ours: `run(sampling_params, **row)` over token ids that we record as they are drawn.

They are known by what they have, not by their base class: it is the real verl's, or our stand-in's
(turnwise/ext/verl/stand_ins). What a loop returns must be what was recorded, token by token; otherwise the episode
fails.
"""

import inspect
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.errors import EpisodeError, PluginError
from turnwise.ext.verl.omega import omega_conf
from turnwise.ext.verl.rewards import ARTIFACT
from turnwise.ext.verl.tools import agent_data_of_loop
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.tools.tool import as_json, as_number
from turnwise.types import FinishReason, Ledger, Message, Role, ToolCall

if TYPE_CHECKING:
    from turnwise.rollout.conversation import Conversation


NEVER_CUT = 2**31 - 1
"""rollout.prompt_length as loops see it: prompts that are too long are left out before (data.overlong)."""
_OURS = ("temperature", "top_p", "top_k", "repetition_penalty")
_LIMITS = ("max_tokens", "max_new_tokens")
_REAL = "verl.experimental.agent_loop.agent_loop"
_FORMATS = {"gpt_oss": "gpt-oss", "gemma": "gemma4"}
"""verl's names of tool-call formats, where ours are others."""
_IGNORED = ("logprobs", "n", "skip_special_tokens", "priority")


def registered_in(module: ModuleType) -> dict[str, type]:
    """A module's own classes by the name that verl's @register gave them: the real verl's, or our stand-in's."""
    own = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
    registry = getattr(sys.modules.get(_REAL), "_agent_loop_registry", {})
    real = {str(entry.get("_target_")): name for name, entry in registry.items()}
    names = [vars(cls).get("verl_agent_name") or real.get(f"{cls.__module__}.{cls.__qualname__}") for cls in own]
    return {name: cls for name, cls in zip(names, own, strict=True) if name}


def verl_loop(kind: type, kwargs: Mapping[str, Any]) -> Callable[[Conversation], Awaitable[None]]:
    """A loop that makes one object of verl's class for each episode; `kwargs` are those of its YAML entry."""
    if inspect.isabstract(kind):
        raise PluginError(f"agent loop class {kind.__qualname__} has no `run`")
    if not inspect.iscoroutinefunction(inspect.unwrap(kind.run)):  # type: ignore[attr-defined]
        raise PluginError(f"agent loop class {kind.__qualname__}: `run` must be async")
    omega_conf()  # before the first episode

    async def loop(chat: Conversation) -> None:
        server = ServerManager(chat)
        agent_loop = kind(**_given(kind, chat, server, dict(kwargs)))
        returned = await agent_loop.run(server.sampling_params(), **_row(chat))
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        if not outputs or any(entry is None for entry in outputs):
            raise EpisodeError(f"agent loop {kind.__qualname__} returned nothing")
        for number, output in enumerate(outputs):
            _check_recorded(output, server.ledgers(), f"{kind.__qualname__}: output {number}")
        _check_all_told(outputs, server.ledgers(), kind.__qualname__)
        chat.artifacts[ARTIFACT] = _kept(outputs[-1])

    loop.__qualname__ = kind.__qualname__
    return loop


@dataclass(slots=True)
class ServerManager:
    """verl's server manager: `generate` writes into the episode's conversations.

    A request id stays with its conversation: the first has the main one, another continues the one whose sequence its
    ids extend, or else gets a branch. Who writes where never depends on who was faster.
    """

    chat: Conversation
    by_request: dict[str, Conversation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.chat.backend, TokenBackend):
            raise PluginError("verl's agent loops need token ids, which an endpoint does not give: evaluate the model "
                              "with an engine of ours")  # fmt: skip

    async def generate(
        self, request_id: str = "", *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **media: Any
    ) -> Any:
        """The tokens that follow, as verl's TokenOutput has them."""
        if unread := [name for name, value in media.items() if name.endswith("_data") and value]:
            raise EpisodeError(f"the agent loop sends {', '.join(unread)}; the engine reads text only")
        limit, stop = self._limits(sampling_params)
        ids = [int(token) for token in prompt_ids]
        conversation = self._of_request(str(request_id), ids)
        written = await conversation.generate_ids(ids, max_tokens=limit, stop=stop)
        return SimpleNamespace(
            token_ids=written.token_ids.tolist(),
            log_probs=written.logprobs.tolist(),
            stop_reason="length" if written.finish_reason is FinishReason.LENGTH else "completed",
            routed_experts=None,
            num_preempted=None,
            extra_fields={},
        )

    def sampling_params(self) -> dict[str, Any]:
        """As verl's loops are given them."""
        ours = self.chat.backend.sampling  # type: ignore[attr-defined]
        top_k = ours.top_k or -1
        return {"temperature": ours.temperature, "top_p": ours.top_p, "top_k": top_k, "repetition_penalty": 1.0,
                "logprobs": True}  # fmt: skip

    def unreadable_calls(self) -> tuple[ToolCall, ...]:
        """What the last turn wrote as a call and cannot be read; for our stand-in of verl's tool agent loop."""
        return tuple(call for call in self.chat.turns[-1].message.tool_calls if call.problem is not None)

    async def answer_unreadable_calls(self) -> list[str]:
        """What is wrong with each of them."""
        calls = self.unreadable_calls()
        replies = await self.chat.call_tools(Message(Role.ASSISTANT, "", calls)) if calls else []
        return [reply.text for reply in replies]

    async def ask_user(self) -> str | None:
        """What the episode's user says to the last answer; None when there is no user."""
        replies = await self.chat.ask_user()
        return replies[0].text if replies else None

    def user_scores(self) -> list[float]:
        """The scores that the user has given so far, by turn."""
        return [turn.user_score for turn in self.chat.turns if turn.user_score is not None]

    def ledgers(self) -> list[Ledger]:
        """Everything that was recorded."""
        return [
            ledger
            for conversation in dict.fromkeys(self.by_request.values())
            for ledger in conversation.backend.segments
        ]

    def _of_request(self, request_id: str, ids: list[int]) -> Conversation:
        if request_id not in self.by_request:
            self.by_request[request_id] = self._extended_by(ids) if self.by_request else self.chat
        return self.by_request[request_id]

    def _extended_by(self, ids: list[int]) -> Conversation:
        """The conversation whose sequence goes on with these ids; a new branch where none does."""
        sequence = np.asarray(ids, np.int64)

        def known(conversation: Conversation) -> int:
            lengths = (
                len(ledger) for ledger in conversation.backend.segments if ledger.shared_length(sequence) == len(ledger)
            )
            return max(lengths, default=0)

        best = max(dict.fromkeys(self.by_request.values()), key=known)
        return best if known(best) else self.chat.fork((), name="sequence")

    def _limits(self, params: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        """(the caller's token limit, its stop strings); what would draw from another distribution is refused."""
        for name, value in self.sampling_params().items():
            if name in _OURS and name in params and params[name] != value:
                raise EpisodeError(f"the agent loop asks for {name}={params[name]}; the run draws with {value}: set "
                                   f"sampling.{name}, so that log-probs are those of the policy")  # fmt: skip
        names = (*_OURS, *_LIMITS, *_IGNORED, "stop")
        if stray := [name for name, value in params.items() if name not in names and value is not None]:
            raise EpisodeError(f"the agent loop asks for {', '.join(stray)}, which is not a way to draw here")
        limit = next((int(params[name]) for name in _LIMITS if params.get(name) is not None), None)
        stop = params.get("stop") or ()
        return limit, (stop,) if isinstance(stop, str) else tuple(stop)


class LoopTokenizer:
    """The model's tokenizer as verl's loops use it: `apply_chat_template` gives ids, as it did in transformers 4."""

    def __init__(self, tokenizer: Any) -> None:
        self._found = tokenizer

    def apply_chat_template(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """Text or ids, never a dict unless asked for."""
        kwargs.setdefault("return_dict", False)
        return self._found.apply_chat_template(list(messages), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._found)


def _given(kind: type, chat: Conversation, server: ServerManager, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the class's constructor takes of all that either release passes."""
    config = SimpleNamespace(config=_config(chat))
    every = {
        "trainer_config": config,
        "server_manager": server,
        "tokenizer": LoopTokenizer(chat.backend.renderer.tokenizer.hf),  # type: ignore[attr-defined]
        "processor": None,
        "dataset_cls": None,
        "data_config": SimpleNamespace(config=config.config.data),
        "hf_model_type": None,
        "tools": SimpleNamespace(tools=loop_tools(chat)),
        **kwargs,
    }
    parameters = inspect.signature(kind).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return every
    if stray := [name for name in kwargs if name not in {parameter.name for parameter in parameters}]:
        raise PluginError(f"agent loop class {kind.__qualname__} takes no {', '.join(stray)}")
    return {parameter.name: every[parameter.name] for parameter in parameters if parameter.name in every}


def _config(chat: Conversation) -> Any:
    """verl's config as far as loops read it, from ours."""
    rollout, backend = chat.rollout, chat.backend
    length = rollout.max_tokens or backend.sampler.context_length or NEVER_CUT  # type: ignore[attr-defined]
    turns = {
        "enable": True, "max_assistant_turns": rollout.max_assistant_turns, "max_user_turns": rollout.max_user_turns,
        "max_parallel_calls": rollout.max_parallel_calls, "max_tool_response_length": rollout.max_reply_tokens * 4,
        "tool_response_truncate_side": "middle", "tool_config_path": None, "interaction_config_path": None,
        "function_tool_path": None, "format": _format(backend),
    }  # fmt: skip
    drawn = {"prompt_length": NEVER_CUT, "response_length": length, "calculate_log_probs": True, "n": 1,
             "max_model_len": None, "full_determinism": False, "multi_turn": turns,
             "agent": {"num_workers": 1}}  # fmt: skip
    data = {"apply_chat_template_kwargs": dict(backend.renderer.template.kwargs),  # type: ignore[attr-defined]
            "max_prompt_length": NEVER_CUT, "max_response_length": length, "return_raw_chat": True}  # fmt: skip
    ours = {"actor_rollout_ref": {"rollout": drawn, "model": {"path": "", "custom_chat_template": None}}, "data": data,
            "trainer": {}, "algorithm": {}, "reward_model": {}}  # fmt: skip
    return omega_conf().create(ours)


def _format(backend: Any) -> str:
    """verl's name of the tool-call format."""
    ours = str(getattr(backend.renderer.call_format, "__name__", "")).rpartition(".")[2]
    return _FORMATS.get(ours, ours)


def _row(chat: Conversation) -> dict[str, Any]:
    """The row's columns, as verl's dataset gives them to `run`."""
    sample = chat.sample
    info = sample.info.get("extra_info", {})
    user = {} if sample.interaction is None else {"name": sample.interaction.name, **sample.interaction.kwargs}
    return {
        **{name: value for name, value in sample.info.items() if name.isidentifier()},
        "raw_prompt": [{"role": message.role.value, "content": message.text} for message in sample.prompt],
        "data_source": sample.data_source,
        "reward_model": {"style": "rule", "ground_truth": sample.ground_truth},
        "extra_info": dict(info),
        "index": info.get("index", 0),
        "agent_name": sample.agent,
        "tools_kwargs": dict(sample.tools_kwargs),
        "interaction_kwargs": user,
        "uid": sample.id,
    }


def _check_recorded(output: Any, ledgers: Sequence[Ledger], where: str) -> None:
    """What a loop returned is a sequence that was recorded: the same ids, and the same of them are the policy's."""
    prompt, response, mask = list(output.prompt_ids), list(output.response_ids), list(output.response_mask)
    if len(response) != len(mask):
        raise EpisodeError(f"{where} has {len(response)} response ids and {len(mask)} entries in the mask")
    sequence = np.asarray([*prompt, *response], np.int64)
    alike = [ledger.shared_length(sequence) for ledger in ledgers]
    if not alike:
        raise EpisodeError(f"{where} was returned, but nothing was generated")
    best = int(np.argmax(alike))
    ledger, same = ledgers[best], alike[best]
    if same < min(len(sequence), len(ledger)):
        raise EpisodeError(f"{where}: token {same} is {sequence[same]}, and {ledger.token_ids[same]} was recorded")
    claimed = np.asarray([*[0] * len(prompt), *mask], bool)
    ours = np.zeros(max(len(sequence), len(ledger)), bool)
    ours[: len(ledger)] = ledger.loss_mask
    claimed = np.pad(claimed, (0, len(ours) - len(claimed)))
    if (wrong := np.flatnonzero(claimed != ours)).size:
        at = int(wrong[0])
        word = "the policy's" if ours[at] else "not the policy's"
        raise EpisodeError(f"{where}: the mask says {int(claimed[at])} of token {at}, which was recorded as {word}")


def _check_all_told(outputs: Sequence[Any], ledgers: Sequence[Ledger], name: str) -> None:
    """Sequences the policy wrote and the loop does not return would be trained on unseen."""
    sequences = [np.asarray([*output.prompt_ids, *output.response_ids], np.int64) for output in outputs]
    for number, ledger in enumerate(ledgers):
        if not any(ledger.shared_length(sequence) == min(len(sequence), len(ledger)) for sequence in sequences):
            raise EpisodeError(f"{name} generated sequence {number} and does not return it among its outputs")


def _kept(output: Any) -> dict[str, Any]:
    """What a loop returned beside tokens, as JSON values."""
    score = as_number(output.reward_score) if getattr(output, "reward_score", None) is not None else None
    if score is None and getattr(output, "reward_score", None) is not None:
        raise EpisodeError(
            f"the agent loop returned {output.reward_score!r:.80} as reward_score; it must be a finite number"
        )
    fields = dict(_json_fields(getattr(output, "extra_fields", None) or {}))
    return {"reward_score": score, "extra_fields": fields, "num_turns": int(getattr(output, "num_turns", 0))}


def _json_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        encoded = as_json(value)
        yield str(name), repr(value)[:1000] if encoded is None and value is not None else encoded


class LoopSchema(dict[str, Any]):
    """A JSON schema that can also be read as the attributes of verl's classes, and dumped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(f"the tool's schema has no {name!r}")
        value = self[name]
        return LoopSchema(value) if isinstance(value, dict) else value

    def model_dump(self, **how: Any) -> dict[str, Any]:
        """The schema as a plain dict, as pydantic's method of this name gives it."""
        return dict(self)


@dataclass(slots=True)
class LoopTool:
    """One tool: `execute` calls it as the agent loops of ours do, with its time limit, its lifecycle and a record."""

    chat: "Conversation"
    tool_schema: LoopSchema
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        name: str = self.tool_schema["function"]["name"]
        return name

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        """Nothing: the tool's own lifecycle is kept behind `execute`, which passes the row's arguments."""
        return instance_id or f"{self.name}{next(self._numbers)}", _response(None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """Calls the tool as the episode's own; returns its response, reward and metrics."""
        turn = self.chat.turns[-1]
        call = ToolCall(f"t{turn.index % 1000:03d}c{next(self._numbers) % 10000:04d}", self.name, parameters)
        with agent_data_of_loop(kwargs.get("agent_data")):
            (reply,) = await self.chat.call_tools(Message(Role.ASSISTANT, "", (call,)))
        record = next(entry for entry in turn.calls if entry.call is call)
        return _response(reply.text), record.score, dict(record.info)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Nothing: the tool itself is asked when the episode ends."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Does nothing, since `create` makes nothing."""


def loop_tools(chat: "Conversation") -> list[LoopTool]:
    """Those that the model is shown."""
    numbers = itertools.count()
    return [LoopTool(chat, LoopSchema(schema), numbers) for schema in chat.tools]


def _response(text: str | None) -> Any:
    """As verl's ToolResponse has it; images were put into words."""
    return SimpleNamespace(text=text, image=None, video=None)
