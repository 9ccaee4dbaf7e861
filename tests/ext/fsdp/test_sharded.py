"""A learner over 2 and 3 processes: the numbers of one, states of any number, and deaths that are seen at once."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import build
from listening import elsewhere, listening
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from turnwise.config import LearnerConfig
from turnwise.config.choices import ModelImplementation
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import Learner, NotFinite, Objective, TokenBatch, UpdateResult, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.process_group import LearnerLost, failed, raise_first
from turnwise.engines.learners.state import read_state
from turnwise.engines.learners.watching import Beat, HangWatch
from turnwise.engines.model.loading import add_lora, choose_implementation, read_model
from turnwise.engines.model.sources import ModelSource
from turnwise.errors import EngineError, PluginError, StorageError
from turnwise.ext.fsdp.learner import ShardedLearner
from turnwise.ext.fsdp.rank_group import LocalRanks
from turnwise.ext.fsdp.rank_setup import RankSetup
from turnwise.ext.fsdp.state import CheckedReader
from turnwise.storage.checkpoints import begin_checkpoint, find_checkpoint, write_checkpoint
from turnwise.storage.run_dir import RunDir

NATIVE, TRANSFORMERS = ModelImplementation.native, ModelImplementation.transformers
OBJECTIVE = Objective("ppo_clip", entropy=0.01, kl_loss=0.1)
SIZES = (2, 3, 4)
TENSOR = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [])


@dataclass(frozen=True)
class Case:
    implementation: ModelImplementation
    size: int
    model: str
    replicas: int = 1
    context: int = 1
    lora_rank: int = 0
    critic: bool = False
    shared_critic: bool = False
    recompute: bool = False


CASES = {
    "native": Case(NATIVE, 3, "tied", critic=True, recompute=True),
    "native, two copies": Case(NATIVE, 4, "tied", 2, critic=True),
    "transformers, a copy each": Case(TRANSFORMERS, 2, "tied", 2),
    "transformers, LoRA, two copies": Case(TRANSFORMERS, 4, "tied", 2, lora_rank=4),
    "native, two share a sequence": Case(NATIVE, 2, "tied", context=2, critic=True, recompute=True),
    "native, four share a sequence": Case(NATIVE, 4, "plain", context=4, critic=True, shared_critic=True),
    "native, two copies, two share": Case(NATIVE, 4, "tied", 2, context=2, lora_rank=4),
    "transformers, two share a sequence": Case(TRANSFORMERS, 2, "plain", context=2, recompute=True),
    "transformers, two pairs share": Case(TRANSFORMERS, 4, "tied", context=2, critic=True, lora_rank=4),
    "native, LoRA": Case(NATIVE, 3, "plain", lora_rank=4, critic=True, shared_critic=True),
    "transformers": Case(TRANSFORMERS, 2, "plain", critic=True),
    "transformers, LoRA": Case(TRANSFORMERS, 2, "tied", lora_rank=4, recompute=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "plain"):
        build("qwen3", tie_word_embeddings=name == "tied").save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, LocalRanks]]:
    """Processes are started once; each learner opens its ranks in them anew. The last tests kill some."""
    made = {size: LocalRanks(["cpu"] * size) for size in SIZES}
    yield made
    for ranks in made.values():
        ranks.stop()


def setup_of(case: Case, models: Path) -> RankSetup:
    config = LearnerConfig(
        lr=1e-2,
        critic_lr=1e-2,
        weight_decay=0.1,
        grad_clip=0.5,
        token_budget=60,
        lora_rank=case.lora_rank,
        shared_critic=case.shared_critic,
        gradient_checkpointing=case.recompute,
    )
    source = ModelSource(case.model, models / case.model)
    shared = {"replicas": case.replicas, "context": case.context}
    return RankSetup(source, case.implementation, config, 0.9, 3, 9, case.critic, reference=True, **shared)


def one_process(setup: RankSetup) -> LocalLearner:
    model, critic = (
        read_model(setup.source, choose_implementation(setup.source, setup.implementation), torch.float32),
        None,
    )
    if setup.critic:
        critic = Critic.sharing(model) if setup.learner.shared_critic else Critic.copying(model)
    if setup.learner.lora_rank:
        model = add_lora(model, setup.learner.lora_rank, setup.learner.lora_alpha, setup.seed)
    return LocalLearner(
        model, setup.learner, temperature=0.9, critic=critic, reference=True, updates=9, base_model="base"
    )


def batches(seed: int, count: int = 2, **changed: float) -> list[TokenBatch]:
    """Micro-batches of one minibatch, each of four sequences of 7 to 25 tokens."""
    noise = np.random.default_rng(seed)
    lengths = noise.integers(7, 25, (count, 4))
    total = int((lengths - 3).sum())
    made = []
    for own in lengths:
        index = np.concatenate(
            [start + np.arange(3, n) for start, n in zip(np.cumsum([0, *own[:-1]]), own, strict=True)]
        )
        owner = np.repeat(np.arange(4), own - 3)

        def floats(low: float = 0.0, size: int = len(index)) -> np.ndarray:
            return (noise.normal(size=size) + low).astype(np.float32)

        tokens = noise.integers(3, 96, own.sum())
        arrays = {"old_logprobs": floats(-4.0), "ref_logprobs": floats(-4.0), "values": floats(), "returns": floats()}
        arrays["advantages"] = floats()
        arrays |= {name: np.full(len(index), value, np.float32) for name, value in changed.items()}
        made.append(TokenBatch(tokens, own, index, owner, own - 3, total, 4 * count, **arrays))
    return made


def close(one: Tensor | np.ndarray, two: Tensor | np.ndarray, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two), atol=tolerance, rtol=tolerance)


def same(one: UpdateResult, two: UpdateResult) -> None:
    assert one.metrics.keys() == two.metrics.keys() and one.metrics["grad_norm"] > 0.0
    for name, value in one.metrics.items():
        assert two.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for mine, theirs in zip(one.outputs, two.outputs, strict=True):
        close(mine.logprobs, theirs.logprobs)
        close(mine.entropies, theirs.entropies)


def weights(learner: Learner) -> dict[str, Tensor]:
    found = learner.weights()
    made = {name: tensor.clone() for name, tensor in found.tensors}
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == dict(found.shapes)
    return made


def same_moments(folder: Path) -> None:
    """Of what one process and several saved after a step."""
    (one, info), (several, info_several) = read_state(folder / "one"), read_state(folder / "several")
    assert info == info_several and one.keys() == several.keys()
    moments = [key for key in one if key.endswith((".exp_avg", ".exp_avg_sq"))]
    assert len(moments) > 10, "after one step these are the gradient and its square"
    for key in moments:
        scale = float(one[key].abs().max()) or 1.0  # a critic whose head is zero has no gradient below it
        close(one[key] / scale, several[key] / scale)


# Of this model with all weights there is the native case, and with a part of them the LoRA one.
DEAR = (
    "transformers",
    "transformers, LoRA, two copies",
    "transformers, a copy each",
    "native, four share a sequence",
    "native, two copies, two share",
    "transformers, two pairs share",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in DEAR else []) for name in CASES]
)
def test_several_processes_compute_what_one_computes(
    name: str, models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    case = CASES[name]
    setup = setup_of(case, models)
    here, there = one_process(setup), ShardedLearner(groups[case.size], setup, base_model="base")
    asked = [Who.POLICY, Who.REFERENCE, *([Who.CRITIC] if case.critic else [])]
    for who in asked:
        close(here.score(batches(0)[0], who), there.score(batches(0)[0], who))
    few = batches(1, 1)  # fewer trajectories than ranks times passes: somebody idles
    same(here.update(few, OBJECTIVE), there.update(few, OBJECTIVE))
    here.save(tmp_path / "one")
    there.save(tmp_path / "several")
    same(here.update(batches(2), OBJECTIVE), there.update(batches(2), OBJECTIVE))  # while it is written
    there.saved()
    same_moments(tmp_path)
    for who in asked:
        close(here.score(batches(3)[0], who), there.score(batches(3)[0], who), 1e-4)
    mine, theirs = weights(here), weights(there)
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        close(tensor, theirs[key], 1e-4)
    there.save_policy(tmp_path)
    saved = read_model(ModelSource("saved", tmp_path / "policy"), choose_implementation(
        ModelSource("saved", tmp_path / "policy"), case.implementation), torch.float32)  # fmt: skip
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in saved.weights())
    assert (tmp_path / "policy_adapter/adapter_model.safetensors").is_file() == bool(case.lora_rank)


@pytest.mark.parametrize("name", ["native", "transformers, LoRA"])
def test_weights_are_given_in_the_format_of_who_samples(
    name: str, models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    setup = setup_of(CASES[name], models)
    given: list[dict[str, Tensor]] = []
    for format_ in ("float32", "bfloat16"):
        learner = ShardedLearner(groups[2], replace(setup, published=format_))
        learner.update(batches(1), OBJECTIVE)
        given.append(weights(learner))
    wide, narrow = given
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(tensor, wide[key].bfloat16()) for key, tensor in narrow.items())
    learner.save_policy(tmp_path)
    saved = read_model(
        ModelSource("saved", tmp_path / "policy"),
        choose_implementation(ModelSource("saved", tmp_path / "policy"), setup.implementation),
        torch.float32,
    )
    assert all(torch.equal(tensor, wide[key]) for key, tensor in saved.weights()), "with all its digits"


@pytest.fixture(scope="module")
def saved_at_two(models: Path, groups: dict[int, LocalRanks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two steps of two processes; what they did next is in `next.pickle`."""
    folder = tmp_path_factory.mktemp("saved")
    learner = ShardedLearner(groups[2], setup_of(CASES["native"], models))
    for seed in range(2):
        learner.update(batches(seed), OBJECTIVE)
    learner.save(folder)
    following = learner.update(batches(5), OBJECTIVE), learner.update(batches(6), OBJECTIVE)
    learner.saved()
    (folder / "next.pickle").write_bytes(pickle.dumps(following))
    return folder


