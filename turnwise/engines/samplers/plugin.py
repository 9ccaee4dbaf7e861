"""A sampler of the user's: of it nothing is known but what it says of itself, and what it writes is checked."""

import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.engines.opener import Opener, OpenSampler, Say, model_source, vocabulary_of
from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Capabilities, Logprobs, Sampler
from turnwise.engines.weight_updates import Update
from turnwise.errors import PluginError, TurnwiseError, one_line
from turnwise.system.plugins import call, load
from turnwise.types import Completion, FinishReason, VersionRun

ROUNDING = 1e-3
"""How far above 0 a log-prob may come out of rounding."""


class PluginOpener(Opener):
    """Of `engine.name=file.py:Class`: it is called with (config, source, tokenizer)."""

    async def open(self, config: Config, renderer: Renderer, say: Say) -> OpenSampler:
        """The user's sampler behind a check."""
        spec, source = config.engine.name, model_source(config)
        sampler = call(find_plugin(spec), spec, "engine", config, source, renderer.tokenizer)
        methods = [name for name in vars(Sampler) if inspect.iscoroutinefunction(getattr(Sampler, name))]
        lacking = [name for name in methods if not inspect.iscoroutinefunction(getattr(sampler, name, None))]
        if lacking:
            raise PluginError(f"engine {spec!r} is not a Sampler: it lacks `async def {lacking[0]}` (docs/engines.md)")
        length, capabilities = getattr(sampler, "context_length", None), getattr(sampler, "capabilities", None)
        if not isinstance(length, int) or length < 1 or not isinstance(capabilities, Capabilities):
            raise PluginError(f"engine {spec!r} is not a Sampler: it must set context_length and capabilities")
        say(f"engine {spec}: {capabilities}; batch invariance of its tokens is not proven")
        checked = CheckedSampler(sampler, spec, vocabulary_of(source, renderer.tokenizer.vocab_size))
        return OpenSampler(checked, config.engine.threads or os.cpu_count() or 1)

    async def check(self, config: Config) -> str | None:
        """It is found and can be called."""
        find_plugin(config.engine.name)
        return None


def find_plugin(spec: str) -> Callable[..., Any]:
    """The class or function of the user's that makes a sampler; PluginError when it cannot be called as one."""
    maker = load(spec, "engine")
    if not callable(maker):
        raise PluginError(f"engine {spec!r} must be a class or a function, not {type(maker).__name__}")
    try:
        inspect.signature(maker).bind(None, None, None)
    except TypeError as error:
        raise PluginError(f"engine {spec!r} is called with (config, source, tokenizer): {error}") from error
    return maker  # type: ignore[no-any-return]


class CheckedSampler:
    """Hands everything on to `sampler`, called `name`; of its completions nothing unchecked is recorded."""

    def __init__(self, sampler: Sampler, name: str, vocabulary: int) -> None:
        self.context_length, self.capabilities = sampler.context_length, sampler.capabilities
        self._sampler, self._name, self._vocabulary = sampler, name, vocabulary

    async def generate(self, request: Request) -> Completion:
        """Its completion, when it is one."""
        try:
            completion = await self._sampler.generate(request)
        except TurnwiseError:
            raise
        except Exception as error:  # code of the user's may raise anything
            raise PluginError(f"engine {self._name!r}: generate failed: {one_line(error)[:300]}") from error
        if problem := self._problem(completion, request):
            raise PluginError(f"engine {self._name!r}: {problem} (docs/engines.md)")
        return completion

    def _problem(self, completion: object, request: Request) -> str | None:
        if not isinstance(completion, Completion) or not isinstance(completion.finish_reason, FinishReason):
            return f"generate gives a Completion with a FinishReason, not {type(completion).__name__}"
        ids, logprobs = completion.token_ids, completion.logprobs
        for name, array, kinds in (("token_ids", ids, "iu"), ("logprobs", logprobs, "f")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
                return f"{name} is not an array of {'whole numbers' if kinds == 'iu' else 'floats'}, one for each token"
        if len(ids) > request.params.max_tokens:
            return f"{len(ids)} tokens where {request.params.max_tokens} were asked for"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            return f"token ids from {ids.min()} to {ids.max()}, and the vocabulary has {self._vocabulary}"
        unknown = self.capabilities.logprobs is Logprobs.NONE
        if not (np.isnan(logprobs).all() if unknown else _are_logprobs(logprobs)):
            return f"log-probs that are {'not nan, and it says it has none' if unknown else 'nan, infinite or above 0'}"
        return _versions_problem(completion.versions, len(ids))

    async def release(self, conversation: str) -> None:
        """Releases what the user's sampler keeps of a conversation."""
        await self._sampler.release(conversation)

    async def publish(self, update: Update, version: int) -> None:
        """Passes new weights on to the user's sampler."""
        await self._sampler.publish(update, version)

    async def sleep(self) -> None:
        """Makes the user's sampler give back its memory."""
        await self._sampler.sleep()

    async def wake(self) -> None:
        """Makes the user's sampler take its memory again."""
        await self._sampler.wake()

    async def close(self) -> None:
        """Closes the user's sampler."""
        await self._sampler.close()


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
