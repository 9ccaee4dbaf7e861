"""The models of one rank, shared out over all of them with FSDP2: policy, critic and reference."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.forward_pass import computes_narrow
from turnwise.engines.learners.state import identity
from turnwise.engines.learners.working_weights import refuse_narrow, working_dtype
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.loading import add_lora, choose_implementation, read_model, train_vision
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.errors import EngineError
from turnwise.ext.fsdp.rank_setup import RankSetup
from turnwise.ledger import Media

T = TypeVar("T")


class Root(nn.Module):
    """Models that are computed with together: whatever is called inside `forward` finds their weights whole.

    Each layer has its own gathering; embeddings, norms and heads are the root's.
    """

    def __init__(self, policy: PolicyModel, critic: Critic | None = None) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(self, work: Callable[[], T]) -> T:
        return work()


@dataclass(frozen=True, slots=True)
class RankModels:
    """The models a rank computes with: its parts of policy, critic and reference."""

    policy: PolicyModel
    critic: Critic | None
    root: Root
    reference: Root | None
    """The policy as it started; None where an adapter is left out for it, or nobody asks."""
    trained: dict[str, dict[str, nn.Parameter]]
    """Parameters of the policy and the critic by name, all of them shared out."""
    unused: set[str]
    """Of the critic's: nothing computes with them, and no step may move them."""
    kinds: dict[str, Tensor]
    """Shapes and number formats of the policy's weights by their Hugging Face names."""
    identity: dict[str, Any]
    """What must be equal for a saved state to fit, as `LocalLearner` has it."""
    autocast: bool
    text_only: str | None
    """Why the policy is given no images."""


@dataclass(frozen=True, slots=True)
class WeightGatherer:
    """Gathers one weight from all ranks."""

    device: torch.device

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        return shared_out_as(tensor, tensor.to_local().to(self.device)).full_tensor()


def shared_out_as(other: Tensor, local: Tensor) -> DTensor:
    """A tensor that is shared out as another is, of which this is the rank's own part."""
    assert isinstance(other, DTensor)
    return DTensor(local, other._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_part(tensor: Tensor) -> Tensor:
    """A rank's own part of what is shared out, on the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def open_models(setup: RankSetup, config: LearnerConfig, mesh: DeviceMesh) -> RankModels:
    """Read the model, make of it what is asked for, and keep this rank's part of all."""
    choice = choose_implementation(setup.source, setup.implementation)
    policy, critic = read_model(setup.source, choice, torch.float32), None
    if policy.shape.no_packing is not None:
        raise EngineError(
            f"learner.processes: sequences of this model cannot share a pass ({policy.shape.no_packing}), so ranks "
            "cannot take as many passes as each other; set learner.processes=1"
        )
    text_only = _why_text_only(policy, setup.picture if mesh.get_rank() == 0 else None)
    if config.train_vision:
        train_vision(policy)
    if setup.critic:  # before LoRA is added: all weights of a critic's own trunk are trained
        critic = Critic.sharing(policy) if config.shared_critic else Critic.copying(policy)
    if config.lora_rank:
        policy = add_lora(policy, config.lora_rank, config.lora_alpha, setup.seed)
    dtype = working_dtype(config, policy)
    autocast = computes_narrow(config) and dtype is torch.float32
    refuse_narrow(policy, working=dtype, autocast=autocast)
    kinds = {name: torch.empty_like(tensor, device="meta") for name, tensor in policy.weights()}
    same, unused = identity(policy, critic), _unused(critic)
    start = copy.deepcopy(policy).requires_grad_(False) if setup.reference and not policy.has_adapter else None
    how = _how(config, mesh, dtype)
    reference = None if start is None else _shared_out(Root(start), how)
    root = _shared_out(Root(policy, critic), how)
    trained = {"policy": _trained(policy)}
    if critic is not None:
        trained["critic"] = _trained(critic)
    return RankModels(policy, critic, root, reference, trained, unused, kinds, same, autocast, text_only)


def _how(config: LearnerConfig, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, Any]:
    offload = OffloadPolicy()
    if config.offload is Offload.optimizer and mesh.device_type != "cpu":
        offload = CPUOffloadPolicy()
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if dtype is torch.float32 else narrow
    return {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}


def _shared_out(root: Root, how: Mapping[str, Any]) -> Root:
    """Bottom up; gradients are added over the ranks, since a minibatch's losses are its shares already."""
    models = [root.policy, *([] if root.critic is None or root.critic.trunk is None else [root.critic.trunk])]
    for model in models:
        _trust_images(model)
        for layer in _layers(model):
            fully_shard(layer, **how)
    if root.critic is not None:
        if root.critic.trunk is not None:
            fully_shard(root.critic.trunk, **how)
        # The head keeps its float32; its input is cast inside.
        fully_shard(root.critic, mesh=how["mesh"], offload_policy=how["offload_policy"])
    fully_shard(root, reshard_after_forward=False, **how)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(root, FSDPModule)
    root.set_reduce_scatter_unused_params(True)  # which experts a rank's tokens see is its own affair
    return root


def _layers(model: PolicyModel) -> list[nn.Module]:
    if isinstance(model, Decoder):
        return list(model.layers)
    from turnwise.engines.model.transformers.model import TransformersModel  # slow to import, and there already

    return model.layer_modules() if isinstance(model, TransformersModel) else []


def _why_text_only(policy: PolicyModel, picture: Media | None) -> str | None:
    """Held against the model's own code while it is whole. One rank does so for all, which have the same files."""
    if not policy.reads_images:
        return "the model reads text only"
    try:
        policy.encode_images([] if picture is None else [picture])
    except EngineError as error:
        return str(error)
    return None


def _trust_images(model: PolicyModel) -> None:
    """The first image is not held against the model's own code again, which would wait for ranks that have none."""
    if model.reads_images:
        from turnwise.engines.model.vision_model import VisionModel

        assert isinstance(model, VisionModel)
        model.proven = True


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _unused(critic: Critic | None) -> set[str]:
    """The head that makes logits of a critic's own trunk."""
    trunk = None if critic is None else critic.trunk
    if trunk is None or critic is None:
        return set()
    if isinstance(trunk, Decoder):
        return set() if trunk.head is None else {"trunk.head"}
    from turnwise.engines.model.transformers.model import TransformersModel

    assert isinstance(trunk, TransformersModel)
    tied = trunk.model.get_input_embeddings().weight
    head = trunk.model.get_output_embeddings()
    own = {parameter for parameter in head.parameters() if parameter is not tied}
    return {name for name, parameter in critic.named_parameters() if parameter in own}
