"""The models of one rank, shared out over all of them with FSDP2: policy, critic and reference."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from turnwise.config import LearnerConfig
from turnwise.config.choices import Offload
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.forward_pass import computes_narrow
from turnwise.engines.learners.state import bit_totals, identity
from turnwise.engines.learners.watching import count_progress
from turnwise.engines.learners.working_weights import refuse_narrow, working_dtype
from turnwise.engines.model.checkpoint_rows import CheckpointRows
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.loading import (
    ImplementationChoice,
    add_lora,
    choose_implementation,
    read_model,
    read_skeleton,
    train_vision,
)
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.errors import EngineError
from turnwise.ext.fsdp.rank_setup import RankSetup
from turnwise.ext.fsdp.shards import local_part, meta, own_rows
from turnwise.ledger import Media

if TYPE_CHECKING:
    from turnwise.engines.model.transformers.model import TransformersModel
    from turnwise.engines.model.transformers.probe import ProbeFindings

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


def open_models(setup: RankSetup, config: LearnerConfig, mesh: DeviceMesh, group: dist.ProcessGroup) -> RankModels:
    """The models that are asked for, of which this rank reads its own rows alone; all ranks do so at once.

    Of a GGUF file the numbers are packed: each rank reads the whole model and keeps its part, one rank after another.
    """
    choice = choose_implementation(setup.source, setup.implementation)
    if setup.source.gguf_file is None:
        told = _tried_by_few(setup, choice) if dist.get_rank() == 0 else None
        skeleton = _built(read_skeleton(setup.source, choice, torch.float32), setup, config, mesh)
        _fill(skeleton, CheckpointRows(setup.source.folder))
        return _finished(skeleton, setup, config, group, _tried_out(skeleton, setup, told, group))
    built: _Built | None = None
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            built = _built(read_model(setup.source, choice, torch.float32), setup, config, mesh)
        dist.barrier(group=group)
        count_progress()
    assert built is not None
    return _finished(built, setup, config, group, _why_no_images(built.policy, setup.picture))


@dataclass(frozen=True, slots=True)
class _Built:
    """Models that are shared out, with their numbers or without."""

    policy: PolicyModel
    critic: Critic | None
    root: Root
    reference: Root | None
    dtype: torch.dtype
    device: str
    """Where it is computed with, and where buffers lie."""
    home: str
    """Where a rank's part of the parameters lies."""


def _built(policy: PolicyModel, setup: RankSetup, config: LearnerConfig, mesh: DeviceMesh) -> _Built:
    critic: Critic | None = None
    if config.train_vision:
        train_vision(policy)
    if setup.critic:  # before LoRA is added: all weights of a critic's own trunk are trained
        critic = Critic.sharing(policy) if config.shared_critic else Critic.copying(policy)
    start = copy.deepcopy(policy).requires_grad_(False) if setup.reference and not config.lora_rank else None
    if config.lora_rank:
        policy = add_lora(policy, config.lora_rank, config.lora_alpha, setup.seed)
    dtype = working_dtype(config, policy)
    refuse_narrow(policy, working=dtype, autocast=computes_narrow(config) and dtype is torch.float32)
    how = _how(config, mesh, dtype)
    reference = None if start is None else _shared_out(Root(start), how)
    home = "cpu" if isinstance(how["offload_policy"], CPUOffloadPolicy) else mesh.device_type
    return _Built(policy, critic, _shared_out(Root(policy, critic), how), reference, dtype, mesh.device_type, home)


def _finished(
    built: _Built, setup: RankSetup, config: LearnerConfig, group: dist.ProcessGroup, text_only: str | None
) -> RankModels:
    """With what is known of them."""
    policy, critic, root = built.policy, built.critic, built.root
    if setup.context > 1:
        _refuse_slices(policy, setup.context)
    if policy.shape.no_packing is not None:
        raise EngineError(
            f"learner.processes: sequences of this model cannot share a pass ({policy.shape.no_packing}), so ranks "
            "cannot take as many passes as each other; set learner.processes=1"
        )
    for model in (policy, *_copies(built)):
        _trust_images(model)
    trained = {"policy": _trained(policy)} | ({} if critic is None else {"critic": _trained(critic)})
    kinds = dict(policy.weights(meta))
    counted = dist.get_rank() < dist.get_world_size() // setup.replicas
    same = identity(policy, critic, lambda tensors: _totals(tensors, group, counted=counted))
    autocast = computes_narrow(config) and built.dtype is torch.float32
    return RankModels(policy, critic, root, built.reference, trained, _unused(critic), kinds, same, autocast, text_only)


