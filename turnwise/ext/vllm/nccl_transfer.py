"""All weights from the learner's GPU to the GPUs of a vLLM server, by NCCL and vLLM's own routes for it.

Not run on a GPU so far: the order of calls and what is sent are tested, NCCL itself is not.
"""

import asyncio
import base64
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = ["--weight-transfer-config", '{"backend": "nccl"}']
"""Of a server that takes weights so."""
Order = Callable[[str, Any], Awaitable[Any]]
"""POST a body to a route of the server; EngineError when it fails."""


class Sender(Protocol):
    """Rank 0 of a group whose other ranks are the workers of one server."""

    unique_id: bytes

    def join(self) -> None:
        """Meet the workers; blocks until all are there."""
        ...

    def send(self, tensors: "Sequence[Tensor]") -> None:
        """To every worker, in this order; blocks until all have them."""
        ...


class NcclSender:
    """Implements Sender with the NCCL of PyTorch, on the device of the weights and a stream of its own: a worker that
    dies must not keep the learner's stream waiting."""

    def __init__(self, device: Any, workers: int) -> None:
        import torch
        from torch.cuda import nccl

        if device.type != "cuda":
            raise EngineError(f"servers.transfer=nccl sends weights from a GPU, and the learner's are on {device}")
        self._nccl, self._device, self._ranks = nccl, device, workers + 1
        self._stream = torch.cuda.Stream(device)
        self.unique_id = bytes(nccl.unique_id())
        self._group: Any = None

    def join(self) -> None:
        """With the sum of one number that vLLM's workers begin with."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group = self._nccl.init_rank(self._ranks, self.unique_id, 0)
            self._nccl.all_reduce([torch.zeros(1, device=self._device)], streams=[self._stream], comms=[self._group])
        self._stream.synchronize()

    def send(self, tensors: "Sequence[Tensor]") -> None:
        """Broadcasts the tensors to the workers one by one."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            for tensor in tensors:
                self._nccl.broadcast([tensor.contiguous()], 0, streams=[self._stream], comms=[self._group])
        self._stream.synchronize()


class Transfer:
    """The weights' way into one server, opened with the first update and again after the server came back."""

    def __init__(self, sender: Callable[[Any, int], Sender] = NcclSender) -> None:
        self._make = sender
        self._sender: Sender | None = None

    def forget(self) -> None:
        """The server is a new one, which knows nobody."""
        self._sender = None

    async def load(self, update: FullWeights, order: Order, workers: int) -> None:
        """Between a pause and a resume of the server."""
        tensors = list(update.tensors)
        if self._sender is None:
            sender = self._make(tensors[0][1].device, workers)
            info = {
                "nccl_unique_id_b64": base64.b64encode(sender.unique_id).decode(), "rank_offset": 1,
                "world_size": workers + 1, "packed": False,
            }  # fmt: skip
            await _both(order("/init_weight_transfer_engine", {"init_info": info}), sender.join)
            self._sender = sender
        sender = self._sender
        about = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        await order("/start_weight_update", {})
        await _both(
            order("/update_weights", {"update_info": about}), lambda: sender.send([weight for _, weight in tensors])
        )
        await order("/finish_weight_update", {})


async def _both(request: Awaitable[Any], work: Callable[[], None]) -> None:
    """The server's half and ours, which wait for each other: the first that fails ends both.

    Ours runs in a thread that nobody waits for: NCCL does not give up on a worker that is gone. No restart of the
    server mends that, so it is no EngineLost.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        try:
            work()
        except RuntimeError as error:  # as torch says what NCCL or CUDA found wrong
            loop.call_soon_threadsafe(finish, EngineError(f"weights cannot be sent by NCCL: {error}"))
        else:
            loop.call_soon_threadsafe(finish, None)

    threading.Thread(target=run, name="nccl transfer", daemon=True).start()
    theirs = asyncio.ensure_future(request)
    try:
        await asyncio.gather(theirs, done)
    except EngineError as error:
        raise EngineError(f"a transfer of weights by NCCL broke off, which cannot be mended: {error}") from error
    finally:
        theirs.cancel()
