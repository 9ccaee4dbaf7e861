"""An episode that was recorded, played again: with the same noise, or from an edited message on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from turnwise import extensions
from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.config.evaluation_sampling import as_evaluated
from turnwise.config.training import GREEDY
from turnwise.engines.samplers.request import NoiseKey, Request
from turnwise.engines.samplers.sampler import Capabilities, Sampler
from turnwise.engines.weight_updates import Update
from turnwise.errors import ConfigError, StorageError
from turnwise.reports.checks.run_checks import check_before_run
from turnwise.reports.plan import plan_text
from turnwise.rollout.chat_backends import ChatBackend, TokenBackend
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.prepare import open_context, prepare
from turnwise.scoring.scorer import apply
from turnwise.storage.checkpoints import MANIFEST
from turnwise.storage.episode_differences import Differences, differences
from turnwise.storage.images.copies import check_kept
from turnwise.storage.run_dir import REPLAY, REUSED, TRAINED, RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.training.runs.run import new_run, printer
from turnwise.types import Completion, FinishReason, JsonSchema, Message, Role, Trajectory, Turn, VersionRun

EVALUATED = "eval"
"""The folder of a run's evaluations."""
EDITED = "edited"
"""The artifact that says what was edited in an episode."""
_EDIT = re.compile(r"turn=(\d{1,6})(?:,(?:call=(\d{1,4})|(assistant)))?")