def goes_on(learner: Learner, folder: Path) -> None:
    learner.load(folder)
    assert learner.step == 2
    for seed, expected in zip((5, 6), pickle.loads((folder / "next.pickle").read_bytes()), strict=True):
        same(expected, learner.update(batches(seed), OBJECTIVE))


def test_saved_at_two_goes_on_at_one_and_three(
    saved_at_two: Path, models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    setup = setup_of(CASES["native"], models)
    one = one_process(setup)
    goes_on(one, saved_at_two)
    three = ShardedLearner(groups[3], setup)
    three.update(batches(9), OBJECTIVE)  # what it did before leaves no trace
    goes_on(three, saved_at_two)
    one.save(tmp_path)
    three.load(tmp_path)
    assert three.step == 4
    same(one.update(batches(7), OBJECTIVE), three.update(batches(7), OBJECTIVE))


def test_two_copies_save_once_and_go_on_from_what_any_number_saved(
    saved_at_two: Path, models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    copies = ShardedLearner(groups[4], setup_of(CASES["native, two copies"], models))
    goes_on(copies, saved_at_two)
    copies.save(tmp_path)
    copies.saved()
    written = [path.stat().st_size for path in (tmp_path / "learner").glob("*.distcp")]
    before = [path.stat().st_size for path in (saved_at_two / "learner").glob("*.distcp")]
    assert sum(written) == pytest.approx(sum(before), rel=0.1), "one copy is written"
    update = copies.update(batches(7), OBJECTIVE)
    for learner in (
        one_process(setup_of(CASES["native"], models)),
        ShardedLearner(groups[3], setup_of(CASES["native"], models)),
    ):
        learner.load(tmp_path)
        assert learner.step == 4
        same(learner.update(batches(7), OBJECTIVE), update)


class Boom:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


def test_states_of_others_and_broken_ones_are_refused_by_name(
    saved_at_two: Path, models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    setup = setup_of(CASES["native, LoRA"], models)
    there = ShardedLearner(groups[3], setup)
    before = weights(there)
    with pytest.raises(EngineError, match="of another model: .*lora was None"):
        there.load(saved_at_two)
    there.save(tmp_path)
    there.saved()
    table, info = tmp_path / "learner/.metadata", tmp_path / "learner/info.json"
    whole = table.read_bytes()
    for broken, words in ((b"", "cannot read .*metadata"), (pickle.dumps(Boom()), "it names posix.system")):
        table.write_bytes(broken)
        for learner in (there, one_process(setup)):
            with pytest.raises(StorageError, match=words):
                learner.load(tmp_path)
    table.write_bytes(whole)
    there.load(tmp_path)
    info.write_text(info.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(StorageError, match="info.json has format 7"):
        there.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(there).items())


@pytest.mark.parametrize(
    ("entry", "file", "words"),
    [
        (BytesStorageMetadata(), "__0_0.distcp", "holds it, which is not a tensor"),  # torch would unpickle it freely
        (TENSOR, "../../elsewhere", "'../../elsewhere', which is not a file beside it"),
        (TENSOR, "/dev/zero", "'/dev/zero', which is not a file beside it"),
    ],
)
def test_a_table_that_leads_to_code_or_out_of_its_folder_is_refused(
    entry: STORAGE_TYPES, file: str, words: str, tmp_path: Path
) -> None:
    place = _StorageInfo(file, 0, 8)
    table = Metadata({"it": entry}, storage_data={MetadataIndex("it"): place})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(StorageError, match=words):
        CheckedReader(tmp_path).read_metadata()


class OlderPython(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does, by `getattr`."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_table_that_an_older_python_wrote_is_read(tmp_path: Path) -> None:
    table = Metadata({"it": TENSOR}, storage_data={MetadataIndex("it"): _StorageInfo("__0_0.distcp", 0, 8)})
    with (tmp_path / ".metadata").open("wb") as file:
        OlderPython(file).dump(table)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    entry = CheckedReader(tmp_path).read_metadata().state_dict_metadata["it"]
    assert isinstance(entry, TensorStorageMetadata) and entry.properties == TENSOR.properties


@pytest.mark.parametrize("name", ["__subclasses__", "__init__", "mro", "__class__", "_member_map_"])
@pytest.mark.parametrize("owner", ["torch\nSize", "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"])
def test_a_table_asks_for_members_of_enums_alone(owner: str, name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(f"cbuiltins\ngetattr\n(c{owner}\nV{name}\ntR.".encode())
    with pytest.raises(StorageError, match="which is not a member of an enum"):
        CheckedReader(tmp_path).read_metadata()


@pytest.mark.long  # tests/engines/test_skeleton.py has what is read, the cases above have what is computed
@pytest.mark.parametrize("kind", ["qwen3_moe", "gguf", "gemma3_text"])  # all layers of the last differ
def test_experts_and_packed_files_are_read_by_ranks_too(
    kind: str, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    source, implementation = ModelSource("it", tmp_path), TRANSFORMERS
    if kind == "gguf":
        from gguf_files import llama, write_gguf

        write_gguf(tmp_path / "it.gguf", llama())
        source, implementation = ModelSource("it", tmp_path, "it.gguf"), NATIVE
    else:
        build(kind).save_pretrained(tmp_path)
    setup = RankSetup(source, implementation, LearnerConfig(lr=1e-2), 0.9, 3, 9, critic=True, reference=True)
    here, there = one_process(setup), ShardedLearner(groups[3], setup)
    mine, theirs = weights(here), weights(there)
    assert mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    same(here.update(batches(1), OBJECTIVE), there.update(batches(1), OBJECTIVE))
    close(here.score(batches(2)[0], Who.REFERENCE), there.score(batches(2)[0], Who.REFERENCE))


@pytest.mark.long  # the cases above have plain attention
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "gemma2"])
def test_sinks_windows_caps_and_values_of_another_size_are_shared_too(
    kind: str, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    build(kind).save_pretrained(tmp_path)
    config = LearnerConfig(lr=1e-2)
    setup = RankSetup(ModelSource("it", tmp_path), TRANSFORMERS, config, 0.9, 3, 9, reference=True, context=2)
    here, there = one_process(setup), ShardedLearner(groups[2], setup)
    close(here.score(batches(2)[0], Who.POLICY), there.score(batches(2)[0], Who.POLICY))
    same(here.update(batches(1), OBJECTIVE), there.update(batches(1), OBJECTIVE))
    here.save(tmp_path / "one")
    there.save(tmp_path / "several")
    there.saved()
    same_moments(tmp_path)


def test_an_error_on_one_rank_is_the_learners_and_changes_nothing(
    models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def broken(batch):\n    return batch.rewards\n")
    setup = setup_of(CASES["native, LoRA"], models)
    here, there = one_process(setup), ShardedLearner(groups[3], setup)
    before = weights(there)
    poisoned = batches(0)
    assert poisoned[1].advantages is not None
    poisoned[1].advantages[-1] = np.nan  # of one trajectory, so of one rank
    with pytest.raises(NotFinite, match="the loss is nan after 0 weight updates"):
        there.update(poisoned, OBJECTIVE)
    with pytest.raises(NotFinite, match="gradient has norm"):
        there.update(batches(0, advantages=1e35), Objective("reinforce"))
    with pytest.raises(PluginError, match="broken.*raised AttributeError"):
        there.update(batches(0), Objective(f"{tmp_path}/mine.py:broken"))
    with pytest.raises(EngineError, match="an update needs a batch"):
        there.update([], OBJECTIVE)
    with pytest.raises(EngineError, match="proven for one process"):
        there.score(batches(0)[0], Who.SAMPLER)
    assert there.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(there).items())
    same(here.update(batches(1), OBJECTIVE), there.update(batches(1), OBJECTIVE))


def test_what_ranks_cannot_open_is_one_error_and_no_process_is_left(models: Path, tmp_path: Path) -> None:
    ranks = LocalRanks(["cpu"])
    setup = RankSetup(ModelSource("none", tmp_path / "none"), NATIVE, LearnerConfig(), 1.0, 0)
    with pytest.raises(EngineError, match="none"):
        ShardedLearner(ranks, setup)
    assert gone(pids(ranks))
    with pytest.raises(LearnerLost, match="processes are gone"):
        ranks.call("forget", [()])


def test_ranks_that_hang_are_ended_with_where_they_were(models: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\n\ndef stuck(batch):\n    time.sleep(3600)\n")
    ranks = LocalRanks(["cpu"])
    learner = ShardedLearner(ranks, setup_of(CASES["native"], models))
    ranks._limit = 2.0  # opening them may take longer on a busy machine
    with pytest.raises(
        LearnerLost, match=r"hangs in `accumulate`.*no process has made progress for 2 s.*mine.py:4 in s"
    ):
        learner.update(batches(0), Objective(f"{tmp_path}/mine.py:stuck"))
    assert gone(pids(ranks))


def test_a_rank_is_silent_or_does_not_come_further_or_neither() -> None:
    watch = HangWatch(["rank 0 of 2", "rank 1 of 2"], 0.05)
    watch.note(0, Beat(1, "a.py:1 in a"))
    assert watch.hangs([0, 1]) is None
    time.sleep(0.06)
    watch.note(0, Beat(1, "a.py:1 in a"))
    assert "rank 1 of 2 has given no sign of life for 0.05 s (learner.hang_seconds)" in str(watch.hangs([0, 1]))
    assert "made progress" in str(watch.hangs([0])) and "rank 0 of 2 is at a.py:1 in a" in str(watch.hangs([0]))
    watch = HangWatch(["rank 0 of 1"], 3600)
    watch.note(0, Beat(2, "a.py:2 in a"))
    assert watch.hangs([0]) is None


@pytest.mark.parametrize("text", ["[../gloo/transport/tcp/pair.cc:547] Connection closed by peer", "a bug"])
def test_whoever_lost_touch_is_no_cause(text: str) -> None:
    answers = [failed(RuntimeError(text)), failed(EngineError("no room"))]
    with pytest.raises((EngineError, RuntimeError), match="no room" if "gloo" in text else "a bug"):
        raise_first(answers, ["rank 0 of 2", "rank 1 of 2"])
    assert raise_first([1, 2], ["rank 0 of 2", "rank 1 of 2"]) is None
    if "gloo" in text:
        assert isinstance(raise_first([failed(RuntimeError(text)), 2], ["rank 0 of 2", "rank 1 of 2"]), LearnerLost)


def pids(ranks: LocalRanks) -> list[int]:
    return [process.pid for process in ranks._processes]


def gone(numbers: Sequence[int]) -> bool:
    """Whether these processes have ended, zombies aside."""
    for number in numbers:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            continue
        if Path(f"/proc/{number}/stat").exists() and ") Z" in Path(f"/proc/{number}/stat").read_text():
            continue
        return False
    return True


DRIVER = """
import sys, time
from turnwise.ext.fsdp.rank_group import LocalRanks
ranks = LocalRanks(["cpu"] * 2)
ranks.begin()
print(*[process.pid for process in ranks._processes], flush=True)
time.sleep(600)
"""


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert driver.stdout is not None
    ranks = [int(word) for word in driver.stdout.readline().split()]
    assert len(ranks) == 2
    driver.kill()
    driver.wait()
    while not gone(ranks):  # a hang is the failure
        time.sleep(0.05)
    while list(tmp_path.iterdir()):
        time.sleep(0.05)


def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_last_checkpoint_good(
    models: Path, groups: dict[int, LocalRanks], tmp_path: Path
) -> None:
    run, ranks = RunDir.create(tmp_path, "run", "train"), groups[3]
    learner = ShardedLearner(ranks, setup_of(CASES["native"], models))

    def fill(place: Path) -> None:
        learner.save(place)
        learner.saved()

    learner.update(batches(0), OBJECTIVE)
    write_checkpoint(run, 1, fill, keep=2)

    def stuck(place: Path) -> None:
        (place / "learner").mkdir()
        os.mkfifo(place / "learner/__1_0.distcp")  # its writer waits for a reader: this save is in the middle
        learner.save(place)

    begun = begin_checkpoint(run, 2, stuck)
    learner.update(batches(1), OBJECTIVE)  # the training goes on meanwhile
    assert learner.saving and learner.step == 2
    os.kill(pids(ranks)[1], signal.SIGKILL)
    with pytest.raises(LearnerLost, match="rank 1 of 3 .*SIGKILL.*checkpoint it was writing is lost, those before it"):
        learner.saved()
    begun.drop()
    assert gone(pids(ranks))
    found = find_checkpoint(run, lambda folder: folder.name)
    assert found.checkpoint is not None and found.checkpoint.state == "step_000001" and found.passed_over == []
    one = one_process(setup_of(CASES["native"], models))
    one.load(found.checkpoint.folder)
    assert one.step == 1


def test_a_rank_killed_in_an_update_ends_it_with_one_error(models: Path, groups: dict[int, LocalRanks]) -> None:
    ranks = groups[2]
    learner = ShardedLearner(ranks, setup_of(CASES["native"], models))
    raised: list[BaseException] = []

    def update() -> None:
        try:
            learner.update(batches(0), OBJECTIVE)
        except BaseException as error:
            raised.append(error)

    if Path("/proc/net/tcp").is_file():  # where the kernel tells
        assert listening(pids(ranks)) and elsewhere(pids(ranks)) == {}, "nobody beside this machine reaches them"
    os.kill(pids(ranks)[1], signal.SIGSTOP)  # the other one waits for it in a collective
    thread = threading.Thread(target=update)
    thread.start()
    time.sleep(0.3)
    os.kill(pids(ranks)[1], signal.SIGKILL)
    thread.join()
    assert isinstance(raised[0], LearnerLost) and "rank 1 of 2" in str(raised[0]) and "SIGKILL" in str(raised[0])
    assert gone(pids(ranks))
    with pytest.raises(LearnerLost, match="processes are gone: rank 1 of 2"):
        learner.update(batches(0), OBJECTIVE)
