"""verl's reward functions as scorers: `compute_score(data_source, solution_str, ground_truth, extra_info)`, its batch
form with plural names, and reward manager classes; `verl_default` and `loop_reward` are built on the same words.

Managers are known by what they have, `__call__(data, return_dict)` or `run_single(data)`. Options of such a scorer:
`tokenizer` (the model's folder, with which managers decode), `compute_score` (FILE.py:function), and whatever else the
class takes.
"""

import asyncio
import dataclasses
import functools
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeGuard

from turnwise.errors import DataError, PluginError, ScoringFailed
from turnwise.ext.verl.omega import omega_conf
from turnwise.ext.verl.stand_ins.reward_score import default_compute_score
from turnwise.scoring.episode_scores import finite
from turnwise.scoring.runners.batch import BatchFunction, results_of
from turnwise.scoring.scorer import (
    TOTAL,
    Scorer,
    ScorerSpec,
    called,
    check_options,
    needs_value,
    parameters_of,
    sum_of_parts,
)
from turnwise.scoring.service import ReadTruth
from turnwise.system.plugins import load
from turnwise.types import Ledger, Origin, Remark, Sample, Trajectory

_ONE = ("data_source", "solution_str", "ground_truth")
_MANY = ("data_sources", "solution_strs", "ground_truths")
_OF_A_ROUTER = ("reward_router_address", "reward_model_tokenizer")
"""What verl's reward loop passes for a reward model that it serves; there is none here."""
ARTIFACT = "verl"
"""Where a trajectory keeps what an agent loop returned beside tokens: `reward_score`, `extra_fields`, `num_turns`."""
DEFAULT = "verl_default"


def scorer(value: Any, spec: ScorerSpec) -> Scorer | None:
    """The adapter: a reward function or a reward manager class as a scorer; None for anything else."""
    if is_manager(value):
        ask = manager_scorer(value, spec.name, spec.options)
        return called(functools.partial(_asked, ask, spec.name), spec.name)
    parameters = {} if isinstance(value, type) else parameters_of(value)
    is_whole = all(name in parameters for name in _ONE)
    if not is_whole and next(iter(parameters), None) not in (*_ONE, *_MANY):
        return None
    required = [name for name, parameter in parameters.items() if needs_value(parameter)]
    further = [name for name in required if name not in (*_ONE, "extra_info", *_OF_A_ROUTER, *spec.options)]
    if further or not is_whole:
        hint = "; it takes a batch: set scoring.run=batch" if _MANY[0] in parameters else ""
        raise PluginError(
            f"scorer {spec.name} takes ({', '.join(map(str, parameters.values()))}); a reward function of verl's takes "
            f"(data_source, solution_str, ground_truth, extra_info), and options that scoring.options sets{hint}"
        )
    check_options(spec, parameters, [*_ONE, "extra_info"])
    absent = {name: None for name in _OF_A_ROUTER if name in parameters and name not in spec.options}
    function = functools.partial(value, **absent, **spec.options)
    return called(functools.partial(_score_one, function, spec.name, _takes(parameters, "extra_info")), spec.name)


def batch_scorer(value: Any, spec: ScorerSpec) -> BatchFunction | None:
    """The adapter for many trajectories in one call; None for what takes one, or is none of verl's."""
    parameters = parameters_of(value)
    if not all(name in parameters for name in _MANY):
        return None
    check_options(spec, parameters, [*_MANY, "extra_infos"])
    call = functools.partial(value, **spec.options)
    takes_infos = _takes(parameters, "extra_infos")
    is_async = inspect.iscoroutinefunction(value)

    async def score(batch: list[Trajectory]) -> list[Any]:
        columns: dict[str, Any] = {
            "data_sources": [trajectory.sample.data_source for trajectory in batch],
            "solution_strs": [solution_of(trajectory) for trajectory in batch],
            "ground_truths": [trajectory.sample.ground_truth for trajectory in batch],
        }
        if takes_infos:
            columns["extra_infos"] = [extra_info_of(trajectory) for trajectory in batch]
        results = await results_of(functools.partial(call, **columns), spec.name, len(batch), is_async=is_async)
        return [as_result(result, spec.name) for result in results]

    return score


