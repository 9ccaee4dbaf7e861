"""Rollout dumps of verl and RL logging board become runs; what is wrong with them is said by file and line."""

import gzip
import json
import math
import shutil

import pytest

from turnwise.errors import ConfigError, DataError
from turnwise.ext.verl.dumps import read as dumps
from turnwise.ext.verl.dumps.dialogue import Markers, read_output, read_prompt
from turnwise.ext.verl.dumps.read import import_dumps
from turnwise.ext.verl.dumps.rows import DumpFormat, read_row
from turnwise.storage.index import parse_line
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, read_status
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import CallStatus, FinishReason, Origin, Role, StopReason

CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'
TWO_TURNS = (
    f"Let me see. {CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\nIt is 42.<|im_end|>"
)


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def verl(**more):
    return {"input": "6*7?", "output": "42", "gts": "42", "score": 1.0, "step": 3} | more


def board(**more):
    return {"step": 1, "prompt": CHATML, "response": "42", "reward": 1.0} | more


def only(folder, file="trajectories/step_000003.parquet"):
    return read_trajectories(folder / file)


def metrics(folder):
    return RunDir(folder).read_jsonl("metrics.jsonl")


def test_verl_dumps_become_a_finished_run(tmp_path):
    dump = tmp_path / "dump"
    write(dump / "1.jsonl", verl(step=1, acc=True, format=0.5, pred="42"), verl(step=1, score=0.0, acc=False, format=1))
    write(dump / "2.jsonl", verl(step=2, acc=1, format=1.0), verl(step=2, input="1+1?", acc=0, score=0.25, format=1.0))
    done = import_dumps([dump], tmp_path / "runs" / "x")
    folder = tmp_path / "runs" / "x"
    assert (done.lines, done.train_steps, done.eval_steps, done.groups, done.bad) == (4, 2, 0, 3, 0)
    first, second = only(folder, "trajectories/step_000001.parquet")
    assert first.sample.id == second.sample.id and (first.sibling, second.sibling) == (0, 1)
    assert first.parts == {"acc": 1.0, "format": 0.5} and first.sample.info == {"pred": "42"}
    assert first.sample.ground_truth == "42" and first.reward == 1.0 and first.right is True
    assert first.segments == [] and first.turns[0].completion_tokens == 0
    assert "tokens" in first.artifacts["imported"]["unsaid"]
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["critic/score/mean"] == 0.5 and lines[1]["critic/score/min"] == 0.25
    assert lines[0]["train/accuracy/unknown"] == lines[0]["train/accuracy"] == 0.5
    assert lines[0]["reward_parts/unknown/format"] == 0.75
    assert not {name for name in lines[0] if name.startswith(("response_length", "actor/", "timing"))}
    assert "seconds" not in lines[0] and "tokens" not in lines[0]
    status = read_status(RunDir.open(folder))
    assert (status.state, status.command, status.step) == (State.FINISHED, "import-jsonl", 2)
    assert str(dump / "1.jsonl") in (folder / "config.yaml").read_text()
    shards = [parse_line(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    assert [shard.file for shard in shards] == [f"trajectories/step_00000{n}.parquet" for n in (1, 2)]


def test_groups_follow_the_uid_and_not_the_request_id(tmp_path):
    rows = [verl(uid="a", request_id="r1"), verl(uid="b", request_id="r2"), verl(uid="a", request_id="r3")]
    import_dumps([write(tmp_path / "3.jsonl", *rows)], tmp_path / "run")
    found = [(t.sample.id, t.sibling, t.sample.info["request_id"]) for t in only(tmp_path / "run")]
    assert found == [("a", 0, "r1"), ("a", 1, "r3"), ("b", 0, "r2")]


def test_the_step_is_the_row_s_or_the_file_name_s(tmp_path):
    row = verl()
    del row["step"]
    import_dumps([write(tmp_path / "17.jsonl", row, verl(step=4.0))], tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run/trajectories").iterdir()) == [
        "step_000004.parquet",
        "step_000017.parquet",
    ]
    with pytest.raises(DataError, match="line 1 has no step, and the file is not named"):
        import_dumps([write(tmp_path / "rows.jsonl", row)], tmp_path / "other")


def test_validation_dumps_become_evaluations(tmp_path):
    write(tmp_path / "val/3.jsonl", verl(acc=1), verl(acc=0, score=0))
    write(tmp_path / "train/3.jsonl", verl())
    done = import_dumps([tmp_path / "train"], tmp_path / "run", evaluations=[tmp_path / "val"])
    assert (done.train_steps, done.eval_steps) == (1, 1)
    assert len(only(tmp_path / "run", "eval/step_000003.parquet")) == 2
    assert [line["val/accuracy"] for line in metrics(tmp_path / "run") if "val/accuracy" in line] == [0.5]
    # A fork of RL logging board marks its rows, or its file.
    write(tmp_path / "board/rollout_data_rank_val0.jsonl", board())
    write(tmp_path / "board/rollout_data_rank0.jsonl", board(), board(validation=True))
    done = import_dumps([tmp_path / "board"], tmp_path / "other")
    assert len(only(tmp_path / "other", "eval/step_000001.parquet")) == 2
    assert len(only(tmp_path / "other", "trajectories/step_000001.parquet")) == 1


def test_a_chatml_conversation_with_tools_is_split(tmp_path):
    import_dumps([write(tmp_path / "3.jsonl", verl(input=CHATML, output=TWO_TURNS))], tmp_path / "run")
    (found,) = only(tmp_path / "run")
    assert [(m.role, m.text) for m in found.sample.prompt] == [
        (Role.SYSTEM, "Be brief."),
        (Role.USER, "What is 6*7?"),
    ]
    assert [m.role for m in found.messages[2:]] == [Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    first, last = found.turns
    assert first.message.content == f"Let me see. {CALL}" and first.message.answer == "Let me see."
    assert [(call.call.name, call.call.arguments, call.status) for call in first.calls] == [
        ("calculate", {"expression": "6*7"}, CallStatus.UNKNOWN)
    ]
    assert first.replies[0].text == "42" and first.replies[0].tool_call_id == first.calls[0].call.id
    assert last.message.text == "It is 42." and found.stop_reason is StopReason.UNKNOWN


def test_plain_role_lines_are_split_only_where_a_template_puts_them():
    prompt = "system\nBe brief.\nuser\nWho is the\nuser\nof it?\nassistant\n"
    opening = read_prompt(prompt)
    assert opening.markers is Markers.PLAIN
    assert [(m.role, m.text) for m in opening.messages] == [
        (Role.SYSTEM, "Be brief."),
        (Role.USER, "Who is the\nuser\nof it?"),
    ]
    replied = "calling\nuser\n<tool_response>\n42\n</tool_response>\nassistant\nIt is 42."
    assert [(p.role, p.text) for p in read_output(replied, Markers.PLAIN)] == [
        (Role.ASSISTANT, "calling"),
        (Role.USER, "<tool_response>\n42\n</tool_response>"),
        (Role.ASSISTANT, "It is 42."),
    ]
    alone = "The word is\nuser\nand nothing else."
    assert [(p.role, p.text) for p in read_output(alone, Markers.PLAIN)] == [(Role.ASSISTANT, alone)]
    assert read_output(replied, Markers.NONE)[0].text == replied
    for text in ("user\nhello", "hello\nassistant\n", "assistant\n", "", "system\nuser\nassistant\nand more words"):
        assert read_prompt(text).markers is Markers.NONE, text
        assert read_prompt(text).messages[0].text == text


def test_llama3_headers_are_split_and_an_open_thought_is_known():
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    prompt = "<|begin_of_text|>" + head.format("user") + "Hi<|eot_id|>" + head.format("assistant")
    opening = read_prompt(prompt)
    assert opening.markers is Markers.LLAMA3 and [m.text for m in opening.messages] == ["Hi"]
    output = "a<|eom_id|>" + head.format("ipython") + "42<|eot_id|>" + head.format("assistant") + "b"
    assert [(p.role, p.text) for p in read_output(output, opening.markers)] == [
        (Role.ASSISTANT, "a"),
        (Role.TOOL, "42"),
        (Role.ASSISTANT, "b"),
    ]
    assert read_prompt(CHATML + "<think>\n").in_reasoning and not read_prompt(CHATML).in_reasoning


@pytest.mark.parametrize(
    "text",
    [
        "words first <|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|>critic\nhi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nhi<|im_end|> words outside <|im_start|>assistant\n",
    ],
)
def test_markers_that_make_no_sense_leave_the_text_whole(text):
    assert read_prompt(text).messages[0].text == text
    output = text.replace("<|im_start|>user\n", "<|im_start|>critic\n")
    assert read_output(output, Markers.CHATML)[0].text == output


def test_calls_and_replies_are_paired_in_order(tmp_path):
    bad = "<tool_call>\nnot json\n</tool_call>"
    other = CALL.replace("6*7", "1+1")
    reply = "<tool_response>\n{}\n</tool_response>"
    both = reply.format("42") + "\n" + reply.format("2") + "\nGo on."
    output = f"{bad}{CALL}{other}<|im_end|>\n<|im_start|>user\n{both}<|im_end|>\n<|im_start|>assistant\n{CALL}"
    import_dumps([write(tmp_path / "3.jsonl", verl(input=CHATML, output=output))], tmp_path / "run")
    (found,) = only(tmp_path / "run")
    first, last = found.turns
    assert [call.status for call in first.calls] == [CallStatus.MALFORMED, CallStatus.UNKNOWN, CallStatus.UNKNOWN]
    assert [(m.role, m.text) for m in first.replies] == [(Role.TOOL, "42"), (Role.TOOL, "2"), (Role.USER, "Go on.")]
    assert [m.tool_call_id for m in first.replies[:2]] == [call.call.id for call in first.calls[1:]]
    assert last.calls == [] and found.stop_reason is StopReason.UNKNOWN


def tokens_of(text):
    """Pieces of a few characters, specials whole, as a tokenizer would decode them one by one."""
    import re

    return re.findall(r"<\|\w+\|>|\n|[^<\n]{1,3}|<", text)


def test_board_rows_keep_their_tokens_with_origins(tmp_path):
    pieces = tokens_of(TWO_TURNS)
    count = len(pieces)
    row = board(
        response=TWO_TURNS,
        response_tokens=pieces,
        logprobs=[-0.5] * count,
        ref_logprobs=[-1.0] * count,
        values=[0.25] * count,
        token_rewards=[0.0] * (count - 1) + [1.0],
        rm_response="well done",
        ref_reward=0.5,
    )
    import_dumps([write(tmp_path / "rollout_data_rank0.jsonl", row)], tmp_path / "run")
    (found,) = only(tmp_path / "run", "trajectories/step_000001.parquet")
    (ledger,) = found.segments
    texts = json.loads((tmp_path / "run/tokens.json").read_text())
    assert "".join(texts[token] for token in ledger.token_ids) == TWO_TURNS
    written = {origin: "".join(texts[t] for t in ledger.token_ids[ledger.origins == origin]) for origin in Origin}
    assert written[Origin.POLICY] == f"Let me see. {CALL}<|im_end|>It is 42.<|im_end|>"
    assert written[Origin.TOOL] == "<tool_response>\n42\n</tool_response>"
    assert written[Origin.USER] == written[Origin.PROMPT] == ""
    assert all((p == -0.5) == m for p, m in zip(ledger.logprobs, ledger.loss_mask, strict=True))
    assert all((v == 0.25) == m for v, m in zip(ledger.training.values, ledger.loss_mask, strict=True))
    assert ledger.training.rewards[-1] == 1.0 and ledger.training.logprobs is None
    policy = int(ledger.loss_mask.sum())
    assert [turn.completion_tokens for turn in found.turns] == [(ledger.turns == 0).sum() - _other(ledger, 0), 4]
    assert sum(turn.completion_tokens for turn in found.turns) == policy
    assert ledger.loss_mask[found.turns[1].start] and ledger.turns[found.turns[1].start] == 1
    assert found.turns[-1].finish_reason is FinishReason.STOP
    (line,) = metrics(tmp_path / "run")
    assert line["response_length/mean"] == count and line["tokens"] == policy
    assert line["actor/kl_loss"] == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert line["critic/rewards/mean"] == 1.0 and line["critic/ref_reward/mean"] == 0.5
    assert found.sample.info == {"ref_reward": 0.5} and found.artifacts["judge"] == {"rm_response": "well done"}


def _other(ledger, turn):
    return int(((ledger.turns == turn) & ~ledger.loss_mask).sum())


def test_an_answer_without_its_end_token_was_cut(tmp_path):
    rows = [
        board(response="42 a", response_tokens=["42", " a"], logprobs=[-1, -2]),
        board(response_tokens=["42", "</s>"]),
    ]
    import_dumps([write(tmp_path / "rollout_data_rank0.jsonl", *rows)], tmp_path / "run")
    cut, whole = only(tmp_path / "run", "trajectories/step_000001.parquet")
    assert (cut.stop_reason, cut.turns[0].finish_reason) == (StopReason.TURN_TRUNCATED, FinishReason.LENGTH)
    assert whole.stop_reason is StopReason.ANSWERED and "stop_reason" not in whole.artifacts["imported"]["unsaid"]
    assert all(math.isnan(value) for value in whole.segments[0].logprobs)


def test_parts_of_characters_and_dropped_specials_still_align(tmp_path):
    output = TWO_TURNS.replace("Let me see.", "Grüße 漢字")
    pieces = tokens_of(TWO_TURNS.replace("Let me see.", "@@"))
    place = next(n for n, piece in enumerate(pieces) if piece.startswith("@@"))
    head = ["Gr", "\ufffd", "\ufffd", "ße", " \ufffd", "\ufffd", "\ufffd", "\ufffd", pieces[place].removeprefix("@@")]
    pieces[place : place + 1] = head
    import_dumps(
        [write(tmp_path / "rollout_data_rank0.jsonl", board(response=output, response_tokens=pieces))], tmp_path / "run"
    )
    (found,) = only(tmp_path / "run", "trajectories/step_000001.parquet")
    assert found.segments and sum(found.segments[0].loss_mask[:8]) == 8
    assert Origin.TOOL in found.segments[0].origins


def test_tokens_that_do_not_spell_a_conversation_are_left_out_and_counted(tmp_path):
    pieces = ["entirely", "other", "words"]
    row = board(response=TWO_TURNS, response_tokens=pieces, logprobs=[-1.0] * 3)
    done = import_dumps([write(tmp_path / "rollout_data_rank0.jsonl", row)], tmp_path / "run")
    assert sum(count for note, count in done.notes.items() if "do not spell" in note) == 1
    (found,) = only(tmp_path / "run", "trajectories/step_000001.parquet")
    assert found.segments == [] and len(found.turns) == 2


def test_rank_files_are_merged_by_step(tmp_path):
    write(tmp_path / "d/rollout_data_rank0.jsonl", board(step=2), board(step=1), board(step=2, response="a"))
    write(tmp_path / "d/rollout_data_rank1.jsonl", board(step=1, response="b"), board(step=2, response="c"))
    import_dumps([tmp_path / "d", tmp_path / "d/rollout_data_rank0.jsonl"], tmp_path / "run")
    for step, answers in ((1, ["42", "b"]), (2, ["42", "a", "c"])):
        found = only(tmp_path / "run", f"trajectories/step_00000{step}.parquet")
        assert [t.answers[-1].text for t in found] == answers
        assert [t.sibling for t in found] == list(range(len(answers)))


def test_images_are_kept_only_from_inside_the_named_folder(tmp_path):
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 4), "red").save(tmp_path / "pictures/in.png")
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "secret.png")
    (tmp_path / "pictures/link.png").symlink_to(tmp_path / "secret.png")
    names = ["in.png", "../secret.png", str(tmp_path / "secret.png"), "link.png", "gone.png", "a\0b", "x" * 5000]
    dump = write(tmp_path / "rollout_data_rank0.jsonl", board(image_path=names, data_source="charts"))
    done = import_dumps([dump], tmp_path / "run", images=tmp_path / "pictures")
    (found,) = only(tmp_path / "run", "trajectories/step_000001.parquet")
    assert [image.source for image in found.sample.images] == [str(tmp_path / "pictures/in.png")]
    assert len(list((tmp_path / "run/images").glob("*.png"))) == 1 and done.notes == {"images left out": 6}
    assert found.sample.data_source == "charts" and found.sample.info["image_path"] == names
    import_dumps([dump], tmp_path / "without")
    assert not (tmp_path / "without/images").exists()