def _refuse_slices(policy: PolicyModel, context: int) -> None:
    """Of sequences, where ranks have no more than those."""
    if policy.shape.states:
        raise EngineError(
            f"fsdp.context_parallel={context}: this model has recurrent layers, whose states go from token to token "
            "and not from rank to rank; set it to 1"
        )
    heads = policy.config.num_heads if isinstance(policy, Decoder) else _heads(_theirs(policy))
    if heads % context:
        raise EngineError(f"fsdp.context_parallel={context} does not divide the {heads} query heads of this model")


def _heads(model: "TransformersModel") -> int:
    """As its config counts them; layers that have others say so themselves."""
    return getattr(model.model.config.get_text_config(), "num_attention_heads", 0)


def _copies(built: _Built) -> list[PolicyModel]:
    """The models that begin as the policy does."""
    trunk = None if built.critic is None else built.critic.trunk
    reference = None if built.reference is None else built.reference.policy
    return [model for model in (trunk, reference) if model is not None]


def _fill(built: _Built, checkpoint: CheckpointRows) -> None:
    """Read this rank's rows into parameters that are on the meta device so far."""

    def room(tensor: Tensor) -> Tensor:
        device = built.home if isinstance(tensor, DTensor) else built.device
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    for root in (built.root, *([] if built.reference is None else [built.reference])):
        root._apply(room)  # type: ignore[no-untyped-call]

    def place(tensor: Tensor) -> tuple[Tensor, int]:
        count_progress()
        return own_rows(tensor)

    for model in (built.policy, *_copies(built)):
        model.fill(checkpoint, place)


@dataclass(frozen=True, slots=True)
class _Tried:
    """What a model of code that is not ours was found to do."""

    found: "ProbeFindings"
    text_only: str | None


def _tried_by_few(setup: RankSetup, choice: ImplementationChoice) -> _Tried | None:
    """By its first layers, which are read whole and dropped again; None where they cannot answer for all."""
    model = read_skeleton(setup.source, choice, torch.float32)
    if isinstance(model, Decoder):
        return None
    model = _theirs(model)
    with model.few_layers(CheckpointRows(setup.source.folder)) as answered:
        text_only = _why_no_images(model, setup.picture) if answered else None
    if not answered or (model.reads_images and text_only is not None):
        return None
    return _Tried(model.findings, text_only)


def _tried_out(built: _Built, setup: RankSetup, told: _Tried | None, group: dist.ProcessGroup) -> str | None:
    """What the first rank was told by a few layers, all know; where those did not answer, all ranks try all layers
    together. Why the policy is given no images, if it is given none."""
    policy = built.policy
    if isinstance(policy, Decoder):
        return _why_no_images(policy, None)
    box = [told]
    dist.broadcast_object_list(box, src=0, group=group)
    if box[0] is None:
        _together(built.root, policy.probe)
        text_only = _together(built.root, lambda: _why_no_images(policy, setup.picture))
        box = [_Tried(_theirs(policy).findings, text_only)]
    assert box[0] is not None
    for model in (policy, *_copies(built)):
        _theirs(model).take_findings(box[0].found)
    return box[0].text_only


def _theirs(model: PolicyModel) -> "TransformersModel":
    from turnwise.engines.model.transformers.model import TransformersModel  # slow to import, and there already

    assert isinstance(model, TransformersModel)
    return model


@torch.no_grad()
def _together(root: Root, work: Callable[[], T]) -> T:
    """What all ranks compute with whole weights, at once."""
    result: T = root(work)
    assert isinstance(root, FSDPModule)
    root.reshard()
    return result


def _totals(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, *, counted: bool) -> dict[str, int]:
    """The sums of the bits of tensors of which every rank has a part; those of one copy are counted."""
    own = bit_totals({name: local_part(tensor) for name, tensor in tensors.items()})
    totals = torch.tensor(list(own.values()), dtype=torch.int64) * counted
    dist.all_reduce(totals, group=group)
    return dict(zip(own, totals.tolist(), strict=True))


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
    return list(model.layers) if isinstance(model, Decoder) else _theirs(model).layer_modules()


def _why_no_images(policy: PolicyModel, picture: Media | None) -> str | None:
    """Held against the model's own code."""
    if not policy.reads_images:
        return "the model reads text only"
    try:
        policy.encode_images([] if picture is None else [picture])
    except EngineError as error:
        return str(error)
    return None


def _trust_images(model: PolicyModel) -> None:
    """An image of the training is not held against the model's own code: that would wait for ranks that have none."""
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
    model = _theirs(trunk).model
    tied, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    own = {parameter for parameter in head.parameters() if parameter is not tied}
    return {name for name, parameter in critic.named_parameters() if parameter in own}
