"""Environments of the verifiers package as tasks: its code plays the episodes, our model answers, its rewards count.

`task=verifiers:ENV_ID`, or a file with `TASK = environment_task("env-id", level=3)`. Each episode is one of the
environment's own, run by `sdk_agents.client` against the base URL of its session, so every token is recorded.
"""

import asyncio
import functools
import importlib
import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.data.task import Task
from turnwise.errors import ConfigError, PluginError, ScoringFailed, one_line
from turnwise.ext.sdk_agents.loop import RESULT
from turnwise.scoring.scorer import Score
from turnwise.types import Sample, Trajectory

ROW = "verifiers"
"""In `extra_info` of a row: the environment's config, and which of its tasks this is."""
_HERE = "turnwise.ext.verifiers.task"
_NAMED: set[str] = set()
"""Configs of environments that tasks of this process name: rows of a file choose among them."""


def environment_task(env_id: str, *, env: Mapping[str, Any] | None = None, holdout: int = 10, **taskset: Any) -> Task:
    """An environment as a task. `taskset` are fields of its taskset's config, `env` those of the environment's, such as
    `{"agent": {"harness": {"id": "null"}}}`. Of its tasks each `holdout`-th is for testing, the others for training."""
    if not isinstance(holdout, int) or holdout < 2:
        raise ConfigError(f"environment {env_id}: holdout is a whole number from 2 on, not {holdout!r}")
    settings = {**(env or {}), "taskset": {"id": env_id, **taskset}}
    try:
        config = json.dumps(settings, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {env_id}: its options are texts, numbers, lists and dicts: {error}") from error
    _NAMED.add(config)
    source = _Tasks.of(config)

    def rows(split: str, seed: int) -> Iterator[dict[str, Any]]:
        for index, task in enumerate(source):
            if (index % holdout == holdout - 1) == (split != "train"):
                yield {"prompt": _prompt(task.data), "extra_info": {ROW: {"config": config, "index": index}}}

    return Task(
        name=env_id,
        rows=rows,
        endless=source.is_endless,
        scorer=f"{_HERE}:reward",
        defaults={"sdk_agents.client": f"{_HERE}:run"},
    )


async def run(base_url: str, sample: Sample) -> dict[str, Any]:
    """The client of an episode: the environment plays its task against this address; its rewards and metrics."""
    where = sample.info.get("extra_info", {}).get(ROW)
    if not isinstance(where, dict):
        raise PluginError(f"sample {sample.id} is not a row of a verifiers environment")
    if where.get("config") not in _NAMED:  # a file's word, and loading an environment imports its package
        raise PluginError(
            f"sample {sample.id}: extra_info.{ROW} names another environment than the task does: name it in"
            " task=verifiers:ENV_ID, or in a file with environment_task(...)"
        )
    vf = _package()
    task = await asyncio.to_thread(_Tasks.of(where["config"]).get, where["index"])
    # Of its own for each episode: what an environment serves knows the address that its model calls go to.
    environment = await asyncio.to_thread(_environment, where["config"])
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="TURNWISE_SESSION_HAS_NO_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        texts = [f"{error.type}: {error.message}" for error in errors] or ["it did not finish"]
        raise RuntimeError(f"environment {environment.config.env_id}: {texts[-1]}")
    trace = _trained(episode.traces, base_url)
    return {
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }


async def reward(trajectory: Trajectory, *, unfinished: float = 0.0) -> Score:
    """What the environment gave, with its rewards and metrics as parts; `unfinished` where a budget of ours ended the
    episode before it could."""
    result = trajectory.artifacts.get(RESULT)
    if not isinstance(result, dict):
        if trajectory.turns:
            return Score(unfinished, {"finished": 0.0})
        raise ScoringFailed("no environment of verifiers played this episode")
    if not isinstance(result.get("reward"), int | float) or not math.isfinite(result["reward"]):
        raise ScoringFailed(f"the environment's reward is {result.get('reward')!r}")
    return Score(float(result["reward"]), {**result["metrics"], **result["rewards"], "finished": 1.0})


class _Tasks:
    """The tasks of one environment in its own order, read as far as they are asked for; endless ones never end."""

    def __init__(self, config: str) -> None:
        environment = _environment(config)
        self.is_endless = not environment.taskset.bounded
        self._source = iter(environment.taskset)
        self._read: list[Any] = []
        self._lock = threading.Lock()  # episodes ask from threads

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(config: str) -> "_Tasks":
        """Those of an environment's config: reading a dataset may take a while."""
        return _Tasks(config)

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count():
            try:
                yield self.get(index)
            except IndexError:
                return

    def get(self, index: int) -> Any:
        """The task at a place; IndexError behind the last."""
        with self._lock:
            while len(self._read) <= index:
                try:
                    self._read.append(next(self._source))
                except StopIteration:
                    raise IndexError(f"the environment has {len(self._read)} tasks, none at {index}") from None
            return self._read[index]


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(f"environments of verifiers need it installed, 0.4 or newer: {one_line(error)}") from error


def _environment(config: str) -> Any:
    """A fresh environment. Its agents run on this machine unless a runtime is named, so one that would let the policy
    run commands here is refused."""
    vf, settings = _package(), json.loads(config)
    name = settings["taskset"]["id"]
    try:
        resolved = vf.resolve_env_config(settings)
        roles = {role: agent for role, agent in resolved if isinstance(agent, vf.AgentConfig)}
        for role, agent in roles.items():
            if agent.runtime == vf.PrimeConfig() and "runtime" not in (settings.get(role) or {}):
                roles[role] = agent.model_copy(update={"runtime": vf.SubprocessConfig()})
        environment = vf.load_environment(resolved.model_copy(update=roles))
    except Exception as error:  # the package of an environment, or pydantic about its options
        raise PluginError(f"environment {name!r} cannot be loaded: {one_line(error)}") from error
    for role, harness in environment._harnesses.items():
        if harness.EXECUTES_CODE and isinstance(roles[role].runtime, vf.SubprocessConfig):
            raise ConfigError(
                f"environment {name!r}: its agent {role!r} would run the model's commands on this machine (harness"
                f" {harness.config.id!r}); write a file with TASK = environment_task({name!r},"
                f' env={{{role!r}: {{"harness": {{"id": "null"}}}}}}), or name a container in its "runtime"'
            )
    return environment


def _trained(traces: list[Any], base_url: str) -> Any:
    """The one trace whose reward the episode's tokens get."""
    ours = [trace for trace in traces if trace.agent.config.client.base_url == base_url]
    for trace in ours:
        if not trace.agent.trainable:
            raise PluginError(
                f"the environment's agent {trace.agent.name!r} is not to be trained, but the policy plays it: give it"
                " a model and a client of its own in env={...}"
            )
    if len(ours) != 1:
        raise PluginError(f"the policy played {len(ours)} agents of the environment; one reward is for one of them")
    return ours[0]


def _prompt(data: Any) -> list[dict[str, str]]:
    """The prompt as reports show it; what the model sees is composed by the environment."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    opening = data.prompt_text or data.description or data.name or "(the environment opens the conversation)"
    return [*system, {"role": "user", "content": opening}]
