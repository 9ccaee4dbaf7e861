"""The one place that opens engines: the sampler of an evaluation, the learner of a fine-tuning, both of a training."""

import asyncio
import copy
import inspect
import os
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.chat.renderer import Renderer
from turnwise.choices import EngineName, ModelImplementation, Precision
from turnwise.config import Config, EngineConfig
from turnwise.engines.devices import Chosen, choose
from turnwise.engines.memory_plan import MemoryPlan, Training, memory_here, shares_weights
from turnwise.engines.model.sources import ModelSource, find_model
from turnwise.engines.samplers.checked import CheckedSampler
from turnwise.engines.samplers.sampler import Capabilities, Logprobs, Sampler
from turnwise.engines.samplers.scripted import Script, ScriptedSampler, lines
from turnwise.engines.updates import FullWeights
from turnwise.errors import ConfigError, EngineError, PluginError
from turnwise.knobs import is_plugin
from turnwise.plugins import call, load

if TYPE_CHECKING:
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.model.attention import Regime
    from turnwise.engines.model.policy_model import PolicyModel
    from turnwise.engines.samplers.endpoint import ChatEndpoint

API_KEY_ENV = "OPENAI_API_KEY"
"""The environment variable that holds an endpoint's key."""

UNKNOWN_CACHE = 0.3
"""The share of a GPU's free memory that becomes cache where nothing is known of the model's sizes."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OpenSampler:
    """A sampler that runs; whoever opened it closes it."""

    sampler: Sampler
    threads: int
    """CPU threads that are best here, for a learner beside it too."""
    regime: "Regime | None" = None
    """The arithmetic in which a learner finds its log-probs again to the last bit; None where none is proven."""


@dataclass(frozen=True, slots=True)
class LearnerParts:
    """What a learner has to have beside the policy, and how many updates it will make in all."""

    updates: int
    critic: bool = False
    reference: bool = False


@dataclass(frozen=True, slots=True)
class OpenEngines:
    """The sampler and the learner of a training."""

    sampler: Sampler
    learner: "LocalLearner"
    exact: bool
    """Whether their log-probs are the same to the last bit: proven, or by kernels that both share."""
    threads: int
    take_turns: bool
    """Whether the sampler gives its memory back while the learner learns."""
    clock: "DeviceClock | None" = None
    """Of the GPU that the sampler writes on."""


def model_source(config: Config) -> ModelSource:
    """Where the configured model is; a hub id is fetched."""
    return find_model(config.model.path, config.model.trust_remote_code)


def _read(config: Config, precision: Precision) -> "PolicyModel":
    from turnwise.engines.model.loading import choose_implementation, read_model

    source = model_source(config)
    return read_model(source, choose_implementation(source, config.model.implementation), _dtype(precision))


def _dtype(precision: Precision) -> "torch.dtype":
    import torch

    found: torch.dtype = getattr(torch, precision.value)
    return found


def open_sampler(
    config: Config, renderer: Renderer, say: Say, *, script: Script | None = None, model: "PolicyModel | None" = None
) -> OpenSampler:
    """The configured sampler; a script replaces it. `model` is what it writes with where it runs one here and the
    caller has it already."""
    if script is not None or config.engine.name == EngineName.scripted:
        if renderer.end_id is None:
            raise EngineError("the tokenizer names no end token; the scripted sampler cannot end a turn")
        replies = script or lines(config.engine.script)
        made = ScriptedSampler(renderer.tokenizer, replies, end_id=renderer.end_id, call_format=renderer.call_format)
        return OpenSampler(made, threads=1)
    if is_plugin(config.engine.name):
        return _open_own(config, renderer, say)
    chosen = choose(config)
    if chosen.on_gpu:
        return _open_cuda(config, chosen, renderer, say, model=model)
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.threads import choose_threads
    from turnwise.engines.samplers.torch_cpu import TorchSampler

    model = model or _read(config, chosen.precision)
    packed = not chosen.batch_invariant and isinstance(model, Decoder) and model.pack_products()
    choice = choose_threads(model, config.engine.threads, batch_invariant=chosen.batch_invariant)
    sampler = TorchSampler(
        model,
        decode=renderer.tokenizer.decode,
        max_batch=chosen.max_batch,
        threads=choice.threads,
        regime=choice.regime,
    )
    measured = ", ".join(f"{count}: {1e3 * seconds:.1f} ms" for count, seconds in choice.seconds_per_step.items())
    say(f"torch engine: {choice.threads} thread(s) (a step took {measured}); {choice.promise()}")
    if packed:
        say("torch engine: weights are laid out for the CPU's products, beside the plain ones (twice their memory)")
    say(f"torch engine: {sampler.capabilities}")
    return OpenSampler(sampler, choice.threads, choice.proven)


def _open_cuda(
    config: Config,
    chosen: Chosen,
    renderer: Renderer,
    say: Say,
    *,
    model: "PolicyModel | None" = None,
    memory: MemoryPlan | None = None,
    clock: "DeviceClock | None" = None,
) -> OpenSampler:
    """The sampler of a GPU; `memory` says how large its cache may be, `model` is there already and in its format."""
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.cuda import CudaSampler
    from turnwise.engines.samplers.threads import usable_cores

    device, dtype = torch.device(chosen.device), _dtype(chosen.precision)
    invariant = _invariant(config, chosen)
    model = _on_gpu(model or _read(config, chosen.precision), device, dtype, invariant)
    memory = memory or memory_here(config, None)
    cache = int(torch.cuda.mem_get_info(device)[0] * UNKNOWN_CACHE) if memory is None else memory.cache
    sampler = CudaSampler(
        model,
        device=device,
        decode=renderer.tokenizer.decode,
        max_batch=chosen.max_batch,
        cache_bytes=cache,
        invariant=invariant,
        clock=clock,
        say=lambda text: say(f"cuda engine: {text}"),
    )
    promise = "what a conversation's tokens are depends on rounding, which other conversations in a batch can change"
    if invariant:
        promise = "a conversation's tokens do not depend on what else is computed (batch-invariant kernels)"
    elif chosen.batch_invariant and not isinstance(model, Decoder):
        promise = f"batch-invariant kernels are of the native implementation only: {promise}"
    say(f"cuda engine: {chosen.precision.value}, at most {chosen.max_batch} sequences at once; {promise}")
    say(f"cuda engine: {sampler.capabilities}")
    return OpenSampler(sampler, config.engine.threads or usable_cores())


def _on_gpu(model: "PolicyModel", device: "torch.device", dtype: "torch.dtype", invariant: bool) -> "PolicyModel":
    """A model as the GPU's sampler computes it; tensors that already are as wanted are shared, not copied."""
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.fused_decoder import FusedDecoder

    if isinstance(model, Decoder):
        return FusedDecoder.of(model, device=device, dtype=dtype, invariant=invariant)
    return model.move(device, dtype)


