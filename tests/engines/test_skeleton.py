"""A model that several processes read by its rows: together they have the weights of one that was read whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import SUPPORTED, build
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.config.choices import ModelImplementation
from turnwise.engines.model.checkpoint_rows import CheckpointRows, OwnRows
from turnwise.engines.model.loading import choose_implementation, read_model, read_skeleton
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.errors import EngineError

NATIVE, TRANSFORMERS = ModelImplementation.native, ModelImplementation.transformers
PROCESSES = 3
CHEAP = ("gpt2", "qwen3_moe", "gemma3_text")
"""Transposed matrices, experts that are fused in memory, tied weights and buffers of its own."""
EVERY = [(NATIVE, "llama"), (NATIVE, "qwen2"), *((TRANSFORMERS, name) for name in SUPPORTED)]


@pytest.fixture(autouse=True)
def tied_stay_tied() -> Iterator[None]:
    """As with FSDP's parameters, which are changed in place when they get their numbers."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def folder_of(name: str, folder: Path, **changed: object) -> Path:
    build(name, **changed).save_pretrained(folder)
    return folder


def chunk(number: int) -> OwnRows:
    """What one of the processes has of a weight."""

    def rows(tensor: Tensor) -> tuple[Tensor, int]:
        if not tensor.dim():
            return tensor.detach(), 0
        size = -(-len(tensor) // PROCESSES)
        first = min(len(tensor), number * size)
        return tensor.detach()[first : first + size], first

    return rows


def empty(implementation: ModelImplementation, folder: Path) -> PolicyModel:
    """A skeleton whose parameters are somewhere, without numbers."""
    source = ModelSource("it", folder)
    model = read_skeleton(source, choose_implementation(source, implementation), torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    model._apply(lambda tensor: torch.full_like(tensor, torch.nan, device="cpu") if tensor.is_meta else tensor)
    return model


def fill(model: PolicyModel, folder: Path) -> None:
    for number in range(PROCESSES):
        model.fill(CheckpointRows(folder), chunk(number))


@pytest.mark.parametrize(
    ("implementation", "name"),
    [pytest.param(*case, marks=[] if case[0] is NATIVE or case[1] in CHEAP else [pytest.mark.long]) for case in EVERY],
)
def test_rows_of_all_processes_are_the_whole(implementation: ModelImplementation, name: str, tmp_path: Path) -> None:
    folder, source = folder_of(name, tmp_path), ModelSource("it", tmp_path)
    whole = read_model(source, choose_implementation(source, implementation), torch.float32)
    model = empty(implementation, folder)
    fill(model, folder)
    model.probe()
    theirs, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert theirs.keys() == {key for key, _ in whole.named_parameters()}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in whole.named_parameters())
    assert all(torch.equal(tensor, buffers[key]) for key, tensor in whole.named_buffers())
    assert (model.facts, model.shape, model.recomputes) == (whole.facts, whole.shape, whole.recomputes)
    written = dict(model.weights())
    assert [(key, tensor.shape) for key, tensor in whole.weights()] == [(k, t.shape) for k, t in written.items()]


EXTENDED = {
    "llama": {"num_hidden_layers": 3},
    "qwen3_moe": {"num_hidden_layers": 4},  # the first is dense
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "falcon_h1": {"num_hidden_layers": 3},  # recurrent
}


@pytest.mark.parametrize("name", EXTENDED)
def test_few_layers_tell_what_all_do_and_read_no_more(name: str, tmp_path: Path) -> None:
    folder, source = folder_of(name, tmp_path, **EXTENDED[name]), ModelSource("it", tmp_path)
    choice = choose_implementation(source, TRANSFORMERS)
    whole, few = (read(source, choice, torch.float32) for read in (read_model, read_skeleton))
    assert isinstance(whole, TransformersModel) and isinstance(few, TransformersModel)
    with few.few_layers(CheckpointRows(folder)) as answered:
        assert answered
    assert few.findings == whole.findings and len(few.findings.layers) == len(whole.shape.caches)
    assert bool(few.findings.recurrent) == (name == "falcon_h1")
    held = [parameter.is_meta for parameter in few.layer_modules()[-1].parameters()]
    assert all(held), "of the last layer nothing is read"


def test_layers_that_all_differ_answer_together(tmp_path: Path) -> None:
    folder, source = folder_of("gemma3_text", tmp_path), ModelSource("it", tmp_path)  # two slide, the third sees all
    few = read_skeleton(source, choose_implementation(source, TRANSFORMERS), torch.float32)
    assert isinstance(few, TransformersModel)
    with few.few_layers(CheckpointRows(folder)) as answered:
        assert not answered


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_process_reads_the_experts_that_it_has_and_no_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name, tmp_path)
    names: list[str] = []
    whole = CheckpointRows.whole
    monkeypatch.setattr(CheckpointRows, "whole", lambda self, name: (names.append(name), whole(self, name))[1])
    by_process = []
    for number in range(PROCESSES):
        names.clear()
        empty(TRANSFORMERS, folder).fill(CheckpointRows(folder), chunk(number))
        by_process.append({key for key in names if ".experts." in key})
    stored = {key for key in CheckpointRows(folder).shapes if ".experts." in key}
    assert [len(mine) / len(stored) for mine in by_process] == [0.5, 0.5, 0.0], "two of four experts, two, none"
    assert by_process[0] | by_process[1] == stored and not by_process[0] & by_process[1]


@pytest.mark.parametrize("implementation", [NATIVE, TRANSFORMERS])
def test_a_tied_head_that_is_stored_too_must_be_the_embedding(
    implementation: ModelImplementation, tmp_path: Path
) -> None:
    folder = folder_of("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fill(empty(implementation, folder), folder)
    tensors["lm_head.weight"][-1, -1] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match="lm_head.weight differs from model.embed_tokens.weight, .*ties them"):
        fill(empty(implementation, folder), folder)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path)
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def refused(implementation: ModelImplementation, words: str, **changed: Tensor) -> None:
        tensors = {key: tensor for key, tensor in (whole | changed).items() if tensor.numel()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(EngineError, match=words):
            fill(empty(implementation, folder), folder)

    spoilt = whole[name].clone()
    spoilt[-1, 0] = torch.nan
    refused(NATIVE, f"{name} hold NaN or infinite weights", **{name: spoilt})
    refused(NATIVE, f"{name} holds torch.int8; unquantised", **{name: spoilt.nan_to_num().to(torch.int8)})
    more = {"model.layers.2.mlp.up_proj.weight": whole[name].clone()}
    refused(NATIVE, "no place for: model.layers.2.mlp.up_proj.weight", **more)
    refused(TRANSFORMERS, "holds model.layers.2.mlp.up_proj.weight: more than config.json counts", **more)
    for implementation, words in ((NATIVE, f"lacks the tensors {name}"), (TRANSFORMERS, f"lacks the tensors {name}")):
        refused(implementation, words, **{name: torch.empty(0)})
    refused(TRANSFORMERS, "other shapes than config.json says", **{name: whole[name][:-1].contiguous()})
