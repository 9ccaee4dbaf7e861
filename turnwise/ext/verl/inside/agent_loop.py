"""`TurnwiseAgentLoop`, named in verl's agent-loop YAML: plays an episode of ours for each sample of verl's batch.

    - name: turnwise
      _target_: turnwise.ext.verl.inside.agent_loop.TurnwiseAgentLoop
      turnwise_config: rollouts.yaml

verl makes one object for each sample. What they share (tools, users, sandbox, scorers) is opened once for each of its
worker processes and entry. Of verl only the class of its outputs is imported, when there is one to give back.
"""

import asyncio
import importlib
import logging
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.chat.calls.tool_format import load_format
from turnwise.chat.render_alignment import render_problem
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import Config
from turnwise.config.check import DEFAULT
from turnwise.config.compose import Composed
from turnwise.data.rows import as_row
from turnwise.data.samples import to_sample
from turnwise.data.task import known_scorers
from turnwise.engines.rendering import demand_readable_calls, renderer_of
from turnwise.errors import DataError, EpisodeError, TurnwiseError
from turnwise.ext.verl.inside.entry import InsideEntry, OnFailure, Reward, unread_of_verl
from turnwise.ext.verl.inside.server import VerlServerSampler
from turnwise.ext.verl.rewards import extra_info_of
from turnwise.rollout.episode import run_episode
from turnwise.rollout.prepare import Prepared, token_context
from turnwise.rollout.routing import Plan, idle_kwargs
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.scoring.scorer import apply, is_failed
from turnwise.scoring.service import Scoring
from turnwise.training.sequences import to_sequences
from turnwise.types import Ledger, Message, Role, Sample, Trajectory

MODULE = "verl.experimental.agent_loop.agent_loop"
ARTIFACT = "turnwise"
"""The extra field with what else is known of the episode."""


@dataclass(slots=True)
class Output:
    """What one sequence of an episode is to verl; the names are its."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    """nan where the server gave none."""
    reward_score: float | None
    num_turns: int
    metrics: dict[str, float]
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def as_verl(self) -> Any:
        """verl's own object, of the release that is installed."""
        module = importlib.import_module(MODULE)
        fields = module.AgentLoopMetrics.model_fields  # releases differ in what they measure
        metrics = module.AgentLoopMetrics(**{name: value for name, value in self.metrics.items() if name in fields})
        return module.AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            multi_modal_data={},
            reward_score=self.reward_score,
            num_turns=self.num_turns,
            metrics=metrics,
            extra_fields=self.extra_fields,
        )


def to_outputs(trajectory: Trajectory, metrics: dict[str, float], *, response_length: int) -> list[Output]:
    """One for each sequence that may be learnt from; EpisodeError for one that verl's batch has no room for."""
    ledgers = [trajectory.segments[item.segment] for item in to_sequences([trajectory])]
    if not ledgers:
        raise EpisodeError(f"the policy wrote nothing: the episode ended with {trajectory.stop_reason.value}")
    outputs = [_output(ledger, trajectory, metrics) for ledger in ledgers]
    for item in outputs:
        if len(item.response_ids) > response_length:
            raise EpisodeError(
                f"the response has {len(item.response_ids)} tokens and verl's rollout.response_length is "
                f"{response_length}"
            )
    return outputs


def masked(trajectory: Trajectory, metrics: dict[str, float], *, end_id: int, limits: tuple[int, int]) -> Output:
    """A failed episode, nothing of which is learnt: what was recorded, as far as verl's batch (`limits`: its prompt
    and response lengths) has room, at least one token long, with a mask of zeros."""
    ledger = trajectory.segments[0] if trajectory.segments else Ledger()
    output = _output(ledger, trajectory, metrics)
    prompt, response = limits
    output.prompt_ids = output.prompt_ids[:prompt] or [end_id]
    output.response_ids = output.response_ids[:response] or [end_id]
    output.response_mask = [0] * len(output.response_ids)
    output.response_logprobs = (output.response_logprobs or [0.0])[:response]
    return output


