"""A tiny config of any class of transformers, made from its defaults by the names of their fields."""

import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY, SPECIAL, CONTEXT = 128, 100, 128
"""Token ids from `SPECIAL` on are those of images, sounds and the like."""
HIDDEN, HEADS, SIZE = 32, 4, 8

_LAYERS = re.compile(
    r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|layers|depth|num_blocks|resampler_depth"
    r"|num_layers_per_stack|conf_num_hidden_layers)$"
)
_SIZES: tuple[tuple[str, int], ...] = (
    (r"hidden_size_per_layer_input|laurel_rank|gated_norm_rank|hc_lowrank|d_rel|ple_embed_dim", 4),
    (r"(moe|shared?|moe_shared|shared_expert)_(expert_)?(intermediate_size|dim)|expert_ffn_hidden_size", 16),
    (r"\w*(intermediate_size|intermediate_size_mlp|ffn_dim|ffn_hidden_size)|d_ff|dff|dim_ff|d_inner|mlp_dim", 48),
    (r"feed_forward_size|prompt_mid_dim", 48),
    (r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_query_groups", 2),
    (r"linear_num_key_heads|index_n_heads|n_mamba_heads", 2),
    (r"\w*attention_heads|\w*num_heads|n_heads?|mamba_n_heads|resampler_(n_)?heads|linear_num_value_heads", HEADS),
    (r"head_dim|global_head_dim|swa_head_dim|(linear_(key_|value_)?|mamba_|index_|resampler_)?head_dim", SIZE),
    (r"kv_channels|d_kv|d_head|dim_head|attention_head_size|mamba_headdim|resampler_dim_head", SIZE),
    (r"mamba_d_head", 16),
    (r"attention_head_dim|rotary_dim|qk_nope_head_dim|v_head_dim|state_size|ssm_state_size|mamba_d_state", SIZE),
    (r"qk_rope_head_dim", SIZE),
    (r"qk_head_dim", 2 * SIZE),
    (r"kv_lora_rank|o_lora_rank|adapter_rank|router_hidden_size", 12),
    (r"q_lora_rank", 16),
    (r"mamba_d_ssm", 64),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|top_k_experts|index_topk\w*", 2),
    (
        r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|o_groups|n_shared_experts|moe_num_shared_experts",
        1,
    ),
    (r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|moe_layer_start_index", 1),
    (r"mamba_chunk_size|chunk_size|attention_chunk_size|index_block_size|block_size|block_multiple_of", 8),
    (r"sliding_window|sliding_window_size|attention_window_size|local_attention|window_size|keep_window_size", 6),
    (r"mamba_dt_rank|time_step_rank|mamba_dt_rank", 4),
    (r"\w*max_position_embeddings|max_seq_len|n_positions|n_ctx|model_max_length|context_length", CONTEXT),
    (r"max_(source|target)_positions", CONTEXT),
    (
        r"vocab_size|vocab_size_per_layer_input|decoder_vocab_size|\w*vocab_size(_base)?|encoder_hash_byte_group_vocab",
        VOCABULARY,
    ),
    (
        r"hidden_size|d_model|n_embd|\w*hidden_size|embed_dim|word_embed_proj_dim|embedding_size|emb_dim|embedding_dim",
        HIDDEN,
    ),
    (r"\w+_embedding_size|lru_width|projection_dim|projector_(in|out)put_dim|vision_output_dim|output_dim", HIDDEN),
    (r"\w+_embed_dim|image_text_hidden_size|hidden_size_global|dim_model_base", HIDDEN),
    (r"image_size", 16),
    (r"patch_size", 4),
    (r"num_position_embeddings", 16),
    (r"spatial_merge_size|attn_layer_period|layer_group_size|expert_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"base_channels|output_channels|num_filters|latent_channels", 32),
    (r"make_ngram_vocab_size_divisible_by|split_ngram_parts|heads_per_ngram", 4),
    (r"query_pre_attn_scalar", 11),
)
"""What a field whose whole name fits is set to, the first that fits."""
_IDS = re.compile(r"\w*(token_(id|index)|_patch_id|_start_id|_end_id|_newline_id)$")
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_PLACES = re.compile(r"deepstack_visual_indexes|fullatt_block_indexes|global_attn_indexes|intermediate_layers_indices")
_INITIAL = ("initializer_range", "init_std", "init_method_std")
Fields = dict[str, Any]


def _rope(**more: Any) -> Fields:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more}}


OWN: dict[str, Fields] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "bamba": {"attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "attention_head_dim": 16,
        "attention_hidden_size": 64, "n_mamba_heads": 2,
    },
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64, "mamba_headdim": 16, "n_mamba_heads": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "num_hidden_layers": 2},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "emu3": {"vocabulary_map": {"<image>": SPECIAL}},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "moe_intermediate_size": 16, "top_k_experts": 2},
    "glm_ocr_text": _rope(mrope_section=[2, 1, 1]),
    "glm4v_text": _rope(mrope_section=[2, 1, 1]),
    "qwen2_5_omni_text": _rope(mrope_section=[2, 1, 1]),
    "ernie4_5_vl_moe_text": _rope(mrope_section=[1, 1, 2]),
    "glm5_next_text": {"index_kpool": 2},
    "step3p5": {"sliding_window": 6},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    "chameleon": {"vocabulary_map": {"<image>": SPECIAL}},
    "radio": {"video_temporal_patch_size": 2},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""What the rules get wrong, by model_type."""
FILLED = {"head_dim": SIZE, "num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1}
"""What a default leaves open and some classes must know."""


def tiny(kind: str, **changes: Any) -> PreTrainedConfig:
    """`tiny("olmo3")`: the config of a class, small enough to be computed in no time."""
    config_class = CONFIG_MAPPING[kind]
    return config_class(**(shrunk(config_class(), [0]) | changes))


def shrunk(default: PreTrainedConfig, taken: list[int]) -> Fields:
    """The fields of a config that must change for it to be tiny; `taken` counts the special tokens that have a number."""
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    layers = next((value for name, value in values.items() if _LAYERS.match(name) and isinstance(value, int)), 0)
    per_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == layers > 3 and not isinstance(value[0], list | tuple)
    }
    kept = _one_of_each(per_layer, layers)
    fields: Fields = {"model_type": default.model_type} if default.model_type else {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = shrunk(value, taken)
        elif name in per_layer:
            fields[name] = [value[index] for index in kept]
        elif (new := _changed(name, value, len(kept), taken)) is not None:
            fields[name] = new
    if "is_decoder" in values:
        fields["is_decoder"] = True
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = HEADS  # families with latent attention have no other way
    _fit_sections(fields, values)
    return fields | OWN.get(default.model_type, {})


def _one_of_each(per_layer: Fields, layers: int) -> list[int]:
    """Layers of a model that are one of every kind it has, in their order; at least two."""
    rows = [str([_kind_of(value[index]) for value in per_layer.values()]) for index in range(layers)]
    kept = sorted({rows.index(row) for row in rows})[:6]
    while len(kept) < 2:
        kept.append(kept[-1] if kept else 0)
    return kept


def _kind_of(value: Any) -> Any:
    return value if isinstance(value, str | bool) else value in (0, 1) and value


def _changed(name: str, value: Any, layers: int, taken: list[int]) -> Any:
    """None where a field stays as it is."""
    if name in _ENDS:
        return None if value is None else _ENDS[name]
    if _IDS.match(name) and isinstance(value, int):
        taken[0] += 1
        return SPECIAL + taken[0] - 1
    if name in _INITIAL:
        return 0.25
    if _PLACES.fullmatch(name) and value:
        return [0]
    if isinstance(value, float) and value > 0 and ("drop" in name):
        return 0.0
    if value is None:
        return FILLED.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return None
    if _LAYERS.match(name):
        return min(layers, value)
    return next((min(size, value) for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)


def _fit_sections(fields: Fields, values: Fields) -> None:
    """Positions in time, height and width share out the pairs of a head that are turned."""
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        pairs = int(SIZE * rope.get("partial_rotary_factor", 1.0)) // 2 or 1
        fields["rope_parameters"] = rope | {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