BAD = {
    b"{": "is not JSON",
    b"[1, 2]": "is a list, not an object",
    b"\xff\xfe": "is not UTF-8 text",
    b'{"input": ' + b"[" * 200_000: "nested too deeply",
    b'{"a": 1, "b": 2}': "has no known shape. Keys found: 'a', 'b'. Shapes known: verl: input, output",
    b"{}": "Keys found: none",
    json.dumps(verl(input=["a"])).encode(): "input is a list, not text",
    json.dumps(verl(output=None)).encode(): "output is null, not text",
    json.dumps(verl(score="1")).encode(): "score is text, not a number",
    json.dumps(verl(score=True)).encode(): "score is a truth value, not a number",
    json.dumps(verl(score=math.nan)).encode(): "score is nan",
    json.dumps(verl(score=10**400)).encode(): "score is too large a number",
    json.dumps(verl(step=-1)).encode(): "step is -1, not a whole number",
    json.dumps(verl(step=1.5)).encode(): "step is 1.5",
    json.dumps(verl(step=math.nan)).encode(): "step is nan",
    json.dumps(verl(step=10**30)).encode(): "not a whole number from 0",
    b'{"input": "a", "output": "b", "score": ' + b"9" * 5000 + b"}": "is not JSON",
    b'{"input": "a", "output": "b", "score": 1e400, "step": 1}': "score is inf",
    json.dumps(verl(uid=[1])).encode(): "uid is a list, not text",
    json.dumps(board(response_tokens="abc")).encode(): "response_tokens is text, not a list",
    json.dumps(board(response_tokens=["a", 1])).encode(): r"response_tokens\[1\] is a number, not text",
    json.dumps(board(response_tokens=["a"], logprobs=[-1, -2])).encode(): "logprobs has 2 values for 1 response_tokens",
    json.dumps(board(response_tokens=["a"], values=["x"])).encode(): r"values\[0\] is text, not a number",
    json.dumps(board(response_tokens=["a"], ref_logprobs=3)).encode(): "ref_logprobs is a number, not a list",
    json.dumps(board(logprobs=[-1.0])).encode(): "has logprobs without response_tokens",
    json.dumps(board() | verl()).encode(): "fits several shapes",
}


