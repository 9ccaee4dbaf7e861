"""A sampler of the user's behind a check: what it writes is a completion of the request, or the run stops."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Logprobs, Sampler
from turnwise.engines.updates import Update
from turnwise.errors import PluginError, TurnwiseError, one_line
from turnwise.types import Completion, FinishReason, VersionRun

ROUNDING = 1e-3
"""How far above 0 a log-prob may come out of rounding."""


class CheckedSampler:
    """Hands everything on to `made`, called `name`; of its completions nothing unchecked is recorded."""

    def __init__(self, made: Sampler, name: str, vocabulary: int) -> None:
        self.context_length, self.capabilities = made.context_length, made.capabilities
        self._made, self._name, self._vocabulary = made, name, vocabulary

    async def generate(self, request: Request) -> Completion:
        """Its completion, when it is one."""
        try:
            found = await self._made.generate(request)
        except TurnwiseError:
            raise
        except Exception as error:  # code of the user's may raise anything
            raise PluginError(f"engine {self._name!r}: generate failed: {one_line(error)[:300]}") from error
        if problem := self._problem(found, request):
            raise PluginError(f"engine {self._name!r}: {problem} (docs/engines.md)")
        return found

    def _problem(self, found: object, request: Request) -> str | None:
        if not isinstance(found, Completion) or not isinstance(found.finish_reason, FinishReason):
            return f"generate gives a Completion with a FinishReason, not {type(found).__name__}"
        ids, logprobs = found.token_ids, found.logprobs
        for name, array, kinds in (("token_ids", ids, "iu"), ("logprobs", logprobs, "f")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
                return f"{name} is no array of {'whole numbers' if kinds == 'iu' else 'floats'}, one for each token"
        if len(ids) > request.params.max_tokens:
            return f"{len(ids)} tokens where {request.params.max_tokens} were asked for"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            return f"token ids from {ids.min()} to {ids.max()}, and the vocabulary has {self._vocabulary}"
        unknown = self.capabilities.logprobs is Logprobs.NONE
        if not (np.isnan(logprobs).all() if unknown else _are_logprobs(logprobs)):
            return f"log-probs that are {'not nan, and it says it has none' if unknown else 'nan, infinite or above 0'}"
        return _versions_problem(found.versions, len(ids))

    async def release(self, conversation: str) -> None:
        """As it does."""
        await self._made.release(conversation)

    async def publish(self, update: Update, version: int) -> None:
        """As it does."""
        await self._made.publish(update, version)

    async def sleep(self) -> None:
        """As it does."""
        await self._made.sleep()

    async def wake(self) -> None:
        """As it does."""
        await self._made.wake()

    async def close(self) -> None:
        """As it does."""
        await self._made.close()


def _are_logprobs(values: NDArray[Any]) -> bool:
    """Whether all are finite and none is above 0; nan is neither."""
    return not len(values) or bool(-math.inf < values.min() <= values.max() <= ROUNDING)


def _versions_problem(versions: object, tokens: int) -> str | None:
    """Completion has counted them already; what they are is still open."""
    runs = versions if isinstance(versions, tuple) else ()
    whole = [isinstance(run, VersionRun) and type(run.version) is int and type(run.tokens) is int for run in runs]
    if whole and all(whole) and all(run.version >= 0 and run.tokens >= min(tokens, 1) for run in runs):
        return None
    return f"versions are runs of tokens under a version from 0 on, not {str(versions)[:100]}"
