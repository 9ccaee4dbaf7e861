"""Tokens per second of whole episodes over vLLM on the same GPU: single turns of many at once, and multi-turn chats.

Ours plays episodes through the product: rendering, ledgers, self-check and scoring included. vLLM is given the same
prompts as token ids through `LLM.generate`, which costs it nothing beside its engine. Each side runs in a process of
its own in one run of this script: ours is measured, then vLLM's load all at once, which takes minutes, and are measured
one at a time.

`single`: random weights of a shape, prompts of about 128 tokens with 8 siblings each, turns of 256 tokens, 256 and
1,024 at once, four episodes for each place (one with 7 B); vLLM is given one batch of them and has prefix caching on.
`chat`: a real model (--model), 64 prompts x 8 siblings, 4 turns, a user who says about 100 tokens after each of the
first three; vLLM has prefix caching on and is asked round by round. Each side's turns end where its model ends them.

    python benchmarks/gpu_rollout.py --tokenizer FOLDER [--shapes 135M 0.6B] [--model FOLDER] [--vllm venv/bin/python]
    python benchmarks/gpu_rollout.py --tools --model FOLDER    # workers.py with a model, by 0, 2 and 4 episode workers
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, tuple[Any, ...]] = {
    "135M": ("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192),
    "0.6B": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 8192),
    "1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 8192),
    "7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 8192),
}
"""family, vocabulary, hidden size, mlp size, layers, heads, kv heads, head dimension, context."""
CONCURRENT = (256, 1024)
NEW = 256
WAVES = 4
"""Episodes for each place: what begins and ends a run is then a small part of it."""
CACHE_GIB = {"135M": 12, "0.6B": 40, "1.5B": 14, "7B": 26, "chat": 16}
"""Keys and values of vLLM, which several of them on one GPU cannot measure: room for 1,024 sequences of 384 tokens
whose prompts are shared by 8."""
CHATS, SIBLINGS, TURNS, TURN_TOKENS = 64, 8, 4, 512
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "his")


def words(seed: int, count: int) -> str:
    """Plain words: about one token each in any tokenizer."""
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(count))


def insisting_user() -> Any:
    """A user who asks three times more."""
    from turnwise import BaseInteraction

    class User(BaseInteraction):
        async def generate_response(
            self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
        ) -> tuple[bool, str, float | None, dict[str, Any]]:
            said = sum(message["role"] == "assistant" for message in messages)
            return said >= TURNS, user_words(said), 0.0, {}

    return User({})


def user_words(turn: int) -> str:
    """What the user says after a turn."""
    return f"Please go on and tell me more about this: {words(turn, 90)}"


def zero(trajectory: Any) -> float:
    """No answer is judged here."""
    return 0.0


def prepared_of(folder: str, samples: list[Any], overrides: list[str], interaction: Any) -> Any:
    from turnwise.data.task_config import configure
    from turnwise.rollout.prepare import prepare

    config = configure(
        f"model.path={folder}", "chat.template=chatml_hermes", "task=null", "rollout.tools=[]",
        "data.max_prompt_tokens=2048", "sampling.temperature=1", *overrides,
    )  # fmt: skip
    return prepare(config, "test", samples=samples, scorer=zero, interaction=interaction)


def samples_of(count: int, length: int) -> list[Any]:
    from turnwise.types import Message, Role, Sample

    return [
        Sample(id=f"sample-{n}", prompt=[Message(Role.USER, words(n, length))], data_source="bench", ground_truth="0")
        for n in range(count)
    ]


async def play(
    prepared: Any, sampler: Any, clock: Any, rounds: int
) -> list[tuple[int, float, list[Any], float | None]]:
    """(tokens, seconds, trajectories, idle share of the GPU) of each round; not of a run's very first, in which every
    episode is self-checked."""
    from turnwise.reports.evaluation_run import play_all
    from turnwise.rollout.prepare import token_context

    context = token_context(prepared, prepared.renderer, sampler, prepared.config.sampling)
    found = []
    async with prepared.running(lambda text: None):
        for number in range(1, rounds + 1):
            trajectories: list[Any] = []
            clock.take()
            start = time.perf_counter()
            await play_all(prepared, context, trajectories, lambda trajectory: None, step=number)
            seconds = time.perf_counter() - start
            tokens = sum(turn.completion_tokens for trajectory in trajectories for turn in trajectory.turns)
            found.append((tokens, seconds, trajectories, clock.take()))
    return found


def ours(arguments: argparse.Namespace) -> None:
    """Our side: writes results and vLLM's prompts into the folder --exchange."""
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.fused_decoder import FusedDecoder
    from turnwise.engines.model.huggingface_folder import DecoderConfig
    from turnwise.engines.samplers.gpu.cuda import CudaSampler

    device = torch.device(arguments.device)
    exchange = Path(arguments.exchange)
    clock = DeviceClock(device)

    def sampler_of(model: Any, prepared: Any, batch: int) -> Any:
        fused = FusedDecoder.of(model, device=device, dtype=torch.bfloat16, invariant=arguments.invariant)
        free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 4 << 30
        return CudaSampler(
            fused, device=device, decode=prepared.renderer.tokenizer.decode, max_batch=batch,
            cache_bytes=free // 2, invariant=arguments.invariant, clock=clock,
        )  # fmt: skip

    results: dict[str, Any] = {}
    for shape in arguments.shapes:
        config = DecoderConfig(*SHAPES[shape], tied=shape != "7B", qkv_bias=SHAPES[shape][0] == "qwen2")
        with torch.device(device):
            model = _random(Decoder, config)
        for count in CONCURRENT:
            prepared = prepared_of(
                arguments.tokenizer,
                samples_of((1 if shape == "7B" else WAVES) * count // SIBLINGS, 110),
                [
                    "sampling.max_tokens=256",
                    f"engine.max_batch={count}",
                    f"rollout.concurrency={2 * count}",
                    f"eval.group_size={SIBLINGS}",
                ],
                None,
            )
            sampler = sampler_of(model, prepared, count)

            async def single(prepared: Any = prepared, sampler: Any = sampler) -> list[Any]:
                try:
                    return await play(prepared, sampler, clock, 3)
                finally:
                    await sampler.close()

            rounds = asyncio.run(single())
            prompts = [
                prepared.renderer.open(sample.prompt, []) for sample in prepared.samples for _ in range(SIBLINGS)
            ]
            (exchange / f"{shape}-{count}.json").write_text(json.dumps(prompts))
            results[f"{shape}-{count}"] = [(tokens, seconds, idle) for tokens, seconds, _, idle in rounds]
            print(f"  ours, {shape}, {count}: " + shown(results[f"{shape}-{count}"]), file=sys.stderr, flush=True)
            del sampler
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
    if arguments.model:
        results["chat"] = chat_ours(arguments, sampler_of, clock)
    (exchange / "ours.json").write_text(json.dumps(results))


def _random(decoder: Any, config: Any) -> Any:
    """A model of random weights made on the GPU: a CPU would take minutes for billions."""
    import torch

    from turnwise.engines.model import huggingface_folder

    tensors = {}
    for part in huggingface_folder.layout(config):
        made = torch.empty(part.shape, dtype=torch.bfloat16)
        tensors[part.name] = (
            made.normal_(0.0, 0.02) if part.columns is not None else made.fill_("bias" not in part.name)
        )
    return decoder(config, tensors)


def chat_ours(arguments: argparse.Namespace, sampler_of: Any, clock: Any) -> list[Any]:
    import torch

    from turnwise.engines.model.decoder import Decoder

    prepared = prepared_of(
        arguments.model, samples_of(CHATS, 60),
        [f"sampling.max_tokens={TURN_TOKENS}", f"eval.group_size={SIBLINGS}", "engine.max_batch=512",
         f"rollout.max_assistant_turns={TURNS}", "rollout.max_user_turns=8", "rollout.max_tokens=4096",
         "rollout.concurrency=1024"],
        insisting_user(),
    )  # fmt: skip
    model = Decoder.read(Path(arguments.model), torch.bfloat16)
    sampler = sampler_of(model, prepared, CHATS * SIBLINGS)

    async def chat() -> list[Any]:
        try:
            return await play(prepared, sampler, clock, 3)
        finally:
            await sampler.close()

    rounds = asyncio.run(chat())
    prompts = [prepared.renderer.open(sample.prompt, []) for sample in prepared.samples]
    tokenizer = prepared.renderer.tokenizer
    between = [
        tokenizer.encode(f"\n<|im_start|>user\n{user_words(turn)}<|im_end|>\n<|im_start|>assistant\n").ids
        for turn in range(1, TURNS)
    ]
    stops = sorted(prepared.renderer.stop_ids)
    (Path(arguments.exchange) / "chat.json").write_text(json.dumps([prompts, between, stops]))
    turns = sum(len(trajectory.turns) for trajectory in rounds[-1][2]) / len(rounds[-1][2])
    found = [(tokens, seconds, idle) for tokens, seconds, _, idle in rounds]
    print(f"  ours, chat ({turns:.2f} turns an episode): {shown(found)}", file=sys.stderr, flush=True)
    return found


def vllm(arguments: argparse.Namespace) -> None:
    """vLLM's side, in its own environment."""
    import torch
    from vllm import LLM, SamplingParams

    exchange, results = Path(arguments.exchange), {}
    name = arguments.peer
    common = {
        "dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 1024, "enable_prefix_caching": True,
        "kv_cache_memory_bytes": CACHE_GIB[name] << 30, "gpu_memory_utilization": 0.1,
    }  # fmt: skip
    if name == "chat":
        llm = LLM(arguments.model, max_model_len=4096, **common)
        wait_for_my_turn(exchange, name)
        prompts, between, stops = json.loads((exchange / "chat.json").read_text())
        results["chat"] = [vllm_chat(llm, SamplingParams, prompts, between, stops) for _ in range(2)]
    else:
        folder = exchange / f"model-{name}"
        write_config(folder, name)
        llm = LLM(str(folder), load_format="dummy", max_model_len=1024, **common)
        wait_for_my_turn(exchange, name)
        params = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False)
        for count in CONCURRENT:
            prompts = [{"prompt_token_ids": ids} for ids in json.loads((exchange / f"{name}-{count}.json").read_text())]
            rounds = []
            for _ in range(2):
                start = time.perf_counter()
                done = llm.generate(prompts[:count], params, use_tqdm=False)
                torch.cuda.synchronize()
                tokens = sum(len(one.outputs[0].token_ids) for one in done)
                rounds.append((tokens, time.perf_counter() - start, None))
            results[f"{name}-{count}"] = rounds
            print(f"  vLLM, {name}, {count}: {shown(rounds)}", file=sys.stderr, flush=True)
    (exchange / f"vllm-{name}.json").write_text(json.dumps(results))