@dataclass(frozen=True, slots=True)
class Edit:
    """What is said instead, and from where the episode goes on: `Edit(2, "41")`.

    Of a turn with tool results one of them is replaced (`call`), of one with a user's message that message; a turn that
    nobody replied to is replied to with the text as the user's. `assistant` replaces the turn's own words.
    """

    turn: int
    text: str
    call: int | None = None
    assistant: bool = False

    @classmethod
    def of(cls, spec: str, text: str) -> "Edit":
        """As a command line says it: turn=2, turn=2,call=1 or turn=2,assistant."""
        match = _EDIT.fullmatch(spec.replace(" ", ""))
        if match is None:
            raise ConfigError(f"--edit {spec!r}: write turn=2, turn=2,call=1 or turn=2,assistant")
        turn, call, assistant = match.groups()
        return cls(int(turn), text, None if call is None else int(call), assistant is not None)

    def check(self, trajectory: Trajectory) -> None:
        """ConfigError when the episode has no such place."""
        turns = len(trajectory.turns)
        if self.turn >= turns:
            raise ConfigError(f"--edit turn={self.turn}: the episode has turns 0 to {turns - 1}")
        turn = trajectory.turns[self.turn]
        replies = turn.replies
        if turn.finish_reason is FinishReason.LENGTH and not self.assistant:
            raise ConfigError(f"--edit turn={self.turn}: that turn was cut off at its limit, and nothing follows it")
        if self.call is not None and self.call >= len(replies):
            raise ConfigError(f"--edit turn={self.turn},call={self.call}: that turn has {len(replies)} replies")
        if self.call is None and not self.assistant and len(replies) > 1:
            raise ConfigError(
                f"--edit turn={self.turn}: that turn has {len(replies)} replies; say which: turn={self.turn},call=0"
            )

    def replies(self, turn: Turn) -> list[Message]:
        """The turn's replies with this one in its place."""
        if not turn.replies:
            return [Message(Role.USER, self.text)]
        at = self.call or 0
        return [replace(reply, content=self.text) if n == at else reply for n, reply in enumerate(turn.replies)]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One trajectory of a run, and where it lies."""

    run: RunDir
    file: str
    """Without its ending: eval/step_000000."""
    row: int
    trajectory: Trajectory

    @classmethod
    def find(cls, run: RunDir, row: int, file: str | None = None, *, any_weights: bool = True) -> "Recorded":
        """The row of a file; where none is named, of the newest one, or of the newest whose weights the run keeps."""
        # In this order: what was trained on again lies in files of its own, and is never the newest.
        files = [
            path for folder in (EVALUATED, REUSED, TRAINED) for path in sorted(run.path.glob(f"{folder}/*.parquet"))
        ]
        names = [path.relative_to(run.path).with_suffix("").as_posix() for path in files]
        if not names:
            raise StorageError(f"{run.path} holds no trajectories yet")
        if file is None and not any_weights:
            for name in sorted(names, key=lambda name: name[-6:], reverse=True):
                trajectories = read_trajectories(run.path / f"{name}.parquet")
                if row < len(trajectories) and _version(trajectories[row]) in {0, *_steps_kept(run)}:
                    file = name
                    break
        chosen = names[-1] if file is None else file.removesuffix(".parquet")
        if chosen not in names:
            raise ConfigError(f"{run.path} has no file {chosen!r}; it has {', '.join(names[-6:])}")
        trajectories = read_trajectories(run.path / f"{chosen}.parquet")
        if not 0 <= row < len(trajectories):
            raise ConfigError(f"--sample {row}: {chosen} holds trajectories 0 to {len(trajectories) - 1}")
        check_kept(run.path, trajectories[row])
        return cls(run, chosen, row, trajectories[row])


@dataclass(frozen=True, slots=True)
class Replayed:
    """An episode played again, and how it differs from its record."""

    recorded: Recorded
    edit: Edit | None
    trajectory: Trajectory
    found: Differences
    notes: tuple[str, ...]
    """What keeps it from being the same for another reason than the edit."""
    written: Path
    """Its own run directory."""

    def as_json(self) -> dict[str, Any]:
        """What a run directory keeps of it."""
        of = {"run": str(self.recorded.run.path), "file": self.recorded.file, "row": self.recorded.row}
        edit = None
        if self.edit is not None:
            edit = {name: getattr(self.edit, name) for name in ("turn", "text", "call", "assistant")}
        return {"of": of, "edit": edit, "notes": list(self.notes), "differences": self.found.as_json()}


def replay_config(config: Config, recorded: Recorded, model: str | None) -> tuple[Config, list[str]]:
    """(the run's config with the weights that wrote the episode, what is not as it was)."""
    if not extensions.engine(config.engine.name).renders or not recorded.trajectory.segments:
        raise ConfigError(
            f"{recorded.file} of {recorded.run.path} has no tokens: an endpoint's words cannot be replayed"
        )
    path, notes = (model, []) if model is not None else _weights(config, recorded)
    folder, name = Path(recorded.file).parts
    config = as_evaluated(config) if folder == EVALUATED else replace(config, eval=replace(config.eval, sampling={}))
    if name.startswith(GREEDY):
        config = replace(config, sampling=replace(config.sampling, temperature=0.0))
    return replace(config, model=replace(config.model, path=path), run=None), notes


def _weights(config: Config, recorded: Recorded) -> tuple[str, list[str]]:
    """The model's path, or the checkpoint of the version that wrote the episode."""
    versions = sorted({turn.policy_version for turn in recorded.trajectory.turns})
    notes = []
    if len(versions) > 1:
        notes.append(f"weights changed while it was played (versions {', '.join(map(str, versions))})")
    version = _version(recorded.trajectory)
    if version == 0:
        return config.model.path, notes
    steps = _steps_kept(recorded.run)
    if version not in steps:
        have = f"it keeps those of steps {', '.join(map(str, steps))}" if steps else "it keeps no checkpoint"
        evaluated = [f"{EVALUATED}/step_{step:06d}" for step in steps]
        if ready := [name for name in evaluated if (recorded.run.path / f"{name}.parquet").is_file()]:
            have += f", which wrote the episodes of --file {ready[-1]}"
        raise ConfigError(
            f"the weights of version {version}, which wrote this episode, are not kept in {recorded.run.path}: {have}; "
            "name others with --model FOLDER, or train with training.save_every=1 and a larger training.keep"
        )
    return str(recorded.run.path / "checkpoints" / f"step_{version:06d}" / "policy"), notes


def _version(trajectory: Trajectory) -> int:
    """Of the weights that wrote its first turn."""
    return min((turn.policy_version for turn in trajectory.turns), default=0)


def _steps_kept(run: RunDir) -> list[int]:
    """Steps whose weights the run has."""
    return sorted(int(path.parent.name[5:]) for path in run.path.glob(f"checkpoints/step_*/{MANIFEST}"))


async def replay(
    recorded: Recorded, edit: Edit | None, config: Config, notes: Sequence[str], console: Console
) -> Replayed:
    """Play it again and score it, in a run directory of its own.

    With an edit, all up to there is as recorded; tools and users are asked all the same, so that their state fits.
    """
    before = recorded.trajectory
    if edit is not None:
        edit.check(before)
    prepared = prepare(config, "test", samples=[before.sample])
    if not prepared.samples:
        raise ConfigError(f"the prompt of {before.sample.id} is longer than data.max_prompt_tokens")
    await check_before_run(prepared, say=printer(console))
    all_notes = list(notes)
    with new_run(config, "replay", console) as run:
        run.show_plan(prepared, plan_text(prepared))
        async with open_context(prepared, say=run.note) as context:
            if edit is not None:
                assert prepared.renderer is not None  # endpoints were refused
                context = _forced(context, before, edit, prepared.renderer, all_notes)
            after = await run_episode(before.sample, sibling=before.sibling, step=before.step, context=context)
            await apply(prepared.scoring.scorers[before.sample.data_source], after)
        if edit is not None:
            after.artifacts[EDITED] = {"turn": edit.turn, "assistant": edit.assistant}
        replayed = Replayed(recorded, edit, after, differences(before, after), tuple(all_notes), run.dir.path)
        await run.recorder.record("eval/step_000000.parquet", [after])
        run.dir.write_json(REPLAY, replayed.as_json())
    return replayed


def _forced(
    context: RolloutContext, before: Trajectory, edit: Edit, renderer: Renderer, notes: list[str]
) -> RolloutContext:
    def backend(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> ChatBackend:
        inner = context.make_backend(conversation, noise, tools)
        assert isinstance(inner, TokenBackend)
        inner.sampler = RecordedSampler(inner.sampler, before, edit, renderer)
        return inner

    return replace(context, make_backend=backend, conversation=partial(ForcedConversation, before, edit, notes))


class RecordedSampler:
    """Says what was recorded when it is asked what was asked then, up to the edit; after that it samples."""

    def __init__(self, inner: Sampler, before: Trajectory, edit: Edit, renderer: Renderer) -> None:
        self._inner, self._before, self._edit, self._renderer = inner, before, edit, renderer
        self.context_length: int = inner.context_length
        self.capabilities: Capabilities = inner.capabilities

    async def generate(self, request: Request) -> Completion:
        for turn in self._before.turns[: self._edit.turn + 1]:
            ledger = self._before.segments[turn.segment]
            if not np.array_equal(ledger.token_ids[: turn.start], request.token_ids):
                continue
            if turn.index == self._edit.turn and self._edit.assistant:
                return self._instead(turn)
            return _recorded(self._before, turn)
        return await self._inner.generate(request)

    def _instead(self, turn: Turn) -> Completion:
        """A person's words, as the policy would have written them; as a script's they have log-probs of 0."""
        ids = list(self._renderer.tokenizer.encode(self._edit.text).ids)
        calls = self._renderer.call_format.parse(self._edit.text, turn=turn.index, in_reasoning=False).tool_calls
        end = self._renderer.call_end_id if calls else self._renderer.end_id
        if end is not None:
            ids.append(end)
        return Completion.of(ids, [0.0] * len(ids), FinishReason.STOP, version=turn.policy_version)

    async def release(self, conversation: str) -> None:
        await self._inner.release(conversation)

    async def publish(self, update: Update, version: int) -> None:
        await self._inner.publish(update, version)

    async def sleep(self) -> None:
        await self._inner.sleep()

    async def wake(self) -> None:
        await self._inner.wake()

    async def close(self) -> None:
        await self._inner.close()


def _recorded(before: Trajectory, turn: Turn) -> Completion:
    ledger, end = before.segments[turn.segment], turn.start + turn.completion_tokens
    versions = [int(number) for number in ledger.versions[turn.start : end]]
    runs = tuple(VersionRun(version, len(list(same))) for version, same in groupby(versions))
    return Completion(
        ledger.token_ids[turn.start : end].copy(),
        ledger.logprobs[turn.start : end].copy(),
        turn.finish_reason,
        runs or (VersionRun(turn.policy_version, 0),),
    )


class ForcedConversation(Conversation):
    """Up to the edit the policy hears what was recorded, whatever tools and users say this time."""

    def __init__(self, before: Trajectory, edit: Edit, notes: list[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before, self._edit, self._notes = before, edit, notes

    async def call_tools(self, message: Message) -> list[Message]:
        return self._recorded_or_live(await super().call_tools(message))

    async def ask_user(self) -> list[Message]:
        try:
            return self._recorded_or_live(await super().ask_user())
        except EpisodeEnd:
            replies = self._recorded_or_live([])
            if not replies:
                raise
            self._shared.ended = None  # who ends it now did not then, or is edited
            return replies

    def add(self, replies: Sequence[Message]) -> None:
        super().add(self._recorded_or_live(replies))

    def _recorded_or_live(self, live: Sequence[Message]) -> list[Message]:
        number, edit = len(self.turns) - 1, self._edit
        if number > edit.turn or (number == edit.turn and edit.assistant):
            return list(live)
        old = self._before.turns[number]
        wanted = edit.replies(old) if number == edit.turn else old.replies
        texts = [reply.text for reply in live]
        if texts not in ([reply.text for reply in old.replies], [reply.text for reply in wanted]):
            self._notes.append(f"turn {number} got another reply this time; up to the edit the recorded one is used")
        return list(wanted)
