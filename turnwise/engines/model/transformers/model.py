"""Any causal language model of transformers as a policy model: its own layers, our attention and cache.

Nothing about a family is assumed: `transformers/probe.py` runs every model once with a handful of tokens and refuses
what does not come out right. Auxiliary losses of routers are left out; dropout is off, in training too.
"""

import copy
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import logging as transformers_logging

from turnwise.engines.kernels.linear import linear
from turnwise.engines.model.checkpoint_rows import CheckpointRows, OwnRows
from turnwise.engines.model.gguf_file import dequantised
from turnwise.engines.model.policy_model import (
    Attend,
    Gather,
    ImageFeatures,
    ModelInputs,
    ModelShape,
    PolicyModel,
    keep_tensor,
)
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.tensor_file import write_tensors
from turnwise.engines.model.token_logprobs import LogitShape, token_scores
from turnwise.engines.model.transformers.attention import CURRENT, FACTS, OURS, AttentionWatch
from turnwise.engines.model.transformers.leading_layers import LeadingLayers
from turnwise.engines.model.transformers.probe import ProbeFindings, probe
from turnwise.engines.model.transformers.recurrent_layers import (
    LAYER,
    SEQUENCES,
    keeps_states,
    recomputed,
    take_recurrent,
)
from turnwise.engines.model.transformers.skeleton import empty_model, make_room
from turnwise.engines.model.transformers.weights import CheckpointNames
from turnwise.errors import EngineError, one_line

ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles change once a sequence grows beyond the length it was first trained with."""

ENDLESS = 1 << 20
"""The context of a model that keeps states and whose config names no end of its positions."""

NOT_OF_THE_MODEL = ("transformers_version", "dtype", "use_cache")
"""Fields of a config that say how it was written or is run."""


class TransformersModel(PolicyModel):
    """The `transformers` policy model; `model` is theirs and its parameters are ours to train."""

    _family: ClassVar[type[_BaseAutoModelClass]] = AutoModelForCausalLM
    _attention: ClassVar[Mapping[str, str]] = {"attn_implementation": OURS}

    def __init__(self, model: PreTrainedModel, names: CheckpointNames | None = None) -> None:
        """Without numbers where the `names` of a skeleton are given."""
        super().__init__()
        self.model = model
        self._names = names or CheckpointNames(model)
        self._takes = _accepted(model, self._decoder)
        self._checkpointed = _checkpointed_layers(model, self._decoder)
        self.eval()
        self._logits, self.recomputes = LogitShape(1.0, None), False
        written = json.loads(model.config.to_json_string())
        self.facts = {"config": {k: v for k, v in written.items() if k not in NOT_OF_THE_MODEL}, "lora": None}
        config = model.config.get_text_config()
        self.shape = ModelShape(
            self._head.weight.shape[0],
            config.hidden_size,
            _context_length(model),
            (),
        )
        if names is None:
            self.probe()

    def probe(self) -> None:
        probed = probe(self.model, self._decoder, self._base)
        self._logits, self.recomputes = probed.logits, bool(self._checkpointed)
        self.shape = replace(
            self.shape,
            caches=probed.caches,
            states=probed.states,
            no_packing=probed.no_packing,
            no_caching=probed.no_caching,
            no_graphs=probed.no_graphs,
        )

    @property
    def findings(self) -> ProbeFindings:
        """What `probe` found."""
        modules = dict(self._decoder.named_modules())
        layers = {name: getattr(module, FACTS) for name, module in modules.items() if hasattr(module, FACTS)}
        recurrent = {name: getattr(module, LAYER) for name, module in modules.items() if hasattr(module, LAYER)}
        return ProbeFindings(self._logits, self.recomputes, self.shape, layers, recurrent)

    def take_findings(self, found: ProbeFindings) -> None:
        """Know what `probe` found of another model of the same code."""
        self._logits, self.recomputes, self.shape = found.logits, found.recomputes, found.shape
        for name, layer in found.layers.items():
            setattr(self._decoder.get_submodule(name), FACTS, layer)
        for name, recurrent in found.recurrent.items():
            take_recurrent(self._decoder.get_submodule(name), recurrent)
        self._decoder.set_attn_implementation(OURS)

    @contextmanager
    def few_layers(self, checkpoint: CheckpointRows) -> Iterator[bool]:
        """A skeleton, tried out with its first layers alone: inside they have their numbers, and no other layer is
        there. False where they cannot answer for all; what is to be refused, all of them have to say."""
        leading = LeadingLayers.of(self._decoder, self._checkpointed)
        if leading is None:
            yield False
            return
        with leading.alone():
            make_room(self)
            self.fill(checkpoint, lambda tensor: (tensor.detach(), 0))
            try:
                self.probe()
                found = leading.spread(self._decoder)
            except EngineError:
                found = None
            if found is not None:
                caches, states = (fact.cache for fact in found[0]), (fact.shape for fact in found[1])
                self.shape = replace(self.shape, caches=tuple(caches), states=tuple(states))
            yield found is not None

    @property
    def _decoder(self) -> PreTrainedModel:
        """The part of theirs that attends with our attention and makes the last states."""
        base: PreTrainedModel = self.model.base_model
        return base

    def _take_over(self, other: "TransformersModel") -> None:
        """Become what another is, on the same weights."""
        self.model, self.shape, self.facts = other.model, other.shape, dict(other.facts)
        self._names, self._takes, self._logits = other._names, other._takes, other._logits
        self._checkpointed, self.recomputes = other._checkpointed, other.recomputes

    @classmethod
    def read(
        cls,
        path: Path,
        dtype: torch.dtype = torch.float32,
        *,
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
    ) -> "TransformersModel":
        """The model of a Hugging Face folder, or of a GGUF file in it, with its weights made into `dtype`."""
        with _refusing(path), _quiet():
            if gguf_file is not None:
                return cls(dequantised(path / gguf_file, dtype, attn_implementation=OURS))
            model, report = cls._family.from_pretrained(
                path,
                dtype=dtype,
                **cls._attention,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        if lacking := sorted(report["missing_keys"]):  # transformers would go on with random ones
            raise EngineError(f"{path} lacks the tensors {', '.join(lacking[:5])}")
        _refuse_more_layers(path, model, report["unexpected_keys"])
        if getattr(model, "hf_quantizer", None) is not None:
            kind = model.config.quantization_config.quant_method
            raise EngineError(f"{path} holds weights quantised by {kind}, which cannot be trained; take plain ones")
        return cls(model)

    @classmethod
    def skeleton(
        cls, path: Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
    ) -> "TransformersModel":
        """The same without numbers, on the meta device: `fill` reads them, and then it has to `probe`."""
        checkpoint = CheckpointRows(path)
        with _refusing(path):
            model = empty_model(cls._family, path, dtype, cls._attention, trust_remote_code)
            names, unread = CheckpointNames.of_skeleton(model, checkpoint.shapes)
        _refuse_more_layers(path, model, unread)
        return cls(model, names)

    def fill(self, checkpoint: CheckpointRows, own_rows: OwnRows) -> None:
        with _refusing(checkpoint.folder):
            lacking = self._names.fill(self._tensors(), checkpoint, own_rows)
        if lacking:  # transformers would go on with random ones
            raise EngineError(f"{checkpoint.folder} lacks the tensors {', '.join(lacking[:5])}")

    def with_lora(self, *, rank: int, alpha: float, seed: int) -> "TransformersModel":
        """The same model with factors to train beside its frozen weights; this one then answers with them too."""
        from turnwise.engines.model.peft_adapter import PeftModel  # peft is an extra

        return PeftModel(self, rank=rank, alpha=alpha, seed=seed)

    def train(self, mode: bool = True) -> "TransformersModel":
        """Dropout is never wanted: the log-probs of sampled tokens must be those of the policy that wrote them."""
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, inputs: ModelInputs, attend: Attend, *, rows: Tensor | None = None, recompute: int = 0) -> Tensor:
        """As promised, but any `recompute` above 0 means all layers: transformers has one switch for them."""
        if self.shape.states and inputs.recurrence is None:
            raise EngineError(f"{type(self.model).__name__} must be told which tokens are one sequence")
        if recompute and not self.recomputes:
            raise EngineError(f"{type(self.model).__name__} cannot compute its layers again in the backward pass")
        # transformers asks a layer whether it trains before it recomputes it; the modules inside stay as they are.
        for layer in self._checkpointed if recompute else ():
            layer.training = True
        try:
            hidden = self._base(inputs.tokens, inputs.positions, attend, inputs.recurrence, inputs.images)
        finally:
            for layer in self._checkpointed if recompute else ():
                layer.training = False
        return hidden if rows is None else hidden.index_select(0, rows)

    def move(self, device: torch.device, dtype: torch.dtype) -> "TransformersModel":
        """As promised, but what the family keeps in float32 stays there."""
        wide: list[str] = list(getattr(self.model, "_keep_in_fp32_modules_strict", None) or ())
        for name, parameter in self.model.named_parameters():
            target = parameter.dtype if any(part in name for part in wide) else dtype
            parameter.data = parameter.data.to(device, target)
        return self.to(device)

    def _base(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend | AttentionWatch,
        recurrence: Recurrence | None = None,
        images: ImageFeatures | None = None,
    ) -> Tensor:
        # [T] -> [1, T], and [3, T] -> [3, 1, T]
        options = {"position_ids": positions.unsqueeze(-2), "use_cache": False, "attend": attend}
        passed = {name: value for name, value in options.items() if name in self._takes}
        before = CURRENT.set(attend), SEQUENCES.set(recurrence)
        try:
            output = self._decoder(**self._entering(tokens, images), **passed)
        finally:
            CURRENT.reset(before[0])
            SEQUENCES.reset(before[1])
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _entering(self, tokens: Tensor, images: ImageFeatures | None) -> dict[str, Any]:
        """The tokens as the decoder takes them."""
        if images is not None:
            raise EngineError(f"{type(self.model).__name__} reads text only")
        return {"input_ids": tokens.unsqueeze(0)}

    @property
    def _head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise EngineError(
                f"{type(self.model).__name__} makes its logits with a {type(head).__name__}, not a matrix"
            )
        return head

    def logits(self, hidden: Tensor) -> Tensor:
        head = self._head
        if hidden.is_cuda:  # which keeps the sums of narrow products wide at no cost
            return self._logits.apply(linear(hidden, head.weight, head.bias, torch.float32))
        return self._logits.apply(functional.linear(hidden, head.weight, head.bias).float())

    def scores(self, hidden: Tensor, targets: Tensor, *, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        head = self._head
        return token_scores(
            hidden, head.weight, targets, temperature=temperature, chunk=chunk, bias=head.bias, shape=self._logits
        )

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights and activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def layer_modules(self) -> list[nn.Module]:
        """The decoder's layers in order: what is sharded, compiled or recomputed one by one."""
        return list(self._checkpointed)

    def _tensors(self) -> dict[str, Tensor]:
        """Live and by the names in memory."""
        tensors: dict[str, Tensor] = self.model.state_dict()
        return tensors

    def weights(self, gather: Gather = keep_tensor) -> Iterator[tuple[str, Tensor]]:
        yield from self._names.outward(self._tensors(), lambda name, tensor: gather(tensor))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._names.shapes(self._tensors())

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._names.inward(self._tensors(), weights)

    def without_adapter(self) -> AbstractContextManager[None]:
        raise EngineError("this model has no adapter to leave out")

    def save(self, folder: Path) -> None:
        write_tensors(folder / "model.safetensors", dict(self.weights()), {"format": "pt"})
        self.save_config(folder)

    def save_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.model.config)
        config.architectures, config.dtype = [type(self.model).__name__], self.dtype
        config.save_pretrained(folder)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Around the library's reading of a folder, in our words."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # the library raises whatever the first broken file makes it stumble over
        if "ignore_mismatched_sizes" in str(error):  # it points to a table that nobody sees
            raise EngineError(f"{path}: its weights have other shapes than config.json says") from error
        if isinstance(error, KeyError) and error.args == (OURS,):
            raise EngineError(
                f"{path}: its class takes attention from a list of its own, so ours cannot take its place"
            ) from error
        if "is a per-layer attribute" in str(error):
            raise EngineError(
                f"{path}: config.json has values for single layers (per_layer_config) that its class does not read"
            ) from error
        raise EngineError(f"transformers cannot load {path}: {one_line(error)[:300]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers: one for every checkpoint is no progress of a training."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _accepted(model: PreTrainedModel, decoder: PreTrainedModel) -> frozenset[str]:
    """Which keyword arguments the decoder takes; without `attend` there is no way to its layers."""
    parameters = inspect.signature(decoder.forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise EngineError(f"{type(model).__name__} takes no attention but its own, which Turnwise cannot supply")
    return frozenset(names | {"attend"})


def _checkpointed_layers(model: PreTrainedModel, decoder: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The layers that can be computed again in backward, switched to do so whenever they are told to train."""
    layers = tuple(module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer))
    if not layers or not model.supports_gradient_checkpointing:
        return ()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.disable_input_require_grads()
    for layer in layers:
        layer._gradient_checkpointing_func = recomputed
    return layers


def _context_length(model: PreTrainedModel) -> int:
    """The most positions; where angles change with a sequence's length, as many as they stay the same for."""
    config: Any = model.config.get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None and keeps_states(config):
        return ENDLESS
    if longest is None:
        raise EngineError(f"{type(model).__name__} does not say how many positions it has (max_position_embeddings)")
    rope = getattr(config, "rope_parameters", None) or {}
    for table in rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else (rope,):
        if table.get("rope_type") in ROPE_BY_LENGTH:
            longest = min(longest, table.get("original_max_position_embeddings") or longest)
    return longest


def _refuse_more_layers(path: Path, model: PreTrainedModel, unread: Iterable[str]) -> None:
    """transformers computes a model without the layers that its config does not count, and says nothing."""
    own = {re.sub(r"\.\d+\.", ".*.", name) for name in model.state_dict()}
    if more := sorted(name for name in unread if re.sub(r"\.\d+\.", ".*.", name) in own):
        raise EngineError(f"{path} holds {', '.join(more[:3])}: more than config.json counts")
