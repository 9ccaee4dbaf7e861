"""A file of weights is read without running anything in it, whatever it asks for."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from turnwise.errors import StorageError
from turnwise.ext.weights.distributed import read_distributed
from turnwise.ext.weights.pickles import Record, read_head, read_pickle

Turnwise = Callable[..., tuple[int, str]]


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def hostile(mark: Path) -> list[Any]:
    """What would make `mark` if it were run."""
    line = f"open({str(mark)!r}, 'w').close()"
    return [
        Calls(os.system, f"touch '{mark}'"),
        Calls(exec, line),
        Calls(eval, line),
        Calls(getattr, Calls(__import__, "os"), "system"),
        Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch '{mark}'"))),
        Calls(torch.load, str(mark)),
    ]


def refused(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(StorageError) as caught:
        read(path)
    return str(caught.value)


def test_calls_in_a_shard_are_refused_by_name_and_not_made(tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "model_world_size_1_rank_0.pt"
    for call in hostile(mark):
        for content in (call, {"model.norm.weight": torch.ones(2), "more": call}, [call]):
            torch.save(content, path)
            said = refused(read_pickle, path)
            assert "nothing of it is run" in said or "cannot be read" in said
            assert not mark.exists()
    torch.save({"a": Calls(os.system, "true")}, path)
    assert f"{path} names posix.system" in refused(read_pickle, path)
    torch.save({"a": Record(1)}, path)
    assert isinstance(read_pickle(path)["a"], Record), "a record of ours is a record"


def test_files_that_are_no_pickles_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content in (b"", b"PK", pickle.dumps({"a": 1}), os.urandom(512), b"\x80\x02c__main__\nx\n."):
        path.write_bytes(content)
        assert "cannot be read" in refused(read_pickle, path) or "names __main__.x" in refused(read_pickle, path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refused(read_pickle, path), "a pipe would wait for ever"
    assert "cannot be read" in refused(read_pickle, tmp_path / "nowhere")


def test_whole_commands_on_hostile_checkpoints(shards: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    fsdp = shutil.copytree(shards / "two/qwen2", tmp_path / "fsdp")
    torch.save({"model.norm.weight": Calls(os.system, f"touch '{mark}'")}, fsdp / "model_world_size_2_rank_1.pt")
    grid = tmp_path / "grid" / "mp_rank_00"
    grid.mkdir(parents=True)
    shutil.copytree(shards / "two/qwen2/huggingface", tmp_path / "grid/huggingface")
    torch.save({"model": {}, "args": Calls(os.system, f"touch '{mark}'")}, grid / "model_optim_rng.pt")
    spread = shutil.copytree(shards / "three/dcp", tmp_path / "dcp")
    (spread / ".metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch '{mark}'")))
    for source in (fsdp, tmp_path / "grid", spread):
        code, said = turnwise("weights", "merge", source, tmp_path / "out")
        assert code == 2 and "system" in said and "nothing of it is run" in said
        assert not mark.exists() and not (tmp_path / "out").exists()


# --- distributed checkpoints -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(3, dtype=torch.bfloat16), "step": 4}
    dcp.save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def test_a_distributed_checkpoint_is_read_without_torch_distributed(saved: Path) -> None:
    found = read_distributed(saved)
    assert sorted(found) == ["a", "b"], "what is no tensor is passed over"
    assert torch.equal(found["a"].read(), torch.arange(12.0).view(3, 4)) and found["b"].dtype is torch.bfloat16


class OlderPython(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does, by `getattr`."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_head_that_an_older_python_wrote(saved: Path) -> None:
    head = saved / ".metadata"
    with head.open("rb") as file:
        table = pickle.load(file)
    with head.open("wb") as file:
        OlderPython(file, protocol=pickle.DEFAULT_PROTOCOL).dump(table)
    assert b"getattr" in head.read_bytes()
    assert torch.equal(read_distributed(saved)["a"].read(), torch.arange(12.0).view(3, 4))


def test_heads_that_name_code_or_files_elsewhere(saved: Path, tmp_path: Path) -> None:
    mark, head = tmp_path / "ran", saved / ".metadata"
    good = head.read_bytes()
    for call in hostile(mark):
        head.write_bytes(pickle.dumps(call))
        assert "nothing of it is run" in refused(read_head, head) and not mark.exists()
    for content in (b"", good[:-40], pickle.dumps([1]), b"\x80\x04."):
        head.write_bytes(content)
        assert refused(read_head, head).startswith(str(head))
    (tmp_path / "secret").write_text("secret")
    head.write_bytes(good.replace(b"__0_0.distcp", b"../secret\x00\x00\x00"))
    assert "which is not a file beside it" in refused(read_distributed, saved)
    head.write_bytes(good)
    part = saved / "__0_0.distcp"
    content = part.read_bytes()
    part.write_bytes(content[:-600])
    assert "before" in refused(read_distributed, saved)
    part.unlink()
    assert f"{saved} lacks __0_0.distcp" in refused(read_distributed, saved)


def test_calls_in_a_part_of_a_distributed_checkpoint(saved: Path, tmp_path: Path) -> None:
    mark, part = tmp_path / "ran", saved / "__0_0.distcp"
    original = part.read_bytes()
    for call in hostile(mark):
        made = io.BytesIO()
        torch.save(call, made)
        part.write_bytes((made.getvalue() + b"\0" * len(original))[: len(original)])
        for stored in read_distributed(saved).values():
            with pytest.raises(StorageError):
                stored.read()
        assert not mark.exists()


def test_a_pickle_with_a_call_hidden_in_a_tensor(tmp_path: Path) -> None:
    """The table of names is that of what is run: a call deep in a state is found too."""
    mark, path = tmp_path / "ran", tmp_path / "model.pt"
    torch.save({"model.norm.weight": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            if name.endswith("data.pkl"):
                content = content.replace(b"ccollections\nOrderedDict\n", b"cos\nsystem\n")
                assert b"cos\nsystem\n" in content
            archive.writestr(name, content)
    assert "os.system" in refused(read_pickle, path) and not mark.exists()
