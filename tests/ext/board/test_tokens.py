"""The token view: exact ids, text that joins to the whole, numbers where there are any."""

import json
import math
import os
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from turnwise.ext.board.table import NotThere, Table
from turnwise.ext.board.tokens import tokens
from turnwise.ledger import NO_VERSION, TokenTrainingData, VersionRun
from turnwise.storage.index import record
from turnwise.storage.token_texts import decode_tokens
from turnwise.types import Ledger, Origin

FILE, SHARD = "trajectories/step_000001.parquet", "trajectories/step_000001"


@pytest.fixture(scope="module")
def byte_level():
    """Single bytes and a few merges, so that an emoji takes four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|im_end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["hello world"] * 5, trainer)
    return tokenizer


def view(run, trajectory):
    record(run, FILE, [trajectory])
    table = Table(run)
    table.refresh(None)
    found = tokens(run, table, SHARD, 0)
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    return found


def with_ids(trajectory, ids):
    ledger = Ledger()
    ledger.append(ids, Origin.PROMPT, 0)
    trajectory.segments = [ledger]
    return trajectory


def test_pieces_join_to_the_text_and_split_characters_show_once_whole(byte_level, run_dir, make):
    text = "hello 😀 wörld 👩‍👧<|im_end|>\n"
    byte_level.save(str(run_dir.path / "tokenizer.json"))
    ids = byte_level.encode(text).ids
    found = view(run_dir, with_ids(make(), ids))["segments"][0]
    assert found["ids"] == ids and len(found["pieces"]) == len(ids)
    assert "".join(found["pieces"]) == text
    place = found["pieces"].index("😀")
    assert found["pieces"][place - 3 : place] == ["", "", ""]
    assert "<|im_end|>" in found["pieces"]


def test_any_ids_join_to_their_decoding(byte_level):
    draw = random.Random(7)
    for _ in range(200):
        ids = [draw.randrange(byte_level.get_vocab_size()) for _ in range(draw.randrange(1, 25))]
        pieces = decode_tokens(byte_level, ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=False)


def test_ids_without_a_token_show_as_numbers(byte_level):
    hello = byte_level.encode("hello").ids
    assert decode_tokens(byte_level, [99_999, *hello, 88_888]) == [
        "#99999",
        *decode_tokens(byte_level, hello),
        "#88888",
    ]
    assert decode_tokens(byte_level, []) == []


def test_bytes_that_rewrite_what_came_before_are_decoded_one_by_one():
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert decode_tokens(tokenizer, [256, 0xC3, 0xA4, 256]) == [" a", "", "ä", " a"]
    assert decode_tokens(tokenizer, [256, 50, 0xC0, 256]) == [" a", "2", "\ufffd", " a"]


def test_numbers_stand_at_the_policys_tokens_only(run_dir, make):
    found = view(run_dir, make(learned=True))
    ledger = found["segments"][0]
    assert found["origin_names"] == ["prompt", "policy", "tool", "user", "template"]
    assert ledger["ids"] == [5, 6, 7, 8, 9, 7, 8] and ledger["origins"] == [0, 0, 1, 1, 2, 1, 1]
    assert ledger["turns"] == [0, 0, 0, 0, 0, 1, 1]
    assert ledger["logprobs"] == [None, None, -0.5, -0.25, None, -0.5, -0.25]
    assert ledger["gaps"] == [None, None, -0.25, -0.5, None, -0.25, -0.5]
    assert ledger["ratios"][2] == pytest.approx(math.exp(0.25), abs=1e-6) and ledger["ratios"][4] is None
    assert ledger["entropies"][2] == 0.5 and ledger["entropies"][0] is None
    assert ledger["values"] is None and ledger["advantages"] is None and ledger["rewards"] is None
    assert ledger["pieces"] == ["#5", "#6", "#7", "#8", "#9", "#7", "#8"]
    assert found["ids_are_real"] is True and found["problem"] is None


def test_what_was_not_computed_is_null(run_dir, make):
    trajectory = make(calls=[])
    trajectory.segments[0].training = TokenTrainingData(
        logprobs=[0.0, 0.0, math.nan, -1000.0], new_logprobs=[0.0, 0.0, -1.0, 1000.0], values=[0.0, 0.0, math.inf, 2.0]
    )
    ledger = view(run_dir, trajectory)["segments"][0]
    assert ledger["gaps"] == [None, None, None, -999.75]
    assert ledger["ratios"] == [None] * 4, "exp(2000) is no number to show"
    assert ledger["values"] == [None, None, None, 2.0]


def test_without_training_there_are_only_logprobs(run_dir, make):
    ledger = view(run_dir, make())["segments"][0]
    others = ("entropies", "advantages", "ratios", "gaps", "values", "ref_logprobs", "rewards")
    assert all(ledger[name] is None for name in others) and ledger["logprobs"][2] == -0.5


def test_versions_are_shown_where_there_are_several(run_dir, make):
    trajectory = make(calls=[])
    assert view(run_dir, trajectory)["segments"][0]["versions"] is None
    trajectory.segments[0].append([3, 4, 5], Origin.POLICY, 1, [-0.5] * 3, (VersionRun(6, 1), VersionRun(7, 2)))
    trajectory.segments[0].append([9], Origin.USER, 1)
    trajectory.segments[0].append([9], Origin.POLICY, 2, [-0.5], NO_VERSION)
    ledger = view(run_dir, trajectory)["segments"][0]
    assert ledger["versions"] == [None, None, 0, 0, 6, 7, 7, None, None]


def test_an_imported_runs_tokens_come_from_its_list(run_dir, make):
    (run_dir.path / "tokens.json").write_text(json.dumps(["a", "b", "c", "d", "e", " five", " six", "7\n", "\ud83d"]))
    found = view(run_dir, make(calls=[]))
    assert found["segments"][0]["pieces"] == [" five", " six", "7\n", "\ufffd"]
    assert found["ids_are_real"] is False


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokens.json", "[1, 2]"), ("tokens.json", "{"), ("tokenizer.json", "")],
)
def test_a_file_that_cannot_be_used_is_named(run_dir, make, name, content):
    (run_dir.path / name).write_text(content)
    found = view(run_dir, make())
    assert found["segments"][0]["pieces"][0] == "#5" and name in found["problem"]


def test_a_new_tokenizer_is_read_again(byte_level, run_dir, make):
    path = run_dir.path / "tokenizer.json"
    path.write_text("{}")
    assert view(run_dir, make())["problem"]
    byte_level.save(str(path))
    os.utime(path, ns=(1, 1))
    assert view(run_dir, make())["problem"] is None


def test_no_segments_for_an_endpoint_and_nothing_for_unknown_rows(run_dir, make):
    trajectory = make()
    trajectory.segments = []
    assert view(run_dir, trajectory)["segments"] == []
    table = Table(run_dir)
    table.refresh(None)
    with pytest.raises(NotThere):
        tokens(run_dir, table, SHARD, 1)
