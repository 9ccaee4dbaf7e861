"""Opens our own engines in this process: the sampler of the CPU, that of a GPU, and the learner beside either."""

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from turnwise import extensions
from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.config.choices import ModelImplementation, Precision
from turnwise.engines.device_limit import hold_to
from turnwise.engines.devices import EngineChoice, choose, device_of, shares_weights
from turnwise.engines.memory_plan import MemoryHolder, MemoryPlan, memory_here
from turnwise.engines.opener import (
    LearnerParts,
    Opener,
    OpenPair,
    OpenSampler,
    Say,
    check_vision,
    dtype_of,
    model_source,
    opener_of,
    read_policy,
)
from turnwise.engines.publish_weights import check_trainable
from turnwise.engines.samplers.sampler import Sampler

if TYPE_CHECKING:
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.model.attention import Regime
    from turnwise.engines.model.policy_model import PolicyModel

UNKNOWN_CACHE = 0.3
"""The share of a GPU's free memory that becomes cache where nothing is known of the model's sizes."""


class InProcessOpener(Opener):
    """Of `engine=auto`, `torch` and `cuda`: our own sampler on the CPU or on a GPU."""

    async def open(self, config: Config, renderer: Renderer, say: Say) -> OpenSampler:
        """The sampler of the device that the config means here."""
        chosen = choose(config)
        if chosen.on_gpu:
            return open_cuda(config, chosen, renderer, say)
        return open_cpu(config, chosen, renderer, say)

    def describe(self, config: Config) -> str:
        """Which of the two, and why where the config leaves it open."""
        return f"{choose(config)}, model {config.model.path}"


def open_cpu(
    config: Config, chosen: EngineChoice, renderer: Renderer, say: Say, *, model: "PolicyModel | None" = None
) -> OpenSampler:
    """The sampler of the CPU, with as many threads as were the fastest; `model` is there already."""
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.cpu.threads import choose_threads
    from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler

    model = model or read_policy(config, chosen.precision)
    check_vision(model, renderer, say)
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
    say(f"torch engine: {choice.threads} thread(s) (step times by thread count: {measured}); {choice.promise()}")
    if packed:
        say("torch engine: weights are kept twice, once in a faster layout for the CPU (twice the memory)")
    say(f"torch engine: {sampler.capabilities}")
    return OpenSampler(sampler, choice.threads, choice.proven)


def open_cuda(
    config: Config,
    chosen: EngineChoice,
    renderer: Renderer,
    say: Say,
    *,
    model: "PolicyModel | None" = None,
    memory: MemoryPlan | None = None,
    clock: "DeviceClock | None" = None,
    part: MemoryHolder = MemoryHolder.both,
) -> OpenSampler:
    """The sampler of a GPU; `memory` says how large its cache may be and, with the `part` of it that this process has,
    what PyTorch may take; `model` is there already and in its format."""
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.cpu.threads import usable_cores
    from turnwise.engines.samplers.gpu.cuda import CudaSampler

    device, dtype = torch.device(chosen.device), dtype_of(chosen.precision)
    invariant = shares_kernels(config, chosen)
    memory = memory or memory_here(config, None)
    hold_to(device, config.engine.memory_fraction if memory is None else memory.share(part))
    model = _on_gpu(model or read_policy(config, chosen.precision), device, dtype, invariant)
    check_vision(model, renderer, say)
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
    promise = "a conversation's tokens depend on rounding, which other conversations in a batch can change"
    if invariant:
        promise = "a conversation's tokens do not depend on the rest of the batch (batch-invariant kernels)"
    elif chosen.batch_invariant and not isinstance(model, Decoder):
        promise = f"only the native implementation has batch-invariant kernels: {promise}"
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


def open_on_gpu(
    config: Config, chosen: EngineChoice, renderer: Renderer, parts: LearnerParts, say: Say, memory: MemoryPlan | None
) -> OpenPair:
    """A sampler on the GPU, and the learner beside it or on the CPU. A native model is read once."""
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.device_utilisation import busy_samples

    learner = open_learner(config, renderer, parts, memory=memory, say=say)
    device = torch.device(chosen.device)
    clock = DeviceClock(device, busy_samples(device))
    same = learner.device == device and not config.learner.lora_rank
    writer = _writer(config, chosen, learner.model, share=same)
    opened = open_cuda(config, chosen, renderer, say, model=writer, memory=memory, clock=clock)
    torch.set_num_threads(opened.threads)
    exact = is_exact_on_gpu(config, chosen, learner)
    say_if_inexact(chosen, exact, say)
    turns = bool(config.engine.sleep) if memory is None else memory.takes_turns
    return OpenPair(opened.sampler, learner, exact, opened.threads, turns, clock)


