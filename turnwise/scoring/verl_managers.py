"""verl's reward manager classes as scorers, both kinds: `__call__(data, return_dict)` and `run_single(data)`.

They are known by what they have. Options of such a scorer: `tokenizer` (the model's folder, with which managers
decode), `compute_score` (FILE.py:function), and whatever else the class takes.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnwise.errors import PluginError
from turnwise.plugins import load
from turnwise.types import Ledger, Origin, Trajectory

_OURS = ("tokenizer", "compute_score")
CONFIG: dict[str, Any] = {
    "reward": {}, "reward_model": {}, "trainer": {"project_name": "turnwise", "experiment_name": "turnwise"},
}  # fmt: skip
"""Sections that managers look into; the option `config` stands over them."""


def is_manager(found: object) -> bool:
    """Whether this is a class written as one of verl's reward managers is."""
    if not isinstance(found, type):
        return False
    if callable(getattr(found, "run_single", None)):
        return True
    try:
        return "num_examine" in inspect.signature(found).parameters
    except (TypeError, ValueError):  # int and other types without one
        return False


def manager_scorer(kind: type, spec: str, options: Mapping[str, Any]) -> Callable[[Trajectory], Awaitable[Any]]:
    """A scorer that asks one manager, made when the first trajectory comes; what it returns is as verl's functions'."""
    if "tokenizer" not in options:
        key = spec.rpartition(":")[2]
        raise PluginError(f"scorer {spec} is a reward manager of verl's, which decodes tokens: set scoring.options={{"
                          f"{key}: {{tokenizer: FOLDER}}}} to the model's folder")  # fmt: skip
    made: list[Any] = []

    async def scorer(trajectory: Trajectory) -> Any:
        if not made:
            made.append(_make(kind, options))
        manager, data = made[0], _data(trajectory, kind)
        if hasattr(manager, "run_single"):
            result = await manager.run_single(data)
            return {**_numbers(result.get("reward_extra_info") or {}), "score": _plain(result["reward_score"])}
        result = await asyncio.to_thread(functools.partial(manager, data, return_dict=True))
        extra = {name: values[0] for name, values in (result.get("reward_extra_info") or {}).items() if len(values)}
        return {**_numbers(extra), "score": float(result["reward_tensor"].sum())}

    scorer.__qualname__ = spec
    return scorer


def _make(kind: type, options: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    given = {name: _as_verl_has_it(value) for name, value in options.items() if name not in _OURS}
    score = options.get("compute_score")
    every = {
        "tokenizer": AutoTokenizer.from_pretrained(options["tokenizer"]),
        "compute_score": None if score is None else load(score, "scorer"),
        "num_examine": 0,
        "reward_fn_key": "data_source",
        "config": OmegaConf.merge(OmegaConf.create(CONFIG), given.pop("config", {})),
    }
    parameters = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in every.items() if name in parameters}, **given)


def _as_verl_has_it(value: Any) -> Any:
    """Mappings with their keys as attributes too, all the way down."""
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(value)) if isinstance(value, Mapping) else value


def _data(trajectory: Trajectory, kind: type) -> Any:
    """One trajectory as verl has it: the prompt, then all that followed, whoever wrote it."""
    import torch

    if not trajectory.segments:
        raise PluginError("verl's reward managers need token ids, which an endpoint does not give")
    from turnwise.scoring.verl_data import DataProto

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
