"""How many GPUs inference servers take, which ones they are given, and how many sequences they decode together."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from turnwise.config import EngineConfig
from turnwise.engines.devices import EPISODES, Gpu, visible_gpus
from turnwise.errors import ConfigError
from turnwise.ext.servers.config import ServersConfig

_TENSOR = ("--tensor-parallel-size", "-tp", "--tp", "--tp-size")
_PIPELINE = ("--pipeline-parallel-size", "-pp", "--pp", "--pp-size")
_CONTEXT = ("--prefill-context-parallel-size", "-pcp")
_DATA = ("--data-parallel-size", "-dp", "--dp", "--dp-size")
_DATA_HERE = ("--data-parallel-size-local", "-dpl")
"""Of the copies those on this machine, where the others are elsewhere."""
BATCH, LARGE_BATCH, LARGE_GPU = 256, 1024, 70 * 2**30
"""Sequences that a server decodes together where nobody says how many: on any GPU, and on one with so many bytes. Those
that are started here are told so."""
_told: dict[str, int] = {}
"""By the address of a server that others started: how many it said that it decodes together."""


def gpus_of_a_server(options: list[str], copies_variable: str | None = None, copies_inside: str | None = None) -> int:
    """As many as the options that it is started with say: tensor x pipeline x data parallel.

    `copies_variable` is an environment variable that tells of data parallel copies too, `copies_inside` an option with
    which they take no GPUs of their own.
    """
    values = _values(options)
    gpus = _copies(values, (_DATA_HERE, _DATA), copies_variable, copies_inside)
    for names in (_TENSOR, _PIPELINE, _CONTEXT):
        gpus *= _first_count(values, names) or 1
    return gpus


def copies_of_a_server(options: list[str], copies_variable: str | None = None, copies_inside: str | None = None) -> int:
    """Data parallel copies behind one address, on all its machines; each decodes sequences of its own."""
    return _copies(_values(options), (_DATA,), copies_variable, copies_inside)


def _values(options: list[str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in named_options(options)}  # the last one wins


def _copies(
    values: dict[str, str], kinds: Sequence[Sequence[str]], copies_variable: str | None, copies_inside: str | None
) -> int:
    counts = (_first_count(values, names) for names in kinds)
    copies = next((count for count in counts if count is not None), 1)
    if copies == 1 and copies_variable is not None and (env := os.environ.get(copies_variable)):
        copies = _count(copies_variable, env)
    return 1 if copies_inside is not None and copies_inside in values else copies


def _first_count(values: dict[str, str], names: Sequence[str]) -> int | None:
    """The number that the last of these names was given; None where none was."""
    written = [name for name in values if name in names]
    return _count(f"servers.options: {written[-1]}", values[written[-1]]) if written else None


def _count(name: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"{name} takes a number of GPUs, not {value!r}")
    return int(value)


def devices_of(replicas: int, each: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server, which takes so many; None where there is no GPU.

    They are given from the last one on, so that the learner's, the first, is taken last.
    """
    count = len(visible_gpus().gpus)
    if not count:
        return [None] * replicas
    if replicas * each > count:
        raise ConfigError(f"servers.replicas={replicas} of {each} GPU(s) each: this machine has {count}")
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]  # ours, of all there are
    order = (named or [str(number) for number in range(count)])[:count][::-1]
    return [",".join(order[number * each : (number + 1) * each]) for number in range(replicas)]


def sequences_of_a_copy(engine: EngineConfig, servers: ServersConfig, gpus: tuple[Gpu, ...]) -> int:
    """How many one copy of a server decodes together: as it is told, else as vLLM does by itself."""
    values = _values(servers.options)
    option = next((values[name] for name in ("--max-num-seqs", "--max-running-requests") if name in values), "")
    if option.isdecimal():
        return max(1, int(option))
    if engine.max_batch:
        return engine.max_batch
    if not gpus and not servers.addresses:
        return EPISODES // 2
    return LARGE_BATCH if gpus and min(gpu.memory for gpu in gpus) >= LARGE_GPU else BATCH


def remember_sequences(address: str, sequences: int) -> None:
    """What a server said when it was opened; before, as many are assumed as where nobody says."""
    _told[address] = sequences


def sequences_of_attached(addresses: Sequence[str]) -> int | None:
    """All that these decode together; None while one of them has not said."""
    told = [_told.get(address) for address in addresses]
    return sum(count for count in told if count) if told and all(told) else None


def named_options(options: list[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, as `--name value` or `--name=value`."""
    for option, following in pairwise([*options, ""]):
        name, equals, value = option.partition("=")
        yield name, value if equals else following