def _invariant(config: Config, chosen: Chosen) -> bool:
    """Whether the GPU's sampler and learner take kernels that round alike; there are some for the native models."""
    return chosen.on_gpu and chosen.batch_invariant and _implementation(config) is ModelImplementation.native


def _implementation(config: Config) -> ModelImplementation:
    from turnwise.engines.model.loading import choose_implementation

    return choose_implementation(model_source(config), config.model.implementation).implementation


def find_own(spec: str) -> Callable[..., Any]:
    """The class or function of the user's that makes a sampler; PluginError when it cannot be called as one."""
    found = load(spec, "engine")
    if not callable(found):
        raise PluginError(f"engine {spec!r} must be a class or a function, not {type(found).__name__}")
    try:
        inspect.signature(found).bind(None, None, None)
    except TypeError as error:
        raise PluginError(f"engine {spec!r} is called with (config, source, tokenizer): {error}") from error
    return found  # type: ignore[no-any-return]


def _open_own(config: Config, renderer: Renderer, say: Say) -> OpenSampler:
    """A sampler of the user's: of it nothing is known but what it says of itself."""
    spec = config.engine.name
    source = model_source(config)
    made = call(find_own(spec), spec, "engine", config, source, renderer.tokenizer)
    methods = [name for name in vars(Sampler) if inspect.iscoroutinefunction(getattr(Sampler, name))]
    lacking = [name for name in methods if not inspect.iscoroutinefunction(getattr(made, name, None))]
    if lacking:
        raise PluginError(f"engine {spec!r} is no Sampler: it lacks `async def {lacking[0]}` (docs/engines.md)")
    length, capabilities = getattr(made, "context_length", None), getattr(made, "capabilities", None)
    if not isinstance(length, int) or length < 1 or not isinstance(capabilities, Capabilities):
        raise PluginError(f"engine {spec!r} is no Sampler: it must set context_length and capabilities")
    say(f"engine {spec}: {capabilities}; that its tokens do not depend on batching is not proven")
    checked = CheckedSampler(made, spec, _vocabulary(source, renderer.tokenizer.vocab_size))
    return OpenSampler(checked, config.engine.threads or os.cpu_count() or 1)


