"""What vLLM's workers do for us: take weights from a folder, whole, and end when we do.

vLLM imports this file by itself, in whichever interpreter it runs: it must import nothing of turnwise.
"""

import os
import signal
import socket
import threading
import time
from typing import Any

WATCH_SECONDS = 1.0


class WeightReader:
    """Given to vLLM as `worker_extension_cls`; its methods are called by `collective_rpc`."""

    model_runner: Any

    def turnwise_load(self, folder: str, label: str = "") -> None:
        """Replace all weights by those of the safetensors files in `folder`, under Hugging Face names; `label` is
        what `turnwise_marked` says of them.

        vLLM's own reloading leaves out a layer that no weight of the checkpoint belongs to. An output layer that shares
        the embedding's tensor is one: on a GPU it sees the new values, on a CPU it has a copy packed for its products.
        """
        self.model_runner.reload_weights(weights_path=folder)
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and hasattr(layer, "embedding_dim") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
        self.turnwise_mark(label)

    def turnwise_mark(self, label: str) -> None:
        """Remember the name of the weights that were loaded last."""
        self.turnwise_label = label

    def turnwise_marked(self) -> str:
        """That name; none before the first."""
        return getattr(self, "turnwise_label", "")

    def turnwise_end_with(self, pid: int, host: str) -> None:
        """End when that process of this machine is gone: vLLM's engine goes on when who made it was killed.

        vLLM starts its workers itself, so they have no lifeline of system/children.py: they look for the process.
        """
        if host == socket.gethostname():
            threading.Thread(target=_watch, args=(pid, os.getppid()), daemon=True).start()


def _watch(pid: int, parent: int) -> None:
    """The parent of a worker is the engine, unless the engine has none and is one itself."""
    while True:
        time.sleep(WATCH_SECONDS)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
    if parent not in (pid, 1) and parent == os.getppid():
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
