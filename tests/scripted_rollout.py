"""Rollouts for tests: a real tokenizer and renderer, a scripted sampler that keeps what it was given."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_recipe import make_tokenizer

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import Config, RolloutConfig
from turnwise.config.choices import HistoryPolicy
from turnwise.config.sections import with_value
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.scripted import Script, ScriptedSampler, lines
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.collector import run_group
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.loading import as_tool
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.types import Completion, Group, Ledger, Message, Role, Sample, ToolCall, Trajectory

ELSEWHERE = {
    "client": "sdk_agents.client",
    "client_env": "sdk_agents.client_env",
    "agents_file": "verl.agents_file",
    "interactions_file": "verl.interactions_file",
}


@dataclass(frozen=True)
class Recorded:
    """One generate call: what the sampler was given and what it wrote."""

    conversation: str
    token_ids: list[int]
    params: SamplingParams
    noise: NoiseKey
    completion: Completion


class RecordingSampler(ScriptedSampler):
    """Keeps every request; each token's logprob is its own, so that misplaced ones are found."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requests: list[Recorded] = []
        self.seen: list[Request] = []
        self.released: Counter[str] = Counter()
        self.error: Exception | None = None
        self.error_at = 0
        self.hang_at: int | None = None
        self.generating = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        turn = sum(kept.conversation == request.conversation for kept in self.requests)
        if self.error is not None and turn >= self.error_at:
            raise self.error
        if self.hang_at is not None and turn >= self.hang_at:
            self.generating.set()
            await asyncio.Event().wait()
        completion = await super().generate(request)
        logprobs = [-(len(request.token_ids) + i + 1) / 1000 for i in range(len(completion.token_ids))]
        completion = replace(completion, logprobs=np.array(logprobs, dtype=np.float32))
        ids = request.token_ids.tolist()
        self.seen.append(request)
        self.requests.append(Recorded(request.conversation, ids, request.params, request.noise, completion))
        return completion

    async def release(self, conversation: str) -> None:
        self.released[conversation] += 1
        await super().release(conversation)


@dataclass
class ScriptedRollout:
    """A context with its sampler and samples."""

    context: RolloutContext
    sampler: RecordingSampler
    samples: list[Sample]

    async def episode(self, number: int = 0, sibling: int = 0) -> Trajectory:
        return await run_episode(self.samples[number], sibling=sibling, step=0, context=self.context)

    async def group(self, size: int, number: int = 0) -> Group:
        return await run_group(self.samples[number], range(size), step=0, context=self.context)

    def play(self, number: int = 0) -> Trajectory:
        return asyncio.run(self.episode(number))

    def requests_of(self, trajectory: Trajectory) -> list[Request]:
        who = (trajectory.step, trajectory.sample.id, trajectory.sibling)
        return [r for r in self.sampler.requests if (r.noise.step, r.noise.sample, r.noise.sibling) == who]

    def check_tokens(self, trajectory: Trajectory) -> None:
        """The ledgers are what the sampler was given and wrote, token by token."""
        requests = self.requests_of(trajectory)
        assert len(requests) == len(trajectory.turns)
        covered: list[list[bool]] = [[False] * len(ledger) for ledger in trajectory.segments]
        previous: dict[int, list[int]] = {}
        for turn, request in zip(trajectory.turns, requests, strict=True):
            ledger, written = trajectory.segments[turn.segment], request.completion
            end = turn.start + len(written.token_ids)
            assert ledger.token_ids[: turn.start].tolist() == request.token_ids
            assert ledger.token_ids[turn.start : end].tolist() == written.token_ids.tolist()
            assert ledger.logprobs[turn.start : end].tolist() == written.logprobs.tolist()
            assert set(ledger.versions[turn.start : end].tolist()) <= {run.version for run in written.versions}
            assert set(ledger.turns[turn.start : end].tolist()) <= {turn.index}
            assert turn.completion_tokens == len(written.token_ids)
            assert turn.prompt_tokens == len(request.token_ids)
            assert turn.finish_reason is written.finish_reason
            covered[turn.segment][turn.start : end] = [True] * len(written.token_ids)
            if turn.segment in previous:
                before = previous[turn.segment]
                assert len(request.token_ids) > len(before) and request.token_ids[: len(before)] == before
            previous[turn.segment] = [*request.token_ids, *written.token_ids]
        for ledger, mask in zip(trajectory.segments, covered, strict=True):
            assert ledger.loss_mask.tolist() == mask
            check_aligned(ledger)