def _vocabulary(source: ModelSource, words: int) -> int:
    """How many token ids a model has: as its config says, which may be more than its tokenizer has words for."""
    from turnwise.engines.model.checkpoint_format import read_raw_config

    raw = {} if source.gguf_file is not None else read_raw_config(source.folder)
    text = raw.get("text_config")
    size = raw.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return max(size, words) if isinstance(size, int) else words


def open_learner(
    config: Config,
    renderer: Renderer,
    parts: LearnerParts,
    *,
    regime: "Regime | None" = None,
    model: "PolicyModel | None" = None,
    memory: MemoryPlan | None = None,
    say: Say | None = None,
) -> "LocalLearner":
    """The learner of a config: all weights or LoRA. `regime` is the sampler's, where it is proven; `model` is what it
    trains, where the caller has read it already. `memory` bounds what its passes take of a GPU, and `say` hears when
    they must become smaller."""
    from turnwise.engines.learners.critic import Critic
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.model.loading import add_lora
    from turnwise.engines.model.policy_folder import PolicyFolder

    chosen, source = config.learner, model_source(config)
    model, critic = model or _read(config, Precision.float32), None
    if parts.critic:  # before LoRA is added: all weights of a critic's own trunk are trained
        critic = Critic.sharing(model) if chosen.shared_critic else Critic.copying(model)
    if chosen.lora_rank:
        model = add_lora(model, chosen.lora_rank, chosen.lora_alpha, config.seed)
    return LocalLearner(
        model,
        chosen,
        temperature=config.sampling.temperature,
        critic=critic,
        reference=parts.reference,
        updates=parts.updates,
        regime=regime,
        invariant=_invariant(config, choose(config)),
        memory_bytes=None if memory is None else memory.learner_room,
        warn=say or warnings.warn,
        companions=PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids),
        base_model=source.base,
    )


@asynccontextmanager
async def open_engines(config: Config, renderer: Renderer, parts: LearnerParts, say: Say) -> AsyncIterator[OpenEngines]:
    """Sampler and learner on the same weights; the sampler is closed on every path.

    Each has a model of its own, but on a GPU whose sampler rests while the learner learns both compute with the same
    tensors.
    """
    async with AsyncExitStack() as stack:

        def keep(sampler: Sampler) -> None:
            stack.push_async_callback(lambda: asyncio.shield(asyncio.ensure_future(sampler.close())))

        chosen, memory = choose(config), None
        if not is_plugin(config.engine.name):  # of another engine nobody knows what it leaves
            memory = memory_here(config, Training(parts.critic, parts.reference))
        together = Together(config, chosen, memory, renderer, parts, say, keep)
        yield open_on_gpu(together) if chosen.on_gpu else _open_apart(together)


@dataclass(frozen=True, slots=True)
class Together:
    """What sampler and learner of a training are opened with."""

    config: Config
    chosen: Chosen
    memory: MemoryPlan | None
    renderer: Renderer
    parts: LearnerParts
    say: Say
    keep: Callable[[Sampler], None]
    """Is told of the sampler, which will be closed from then on."""


