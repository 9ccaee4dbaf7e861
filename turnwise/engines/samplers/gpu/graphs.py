"""Work of fixed shape on a device: run as it stands the first time, then captured once and replayed by its key."""

from collections.abc import Callable, Hashable

import torch

Say = Callable[[str], None]


class Graphs:
    """CUDA graphs by key, all in one pool of memory; on the CPU, and where a model cannot be captured, plain calls.

    The first run of a key compiles its kernels and is a real one. Work reads and writes tensors that stay where they
    are; what it makes in between belongs to the pool, which is safe to share since runs follow each other on a stream.
    """

    def __init__(self, device: torch.device, say: Say, *, off: str | None) -> None:
        """`off` says why nothing may be captured."""
        self._captures = device.type == "cuda" and off is None
        if device.type == "cuda" and off is not None:
            say(f"passes run without CUDA graphs, which costs speed: {off}")
        self._say = say
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work, by replay where it can be."""
        graph = self._graphs.get(key)
        if graph is None and self._captures and key in self._seen:
            graph = self._capture(key, work)
        if graph is None:
            work()
            self._seen.add(key)
        else:
            graph.replay()

    def _capture(self, key: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Not by `torch.cuda.graph`, which waits for the whole device and empties the cache of a learner beside us."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except torch.OutOfMemoryError:
            self._break_off(graph)
            raise
        except RuntimeError as error:
            self._break_off(graph)
            self._captures = False
            self._say(
                f"passes run without CUDA graphs, which costs speed; capturing failed: {str(error).splitlines()[0]}"
            )
            return None
        graph.capture_end()
        self._graphs[key] = graph
        return graph

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # an invalid capture cannot end well, and must end all the same
            torch.cuda.current_stream().synchronize()

    def clear(self) -> None:
        """Give the memory back; kernels stay compiled."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
