"""A Sampler over the server manager that verl gives its agent loops: token ids out, ids and log-probs back.

One for each episode: verl says anew for each how to draw. verl owns the servers, their weights and their sleep.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.engines.samplers.request import Request, refuse_media
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Update
from turnwise.errors import EngineError, EngineLost, EpisodeError, one_line
from turnwise.ledger import NO_VERSION, VersionRun
from turnwise.types import Completion, FinishReason

GONE = "RayActorError"
"""What the class of an error is called, or one that it is derived from, when a server of verl's died."""


@dataclass(slots=True)
class VerlServerSampler:
    """Writes one episode's turns with verl's `server_manager.generate`; `steps` are the weights that wrote them."""

    manager: Any
    """verl's LLMServerClient (AsyncLLMServerManager in 0.6)."""
    sampling_params: Mapping[str, Any]
    """As verl gave them for this episode: passed on as they are, with the turn's limit and stops added."""
    decode: Callable[[Sequence[int]], str]
    prompt_length: int
    context_length: int
    extra: dict[str, Any] = field(default_factory=dict)
    """What else `generate` is given: `priority`, where verl has one."""
    fixed_id: str | None = None
    """The request id of an episode that verl wants repeated exactly; None takes the conversation's own."""
    steps: list[int] = field(default_factory=list)
    """The trainer's steps whose weights wrote, as far as the servers told."""
    preempted: int | None = None
    capabilities: Capabilities = field(default=Capabilities(Logprobs.FILTERED, frozenset()), init=False)
    _names: dict[str, int] = field(default_factory=dict, init=False)

    async def generate(self, request: Request) -> Completion:
        """One turn. A prompt longer than verl's batch has room for is refused, never cut."""
        refuse_media(request, "agent loop")
        ids = request.token_ids.tolist()
        if request.conversation not in self._names and len(ids) > self.prompt_length:
            raise EpisodeError(
                f"the prompt has {len(ids)} tokens, the tools' descriptions included, and verl's "
                f"rollout.prompt_length is {self.prompt_length}: raise it, or leave the row out"
            )
        number = self._names.setdefault(request.conversation, len(self._names))
        name = request.conversation if self.fixed_id is None else f"{self.fixed_id}-{number}"
        params = {**self.sampling_params, "max_tokens": request.params.max_tokens}
        if request.params.stop_ids:
            params["stop_token_ids"] = sorted(request.params.stop_ids)
        if request.params.stop_strings:
            params["stop"] = list(request.params.stop_strings)
        try:
            output = await self.manager.generate(name, prompt_ids=ids, sampling_params=params, **self.extra)
        except Exception as error:  # whatever verl, Ray or the engine behind them raise
            if any(kind.__name__ == GONE for kind in type(error).__mro__):
                raise EngineLost(f"verl's server was lost: {one_line(error)[:300]}") from error
            raise EngineError(f"verl's server could not write the turn: {one_line(error)[:300]}") from error
        return self._completion(output, request)

    def _completion(self, output: Any, request: Request) -> Completion:
        """What came back, with the reason that verl does not tell: servers call a turn that ran out `completed`."""
        stop_reason, params = output.stop_reason, request.params
        if stop_reason in ("aborted", "abort"):
            raise EngineLost("verl's server broke the turn off")
        ids = [int(token) for token in output.token_ids]
        logprobs = [math.nan] * len(ids) if output.log_probs is None else list(output.log_probs)
        if len(logprobs) != len(ids) or len(ids) > params.max_tokens:
            raise EngineError(
                f"verl's server gave {len(ids)} tokens with {len(logprobs)} log-probs where {params.max_tokens} tokens "
                "were asked for"
            )
        if self.sampling_params.get("logprobs") and not np.isfinite(logprobs).all():
            raise EngineError("verl's server gave no log-probs, which rollout.calculate_log_probs asks for")
        extra = getattr(output, "extra_fields", None) or {}
        steps = [extra.get(name) for name in ("min_global_steps", "global_steps", "max_global_steps")]
        step_numbers = [int(step) for step in steps if step is not None]
        self.steps += step_numbers
        if (count := getattr(output, "num_preempted", None)) is not None:
            self.preempted = (self.preempted or 0) + int(count)
        cut = stop_reason == "length" or (len(ids) >= params.max_tokens and not self._ended(ids, request))
        return Completion(
            np.array(ids, dtype=np.int64),
            np.array(logprobs, dtype=np.float32),
            FinishReason.LENGTH if cut else FinishReason.STOP,
            (VersionRun(_writer(step_numbers), len(ids)),),
        )

    def _ended(self, ids: Sequence[int], request: Request) -> bool:
        """Whether a turn that is as long as it may be also came to its end."""
        if ids[-1] in request.params.stop_ids:
            return True
        text = self.decode(ids) if request.params.stop_strings else ""
        return any(stop in text for stop in request.params.stop_strings)

    async def release(self, conversation: str) -> None:
        """Does nothing: no conversation is kept here."""

    async def publish(self, update: Update, version: int) -> None:
        raise EngineError("verl's trainer publishes its weights itself")

    async def sleep(self) -> None:
        """Does nothing: verl decides when its servers sleep."""

    async def wake(self) -> None:
        """Does nothing: verl decides when its servers wake."""

    async def close(self) -> None:
        """Does nothing: verl's servers are not opened here."""


def _writer(steps: Sequence[int]) -> int:
    """The step whose weights wrote a turn. Of one that went on across an update of verl's the servers tell the first
    and the last step and not which token is whose: no version is then true of each, and the range stays in `steps`."""
    return steps[0] if len(set(steps)) == 1 else NO_VERSION