def wait_for_my_turn(exchange: Path, name: str) -> None:
    """Say that the model is loaded, and wait until nothing else is measured."""
    (exchange / f"loaded-{name}").touch()
    while not (exchange / f"go-{name}").exists():
        time.sleep(0.05)


def vllm_chat(llm: Any, sampling: Any, prompts: Any, between: Any, stops: Any) -> tuple[int, float, None]:
    """The chats round by round, all that go on at once."""
    params = sampling(temperature=1.0, max_tokens=TURN_TOKENS, stop_token_ids=stops, logprobs=0, detokenize=False)
    going, tokens, start = [list(ids) for ids in prompts for _ in range(SIBLINGS)], 0, time.perf_counter()
    for turn in range(TURNS):
        done = llm.generate([{"prompt_token_ids": ids} for ids in going], params, use_tqdm=False)
        following = []
        for ids, one in zip(going, done, strict=True):
            written = list(one.outputs[0].token_ids)
            tokens += len(written)
            if turn + 1 < TURNS and written and written[-1] in stops:
                following.append([*ids, *written, *between[turn]])
        going = following
        if not going:
            break
    found = (tokens, time.perf_counter() - start, None)
    print(f"  vLLM, chat: {shown([found])}", file=sys.stderr, flush=True)
    return found