def _output(ledger: Ledger, trajectory: Trajectory, metrics: dict[str, float]) -> Output:
    """Of one ledger, up to the last token that the policy wrote: what follows nobody answered, and verl stands the
    reward on the last token."""
    ids, mask = ledger.token_ids, ledger.loss_mask
    places = np.flatnonzero(mask)
    first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (len(ids), len(ids))
    extra_info = extra_info_of(trajectory)
    return Output(
        prompt_ids=ids[:first].tolist(),
        response_ids=ids[first:end].tolist(),
        response_mask=mask[first:end].astype(int).tolist(),
        response_logprobs=ledger.logprobs[first:end].tolist(),
        reward_score=trajectory.reward,
        num_turns=extra_info["num_turns"],
        metrics=dict(metrics),
        extra_fields={
            "turn_scores": extra_info["turn_scores"],
            "tool_rewards": extra_info["tool_rewards"],
            ARTIFACT: {
                "stop_reason": trajectory.stop_reason.value,
                "failure": trajectory.failure,
                "parts": dict(trajectory.parts),
                "engine_lost": trajectory.facts.engine_lost,
            },
        },
    )


logger = logging.getLogger(__name__)

OF_VERL = (
    "name", "trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "hf_model_type",
    "tools",
)  # fmt: skip
"""What verl gives the constructor of a loop, and the name of the entry."""
ANY = "any"
"""The data source of a row that is not known yet."""
NOT_OF_THE_ROW = ("priority", "session_id", "agent_name", "global_steps")
"""What `run` is given beside the columns of the row."""


class TurnwiseAgentLoop:
    """verl's AgentLoopBase in all that verl asks of one: `run(sampling_params, **row)`."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **options: Any) -> None:
        self._rollout = trainer_config.config.actor_rollout_ref.rollout
        self._manager, self._tokenizer = server_manager, tokenizer
        self._entry = InsideEntry.of(
            {key: _plain(value) for key, value in options.items() if key not in OF_VERL and _is_yaml(value)}
        )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """The sample's episode, as AgentLoopOutput; a list of them where the entry allows several sequences."""
        outputs = [output.as_verl() for output in await self.play(sampling_params, **row)]
        return outputs if self._entry.several_sequences else outputs[0]

    async def play(self, sampling_params: Mapping[str, Any], **row: Any) -> list[Output]:
        """The same before it becomes verl's."""
        shared = await _shared(self._entry, self._tokenizer, self._rollout)
        sampler = self._sampler(sampling_params, row, shared.renderer.tokenizer)
        sample = shared.sample(row)
        async with shared.room:
            trajectory = await shared.episode(sample, sampler, sampling_params, row)
        return self._outputs(trajectory, sampler, shared)

    def _sampler(self, params: Mapping[str, Any], row: Mapping[str, Any], tokenizer: Tokenizer) -> VerlServerSampler:
        rollout, extra = self._rollout, {}
        if row.get("priority") is not None:
            extra["priority"] = int(row["priority"])
        length = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        fixed = f"det-{extra.get('priority', 0)}" if rollout.get("full_determinism") else None
        return VerlServerSampler(
            self._manager, params, tokenizer.decode, rollout.prompt_length,
            length - (rollout.get("name") == "sglang"),  # whose server keeps one token of the context back
            extra, fixed,
        )  # fmt: skip

    def _outputs(self, trajectory: Trajectory, sampler: VerlServerSampler, shared: "_Shared") -> list[Output]:
        turns, wanted = trajectory.every_turn, bool(sampler.sampling_params.get("logprobs"))
        metrics = {
            "generate_sequences": sum(turn.generate_seconds for turn in turns),
            "tool_calls": sum(turn.reply_seconds for turn in turns),
            "num_preempted": -1 if sampler.preempted is None else sampler.preempted,
        }
        limits = self._rollout.prompt_length, self._rollout.response_length
        failure, outputs = trajectory.failure, list[Output]()
        if failure is None:
            try:
                outputs = to_outputs(trajectory, metrics, response_length=limits[1])
                if len(outputs) > 1 and not self._entry.several_sequences:
                    raise EpisodeError(
                        f"the episode has {len(outputs)} sequences and verl's worker takes one: with a trainer of "
                        "verl.trainer.ppo.v1 set several_sequences: true in the agent-loop entry; one whose template "
                        "rewrites history is kept in one sequence by chat.history=verbatim"
                    )
            except EpisodeError as error:
                failure = str(error)
        if failure is not None:
            if self._entry.on_failure is OnFailure.stop:
                raise EpisodeError(f"sample {trajectory.sample.id}: {failure}")
            logger.warning("sample %s is not learnt from: %s", trajectory.sample.id, failure)
            trajectory.failure = failure
            end_id = min(shared.renderer.stop_ids, default=0)
            outputs = [masked(trajectory, metrics, end_id=end_id, limits=limits)]
            outputs[0].reward_score = 0.0 if self._entry.reward is Reward.turnwise else None
        for output in outputs:
            output.response_logprobs = output.response_logprobs if wanted else None
            if self._entry.reward is Reward.turnwise:  # the same keys for all: verl reads those of a batch's first
                output.extra_fields["reward_extra_info"] = {"acc": float(bool(trajectory.right))}
            output.extra_fields |= {
                "min_global_steps": min(sampler.steps, default=None),
                "max_global_steps": max(sampler.steps, default=None),
            }
        return outputs


