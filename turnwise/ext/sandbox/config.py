"""The section `sandbox`: where the code that a model writes is run."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import at_least, duration, knob, only, reaches, url
from turnwise.config.marks import key_in
from turnwise.errors import ConfigError
from turnwise.ext.sandbox.level import SandboxLevel

LOCAL = ("sandbox.url", "null")
VISION = ("cv2", "scipy.ndimage", "scipy.stats", "skimage.io", "skimage.measure", "sklearn.cluster", "shapely.geometry")
"""What code about images imports, where the extra `vision` is installed."""
PRELOADED = ("numpy", "sympy", "pandas", "PIL.Image", "matplotlib.pyplot", *VISION)


def is_none(level: SandboxLevel) -> bool:
    """Whether code would run without a sandbox."""
    return level is SandboxLevel.L0


@dataclass
class SandboxConfig:
    """Where the code that a model writes is run."""

    EVERY_KNOB: ClassVar = (key_in("TURNWISE_SANDBOX_TOKEN"),)

    level: SandboxLevel = knob(SandboxLevel.auto, only(*LOCAL), reaches("sandbox", is_none))
    """Exactly this isolation, or the highest that can be proven. Set it to get the same one on every machine."""
    min_level: SandboxLevel = knob(SandboxLevel.L2, reaches("sandbox", is_none))
    """Below this isolation no code is run. Raise it for models you do not trust; lower it only in a throw-away
    machine."""
    stateless: bool = False
    """Forget variables and files after each call. Set it when every call must stand alone."""
    seconds: float = knob(10.0, duration())
    """Seconds of one call; then it is interrupted. Raise it for heavy computations."""
    memory_mb: int = knob(512, at_least(1, 2**30), only(*LOCAL))
    """Memory of one session, beyond what the preloaded packages take. Raise it for data frames and plots."""
    scratch_mb: int = knob(64, at_least(1, 2**30), only(*LOCAL))
    """Size of the files of one session. Raise it when the code writes data."""
    preload: list[str] = knob([*PRELOADED], only(*LOCAL), reaches("code", lambda name: name not in PRELOADED))
    """Packages that every session has loaded, so that importing them takes no time; of the default list those that are
    installed. Empty it for a quicker start, add what your task's code imports."""
    url: str | None = knob(None, url(), reaches("network"))
    """A sandbox server's address instead of this machine, such as http://sandbox:8080. Its token is the value of the
    environment variable TURNWISE_SANDBOX_TOKEN. Set it when this machine cannot isolate code."""

    def check(self) -> None:
        """ConfigError for what no run can use."""
        if self.min_level is SandboxLevel.auto:
            raise ConfigError("sandbox.min_level is a level (L0, L2, L3 or L4); auto is for sandbox.level")