def write_config(folder: Path, shape: str) -> None:
    """A config.json alone: vLLM makes up the weights."""
    import transformers

    family, vocabulary, hidden, mlp, layers, heads, kv_heads, head_dim, context = SHAPES[shape]
    kinds = {"llama": ("Llama", {}), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {})}
    name, more = kinds[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=context,
        tie_word_embeddings=shape != "7B", **more,
    )  # fmt: skip
    config.architectures = [f"{name}ForCausalLM"]
    folder.mkdir()
    config.save_pretrained(folder)


def shown(rounds: list[Any]) -> str:
    texts = [
        f"{tokens / seconds:,.0f}" + ("" if idle is None else f" ({idle:.0%} idle)") for tokens, seconds, idle in rounds
    ]
    return f"{', '.join(texts)} tokens/s by round"


def run_vllm(python: str, command: list[str], names: list[str], exchange: Path) -> dict[str, Any]:
    """What each of vLLM's processes measured, one for each name."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    peers = {name: subprocess.Popen([python, __file__, *command, "--peer", name], env=environment) for name in names}
    found: dict[str, Any] = {}
    try:
        while any(not (exchange / f"loaded-{name}").exists() and peer.poll() is None for name, peer in peers.items()):
            time.sleep(0.2)
        for name, peer in peers.items():
            (exchange / f"go-{name}").touch()
            if peer.wait() == 0:
                found |= json.loads((exchange / f"vllm-{name}.json").read_text())
            else:
                print(f"  vLLM, {name}: failed", file=sys.stderr, flush=True)
    finally:
        for peer in peers.values():
            peer.kill()
    return found


def compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as exchange:
        command = ["--exchange", exchange, "--tokenizer", arguments.tokenizer, "--shapes", *arguments.shapes]
        command += ["--model", arguments.model] if arguments.model else []
        command += ["--invariant"] if arguments.invariant else []
        command += ["--device", arguments.device]
        names = [*arguments.shapes, *(["chat"] if arguments.model else [])]
        subprocess.run([sys.executable, __file__, *command, "--peer", "ours"], check=True)
        found = json.loads((Path(exchange) / "ours.json").read_text())
        theirs = run_vllm(arguments.vllm, command, names, Path(exchange)) if arguments.vllm else {}
    print("tokens a second of whole episodes, best round of each side")
    for name, rounds in found.items():
        best = max(tokens / seconds for tokens, seconds, _ in rounds)
        text = f"  {name:12s} ours {best:10,.0f}"
        if name in theirs:
            peer = max(tokens / seconds for tokens, seconds, _ in theirs[name])
            text += f"   vLLM {peer:10,.0f}   ratio {best / peer:5.2f}"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a Hugging Face folder whose tokenizer is used; its weights are not")
    parser.add_argument("--shapes", nargs="*", default=["135M"], choices=list(SHAPES), help="of random weights")
    parser.add_argument("--model", help="a Hugging Face folder of a chat model, for the multi-turn part")
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM; without it only ours runs")
    parser.add_argument("--invariant", action="store_true", help="ours in the batch-invariant mode")
    parser.add_argument("--device", default="cuda", help="of our side; cpu only shows that the script runs")
    parser.add_argument("--tools", action="store_true", help="six-turn episodes with a calculator, and nothing else")
    parser.add_argument("--exchange", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tools:
        import workers  # beside this file

        workers.main(["--model", arguments.model or "tiny", "--workers", "0", "2", "4"])
    elif arguments.peer is None:
        import torch

        if (arguments.device == "cuda" and not torch.cuda.is_available()) or arguments.tokenizer is None:
            print("skipped: this benchmark needs a CUDA GPU and --tokenizer FOLDER")
            return
        compare(arguments)
    elif arguments.peer == "ours":
        ours(arguments)
    else:
        vllm(arguments)


if __name__ == "__main__":
    main()
