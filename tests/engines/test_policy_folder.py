"""A saved policy is what was trained, for those who load it elsewhere: weights, template in use, tokens that end a turn."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import turnwise
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer, load_template
from turnwise.engines.model import attention
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.model.sources import find_model
from turnwise.errors import EngineError
from turnwise.system.plugins import builtin

TINY = Path(next(iter(turnwise.__path__))) / "engines" / "bundled" / "tiny"
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the bundled model to spoil."""
    return Path(shutil.copytree(TINY, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.py")))


def template_file(folder: Path, mark: str) -> str:
    path = folder / "other.jinja"
    path.write_text(load_template("chatml_hermes") + "{{- '" + mark + "' if add_generation_prompt }}")
    return str(path)


def change(path: Path, **fields: Any) -> None:
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**old, **fields}))


def test_others_load_the_weights_the_template_in_use_and_the_end_tokens(source: Path, tmp_path: Path) -> None:
    change(source / "generation_config.json", temperature=0.6, do_sample=True, eos_token_id=1)
    change(source / "tokenizer_config.json", chat_template="{{ 'the template of the source' }}")
    tokenizer = Tokenizer(source, template_file(tmp_path, "MARK"))
    decoder = Decoder.read(source)
    PolicyFolder.of(find_model(str(source)), tokenizer, {2, 0}).save(tmp_path / "policy", decoder)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "policy")
    text = theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.apply_template(ASKED, [], True, {}) and text.endswith("MARK")
    assert theirs(text)["input_ids"] == AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    generation = GenerationConfig.from_pretrained(tmp_path / "policy")
    assert (generation.eos_token_id, generation.temperature) == ([0, 2], 0.6)
    ids = torch.arange(40)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()(ids.unsqueeze(0)).logits[0]
        ours = decoder.logits(decoder(ModelInputs(ids, ids), attention.packed([40])))
    torch.testing.assert_close(logits, ours, atol=1e-4, rtol=1e-4)


def test_the_bundled_models_own_ends_are_the_ones_a_run_stops_at(tmp_path: Path) -> None:
    renderer = Renderer(Tokenizer(TINY), builtin("turnwise.chat.formats", "hermes", "tool format"))
    PolicyFolder.of(find_model("tiny"), renderer.tokenizer, renderer.stop_ids).save(tmp_path, Decoder.read(TINY))
    found = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert set(found if isinstance(found, list) else [found]) == set(renderer.stop_ids)


def test_several_templates_stay_several(source: Path, tmp_path: Path) -> None:
    (source / "chat_template.jinja").unlink()
    several = [{"name": "default", "template": "{{ 'plain' }}"}, {"name": "tool_use", "template": "{{ 'with tools' }}"}]
    change(source / "tokenizer_config.json", chat_template=several)
    PolicyFolder.of(find_model(str(source)), Tokenizer(source), {2}).save(tmp_path / "policy", Decoder.read(source))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert theirs.chat_template == {"default": "{{ 'plain' }}", "tool_use": "{{ 'with tools' }}"}


def test_a_source_that_goes_away_is_no_loss(source: Path, tmp_path: Path) -> None:
    decoder, policy = Decoder.read(source), PolicyFolder.of(find_model(str(source)), Tokenizer(source), {2})
    shutil.rmtree(source)
    policy.save(tmp_path / "policy", decoder)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token_id == 2


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "", ".", "a/b", "a\x00b"])
def test_a_template_cannot_be_written_elsewhere(source: Path, name: str) -> None:
    tokenizer = Tokenizer(source)
    tokenizer._hf.chat_template = {"default": "{{ 1 }}", name: "{{ 2 }}"}
    with pytest.raises(EngineError, match="name for a chat template"):
        PolicyFolder.of(find_model(str(source)), tokenizer, {2})


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_broken_generation_config_is_found_before_training(source: Path, text: str) -> None:
    (source / "generation_config.json").write_text(text)
    with pytest.raises(EngineError, match="generation_config"):
        PolicyFolder.of(find_model(str(source)), Tokenizer(source), {2})
