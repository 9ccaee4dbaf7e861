"""Opens our own sampler on the CPU."""

from typing import TYPE_CHECKING

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.engines.devices import Chosen
from turnwise.engines.opened import OpenSampler, Say, check_sight, read_policy

if TYPE_CHECKING:
    from turnwise.engines.model.policy_model import PolicyModel


def open_cpu(
    config: Config, chosen: Chosen, renderer: Renderer, say: Say, *, model: "PolicyModel | None" = None
) -> OpenSampler:
    """The sampler of the CPU, with as many threads as were the fastest; `model` is there already."""
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.threads import choose_threads
    from turnwise.engines.samplers.torch_cpu import TorchSampler

    model = model or read_policy(config, chosen.precision)
    check_sight(model, renderer, say)
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