async def _score_one(function: Callable[..., Any], name: str, takes_info: bool, trajectory: Trajectory) -> Any:
    """It is given the last assistant message, not the whole conversation as in verl, where text of tools and users
    could be taken for an answer."""
    sample = trajectory.sample
    arguments: dict[str, Any] = {
        "data_source": sample.data_source,
        "solution_str": solution_of(trajectory),
        "ground_truth": sample.ground_truth,
    }
    if takes_info:
        arguments["extra_info"] = extra_info_of(trajectory)
    result = function(**arguments)
    return as_result(await result if inspect.isawaitable(result) else result, name)


async def _asked(manager: Callable[[Trajectory], Any], name: str, trajectory: Trajectory) -> Any:
    return as_result(await manager(trajectory), name)


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def solution_of(trajectory: Trajectory) -> str:
    """What verl's functions get as the solution: the last answer; with verl.strict all that followed the prompt."""
    whole = trajectory.artifacts.get("solution_str")
    if isinstance(whole, str):
        return whole
    return trajectory.answers[-1].text if trajectory.answers else ""


def extra_info_of(trajectory: Trajectory) -> dict[str, Any]:
    """The row's extra_info with what verl's loops add; replies of one turn count as one turn there."""
    return {
        **trajectory.sample.info.get("extra_info", {}),
        "rollout_reward_scores": trajectory.facts.tool_rewards,
        "num_turns": 1 + len(trajectory.turns) + sum(bool(turn.replies) for turn in trajectory.turns),
        "turn_scores": [turn.user_score for turn in trajectory.turns if turn.user_score is not None],
        "tool_rewards": [call.score for call in trajectory.calls if call.score is not None],
    }


def as_result(result: Any, name: str) -> Any:
    """What a verl reward function returned. A dict must hold `score`; a text beside it is no reward but a remark."""
    if not isinstance(result, dict):
        return result
    if TOTAL not in result:
        raise PluginError(f"scorer {name} returned a dict without {TOTAL!r}: {sorted(map(str, result))}")
    parts = {part: value for part, value in result.items() if part == TOTAL or isinstance(value, numbers.Real)}
    remarks = tuple(
        Remark(str(part), text) for part, text in result.items() if part not in parts and isinstance(text, str) and text
    )
    return dataclasses.replace(sum_of_parts(parts, name), remarks=remarks)


# --- scorers of its own -------------------------------------------------------------------------------------------


def truth_reader(_options: Mapping[str, Any]) -> ReadTruth:
    """A truth is needed whatever the options are."""
    return some_truth


def some_truth(sample: Sample) -> object:
    """The ground truth, whatever its shape; DataError for none: verl's rules would call every answer wrong."""
    truth = sample.ground_truth
    if truth is None or (isinstance(truth, str) and not truth.strip()):
        raise DataError(f"sample {sample.id!r}: {DEFAULT} needs reward_model.ground_truth")
    return truth


async def verl_default(trajectory: Trajectory) -> Any:
    """What verl's `default_compute_score` gives: 1 or -1 for math_dapo and aime, geometry3k's with its format."""
    sample = trajectory.sample
    return as_result(default_compute_score(sample.data_source, solution_of(trajectory), sample.ground_truth), DEFAULT)


async def loop_reward(trajectory: Trajectory) -> float:
    """The `reward_score` that an agent loop of verl's returned with its tokens."""
    output = trajectory.artifacts.get(ARTIFACT)
    reward = finite(output.get("reward_score")) if isinstance(output, dict) else None
    if reward is None:
        raise ScoringFailed("the agent loop returned no reward_score")
    return reward


_OURS = ("tokenizer", "compute_score")
CONFIG: dict[str, Any] = {
    "reward": {}, "reward_model": {}, "trainer": {"project_name": "turnwise", "experiment_name": "turnwise"},
}  # fmt: skip
"""Sections that managers look into; the option `config` stands over them."""


def is_manager(value: object) -> TypeGuard[type]:
    """Whether this is a class written as one of verl's reward managers is."""
    if not isinstance(value, type):
        return False
    if callable(getattr(value, "run_single", None)):
        return True
    try:
        return "num_examine" in inspect.signature(value).parameters
    except (TypeError, ValueError):  # int and other types without one
        return False