def check_aligned(ledger: Ledger) -> None:
    assert ledger.turns.tolist() == sorted(ledger.turns.tolist())
    assert ((ledger.logprobs != 0.0) == ledger.loss_mask).all()
    assert ((ledger.versions >= 0) == ledger.loss_mask).all()


@dataclass
class ScriptedRollouts:
    """Makes scripted rollouts."""

    folder: Path
    renderer: Renderer
    opened: list[ScriptedRollout] = field(default_factory=list)

    def make(
        self,
        script: Script | Sequence[str],
        *,
        tools: Sequence[object] = (),
        samples: Sequence[Sample] | None = None,
        renderer: Renderer | None = None,
        context_length: int = 1 << 20,
        max_tokens: int = 4096,
        stop: Sequence[str] = (),
        **rollout: Any,
    ) -> ScriptedRollout:
        """`rollout` are values of config.rollout, or of a section that an extension has (ELSEWHERE)."""
        config = Config()
        config.chat.check_share = 1.0
        config.sampling.max_tokens, config.sampling.stop = max_tokens, list(stop)
        for key, value in rollout.items():
            if key in ELSEWHERE:
                config = with_value(config, ELSEWHERE[key], value)
                continue
            assert hasattr(config.rollout, key), key
            setattr(config.rollout, key, value)
        toolbox = Toolbox([as_tool(entry) for entry in tools], config.rollout)
        users = Users(config)
        chosen = list(samples) if samples is not None else [make_sample()]
        plan = Plan(chosen, config, toolbox, users)
        voice = renderer or self.renderer
        sampler = RecordingSampler(
            voice.tokenizer,
            script if callable(script) else lines(script),
            end_id=min(voice.stop_ids),
            context_length=context_length,
        )

        def make_backend(conversation: str, noise: NoiseKey, schemas: list[Any]) -> TokenBackend:
            return TokenBackend(voice, sampler, config.sampling, schemas, noise, conversation)

        rollout = ScriptedRollout(RolloutContext(config, plan, toolbox, users, make_backend), sampler, chosen)
        self.opened.append(rollout)
        return rollout

    def renderer_with(self, template: str, history: HistoryPolicy) -> Renderer:
        path = self.folder / f"template_{len(list(self.folder.glob('template_*')))}.jinja"
        path.write_text(template)
        return Renderer(Tokenizer(self.folder, str(path)), hermes, history=history)


def make_sample(identity: str = "test:0", question: str = "What is 6 times 7?", **fields: Any) -> Sample:
    prompt = (Message(Role.SYSTEM, "Solve the problem with the tools."), Message(Role.USER, question))
    return Sample(identity, prompt, **{"data_source": "test", "ground_truth": "42", **fields})


def run_calls(
    tools: Sequence[object], calls: Sequence[ToolCall], *, sample: Sample | None = None, **settings: Any
) -> Any:
    """(messages, records) of one turn of an episode, which is closed without a complaint."""
    config = RolloutConfig(**settings)

    async def turn() -> Any:
        box = Toolbox([as_tool(entry) for entry in tools], config)
        episode = box.open(sample or Sample("s", (), "test"), list(box.tools))
        records: list[Any] = []
        try:
            return await episode.call(calls, records), records
        finally:
            assert await episode.close() == []

    return asyncio.run(turn())


def run_one(chosen: object, arguments: dict[str, Any] | None = None, **settings: Any) -> Any:
    """(reply, record) of one call."""
    call = ToolCall("t0", as_tool(chosen).name, arguments or {})
    (reply,), (record,) = run_calls([chosen], [call], **settings)
    assert reply.role is Role.TOOL and reply.tool_call_id == "t0"
    assert record.call == call
    return reply, record


def make_call(name: str, /, **arguments: Any) -> str:
    return hermes.render_call(ToolCall("", name, arguments))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> Renderer:
    return Renderer(Tokenizer(tokenizer_folder), hermes)


@pytest.fixture
def rollouts(tokenizer_folder: Path, renderer: Renderer) -> ScriptedRollouts:
    return ScriptedRollouts(tokenizer_folder, renderer)


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """Makes samples: `sample("test:3", "What is 1 + 1?", ground_truth="2")`."""
    return make_sample


@pytest.fixture
def call() -> Callable[..., str]:
    """What a model writes to call a tool: `call("calculate", expression="6*7")`."""
    return make_call


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs the tool calls of one turn: `run([tool], [ToolCall(...)], max_parallel_calls=2)`."""
    return run_calls


@pytest.fixture
def one() -> Callable[..., Any]:
    """Runs one call of a tool: `one(tool, {"x": 1})`."""
    return run_one
