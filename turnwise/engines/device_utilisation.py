"""How much of the time kernels ran on a GPU, as its driver counts it (what nvidia-smi shows), sampled now and then."""

import ctypes
import threading
import weakref
from collections.abc import Callable

import torch

SECONDS = 0.2
"""Between two samples; the driver's own cover between a sixth of a second and a second."""
LIBRARY = "libnvidia-ml.so.1"
"""It comes with the driver."""

Read = Callable[[], float | None]
"""read(): the share of the driver's last period in which a kernel ran; None when it does not say."""


class BusySamples:
    """The mean of what a driver says, sampled by a thread that ends with this object."""

    def __init__(self, read: Read, seconds: float = SECONDS) -> None:
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        ended = threading.Event()
        weakref.finalize(self, ended.set)
        sampling = threading.Thread(target=_sample, args=(weakref.ref(self), read, seconds, ended), daemon=True)
        sampling.start()

    def add(self, share: float) -> None:
        """One more sample."""
        with self._lock:
            self._sum, self._count = self._sum + share, self._count + 1

    def take(self) -> float | None:
        """The mean since the last take; None when there was no sample."""
        with self._lock:
            mean = self._sum / self._count if self._count else None
            self._sum, self._count = 0.0, 0
        return mean


def _sample(samples: "weakref.ref[BusySamples]", read: Read, seconds: float, ended: threading.Event) -> None:
    while not ended.wait(seconds):
        share, alive = read(), samples()
        if share is not None and alive is not None:
            alive.add(share)
        del alive


def busy_samples(device: torch.device) -> BusySamples | None:
    """Of a GPU of NVIDIA's; None where there is no such driver, or it does not know the device (a part of a GPU)."""
    read = _driver(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if device.type == "cuda" else None
    return None if read is None else BusySamples(read)


class _Utilisation(ctypes.Structure):
    """Percents, as NVML writes them."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def _driver(uuid: str) -> Read | None:
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    handle, found = ctypes.c_void_p(), _Utilisation()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None

    def read() -> float | None:
        return None if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) else found.gpu / 100

    return None if read() is None else read
