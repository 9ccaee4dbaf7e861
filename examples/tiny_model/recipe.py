"""How the tiny model was made: tokenizer, fresh weights, supervised fine-tuning on scripted traces.

Run `python examples/tiny_model/recipe.py --out DIR`; DIR=turnwise/engines/bundled/tiny makes the package's own anew.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from turnwise.chat.tokenizer import load_template
from turnwise.config import Config
from turnwise.data.task_config import compose
from turnwise.data.tasks.arithmetic import SYSTEM, problem_at, write_out
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import config_from_hf
from turnwise.rollout.toolbox.loading import load_tool
from turnwise.rollout.users.code_verify import FEEDBACK
from turnwise.sft import fine_tune

VOCABULARY = 768
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
PHRASES = (
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}}, "required": ["',
    '"]}}}',
    '{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}',
    "To call one, write:",
    '{"name": ..., "arguments": ...}',
)
"""JSON that never varies is one token each: the model is small and should spend its turns on the problem."""
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
OVERRIDES = (
    "task=arithmetic",
    "sft.traces=12000",
    "sft.steps=900",
    "sft.batch_tokens=6144",
    "sft.lr=3e-3",
    "sft.warmup=100",
    "training.save_every=0",
)


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of our own texts with single digits, ChatML control tokens and hermes tags."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS) - len(PHRASES),
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (*TAGS, *PHRASES)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    wrapped.chat_template = load_template("chatml_hermes")
    wrapped.save_pretrained(folder)


def _corpus() -> Iterator[str]:
    described = [str(load_tool(name).schema["function"]["description"]) for name in ("calculate", "python")]
    rng = random.Random(0)
    for index in range(3000):
        problem = problem_at("train", 0, index)
        expression = write_out(rng.choice((problem.family.right, *problem.family.wrong)), problem.numbers)
        yield problem.question
        yield from (expression, f"print({expression})", SYSTEM, FEEDBACK, "Tools:", *described)
        yield from ("calculate", "expression", "python", "code", "system", "user", "assistant", "tool")
        yield from ("Error: not an arithmetic expression", "Error: the call is not valid JSON")
        yield "File line SyntaxError: '(' was never closed"


def make_model(out: Path, config: Config) -> None:
    """Tokenizer, fresh weights and training, all from `config.seed`."""
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(out)
    Decoder.fresh(config_from_hf(SHAPE), config.seed).save(out)
    config.model.path = str(out)
    with tempfile.TemporaryDirectory() as runs:
        config.runs_dir = runs
        shutil.copytree(fine_tune(config).policy, out, dirs_exist_ok=True)


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("overrides", nargs="*", help="config values, key=value")
    args = parser.parse_args()
    make_model(args.out, compose([*OVERRIDES, *args.overrides]).config)


if __name__ == "__main__":
    main()
