"""The tokenizer wrapper: offsets, cuts, left context, verbatim decoding, templates by name."""

import json
import shutil
from pathlib import Path

import pytest
from chat_families import FAMILIES, Family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import turnwise
from turnwise.chat.tokenizer import Tokenizer, load_template, occurrences
from turnwise.errors import TemplateError

TEXTS = [
    "",
    " ",
    "plain",
    "  two  spaces \n\n",
    "é🙂東京",
    "a<|im_end|>b",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<think>x</think>",
]


@pytest.fixture(scope="module")
def chatml(renderer):
    return renderer("qwen25").tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_cover_the_text_white_space_included(chatml, text):
    encoding = chatml.encode(text)
    covered = sorted({position for start, end in encoding.offsets for position in range(start, end)})
    assert covered == list(range(len(text)))
    assert chatml.decode(encoding.ids) == text


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), cuts=st.sets(st.integers(0, 40)))
def test_cut_text_decodes_to_itself(chatml, text, cuts):
    encoding = chatml.encode(text, cuts=sorted(cut for cut in cuts if cut <= len(text)), after="")
    assert chatml.decode(encoding.ids) == text
    assert len(encoding.ids) == len(encoding.offsets)
    assert all(0 <= start <= end <= len(text) for start, end in encoding.offsets)


def test_left_context_gives_the_tokens_of_a_longer_text(renderer):
    tokenizer = renderer("llama2").tokenizer
    whole = tokenizer.encode("</s>hello world").ids
    assert tokenizer.encode("hello world", after="</s>").ids == whole[1:]
    assert tokenizer.encode("hello world", after="").ids == whole[1:]
    assert tokenizer.encode("hello world").ids != whole[1:], "at the start of a sequence a word gets its space"
    swallowing = renderer("phi").tokenizer
    assert swallowing.decode(swallowing.encode("\n<|user|>", after="<|end|>").ids) == "<|user|>"
    assert swallowing.decode(swallowing.encode("\n<|user|>", after="").ids) == "\n<|user|>"


def test_no_control_token_that_takes_white_space_serves_as_left_context(tmp_path):
    control = FAMILIES["phi"].control[::-1]
    tokenizer = Tokenizer(Family("phi", control, "<|endoftext|>", strips=control[:-1]).build(tmp_path))
    assert tokenizer.decode(tokenizer.encode("\n<|user|>", after="").ids) == "\n<|user|>"


def test_settings_saved_for_training_do_not_cut_or_pad(folder, tmp_path):
    copy = shutil.copytree(folder("qwen25"), tmp_path / "copy")
    saved = json.loads((copy / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (copy / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(copy)
    assert (
        tokenizer.decode(tokenizer.encode("one two three four five six seven").ids)
        == "one two three four five six seven"
    )
    assert len(tokenizer.encode("a").ids) == 1


def test_occurrences_overlap():
    assert occurrences(("aa", "b"), "aaab") == [(0, 2), (1, 3), (3, 4)]
    assert occurrences((), "x") == []


def test_a_folder_without_a_template_says_what_to_do(folder, tmp_path):
    copy = shutil.copytree(folder("qwen25"), tmp_path / "bare")
    for path in copy.glob("*.jinja"):
        path.unlink()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TemplateError, match="chat.template=FILE or chatml_hermes"):
        Tokenizer(copy)
    assert Tokenizer(copy, "chatml_hermes").vocab_size > 400


def test_templates_by_name_and_by_path(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("hello")
    assert load_template(str(path)) == "hello"
    assert "<|im_start|>" in load_template("chatml_hermes")
    with pytest.raises(TemplateError, match="did you mean 'chatml_hermes'"):
        load_template("chatml_hermse")


@pytest.mark.parametrize(
    ("kind", "named"),
    [("llama", "TokenizersBackend"), ("llama", "LlamaTokenizerFast"), ("qwen2", "Qwen2Tokenizer"),
     ("qwen2", "PreTrainedTokenizerFast"), ("unheard_of", "PreTrainedTokenizerFast")],
)  # fmt: skip
def test_the_class_is_the_one_that_the_library_takes(tmp_path, kind, named):
    """Though the library is given a config that knows the model's kind and nothing of it."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(Path(next(iter(turnwise.__path__))) / "engines" / "bundled" / "tiny", folder)
    for name, change in (("config", {"model_type": kind}), ("tokenizer_config", {"tokenizer_class": named})):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found, expected = Tokenizer(folder)._hf, AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected) and found.init_kwargs == expected.init_kwargs
    assert found.get_vocab() == expected.get_vocab() and found.all_special_ids == expected.all_special_ids
    assert found("é 12 <|im_end|>\n x")["input_ids"] == expected("é 12 <|im_end|>\n x")["input_ids"]
