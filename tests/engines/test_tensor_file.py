"""Tensor files: what the format's own library reads of them, and who may read them."""

import os
from pathlib import Path

import pytest
import torch
from architectures import build
from safetensors import safe_open
from safetensors.torch import load_file

from turnwise.engines.model.tensor_file import write_tensors
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.errors import EngineError


def test_the_library_reads_every_kind_of_tensor_back(tmp_path: Path) -> None:
    shared = torch.arange(24.0).view(4, 6)
    tensors = {
        "odd": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "upper": shared[:2],
        "lower": shared[2:],
        "turned": shared.t(),
        "step": torch.tensor(7.0),
        "none": torch.zeros(0, 3),
        "wide": torch.tensor([[1], [2]], dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "trained": torch.nn.Parameter(torch.ones(2, 2)),
    }
    path = tmp_path / "some" / "x.safetensors"
    write_tensors(path, tensors, {"format": "pt", "note": "ä"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ä"}


def test_what_the_format_has_no_name_for_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"phase is torch.complex64"):
        write_tensors(tmp_path / "x.safetensors", {"phase": torch.zeros(2, dtype=torch.complex64)}, {})
    assert not list(tmp_path.iterdir())


def test_a_saved_policy_can_be_read_by_whoever_may_read_its_config(tmp_path: Path) -> None:
    """A server often runs as another user than the training."""
    before = os.umask(0o022)
    try:
        TransformersModel(build("qwen2")).save(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"config.json": 0o644, "model.safetensors": 0o644}
