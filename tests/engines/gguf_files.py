"""Small GGUF files for tests: a random Llama of our own decoder with the bundled tokenizer, written by the gguf package."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from turnwise.chat.tokenizer import load_template
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.sources import find_model

CONFIG = DecoderConfig("llama", 768, 64, 96, 2, 4, 2, 16, 2048, norm_eps=1e-5, tied=True)
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama(seed: int = 3) -> Decoder:
    return Decoder.fresh(CONFIG, seed)


def write_gguf(path: Path, decoder: Decoder, *, eos: int = 2, pre: str = "gpt-2", **more: Any) -> None:
    """The decoder as a file. `more` are keys of its header, dots written as `__`, or tensors; embeddings are Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    config = decoder.config
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size, eos, pre)
    for key, value in more.items():
        name = key.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        else:
            {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](name, value)
    for name, tensor in decoder.weights():
        _add_weight(writer, name, tensor.float().numpy(), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weight(writer: gguf.GGUFWriter, name: str, array: np.ndarray, config: DecoderConfig) -> None:
    if name == "model.embed_tokens.weight":
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("token_embd.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
        return
    if name == "model.norm.weight":
        writer.add_tensor("output_norm.weight", array)
        return
    _, _, layer, rest = name.split(".", 3)
    theirs = NAMES[rest.removesuffix(".weight")]
    if theirs in ("attn_q", "attn_k"):  # the format has the pairs of rotary positions side by side
        heads = config.num_heads if theirs == "attn_q" else config.num_kv_heads
        pairs = array.reshape(heads, 2, config.head_dim // 2, array.shape[1])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(array))


def _add_tokenizer(writer: gguf.GGUFWriter, size: int, eos: int, pre: str) -> None:
    found = json.loads((find_model("tiny").folder / "tokenizer.json").read_text())
    words = {index: word for word, index in found["model"]["vocab"].items()}
    added = {token["id"]: token for token in found["added_tokens"]}
    words |= {index: token["content"] for index, token in added.items()}
    kinds = [
        3 if index in added and added[index]["special"] else 4 if index in added else 1 if index in words else 5
        for index in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([words.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in found["model"]["merges"]])
    writer.add_eos_token_id(eos)
    writer.add_bos_token_id(1)
    writer.add_chat_template(load_template("chatml_hermes"))


def rounded(decoder: Decoder) -> torch.Tensor:
    """The embeddings as the file's number format keeps them."""
    kind = gguf.GGMLQuantizationType.Q8_0
    array = dict(decoder.weights())["model.embed_tokens.weight"].numpy()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))