def _open_apart(given: Together) -> OpenEngines:
    """A sampler on the CPU or of the user's own, and a learner wherever its device is."""
    import torch

    config, chosen, renderer = given.config, given.chosen, given.renderer
    trained = _read(config, Precision.float32)
    writer, same = None, False
    if chosen.engine == EngineName.torch:
        same = chosen.precision is Precision.float32
        writer = copy.deepcopy(trained) if same else _read(config, chosen.precision)
    opened = open_sampler(config, renderer, given.say, model=writer)
    given.keep(opened.sampler)
    _check_trainable(config.engine.name, opened.sampler.capabilities)
    torch.set_num_threads(opened.threads)
    learner = open_learner(
        config, renderer, given.parts, regime=opened.regime, model=trained, memory=given.memory, say=given.say
    )
    same = same and learner.device.type == "cpu" and not learner.forward.narrow
    exact = same and opened.regime is not None
    return OpenEngines(opened.sampler, learner, exact, opened.threads, bool(config.engine.sleep))


def open_on_gpu(given: Together) -> OpenEngines:
    """A sampler on the GPU, and the learner beside it or on the CPU. A native model is read once."""
    import torch

    from turnwise.engines.device_clock import DeviceClock

    config, chosen, memory = given.config, given.chosen, given.memory
    learner = open_learner(config, given.renderer, given.parts, memory=memory, say=given.say)
    device, clock = torch.device(chosen.device), DeviceClock(torch.device(chosen.device))
    same = learner.device == device and not config.learner.lora_rank
    writer = _writer(config, chosen, learner.model, share=same)
    opened = _open_cuda(config, chosen, given.renderer, given.say, model=writer, memory=memory, clock=clock)
    given.keep(opened.sampler)
    torch.set_num_threads(opened.threads)
    same = same and {p.dtype for p in learner.model.parameters()} == {_dtype(chosen.precision)}
    exact = same and _invariant(config, chosen)
    if chosen.batch_invariant and not exact:
        given.say(
            "engine.batch_invariant: log-probs of sampler and learner agree to rounding only; they are equal to the "
            "last bit where all weights of a native model are trained, on the sampler's device and in its precision"
        )
    turns = bool(config.engine.sleep) if memory is None else memory.takes_turns
    return OpenEngines(opened.sampler, learner, exact, opened.threads, turns, clock)


def _writer(config: Config, chosen: Chosen, trained: "PolicyModel", *, share: bool) -> "PolicyModel":
    """What the GPU's sampler writes with: the learner's own tensors where it may, else a copy, an adapter merged."""
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.fused_decoder import FusedDecoder

    if not isinstance(trained, Decoder):
        return _read(config, chosen.precision)
    if share and isinstance(trained, FusedDecoder) and shares_weights(config, chosen, ModelImplementation.native):
        return FusedDecoder.sharing(trained)
    device, dtype = torch.device(chosen.device), _dtype(chosen.precision)
    copies = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in trained.tensors().items()}
    return Decoder(trained.config, copies)


def _check_trainable(name: str, capabilities: Capabilities) -> None:
    """Refuse a sampler whose tokens cannot be learned from."""
    if capabilities.logprobs is Logprobs.NONE:
        raise ConfigError(f"training needs log-probs: engine={name} gives none")
    if FullWeights not in capabilities.updates:
        taken = ", ".join(sorted(kind.__name__ for kind in capabilities.updates)) or "nothing"
        raise ConfigError(f"training publishes FullWeights after each step: engine={name} takes {taken}")


def open_endpoint(config: EngineConfig) -> "ChatEndpoint":
    """A client of the configured endpoint; it must be closed."""
    from turnwise.engines.samplers.endpoint import ChatEndpoint

    if config.base_url is None:
        raise ConfigError("engine=openai needs engine.base_url, such as http://127.0.0.1:8000/v1")
    key = os.environ.get(API_KEY_ENV)
    return ChatEndpoint(config.base_url, config.model, key, config.timeout_seconds, config.retries)
