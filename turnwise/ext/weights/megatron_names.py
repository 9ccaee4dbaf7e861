"""The names that Megatron-core and Hugging Face give the same tensors, and how ranks share each: tables, no code.

In a pattern `*` is a layer and `#` an expert. A row holds for a model whose own names have all of the row's sources.
"""

from dataclasses import dataclass
from enum import Enum


class Cut(Enum):
    """What the ranks of a tensor-parallel group hold of a tensor."""

    copies = "every rank the whole"
    words = "its rows of the vocabulary, padded"
    rows = "its rows"
    columns = "its columns"
    groups = "query, key and value heads of its groups, group after group"
    halves = "its rows of the gate, then its rows of the up matrix"


class Stage(Enum):
    """Which stages of the pipeline hold a tensor."""

    first = "the first"
    own = "the one that has its layer"
    last = "the last"


@dataclass(frozen=True, slots=True)
class NameRow:
    """`NameRow("mlp.router.weight", Cut.copies, ("mlp.gate.weight",))`: Megatron's pattern, and Hugging Face's."""

    theirs: str
    cut: Cut
    ours: tuple[str, ...]
    stage: Stage = Stage.own
    beside: str = ""
    """Another name the model must have for the row to hold; a norm is called after what it stands before."""


def _layer(theirs: str, cut: Cut, *ours: str, beside: str = "") -> NameRow:
    near = f"layers.*.{beside}" if beside else ""
    return NameRow(f"decoder.layers.*.{theirs}", cut, tuple(f"layers.*.{name}" for name in ours), beside=near)


