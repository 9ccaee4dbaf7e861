"""Wraps PIL's operations, once per process, so that each image carries its trail."""

import builtins
from collections.abc import Callable
from functools import wraps
from typing import Any

from turnwise.data.images.provenance import IDENTITY, Matrix, Trail, scaled, turned
from turnwise.ext.sandbox.inside.arrays import wrap_arrays
from turnwise.ext.sandbox.inside.image_trails import ATTRIBUTE, files, mark, short, shortened, trail_of

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

Geometry = Callable[[Any, Any, dict[str, Any]], Matrix | None]
"""(image, result, arguments) -> how the result's pixels lie in the image."""


def named(names: tuple[str, ...], values: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name: positional ones by `names`, then keywords."""
    return {**dict(zip(names, values, strict=False)), **keywords}


def unchanged(image: Any, result: Any, arguments: dict[str, Any]) -> Matrix | None:
    """Each pixel stays where it is."""
    return IDENTITY if image.size == result.size else None


def lost(image: Any, result: Any, arguments: dict[str, Any]) -> Matrix | None:
    """The result is no rectangle of the image."""
    return None


def cropped(image: Any, result: Any, arguments: dict[str, Any]) -> Matrix | None:
    box = arguments.get("box")
    if box is None:
        return IDENTITY
    left, upper = round(box[0]), round(box[1])
    return (1, 0, left, 0, 1, upper)


def resized(image: Any, result: Any, arguments: dict[str, Any]) -> Matrix | None:
    box = arguments.get("box")
    return scaled((0, 0, *image.size) if box is None else tuple(box), result.size)


def rotated(image: Any, result: Any, arguments: dict[str, Any]) -> Matrix | None:
    """A quarter turn is still a rectangle, where PIL itself takes it for one."""
    if arguments.get("center") or arguments.get("translate"):
        return None
    angle = arguments["angle"] % 360
    if angle == 0:
        return IDENTITY
    if angle == 180:
        return turned(3, image.size)
    if angle in (90, 270) and (arguments.get("expand") or image.width == image.height):
        return turned(2 if angle == 90 else 4, image.size)
    return None


def transposed(image: Any, result: Any, arguments: dict[str, Any]) -> Matrix | None:
    return turned(int(arguments["method"]), image.size)


METHODS: dict[str, tuple[tuple[str, ...], Geometry]] = {
    "crop": (("box",), cropped),
    "resize": (("size", "resample", "box", "reducing_gap"), resized),
    "reduce": (("factor", "box"), resized),
    "rotate": (("angle", "resample", "expand", "center", "translate", "fillcolor"), rotated),
    "transpose": (("method",), transposed),
    "transform": (("size", "method", "data", "resample", "fill", "fillcolor"), lost),
    "convert": (("mode", "matrix", "dither", "palette", "colors"), unchanged),
    "quantize": (("colors", "method", "kmeans", "palette", "dither"), unchanged),
    "filter": (("filter",), unchanged),
    "point": (("lut", "mode"), unchanged),
    "effect_spread": (("distance",), unchanged),
    "getchannel": (("channel",), unchanged),
    "remap_palette": (("dest_map", "source_palette"), unchanged),
}
"""Methods that give a new image."""

IN_PLACE: dict[str, tuple[str, ...]] = {
    "paste": ("im", "box", "mask"),
    "putalpha": ("alpha",),
    "alpha_composite": ("im", "dest", "source"),
    "putdata": (),
    "putpixel": (),
    "frombytes": (),
}
"""Methods that alter the pixels of an image."""

OPERATIONS = (
    *("autocontrast", "colorize", "contain", "cover", "pad", "crop", "scale", "expand", "equalize", "fit", "flip"),
    *("grayscale", "invert", "mirror", "posterize", "solarize", "exif_transpose"),
)
"""Functions of ImageOps: their geometry comes from the methods they call."""


def altered(image: Any, name: str, arguments: dict[str, Any]) -> None:
    """Note a change in place, once for a run of equal ones."""
    trail = trail_of(image)
    if trail.steps and trail.steps[-1] == (name, arguments):
        return
    mark(image, trail.after(name, arguments, IDENTITY))


def wrap_method(cls: Any, name: str, names: tuple[str, ...], geometry: Geometry) -> None:
    """A method that gives a new image."""
    original = getattr(cls, name)

    @wraps(original)
    def method(self: Any, *given: Any, **keywords: Any) -> Any:
        result = original(self, *given, **keywords)
        arguments = named(names, given, keywords)
        mark(result, trail_of(self).after(name, shortened(arguments), geometry(self, result, arguments)))
        return result

    setattr(cls, name, method)


def wrap_in_place(cls: Any, name: str, names: tuple[str, ...]) -> None:
    """A method that alters its image."""
    original = getattr(cls, name)

    @wraps(original)
    def method(self: Any, *given: Any, **keywords: Any) -> Any:
        result = original(self, *given, **keywords)
        altered(self, name, shortened(named(names, given, keywords)) if names else {})
        return result

    setattr(cls, name, method)


def wrap_sizing(cls: Any, name: str, names: tuple[str, ...]) -> None:
    """A method that changes the size of its own image."""
    original = getattr(cls, name)

    @wraps(original)
    def method(self: Any, *given: Any, **keywords: Any) -> Any:
        trail, size = trail_of(self), self.size
        result = original(self, *given, **keywords)
        if self.size != size:
            arguments = shortened(named(names, given, keywords))
            mark(self, trail.after(name, arguments, scaled((0, 0, *size), self.size)))
        return result

    setattr(cls, name, method)


def wrap_lifecycle(cls: Any) -> None:
    """Copies, pickles and results of operations we do not know keep the trail."""
    new, get_state, set_state, split, copy = cls._new, cls.__getstate__, cls.__setstate__, cls.split, cls.copy
    save = cls.save

    def _new(self: Any, im: Any) -> Any:
        result = new(self, im)
        trail = trail_of(self)
        if trail.source is not None or trail.steps:
            if result.size != self.size:
                trail = Trail(trail.source, trail.source_size, None, trail.steps)
            mark(result, trail)
        return result

    def __getstate__(self: Any) -> list[Any]:
        info, *others = get_state(self)
        return [{**info, ATTRIBUTE: trail_of(self)}, *others]

    def __setstate__(self: Any, state: list[Any]) -> None:
        info, *others = state
        trail = info.get(ATTRIBUTE)
        set_state(self, [{key: value for key, value in info.items() if key != ATTRIBUTE}, *others])
        if isinstance(trail, Trail):
            mark(self, trail)

    @wraps(split)
    def split_(self: Any) -> Any:
        bands = split(self)
        for name, band in zip(self.getbands(), bands, strict=True):
            mark(band, trail_of(self).after("split", {"band": name}, IDENTITY))
        return bands

    @wraps(copy)
    def copy_(self: Any) -> Any:
        result = copy(self)
        mark(result, trail_of(self))
        return result

    @wraps(save)
    def save_(self: Any, fp: Any, *given: Any, **keywords: Any) -> None:
        trail = trail_of(self)  # before: saving may convert
        save(self, fp, *given, **keywords)
        files.add_path(getattr(fp, "name", fp) if hasattr(fp, "write") else fp, trail)

    cls._new, cls.__getstate__, cls.__setstate__ = _new, __getstate__, __setstate__
    cls.split, cls.copy, cls.save = split_, copy_, save_


def wrap_functions(module: Any) -> None:
    """Functions of PIL.Image that make images."""
    original_open, original_new = module.open, module.new

    @wraps(original_open)
    def open_(fp: Any, *given: Any, **keywords: Any) -> Any:
        image = original_open(fp, *given, **keywords)
        trail = files.find_path(fp)
        if trail is None:
            name = fp if isinstance(fp, str) else getattr(fp, "name", None)
            trail = Trail(steps=(("open", shortened({"name": name}) if isinstance(name, str) else {}),))
        mark(image, trail)
        return image

    @wraps(original_new)
    def new(*given: Any, **keywords: Any) -> Any:
        image = original_new(*given, **keywords)
        mark(image, Trail(steps=(("new", shortened(named(("mode", "size", "color"), given, keywords))),)))
        return image

    module.open, module.new = open_, new
    for name, names in (
        ("blend", ("im1", "im2", "alpha")),
        ("composite", ("image1", "image2", "mask")),
        ("alpha_composite", ("im1", "im2")),
        ("eval", ("image",)),
    ):
        setattr(module, name, wrap_mixing(getattr(module, name), name, names))
    merge = module.merge

    @wraps(merge)
    def merge_(mode: Any, bands: Any) -> Any:
        bands = list(bands)
        result = merge(mode, bands)
        mark(result, first_known(bands).after("merge", {"mode": short(mode)}, IDENTITY))
        return result

    module.merge = merge_


def wrap_mixing(original: Any, name: str, names: tuple[str, ...]) -> Any:
    """A function of one image or more, of equal size."""

    @wraps(original)
    def function(*given: Any, **keywords: Any) -> Any:
        result = original(*given, **keywords)
        arguments = named(names, given, keywords)
        mark(result, first_known(list(arguments.values())).after(name, shortened(arguments), IDENTITY))
        return result

    return function


def first_known(images: list[Any]) -> Trail:
    """The trail of the first image that has a source, else of the first."""
    trails = [trail_of(image) for image in images] or [Trail()]
    return next((trail for trail in trails if trail.source is not None), trails[0])


def wrap_operation(original: Any, name: str) -> Any:
    """A function of ImageOps: one step, with the geometry of what it did inside."""

    @wraps(original)
    def function(image: Any, *given: Any, **keywords: Any) -> Any:
        before = trail_of(image)
        result = original(image, *given, **keywords)
        changed = image if result is None else result
        inner = trail_of(changed)
        if inner is before and result is not image:
            return result
        matrix = inner.matrix if inner.source is not None else None
        arguments = shortened({**{str(index): value for index, value in enumerate(given)}, **keywords})
        step = before.after(name, arguments, None)
        mark(changed, Trail(before.source, before.source_size, matrix, step.steps))
        return result

    return function


def wrap_pil_image(module: Any) -> None:
    """Makes the methods and functions of PIL.Image keep trails; called when it is imported."""
    cls = module.Image
    for name, (names, geometry) in METHODS.items():
        wrap_method(cls, name, names, geometry)
    for name, names in IN_PLACE.items():
        wrap_in_place(cls, name, names)
    wrap_sizing(cls, "thumbnail", ("size", "resample", "reducing_gap"))
    wrap_lifecycle(cls)
    wrap_arrays(module)
    wrap_functions(module)


def wrap_pil_jpeg(module: Any) -> None:
    """PIL.JpegImagePlugin was imported."""
    wrap_sizing(module.JpegImageFile, "draft", ("mode", "size"))


def wrap_pil_draw(module: Any) -> None:
    """Makes PIL.ImageDraw note that it changes an image; called when it is imported."""
    original = module.ImageDraw.__init__

    @wraps(original)
    def __init__(self: Any, im: Any, *given: Any, **keywords: Any) -> None:
        original(self, im, *given, **keywords)
        altered(im, "draw", {})

    module.ImageDraw.__init__ = __init__


def wrap_pil_operations(module: Any) -> None:
    """Makes the functions of PIL.ImageOps keep trails; called when it is imported."""
    for name in OPERATIONS:
        if hasattr(module, name):
            setattr(module, name, wrap_operation(getattr(module, name), name))


def wrap_pil_enhance(module: Any) -> None:
    """PIL.ImageEnhance was imported."""
    base = module._Enhance
    original = base.enhance

    @wraps(original)
    def enhance(self: Any, factor: float) -> Any:
        result = original(self, factor)
        name = type(self).__name__.lower()
        mark(result, trail_of(self.image).after(name, {"factor": short(factor)}, IDENTITY))
        return result

    base.enhance = enhance