class _Shared:
    """What the episodes of one entry share in a worker process."""

    def __init__(self, entry: InsideEntry, tokenizer: Any, rollout: Any) -> None:
        """Every name is looked up and every file read; nothing is started."""
        config = _within(entry.compose(), rollout)
        self.entry, self.renderer = entry, _renderer(config, tokenizer)
        tools = [tool for spec in config.rollout.tools for tool in load_tools(spec, config)]
        if tools:
            demand_readable_calls(config, self.renderer.tokenizer)
        toolbox, users = Toolbox(tools, config.rollout, config), Users(config)
        # The rows are not known yet, but which loop plays them, and whether it can be found, is.
        plan = Plan([Sample(ANY, (Message(Role.USER, ""),), ANY)], config, toolbox, users)
        sources = [ANY if name == "default" else name for name in config.scoring.scorers]
        self._known = known_scorers()
        scoring = Scoring.of(config.scoring, sources, task_scorers=self._known)
        self.prepared = Prepared(config, [], 0, None, self.renderer, toolbox, users, plan, scoring)
        limit = config.rollout.concurrency
        self.room: AbstractAsyncContextManager[Any] = nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._played = 0
        self._keeper: asyncio.Future[None] | None = None
        for option in unread_of_verl(rollout):
            logger.warning("verl's rollout.%s is not read by this agent loop: say it in turnwise_config", option)

    async def start(self) -> None:
        """Open the services. One task opens and closes them; it ends with the worker's event loop."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def keep() -> None:
            async with self.prepared.running(logger.info):
                ready.set_result(None)
                await asyncio.Event().wait()

        self._keeper = asyncio.ensure_future(keep())
        await asyncio.wait((ready, self._keeper), return_when=asyncio.FIRST_COMPLETED)
        if self._keeper.done():
            self._keeper.result()

    def sample(self, row: Mapping[str, Any]) -> Sample:
        """verl's row as a sample of ours, refused like one of a file."""
        values = {
            key: value
            for key, value in row.items()
            if key not in NOT_OF_THE_ROW and type(value).__module__ != "torch"  # padding of verl's own
        }
        name = str(row.get("uid") or row.get("index") or 0)
        source = self.prepared.config.data.default_source
        unnamed = to_sample(as_row(values, Path("verl"), 0, name), prompt_key="raw_prompt", default_source=source)
        sample = replace(unnamed, id=name)
        if sample.images:
            raise DataError(f"sample {name} has images; our agent loops inside verl read text only")
        idle_kwargs([sample], [self.prepared.plan.route(sample)], self.prepared.toolbox)
        return sample

    async def episode(
        self, sample: Sample, sampler: VerlServerSampler, params: Mapping[str, Any], row: Mapping[str, Any]
    ) -> Trajectory:
        """Plays a sample with verl's sampling settings and scores the trajectory."""
        config, scoring = self.prepared.config, self.prepared.scoring
        scorer = None
        if self.entry.reward is Reward.turnwise:
            scorer = scoring.scorer_for(sample.data_source, config.scoring, task_scorers=self._known)
        top_k = int(params.get("top_k") or 0)
        sampling = replace(
            config.sampling,
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(top_k, 0),
        )
        prepared = replace(self.prepared, config=replace(config, sampling=sampling))
        context = token_context(prepared, self.renderer, sampler, sampling)
        step = int(row.get("global_steps") or 1) if self._played else 0  # the first is always compared with a render
        self._played += 1
        sibling = int(next((row[name] for name in ("session_id", "priority") if row.get(name) is not None), 0))
        trajectory = await run_episode(sample, sibling=sibling, step=step, context=context)
        if (problem := render_problem([trajectory])) is not None:
            raise TurnwiseError(problem)
        if scorer is not None:
            await apply(scorer, trajectory)
            if not is_failed(trajectory) and trajectory.reward is None:
                raise ValueError(f"{sample.id} has neither a reward nor a failure")
        return trajectory


