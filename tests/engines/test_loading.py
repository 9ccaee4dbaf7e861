"""Which implementation computes a model and why, GGUF files, and what is known of a model before its weights are read."""

import contextlib
import io
import json
import os
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import build
from gguf_files import CONFIG, llama, rounded, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MistralConfig, MistralForCausalLM

from turnwise.chat.renderer import Renderer
from turnwise.commands.cli import main
from turnwise.config.choices import ModelImplementation as Wanted
from turnwise.engines.model import attention, gguf_file
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.gguf_file import check_reader
from turnwise.engines.model.loading import add_lora, choose_implementation, model_facts, read_model, read_tokenizer
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.model.policy_model import ModelInputs, PolicyModel
from turnwise.engines.model.sources import ModelSource, find_model
from turnwise.errors import EngineError
from turnwise.system.plugins import builtin

TINY = find_model("tiny")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in a GGUF file whose header calls another token the end than the one that ends its turns."""
    try:
        check_reader()
    except EngineError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, llama(), eos=1)
    return path


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral with a sliding window, which the native decoder has not, and the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("mistral") / "model"
    config = MistralConfig(
        vocab_size=768, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, sliding_window=16, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY.folder / name, folder)
    return folder


def copy_of(folder: Path, place: Path, **fields: Any) -> ModelSource:
    """A copy of a model with other fields in its config."""
    made = Path(shutil.copytree(folder, place / "copy", ignore=shutil.ignore_patterns("__pycache__", "*.py")))
    old = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**old, **fields}))
    return find_model(str(made))


def logits(model: PolicyModel) -> torch.Tensor:
    ids = torch.arange(3, 43)
    with torch.no_grad():
        return model.logits(model(ModelInputs(ids, torch.arange(40)), attention.packed([40])))


def check(*args: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["check", "eval.samples=2", *args])
    return code, " ".join(out.getvalue().split())


# --- the choice -----------------------------------------------------------------------------------------------------


def test_native_is_taken_where_it_covers_the_config_and_says_so() -> None:
    choice = choose_implementation(TINY, Wanted.auto)
    assert (choice.implementation, str(choice), choice.notices) == (
        Wanted.native,
        "native: qwen3 with default rope",
        (),
    )
    assert choose_implementation(TINY, Wanted.native) == choice
    asked = choose_implementation(TINY, Wanted.transformers)
    assert str(asked) == "transformers: asked for with model.implementation"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"residual_multiplier": 0.5}, "residual_multiplier"),
    ],
)
def test_what_native_does_not_compute_goes_to_transformers_with_the_reason(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = copy_of(TINY.folder, tmp_path, **fields)
    choice = choose_implementation(source, Wanted.auto)
    assert choice.implementation is Wanted.transformers and reason in choice.reason
    with pytest.raises(EngineError, match="model.implementation=native: .*") as refused:
        choose_implementation(source, Wanted.native)
    assert reason in str(refused.value)
    unread = [notice for notice in choice.notices if "declares no residual_multiplier" in notice]
    assert len(unread) == ("residual_multiplier" in fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "nope"}, "no causal language model of the type 'nope'"),
        ({"model_type": "qwen33"}, "did you mean 'qwen3'?"),
        ({"model_type": None}, "model type None"),
        ({"model_type": "clip_text_model"}, "no causal language model"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 10**9}, "is more than the 10000 supported"),
        ({"is_causal": False}, "is_causal"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wanted", [Wanted.auto, Wanted.transformers])
def test_what_neither_computes_is_refused(fields: dict[str, Any], reason: str, wanted: Wanted, tmp_path: Path) -> None:
    source = copy_of(TINY.folder, tmp_path, **fields)
    with pytest.raises(EngineError) as refused:
        model_facts(source, choose_implementation(source, wanted))
    assert reason in str(refused.value)


def test_a_quantised_model_of_another_family_is_refused_too(windowed: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="quantization_config is not supported"):
        choose_implementation(copy_of(windowed, tmp_path, quantization_config={"bits": 4}), Wanted.auto)


def test_code_of_a_model_is_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}
    known = copy_of(TINY.folder, tmp_path / "known", auto_map=code)
    choice = choose_implementation(known, Wanted.auto)
    assert choice.implementation is Wanted.native
    assert "configuration_x.XConfig), which is not run" in " ".join(choice.notices)
    other = copy_of(TINY.folder, tmp_path / "other", auto_map=code, model_type="x")
    with pytest.raises(EngineError, match="set model.trust_remote_code=true to run it") as refused:
        choose_implementation(other, Wanted.auto)
    assert "modeling_x.XModel" in str(refused.value)
    for source in (known, other):
        trusted = choose_implementation(find_model(str(source.folder), trust_remote_code=True), Wanted.auto)
        assert trusted.implementation is Wanted.transformers
    code, text = check(f"model.path={TINY.folder}", "model.trust_remote_code=true")
    assert code == 0 and text.count("model.trust_remote_code=true: Python files that come with") == 2  # plan and checks


# --- facts ----------------------------------------------------------------------------------------------------------


def test_facts_are_the_same_whoever_computes_the_model(file: Path) -> None:
    for source in (TINY, find_model(str(file))):
        found = [
            model_facts(source, choose_implementation(source, wanted))
            for wanted in (Wanted.native, Wanted.transformers)
        ]
        assert replace(found[0], tensors=()) == replace(found[1], tensors=())  # native fuses some
    assert found[0].vocab_size == CONFIG.vocab_size and found[0].context_length == CONFIG.context_length
    assert found[0].cached_numbers == CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim


def test_check_says_who_computes_the_model_and_reads_no_weights(windowed: Path) -> None:
    code, text = check(f"model.path={windowed}", "--json")
    assert code == 0, text
    assert "model transformers: native cannot compute it: sliding_window 16 below the context of 512" in text
    found = json.loads(text[text.rindex('{"passed"') :])["findings"]
    assert any(one["check"] == "model" and one["text"].startswith("transformers: ") for one in found)
    assert "KV cache 0.3 kB a token" in text  # 2 layers, 2 heads, 8 + 8 numbers of 4 bytes
    assert "native: qwen3 with default rope" in check()[1]


# --- reading --------------------------------------------------------------------------------------------------------


def test_both_implementations_read_the_same_model_and_take_lora() -> None:
    native = read_model(TINY, choose_implementation(TINY, Wanted.native), torch.float32)
    theirs = read_model(TINY, choose_implementation(TINY, Wanted.transformers), torch.float32)
    torch.testing.assert_close(logits(native), logits(theirs), atol=1e-4, rtol=1e-4)
    adapted = add_lora(native, 4, 8.0, 0)
    assert isinstance(adapted, LoraDecoder) and (adapted.rank, adapted.alpha) == (4, 8.0)


def test_a_gguf_file_is_dequantised_into_the_native_decoder(file: Path) -> None:
    source = find_model(str(file))
    choice = choose_implementation(source, Wanted.auto)
    assert str(choice) == "native: llama with default rope" and choice.notices == ()
    model = read_model(source, choice, torch.float32)
    assert isinstance(model, Decoder) and model.config.num_layers == 2
    expected = llama()
    expected.load([(name, rounded(expected) if "embed" in name else one) for name, one in expected.weights()])
    torch.testing.assert_close(dict(model.weights()), dict(expected.weights()))
    theirs = read_model(source, choose_implementation(source, Wanted.transformers), torch.float32)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-4, rtol=1e-4)


def test_a_gguf_file_brings_its_tokenizer_and_turns_end_where_the_template_ends_them(file: Path) -> None:
    renderer = Renderer(
        read_tokenizer(find_model(str(file))), builtin("turnwise.chat.formats", "hermes", "tool format")
    )
    bundled = read_tokenizer(TINY)
    text = "<|im_start|>user\nWhat is 12 + 345?<|im_end|>\n<tool_call>"
    assert renderer.tokenizer.encode(text).ids == bundled.encode(text).ids
    end = bundled.added_ids["<|im_end|>"]
    assert renderer.tokenizer.end_ids == {1} and renderer.end_id == end and end in renderer.stop_ids


@pytest.mark.parametrize("wanted", [Wanted.native, Wanted.transformers])
def test_a_policy_from_a_gguf_file_is_a_plain_folder(wanted: Wanted, file: Path, tmp_path: Path) -> None:
    source = find_model(str(file))
    renderer = Renderer(read_tokenizer(source), builtin("turnwise.chat.formats", "hermes", "tool format"))
    model = read_model(source, choose_implementation(source, wanted), torch.float32)
    PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids).save(tmp_path / "policy", model)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "policy")
    asked = [{"role": "user", "content": "2 + 2?"}]
    text = theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == renderer.tokenizer.apply_template(asked, [], True, {})
    assert theirs(text)["input_ids"] == renderer.tokenizer.encode(text).ids
    assert GenerationConfig.from_pretrained(tmp_path / "policy").eos_token_id == sorted(renderer.stop_ids)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(torch.arange(3, 43)[None]).logits[0], logits(model), atol=1e-4, rtol=1e-4)
    saved = find_model(str(tmp_path / "policy"))
    assert choose_implementation(saved, Wanted.auto).implementation is Wanted.native


def test_a_policy_of_a_transformers_model_is_a_plain_folder(windowed: Path, tmp_path: Path) -> None:
    source = find_model(str(windowed))
    model = read_model(source, choose_implementation(source, Wanted.auto), torch.float32)
    PolicyFolder.of(source, read_tokenizer(source), {2}).save(tmp_path, model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(torch.arange(3, 43)[None]).logits[0], logits(model), atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == read_tokenizer(source).templates["default"]


def test_a_folder_that_lacks_a_weight_is_refused_and_not_filled_with_noise(windowed: Path, tmp_path: Path) -> None:
    source = copy_of(windowed, tmp_path)
    tensors = load_file(source.folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, source.folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks the tensors model.layers.1.mlp.down_proj.weight"):
        read_model(source, choose_implementation(source, Wanted.auto), torch.float32)


# --- what a GGUF file may say ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, "rope.scaling.factor=4.0, rope.scaling.type=linear"),
        ({"llama__attention__sliding_window": 128}, "attention.sliding_window=128"),
        ({"rope_freqs__weight": np.ones(8, dtype=np.float32)}, "holds rope_freqs.weight, scaled rotary positions"),
    ],
)  # fmt: skip
def test_what_transformers_would_not_read_is_refused(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, llama(), **more)
    with pytest.raises(EngineError, match=reason):
        choose_implementation(find_model(str(path)), Wanted.auto)


@pytest.mark.usefixtures("file")
def test_what_a_header_says_twice_is_no_reason_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, llama(), pre="smollm", llama__attention__key_length=16, llama__attention__value_length=16,
               llama__rope__scaling__type="none", llama__expert_count=0)  # fmt: skip
    choice = choose_implementation(find_model(str(path)), Wanted.auto)
    assert choice.implementation is Wanted.native
    assert "pre-tokenizer 'smollm'" in " ".join(choice.notices)


@pytest.mark.parametrize("content", [b"", b"GG", b"junk" * 99, b"GGUF\x03\0\0\0", b"GGUF" + b"\xff" * 200])
def test_junk_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(content)
    with pytest.raises(EngineError, match=r"junk.gguf is not a readable GGUF file: [^\n]*$"):
        choose_implementation(find_model(str(tmp_path / "junk.gguf")), Wanted.auto)


def test_half_a_file_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for share in (0.02, 0.9):
        (tmp_path / "half.gguf").write_bytes(content[: int(share * len(content))])
        source = find_model(str(tmp_path / "half.gguf"))
        with pytest.raises(EngineError, match=r"half.gguf"):
            read_model(source, choose_implementation(source, Wanted.auto), torch.float32)


def test_the_extra_is_named_where_it_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EngineError, match=r"pip install 'turnwise\[gguf\]'"):
        choose_implementation(find_model(str(file)), Wanted.auto)


def test_a_hybrid_model_is_trained_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's log-probs and the learner's agree before the first update, or the run would stop."""
    monkeypatch.chdir(tmp_path)
    build("lfm2", vocab_size=768, max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY.folder / name, tmp_path / "model" / name)
    (tmp_path / "reward.py").write_text("async def odd(trajectory):\n    return float(trajectory.sibling % 2)\n")
    sizes = ["training.steps=1", "training.groups=2", "training.group_size=2", "eval.samples=2"]
    rewards = ["scoring.scorers={arithmetic: reward.py:odd}", "sampling.max_tokens=16"]
    assert main(["train", "model.path=model", "run=hybrid", *sizes, *rewards]) == 0
    log = (tmp_path / "runs/hybrid/log.txt").read_text()
    assert "sampler and learner log-probs differ by" in log, log