def manager_scorer(kind: type, spec: str, options: Mapping[str, Any]) -> Callable[[Trajectory], Awaitable[Any]]:
    """A scorer that asks one manager, made when the first trajectory comes; what it returns is as verl's functions'."""
    if "tokenizer" not in options:
        key = spec.rpartition(":")[2]
        raise PluginError(f"scorer {spec} is a reward manager of verl's, which decodes tokens: set scoring.options={{"
                          f"{key}: {{tokenizer: FOLDER}}}} to the model's folder")  # fmt: skip

    @functools.cache
    def manager_of() -> Any:
        return _make(kind, options)

    async def scorer(trajectory: Trajectory) -> Any:
        manager, data = manager_of(), _data(trajectory, kind)
        if hasattr(manager, "run_single"):
            result = await manager.run_single(data)
            return {**_numbers(result.get("reward_extra_info") or {}), "score": _plain(result["reward_score"])}
        result = await asyncio.to_thread(functools.partial(manager, data, return_dict=True))
        extra = {name: values[0] for name, values in (result.get("reward_extra_info") or {}).items() if len(values)}
        return {**_numbers(extra), "score": float(result["reward_tensor"].sum())}

    return scorer


def _make(kind: type, options: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    omega = omega_conf()
    further = {name: _as_verl_has_it(value) for name, value in options.items() if name not in _OURS}
    score = options.get("compute_score")
    every = {
        "tokenizer": AutoTokenizer.from_pretrained(options["tokenizer"]),
        "compute_score": None if score is None else load(score, "scorer"),
        "num_examine": 0,
        "reward_fn_key": "data_source",
        "config": omega.merge(omega.create(CONFIG), further.pop("config", {})),
    }
    parameters = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in every.items() if name in parameters}, **further)


def _as_verl_has_it(value: Any) -> Any:
    """Mappings with their keys as attributes too, all the way down."""
    return omega_conf().create(dict(value)) if isinstance(value, Mapping) else value


def _data(trajectory: Trajectory, kind: type) -> Any:
    """One trajectory as verl has it: the prompt, then all that followed, whoever wrote it."""
    import torch

    if not trajectory.segments:
        raise PluginError("verl's reward managers need token ids, which an endpoint does not give")
    from turnwise.ext.verl.stand_ins.data_proto import DataProto

    ledger, start = _last(trajectory)
    ids = torch.from_numpy(ledger.token_ids.copy())
    tensors = {
        "prompts": ids[:start], "responses": ids[start:], "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "response_mask": torch.from_numpy(ledger.loss_mask[start:].astype("int64")),
    }  # fmt: skip
    sample = trajectory.sample
    others = {
        **sample.info,
        "data_source": sample.data_source,
        "reward_model": {"style": "rule", "ground_truth": sample.ground_truth},
        "extra_info": dict(sample.info.get("extra_info", {})),
        "__num_turns__": 1 + len(trajectory.turns) + sum(bool(turn.replies) for turn in trajectory.turns),
        "uid": sample.id,
    }
    method = getattr(kind, "run_single", None) or kind.__call__
    proto = getattr(inspect.unwrap(method), "__globals__", {}).get("DataProto", DataProto)
    return proto.from_dict(
        tensors={name: tensor.unsqueeze(0) for name, tensor in tensors.items()},
        non_tensors={name: _objects(value) for name, value in others.items()},
    )


def _last(trajectory: Trajectory) -> tuple[Ledger, int]:
    """The sequence of the last turn, and where its prompt ends."""
    ledger = trajectory.segments[trajectory.turns[-1].segment if trajectory.turns else 0]
    written = (ledger.origins != Origin.PROMPT).nonzero()[0]
    return ledger, int(written[0]) if written.size else len(ledger)


def _objects(value: Any) -> Any:
    import numpy as np

    column = np.empty(1, dtype=object)
    column[0] = value
    return column


def _numbers(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a manager says beside the score; `score` itself is the reward's."""
    return {str(name): _plain(value) for name, value in extra.items() if str(name) != "score"}


def _plain(value: Any) -> Any:
    """A tensor or an array of one value as that value."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
