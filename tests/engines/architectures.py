"""Tiny configs of many architectures of transformers, for tests of both implementations of a policy model."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY, CONTEXT, WINDOW = 96, 128, 6
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EIGHT = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDES, SEES_ALL = "sliding_attention", "full_attention"

SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": EIGHT | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": EIGHT | {"sliding_window": WINDOW},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": EIGHT,
    "qwen3_moe": EIGHT | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "gemma3_text": EIGHT
    | {
        "num_hidden_layers": 3,
        "layer_types": [SLIDES, SLIDES, SEES_ALL],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 11,
        "rope_parameters": {
            SLIDES: {"rope_type": "default", "rope_theta": 1000.0},
            SEES_ALL: {"rope_type": "default", "rope_theta": 100000.0},
        },
    },
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {},
    "glm4": EIGHT | {"attention_bias": True, "partial_rotary_factor": 0.5},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "gpt_oss": EIGHT
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": [SLIDES, SEES_ALL]},
    "deepseek_v3": EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "first_k_dense_replace": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "gemma2": EIGHT
    | {
        "sliding_window": WINDOW,
        "layer_types": [SLIDES, SEES_ALL],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "phi": {},
    "stablelm": {"use_qkv_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": EIGHT
    | {
        "global_head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": [SLIDES, SEES_ALL, SEES_ALL],
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 4,
        "num_kv_shared_layers": 0,
    },
}
"""By model_type; layers that mix in every way that `Mixing` knows are among them."""

LINEAR = {
    "layer_types": ["linear_attention", SEES_ALL],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
HYBRID: dict[str, dict[str, Any]] = {
    "falcon_h1": EIGHT | MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "lfm2": {"layer_types": ["conv", SEES_ALL], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": EIGHT | LINEAR,
    "qwen3_5_moe_text": EIGHT | LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_next": EIGHT | LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "nemotron_h": EIGHT
    | {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}
"""Architectures with layers that carry a state from token to token, the last with no others."""

NAMES_OF_GPT2 = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def config_of(kind: str, **changes: Any) -> Any:
    """The config of an architecture, with some fields changed."""
    given = SMALL | (SUPPORTED | HYBRID).get(kind, {}) | changes
    if kind == "gpt2":
        given = {name: value for name, value in given.items() if name not in NAMES_OF_GPT2}
    return AutoConfig.for_model(kind, **given)


def build(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Plain transformers with random weights; norms, biases and sinks are moved off the values that hide them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(kind, **changes), attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model