def _writer(config: Config, chosen: EngineChoice, trained: "PolicyModel", *, share: bool) -> "PolicyModel":
    """What the GPU's sampler writes with: the learner's own tensors where it may, else a copy, an adapter merged."""
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.fused_decoder import FusedDecoder

    if not isinstance(trained, Decoder):
        return read_policy(config, chosen.precision)
    if share and isinstance(trained, FusedDecoder) and shares_weights(config, chosen, ModelImplementation.native):
        return FusedDecoder.sharing(trained)
    device, dtype = torch.device(chosen.device), dtype_of(chosen.precision)
    copies = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in trained.tensors().items()}
    return Decoder(trained.config, copies)


async def open_apart(
    config: Config,
    renderer: Renderer,
    parts: LearnerParts,
    say: Say,
    memory: MemoryPlan | None,
    keep: Callable[[Sampler], None],
) -> OpenPair:
    """A sampler on the CPU or of another's code, and a learner wherever its device is. `keep` closes the sampler."""
    import torch

    chosen, trained = choose(config), read_policy(config, Precision.float32)
    if extensions.engine(config.engine.name).here:
        same = chosen.precision is Precision.float32
        writer = copy.deepcopy(trained) if same else read_policy(config, chosen.precision)
        opened = open_cpu(config, chosen, renderer, say, model=writer)
    else:
        opened = await opener_of(config).open(config, renderer, say)
    keep(opened.sampler)
    check_trainable(config.engine.name, opened.sampler.capabilities, lora=bool(config.learner.lora_rank))
    torch.set_num_threads(opened.threads)
    learner = open_learner(config, renderer, parts, regime=opened.regime, model=trained, memory=memory, say=say)
    exact = is_exact(config, chosen, learner, opened.regime)
    return OpenPair(opened.sampler, learner, exact, opened.threads, bool(config.engine.sleep))


def is_exact(config: Config, chosen: EngineChoice, learner: "LocalLearner", regime: "Regime | None") -> bool:
    """Whether a learner finds the CPU sampler's log-probs again to the last bit, in the regime that is proven."""
    same = extensions.engine(config.engine.name).here and chosen.precision is Precision.float32
    return same and regime is not None and learner.device.type == "cpu" and not learner.forward.narrow


def is_exact_on_gpu(config: Config, chosen: EngineChoice, learner: "LocalLearner") -> bool:
    """Whether a learner finds the GPU sampler's log-probs again to the last bit, by kernels that both share."""
    same = str(learner.device) == chosen.device and not config.learner.lora_rank
    same = same and {p.dtype for p in learner.model.parameters()} == {dtype_of(chosen.precision)}
    return same and shares_kernels(config, chosen)


def say_if_inexact(chosen: EngineChoice, exact: bool, say: Say) -> None:
    """What `engine.batch_invariant` on a GPU does not reach as far as the learner."""
    if chosen.batch_invariant and not exact:
        say(
            "engine.batch_invariant: log-probs of sampler and learner agree to rounding only; they are equal to the "
            "last bit where all weights of a native model are trained, on the sampler's device and in its precision"
        )


def open_learner(
    config: Config,
    renderer: Renderer,
    parts: LearnerParts,
    *,
    regime: "Regime | None" = None,
    model: "PolicyModel | None" = None,
    memory: MemoryPlan | None = None,
    part: MemoryHolder = MemoryHolder.both,
    say: Say | None = None,
) -> "LocalLearner":
    """The learner of a config: all weights or LoRA. `regime` is the sampler's, where it is proven; `model` is what it
    trains, where the caller has read it already. `memory` bounds what its passes take of a GPU and, with the `part` of
    it that this process has, what PyTorch may; `say` hears when passes must become smaller."""
    import torch

    from turnwise.engines.learners.critic import Critic
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.model.loading import add_lora, train_vision
    from turnwise.engines.model.policy_folder import PolicyFolder

    chosen, source = config.learner, model_source(config)
    if memory is not None:
        hold_to(torch.device(device_of(chosen.device)), memory.share(part))
    model, critic = model or read_policy(config, Precision.float32), None
    if chosen.train_vision:
        train_vision(model)
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
        invariant=shares_kernels(config, choose(config)),
        memory_bytes=None if memory is None else memory.learner_room,
        warn=say or warnings.warn,
        companions=PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids),
        base_model=source.base,
    )


def shares_kernels(config: Config, chosen: EngineChoice) -> bool:
    """Whether the GPU's sampler and learner take kernels that round alike; there are some for the native models."""
    return chosen.on_gpu and chosen.batch_invariant and implementation_of(config) is ModelImplementation.native


def implementation_of(config: Config) -> ModelImplementation:
    """Whose code computes the configured model."""
    from turnwise.engines.model.loading import choose_implementation

    return choose_implementation(model_source(config), config.model.implementation).implementation