_by_loop: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[InsideEntry, asyncio.Task[_Shared]]]"
_by_loop = weakref.WeakKeyDictionary()


async def _shared(entry: InsideEntry, tokenizer: Any, rollout: Any) -> _Shared:
    """Made once; a mistake in the config is raised to every sample that waits, and looked for again by the next."""
    futures = _by_loop.setdefault(asyncio.get_running_loop(), {})

    async def make() -> _Shared:
        try:
            shared_state = await asyncio.to_thread(
                _Shared, entry, tokenizer, rollout
            )  # imports tools, reads a tokenizer
            await shared_state.start()
            return shared_state
        except BaseException:
            del futures[entry]
            raise

    if entry not in futures:
        futures[entry] = asyncio.ensure_future(make())
    return await asyncio.shield(futures[entry])


def _within(composed: Composed, rollout: Any) -> Config:
    """Our config within verl's lengths: an episode has room for `response_length` tokens, and so has a turn of it that
    is not limited otherwise."""
    config, most = composed.config, int(rollout.response_length)
    own = config.rollout.max_tokens
    tokens = most if own is None else min(own, most)
    turn = tokens if composed.origins["sampling.max_tokens"] == DEFAULT else config.sampling.max_tokens
    return replace(
        config,
        rollout=replace(config.rollout, max_tokens=tokens),
        sampling=replace(config.sampling, max_tokens=min(turn, tokens)),
    )


def _renderer(config: Config, tokenizer: Any) -> Renderer:
    """Of a copy of verl's tokenizer, which pads and adds tokens of its own: ours must not."""
    if config.chat.tool_format is not None:
        load_format(config.chat.tool_format)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        name = getattr(tokenizer, "name_or_path", None) or "verl's model"
        return renderer_of(config, Tokenizer(Path(folder), config.chat.template, name=str(name)))


def _is_yaml(value: Any) -> bool:
    """Whether an argument can stand in a YAML file; releases to come may pass objects of their own."""
    return value is None or isinstance(value, str | int | float) or hasattr(value, "_metadata") or _is_tree(value)


def _is_tree(value: Any) -> bool:
    return isinstance(value, list | dict)


def _plain(value: Any) -> Any:
    """OmegaConf's lists and mappings as Python's."""
    if not hasattr(value, "_metadata"):
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value)