DENSE, SPARSE = "mlp.up_proj.weight", "mlp.gate.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
EXPERT = "mlp.experts.#"
DECODER = (
    NameRow("embedding.word_embeddings.weight", Cut.words, ("embed_tokens.weight",), Stage.first),
    _layer("self_attention.linear_qkv.layer_norm_weight", Cut.copies, "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.weight", Cut.groups, *(f"{name}.weight" for name in QKV)),
    _layer("self_attention.linear_qkv.bias", Cut.groups, *(f"{name}.bias" for name in QKV)),
    _layer("self_attention.q_layernorm.weight", Cut.copies, "self_attn.q_norm.weight"),
    _layer("self_attention.k_layernorm.weight", Cut.copies, "self_attn.k_norm.weight"),
    _layer("self_attention.linear_proj.weight", Cut.columns, "self_attn.o_proj.weight"),
    _layer("self_attention.linear_proj.bias", Cut.copies, "self_attn.o_proj.bias"),
    _layer("mlp.linear_fc1.layer_norm_weight", Cut.copies, "post_attention_layernorm.weight", beside=DENSE),
    _layer("mlp.linear_fc1.weight", Cut.halves, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("mlp.linear_fc2.weight", Cut.columns, "mlp.down_proj.weight"),
    _layer("pre_mlp_layernorm.weight", Cut.copies, "post_attention_layernorm.weight", beside=SPARSE),
    _layer("mlp.router.weight", Cut.copies, SPARSE),
    _layer("mlp.experts.linear_fc1.weight#", Cut.halves, f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"),
    _layer("mlp.experts.linear_fc2.weight#", Cut.columns, f"{EXPERT}.down_proj.weight"),
    NameRow("decoder.final_layernorm.weight", Cut.copies, ("norm.weight",), Stage.last),
)
"""Of every family; its prefixes come before both names."""


def _tower(theirs: str, cut: Cut, *ours: str) -> NameRow:
    return NameRow(f"vision_model.{theirs}", cut, ours, Stage.first)


def _pair(theirs: str, ours: str, weight: Cut, bias: Cut) -> tuple[NameRow, NameRow]:
    """A layer's weight and bias."""
    return _tower(f"{theirs}.weight", weight, f"{ours}.weight"), _tower(f"{theirs}.bias", bias, f"{ours}.bias")


def _blocks(ours: str, up: str, down: str) -> tuple[NameRow, ...]:
    """A tower's blocks; queries, keys and values are one tensor there, whose parts are named by `/q`, `/k` and `/v`."""
    layer, mlp = "decoder.layers.*", f"{ours}.mlp"
    norms = (("norm1", "self_attention.linear_qkv"), ("norm2", "mlp.linear_fc1"))
    return (
        *(
            _tower(f"{layer}.{before}.layer_norm_{kind}", Cut.copies, f"{ours}.{norm}.{kind}")
            for norm, before in norms
            for kind in ("weight", "bias")
        ),
        *(
            _tower(
                f"{layer}.self_attention.linear_qkv.{kind}",
                Cut.groups,
                *(f"{ours}.attn.qkv.{kind}/{part}" for part in "qkv"),
            )
            for kind in ("weight", "bias")
        ),
        *_pair(f"{layer}.self_attention.linear_proj", f"{ours}.attn.proj", Cut.columns, Cut.copies),
        *(
            _tower(f"{layer}.mlp.linear_fc1.{kind}", Cut.halves, f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}")
            for kind in ("weight", "bias")
        ),
        *_pair(f"{layer}.mlp.linear_fc1", f"{mlp}.{up}", Cut.rows, Cut.rows),
        *_pair(f"{layer}.mlp.linear_fc2", f"{mlp}.{down}", Cut.columns, Cut.copies),
    )


def _merger(theirs: str, ours: str, fc1: str, fc2: str) -> tuple[NameRow, ...]:
    return (
        *_pair(f"{theirs}.linear_fc1", f"{ours}.{fc1}", Cut.rows, Cut.rows),
        *_pair(f"{theirs}.linear_fc2", f"{ours}.{fc2}", Cut.columns, Cut.copies),
    )


QWEN2_TOWER = (
    *_pair("patch_embed.proj", "visual.patch_embed.proj", Cut.copies, Cut.copies),
    *_blocks("visual.blocks.*", "fc1", "fc2"),
    *_pair("decoder.layers.*.mlp.linear_fc2", "visual.blocks.*.mlp.down_proj", Cut.columns, Cut.copies),
    *_pair("decoder.final_layernorm", "visual.merger.ln_q", Cut.copies, Cut.copies),
    *_merger("projection.encoder", "visual.merger", "mlp.0", "mlp.2"),
)
QWEN3_TOWER = (
    *_pair("patch_embed.proj", "model.visual.patch_embed.proj", Cut.copies, Cut.copies),
    _tower("pos_embed.weight", Cut.copies, "model.visual.pos_embed.weight"),
    *_blocks("model.visual.blocks.*", "linear_fc1", "linear_fc2"),
    *_pair("merger.patch_norm", "model.visual.merger.norm", Cut.copies, Cut.copies),
    *_merger("merger", "model.visual.merger", "linear_fc1", "linear_fc2"),
    *_pair(
        "decoder.deepstack_merger_list.*.patch_norm",
        "model.visual.deepstack_merger_list.*.norm",
        Cut.copies,
        Cut.copies,
    ),
    *_merger(
        "decoder.deepstack_merger_list.*", "model.visual.deepstack_merger_list.*", "linear_fc1", "linear_fc2"
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """`FamilyNames("model.", "language_model.", QWEN2_TOWER)`: prefixes of a decoder, and the tower."""

    ours: str = "model."
    theirs: str = ""
    tower: tuple[NameRow, ...] = ()

    def rows(self) -> tuple[NameRow, ...]:
        """The rows of the whole model but its head."""
        decoder = tuple(
            NameRow(
                self.theirs + row.theirs,
                row.cut,
                tuple(self.ours + name for name in row.ours),
                row.stage,
                self.ours + row.beside if row.beside else "",
            )
            for row in DECODER
        )
        return self.tower + decoder


FAMILIES = {
    "llama": FamilyNames(),
    "mistral": FamilyNames(),
    "qwen2": FamilyNames(),
    "qwen3": FamilyNames(),
    "qwen3_moe": FamilyNames(),
    "qwen2_vl": FamilyNames("model.", "language_model.", QWEN2_TOWER),
    "qwen2_5_vl": FamilyNames("model.", "language_model.", QWEN2_TOWER),
    "qwen3_vl": FamilyNames("model.language_model.", "language_model.", QWEN3_TOWER),
    "qwen3_vl_moe": FamilyNames("model.language_model.", "language_model.", QWEN3_TOWER),
}
"""By model_type."""
HEAD, OUTPUT = "lm_head.weight", "output_layer.weight"
ALSO = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Names that layers without Transformer Engine have, and what it calls the same in a layer without experts."""