@pytest.mark.long
def test_experts_are_replayed_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an episode worker, whose turns and trajectories bring them."""
    monkeypatch.chdir(tmp_path)
    build("qwen3_moe", vocab_size=768, max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY.folder / name, tmp_path / "model" / name)
    (tmp_path / "reward.py").write_text("async def odd(trajectory):\n    return float(trajectory.sibling % 2)\n")
    sizes = ["training.steps=1", "training.groups=2", "training.group_size=2", "eval.samples=2", "rollout.workers=1"]
    rewards = ["scoring.scorers={arithmetic: reward.py:odd}", "sampling.max_tokens=16", "learner.routing_replay=true"]
    assert main(["train", "model.path=model", "run=experts", *sizes, *rewards]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/experts/metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "routing/replayed" in line]
    assert 0.8 < step["routing/replayed"] < 1 and step["routing/bytes_per_token"] == 2


def _header(tensors: int, entries: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + body


def _list(kind: int, length: int) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, length)


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (b"", None),
        (_header(2**64 - 1, 2**64 - 1, b""), 10**10),
        (_header(2**40, 0, b""), 10**10),
        (_header(0, 1, struct.pack("<Q", 2**35)), 10**10),
        (_header(0, 1, struct.pack("<Q", 2**64 - 1)), None),
        (_header(0, 2, _list(10, 2**64 - 1) + b"abc"), None),
        (_header(0, 1, _list(10, 2**64 - 1)), None),
        (_header(0, 1, _list(8, 2**64 - 1)), None),
        (_header(0, 1, _list(9, 1)), None),
        (_header(1, 0, struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**32 - 1)), 10**10),
    ],
)
def test_a_hostile_header_is_refused_at_once(tmp_path: Path, content: bytes, size: int | None) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)  # holes: nothing is written
    with pytest.raises(EngineError, match="is not a readable GGUF file"):
        gguf_file.read_header(path)


@pytest.mark.usefixtures("file")
def test_values_of_the_wrong_kind_in_a_header_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama())
    content = (tmp_path / "m.gguf").read_bytes()
    key = b"llama.embedding_length"
    assert content.count(key) == 1
    (tmp_path / "m.gguf").write_bytes(content.replace(key + struct.pack("<I", 4), key + struct.pack("<I", 6)))
    with pytest.raises(EngineError, match="hidden_size"):
        choose_implementation(find_model(str(tmp_path / "m.gguf")), Wanted.auto)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rms_norm_eps", 10**400, "rms_norm_eps must be a positive number"),
        ("max_position_embeddings", 2, "a context of 2 tokens"),
        ("vocab_size", 10**12, r"embed_tokens.weight is \(768, 128\), config.json says"),
        ("num_hidden_layers", 4, "lacks the tensors model.layers.3"),
    ],
)
def test_a_config_that_its_weights_belie_is_refused_before_they_are_read(
    tmp_path: Path, field: str, value: int, words: str
) -> None:
    source = _changed_tiny(tmp_path, {field: value})
    with pytest.raises(EngineError, match=words):
        model_facts(source, choose_implementation(source, Wanted.native))


@pytest.mark.parametrize(
    ("config", "words"), [({"num_hidden_layers": 2}, "more than config.json counts"), ({"vocab_size": 700}, "shapes")]
)
def test_transformers_does_not_compute_another_model_than_the_files_hold(
    tmp_path: Path, config: dict[str, int], words: str
) -> None:
    source = _changed_tiny(tmp_path, config)
    with pytest.raises(EngineError, match=words):
        read_model(source, choose_implementation(source, Wanted.transformers), torch.float32)


def _changed_tiny(place: Path, config: dict[str, int]) -> ModelSource:
    folder = place / "changed"
    shutil.copytree(find_model("tiny").folder, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return find_model(str(folder))
