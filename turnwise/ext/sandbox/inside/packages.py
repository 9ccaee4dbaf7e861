"""What is changed in packages the code uses, when they are loaded: before the sessions, or by the code itself."""

import builtins
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from turnwise.ext.sandbox.inside.images import Gallery
from turnwise.ext.sandbox.inside.pillow import (
    wrap_pil_draw,
    wrap_pil_enhance,
    wrap_pil_image,
    wrap_pil_jpeg,
    wrap_pil_operations,
)
from turnwise.ext.sandbox.inside.vision import NDIMAGE, SKIMAGE, wrap_all, wrap_cv2

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules


class Current:
    """What the changed functions refer to; set when a session starts."""

    gallery: Gallery | None = None
    seed: int | None = None


def the_gallery() -> Gallery:
    """The gallery of the session; RuntimeError before one was started."""
    if Current.gallery is None:
        raise RuntimeError("no session was started")
    return Current.gallery


def change_pil_image(module: Any) -> None:
    wrap_pil_image(module)

    def show(self: Any, *given: Any, **keywords: Any) -> None:
        """Give the image back with the result of this call."""
        the_gallery().show(self)

    module.Image.show = show


def change_matplotlib(module: Any) -> None:
    module.use("Agg")


def change_pyplot(module: Any) -> None:
    def show(*given: Any, **keywords: Any) -> None:
        """Give all open figures back with the result of this call, and close them."""
        the_gallery().show_figures()

    module.show = show


def change_figure(module: Any) -> None:
    def show(self: Any, *given: Any, **keywords: Any) -> None:
        """Give the figure back with the result of this call."""
        the_gallery().show(self)

    module.Figure.show = show


def seed_numpy(module: Any) -> None:
    if Current.seed is not None:
        module.seed(Current.seed)


def change_cv2(module: Any) -> None:
    wrap_cv2(module, lambda image: the_gallery().show(image))


CHANGES: dict[str, Callable[[Any], None]] = {
    "PIL.Image": change_pil_image,
    "PIL.JpegImagePlugin": wrap_pil_jpeg,
    "PIL.ImageDraw": wrap_pil_draw,
    "PIL.ImageOps": wrap_pil_operations,
    "PIL.ImageEnhance": wrap_pil_enhance,
    "matplotlib": change_matplotlib,
    "matplotlib.pyplot": change_pyplot,
    "matplotlib.figure": change_figure,
    "numpy.random": seed_numpy,
    "cv2": change_cv2,
    "scipy.ndimage": wrap_all(NDIMAGE),
    **{name: wrap_all(functions) for name, functions in SKIMAGE.items()},
}


class Watcher:
    """A finder that changes a package right after it was loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing, except for the packages to be changed."""
        if name not in CHANGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def change_packages() -> None:
    """Change what is loaded, and watch for the rest. Once per process."""
    for name, change in CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    if any(name not in sys.modules for name in CHANGES):
        sys.meta_path.insert(0, Watcher())
    os.environ["MPLBACKEND"] = "Agg"
