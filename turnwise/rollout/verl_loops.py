"""verl's agent loops as loops of ours: `run(sampling_params, **row)` over token ids that we record as they are drawn.

They are known by what they have, not by their base class: it is the real verl's, or our stand-in's
(turnwise/compat/verl). What a loop returns must be what was recorded, token by token; otherwise the episode fails.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from turnwise.errors import EpisodeError, PluginError
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.tools.tool import as_json, as_number
from turnwise.rollout.verl_loop_tools import loop_tools
from turnwise.types import FinishReason, Ledger, Message, Role, ToolCall

ARTIFACT = "verl"
"""Where a trajectory keeps what the loop returned beside tokens: `reward_score`, `extra_fields`, `num_turns`."""
NEVER_CUT = 2**31 - 1
"""rollout.prompt_length as loops see it: prompts that are too long are left out before (data.overlong)."""
_OURS = ("temperature", "top_p", "top_k", "repetition_penalty")
_LIMITS = ("max_tokens", "max_new_tokens")
_REAL = "verl.experimental.agent_loop.agent_loop"
_FORMATS = {"gpt_oss": "gpt-oss", "gemma": "gemma4"}
"""verl's names of tool-call formats, where ours are others."""
_IGNORED = ("logprobs", "n", "skip_special_tokens", "priority")


def is_verl_loop(found: object) -> bool:
    """Whether this is a class written as verl's AgentLoopBase is."""
    run = getattr(found, "run", None)
    return isinstance(found, type) and callable(run) and "sampling_params" in inspect.signature(run).parameters


def registered_in(module: ModuleType) -> dict[str, type]:
    """A module's own classes by the name that verl's @register gave them: the real verl's, or our stand-in's."""
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    known = getattr(sys.modules.get(_REAL), "_agent_loop_registry", {})
    real = {str(entry.get("_target_")): name for name, entry in known.items()}
    names = [vars(one).get("verl_agent_name") or real.get(f"{one.__module__}.{one.__qualname__}") for one in own]
    return {name: one for name, one in zip(names, own, strict=True) if name}


