"""A real Ray cluster of three nodes on this machine, started once for a file of tests."""

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from listening import below, title

STORE = 100 * 2**20


@contextlib.contextmanager
def patience(seconds: float = 240.0) -> Iterator[None]:
    """Ray gives a node 30 seconds to be known, which on a busy machine are too few: each look for it takes longer."""
    services: Any = import_module("ray._private.services")
    look = services.get_node

    def get_node(*where: Any) -> Any:
        until = time.monotonic() + seconds
        while True:
            try:
                return look(*where)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = look


class Nodes:
    """`Nodes()` starts a head and two more nodes; `add` and `remove` change that."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
        with patience():
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.add(), self.add()]
        self.address: str = self.cluster.address

    def add(self, cpus: int = 2) -> Any:
        with patience():
            return self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE)

    def remove(self, node: Any) -> None:
        """As a machine that is switched off."""
        self.cluster.remove_node(node, allow_graceful=False)

    def actors(self, kind: str, node: Any = None) -> list[int]:
        """Process ids of the actors of a class, on all nodes or one."""
        raylets = [one.all_processes["raylet"][0].process.pid for one in ([node] if node else self._nodes())]
        return [pid for pid in below(raylets) if title(pid).startswith(f"ray::{kind}")]

    def wait_without(self, kind: str, seconds: float = 60) -> list[int]:
        """Process ids of the actors of a class that are still there after this long: Ray ends them when it comes to it."""
        until = time.monotonic() + seconds
        while (left := self.actors(kind)) and time.monotonic() < until:
            time.sleep(0.2)
        return left

    def kill(self, kind: str) -> None:
        """The first actor of a class, as the kernel kills it when memory is short."""
        os.kill(self.actors(kind)[0], signal.SIGKILL)

    def freeze(self, kind: str) -> None:
        """The first actor of a class, as on a machine that stands still: Ray sees a process that is there."""
        os.kill(self.actors(kind)[0], signal.SIGSTOP)

    def _nodes(self) -> list[Any]:
        return list(self.cluster.list_all_nodes())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    before = dict(os.environ)
    if "ray" in sys.modules:  # it reads this once, when it is imported
        os.environ["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "disabled")
    else:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    made = Nodes()
    try:
        yield made
    finally:
        made.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