@pytest.mark.parametrize("line", BAD, ids=[text[:40] for text in BAD.values()])
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line):
    dump = write(tmp_path / "3.jsonl", verl(), b"", line)
    with pytest.raises(DataError, match=f"3.jsonl, line 3 .*{BAD[line]}"):
        import_dumps([dump], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    done = import_dumps([dump], tmp_path / "run", skip_bad=True)
    assert (done.lines, done.bad) == (1, 1) and "line 3" in done.first_bad
    assert "1 bad lines left out" in (tmp_path / "run/plan.txt").read_text()


def test_strange_but_legal_values_are_kept(tmp_path):
    odd = verl(
        input="\ud800 \u202e<script>alert(1)</script>",
        output="",
        gts={"a": [math.inf, {"b": 10**40}]},
        score=10**30,
        huge=10**400,
        nothing=None,
        lost=math.nan,
        acc=0.5,
        __num_turns__=4,
        deep={"x": [[[1]]]},
    )
    import_dumps([write(tmp_path / "3.jsonl", odd)], tmp_path / "run")
    (found,) = only(tmp_path / "run")
    assert found.reward == 1e30 and found.parts == {"acc": 0.5}
    assert found.sample.ground_truth == {"a": ["inf", {"b": "1.000000e+40"}]}
    assert found.sample.info["lost"] == "nan" and found.sample.info["huge"] == "a number of 1329 bits"
    assert found.sample.info["__num_turns__"] == 4 and found.sample.info["deep"] == {"x": [[[1]]]}
    assert found.turns[0].message.text == "" and found.sample.prompt[0].text.endswith("</script>")


def test_not_computed_and_infinite_token_numbers_stay_out_of_the_metrics(tmp_path):
    row = board(
        response_tokens=["4", "2"], logprobs=[-1.0, math.nan], ref_logprobs=[-1e300, None], values=[math.inf, 1.0]
    )
    import_dumps([write(tmp_path / "rollout_data_rank0.jsonl", row)], tmp_path / "run")
    (line,) = metrics(tmp_path / "run")
    assert line["actor/kl_loss"] == pytest.approx(math.exp(-20) - 1 + 20) and line["critic/values/max"] == 1.0


def test_files_that_cannot_be_imported(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(DataError, match="nothing to import in 1 file; all are empty"):
        import_dumps([tmp_path / "empty.jsonl"], tmp_path / "run")
    with gzip.open(tmp_path / "1.jsonl", "wb") as file:
        file.write(json.dumps(verl()).encode())
    with pytest.raises(DataError, match="is compressed; unpack it first"):
        import_dumps([tmp_path / "1.jsonl"], tmp_path / "run")
    with pytest.raises(DataError, match="nothing to import .* 2 bad lines, the first: .*line 1"):
        import_dumps([write(tmp_path / "2.jsonl", b"x", b"y")], tmp_path / "run", skip_bad=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no .jsonl files"):
        import_dumps([tmp_path / "folder"], tmp_path / "run")
    write(tmp_path / "folder/deeper/3.jsonl", verl())
    with pytest.raises(DataError, match="there are some in .*deeper"):
        import_dumps([tmp_path / "folder"], tmp_path / "run")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        import_dumps([tmp_path / "nowhere"], tmp_path / "run")
    with pytest.raises(ConfigError, match="no file to import"):
        import_dumps([], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_refused_and_left_alone(tmp_path):
    dump = write(tmp_path / "3.jsonl", verl())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
        import_dumps([dump], tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_a_line_that_is_too_long_is_passed_over_without_being_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(dumps, "LONGEST_LINE", 1000)
    dump = write(tmp_path / "3.jsonl", verl(output="x" * 5000), verl())
    with pytest.raises(DataError, match="line 1 is longer than"):
        import_dumps([dump], tmp_path / "run")
    assert import_dumps([dump], tmp_path / "run", skip_bad=True).lines == 1
    assert only(tmp_path / "run")[0].answers[0].text == "42"


def test_an_import_that_breaks_off_says_so_in_its_status(tmp_path):
    dump = write(tmp_path / "3.jsonl", verl())

    def vanish(done, total):
        shutil.rmtree(tmp_path / "run/trajectories", ignore_errors=True)
        dump.write_bytes(b"{}" + b" " * (dump.stat().st_size - 2)) if done >= total // 2 else None

    with pytest.raises(DataError, match="changed while it was read"):
        import_dumps([dump], tmp_path / "run", progress=vanish)
    status = read_status(RunDir.open(tmp_path / "run"))
    assert status.state is State.FAILED and "changed while it was read" in status.reason


def test_hostile_repetition_is_read_in_linear_time():
    """Texts that would make a backtracking parser hang; the test hangs if this one does."""
    many = "<tool_response>" * 50_000
    assert read_output(CHATML + many, Markers.CHATML)
    assert read_prompt("<|im_start|>user\n" + many + "<|im_end|>\n<|im_start|>assistant\n").messages
    assert read_prompt("user\n" * 100_000 + "assistant\n").messages
    assert read_output("<|im_start|>" * 100_000 + "\n" * 100_000, Markers.CHATML)
    row = board(response=TWO_TURNS, response_tokens=["\ufffd"] * 100_000 + ["zzz"])
    assert read_row(json.dumps(row).encode(), DumpFormat.AUTO, None).tokens is not None