def verl_loop(kind: type, kwargs: Mapping[str, Any]) -> Callable[[Conversation], Awaitable[None]]:
    """A loop that makes one object of verl's class for each episode; `kwargs` are those of its YAML entry."""
    if inspect.isabstract(kind):
        raise PluginError(f"agent loop class {kind.__qualname__} has no `run`")
    if not inspect.iscoroutinefunction(inspect.unwrap(kind.run)):  # type: ignore[attr-defined]
        raise PluginError(f"agent loop class {kind.__qualname__}: `run` must be async")

    async def loop(chat: Conversation) -> None:
        server = ServerManager(chat)
        made = kind(**_given(kind, chat, server, dict(kwargs)))
        returned = await made.run(server.sampling_params(), **_row(chat))
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        if not outputs or any(one is None for one in outputs):
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
        if shown := [name for name, value in media.items() if name.endswith("_data") and value]:
            raise EpisodeError(f"the agent loop sends {', '.join(shown)}; the engine reads text only")
        limit, stop = self._limits(sampling_params)
        ids = [int(one) for one in prompt_ids]
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
        """What the user gave so far."""
        return [turn.user_score for turn in self.chat.turns if turn.user_score is not None]

    def ledgers(self) -> list[Ledger]:
        """Everything that was recorded."""
        return [ledger for one in dict.fromkeys(self.by_request.values()) for ledger in one.backend.segments]

    def _of_request(self, request_id: str, ids: list[int]) -> Conversation:
        if request_id not in self.by_request:
            self.by_request[request_id] = self._extended_by(ids) if self.by_request else self.chat
        return self.by_request[request_id]

    def _extended_by(self, ids: list[int]) -> Conversation:
        """The conversation whose sequence goes on with these ids; a new branch where none does."""
        given = np.asarray(ids, np.int64)

        def known(one: Conversation) -> int:
            lengths = (len(ledger) for ledger in one.backend.segments if ledger.shared_length(given) == len(ledger))
            return max(lengths, default=0)

        best = max(dict.fromkeys(self.by_request.values()), key=known)
        return best if known(best) else self.chat.fork((), name="sequence")

    def _limits(self, given: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        """(the caller's token limit, its stop strings); what would draw from another distribution is refused."""
        for name, value in self.sampling_params().items():
            if name in _OURS and name in given and given[name] != value:
                raise EpisodeError(f"the agent loop asks for {name}={given[name]}; the run draws with {value}: set "
                                   f"sampling.{name}, so that log-probs are those of the policy")  # fmt: skip
        known = (*_OURS, *_LIMITS, *_IGNORED, "stop")
        if stray := [name for name, value in given.items() if name not in known and value is not None]:
            raise EpisodeError(f"the agent loop asks for {', '.join(stray)}, which is not a way to draw here")
        limit = next((int(given[name]) for name in _LIMITS if given.get(name) is not None), None)
        stop = given.get("stop") or ()
        return limit, (stop,) if isinstance(stop, str) else tuple(stop)


class LoopTokenizer:
    """The model's tokenizer as verl's loops use it: `apply_chat_template` gives ids, as it did in transformers 4."""

    def __init__(self, found: Any) -> None:
        self._found = found

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
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return every
    if stray := [name for name in kwargs if name not in {one.name for one in parameters}]:
        raise PluginError(f"agent loop class {kind.__qualname__} takes no {', '.join(stray)}")
    return {one.name: every[one.name] for one in parameters if one.name in every}


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
    return OmegaConf.create(ours)


def _format(backend: Any) -> str:
    """verl's name of the tool-call format."""
    ours = str(backend.renderer.call_format.__name__).rpartition(".")[2]
    return _FORMATS.get(ours, ours)


def _row(chat: Conversation) -> dict[str, Any]:
    """The row's columns, as verl's dataset gives them to `run`."""
    sample = chat.sample
    info = sample.info.get("extra_info", {})
    user = {} if sample.interaction is None else {"name": sample.interaction.name, **sample.interaction.kwargs}
    return {
        **{name: value for name, value in sample.info.items() if name.isidentifier()},
        "raw_prompt": [{"role": one.role.value, "content": one.text} for one in sample.prompt],
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
    given = np.asarray([*prompt, *response], np.int64)
    alike = [ledger.shared_length(given) for ledger in ledgers]
    if not alike:
        raise EpisodeError(f"{where} was returned, but nothing was generated")
    best = int(np.argmax(alike))
    ledger, same = ledgers[best], alike[best]
    if same < min(len(given), len(ledger)):
        raise EpisodeError(f"{where}: token {same} is {given[same]}, and {ledger.token_ids[same]} was recorded")
    said = np.asarray([*[0] * len(prompt), *mask], bool)
    ours = np.zeros(max(len(given), len(ledger)), bool)
    ours[: len(ledger)] = ledger.loss_mask
    said = np.pad(said, (0, len(ours) - len(said)))
    if (wrong := np.flatnonzero(said != ours)).size:
        at = int(wrong[0])
        word = "the policy's" if ours[at] else "not the policy's"
        raise EpisodeError(f"{where}: the mask says {int(said[at])} of token {at}, which was recorded as {word}")


def _check_all_told(outputs: Sequence[Any], ledgers: Sequence[Ledger], name: str) -> None:
    """Sequences the policy wrote and the loop does not return would be trained on unseen."""
    told = [np.asarray([*one.prompt_ids, *one.response_ids], np.int64) for one in outputs]
    for number, ledger in enumerate(ledgers):
        if not any(ledger.shared_length(given) == min(len(given), len(ledger)) for given in told):
            raise EpisodeError(f"{name} generated sequence {number} and does not return it among its outputs")


def _kept(output: Any) -> dict[str, Any]:
    """What a loop returned beside tokens, as JSON values."""
    score = as_number(output.reward_score) if getattr(output, "reward_score", None) is not None else None
    if score is None and getattr(output, "reward_score", None) is not None:
        raise EpisodeError(
            f"the agent loop returned {output.reward_score!r:.80} as reward_score; it is no finite number"
        )
    fields = dict(_json_fields(getattr(output, "extra_fields", None) or {}))
    return {"reward_score": score, "extra_fields": fields, "num_turns": int(getattr(output, "num_turns", 0))}


def _json_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        kept = as_json(value)
        yield str(name), repr(value)[:1000] if kept is None and value is not None else kept
