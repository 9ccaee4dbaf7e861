"""Wraps what OpenCV, scikit-image and scipy do to images, so that their arrays keep the trail that PIL's images have.

An operation whose result shows the image in place keeps the place; one whose result shows something else of it, such as
its edges, keeps the source and no place. The host compares what is claimed with the pixels in any case.
"""

import builtins
from collections.abc import Callable
from functools import wraps
from typing import Any

from turnwise.data.images.provenance import IDENTITY, Matrix, Trail, scaled, turned
from turnwise.ext.sandbox.inside.arrays import traced, trail_of_array
from turnwise.ext.sandbox.inside.image_trails import files, shortened

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

Size = tuple[int, int]
Geometry = Callable[[Size, Size, dict[str, Any]], Matrix | None]
"""(size of the image, size of the result, arguments) -> how the result's pixels lie in the image."""
NEARLY = 1e-6
KEEPS_TRAIL = "_keeps_trail"
"""The attribute of a function that was wrapped."""


def unchanged(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """Each pixel stays where it is."""
    return IDENTITY if size == result else None


def lost(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """What the result shows is no part of the image."""
    return None


def resized(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """All of the image, in another size."""
    return scaled((0, 0, *size), result)


def cv_rotated(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """ROTATE_90_CLOCKWISE, ROTATE_180 and ROTATE_90_COUNTERCLOCKWISE, which are 0, 1 and 2."""
    return turned({0: 4, 1: 3, 2: 2}.get(arguments["rotateCode"], -1), size)


def cv_flipped(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """Upside down for 0, sideways above it, both below."""
    code = arguments["flipCode"]
    return turned(1 if code == 0 else 0 if code > 0 else 3, size)


def cv_transposed(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """Rows become columns."""
    return turned(5, size)


def cv_cut(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """getRectSubPix: so many pixels around a point."""
    x, y = arguments["center"]
    return (1, 0, float(x) - (result[0] - 1) / 2, 0, 1, float(y) - (result[1] - 1) / 2)


def cv_warped(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """warpAffine: quarter turns, shifts and scales are still rectangles. OpenCV's points are middles of pixels."""
    (a, b, c), (d, e, f) = ((float(number) for number in row) for row in arguments["M"])
    area = a * e - b * d
    if not area or int(arguments.get("flags") or 0) & 16:  # WARP_INVERSE_MAP
        return None
    g, h, j, k = (0.0 if abs(x) < NEARLY else x for x in (e / area, -b / area, -d / area, a / area))
    if (g or k) and (h or j):
        return None
    x, y = 0.5 - g * (c + 0.5) - h * (f + 0.5), 0.5 - j * (c + 0.5) - k * (f + 0.5)
    return (g, h, x, j, k, y)


def turned_by_angle(size: Size, result: Size, arguments: dict[str, Any]) -> Matrix | None:
    """scikit-image and scipy turn against the clock, by degrees; a quarter turn is still a rectangle."""
    angle = arguments["angle"] % 360
    if angle == 0:
        return unchanged(size, result, arguments)
    if angle == 180:
        return turned(3, size) if size == result else None
    if angle in (90, 270) and result == (size[1], size[0]) and arguments.get("center") is None:
        return turned(2 if angle == 90 else 4, size)
    return None


FIRST = ("src", "image", "img", "src1", "input")
"""What the functions below call the image that they are given, where code names it."""
_SAME = (
    *("cvtColor", "GaussianBlur", "medianBlur", "bilateralFilter", "blur", "boxFilter", "filter2D", "equalizeHist"),
    *("normalize", "convertScaleAbs", "addWeighted", "bitwise_not", "bitwise_and", "bitwise_or", "LUT", "add"),
    *("subtract", "multiply", "threshold", "erode", "dilate", "morphologyEx", "fastNlMeansDenoising"),
    *("fastNlMeansDenoisingColored", "detailEnhance", "extractChannel"),
)
_LOST = (
    *("Canny", "Laplacian", "Sobel", "Scharr", "inRange", "adaptiveThreshold", "applyColorMap", "warpPerspective"),
    *("copyMakeBorder", "distanceTransform"),
)
_DRAWN = (
    *("rectangle", "line", "circle", "ellipse", "putText", "polylines", "fillPoly", "drawContours", "arrowedLine"),
    *("drawMarker", "fillConvexPoly"),
)
Wrapped = tuple[tuple[str, ...], Geometry]
"""The names of a function's first parameters, where its geometry needs them, and the geometry."""


def _all(names: tuple[str, ...], geometry: Geometry) -> dict[str, Wrapped]:
    return dict.fromkeys(names, ((), geometry))


CV2: dict[str, Wrapped] = {
    **_all((*_SAME, *_DRAWN), unchanged),
    **_all(_LOST, lost),
    **_all(("resize", "pyrDown", "pyrUp"), resized),
    "rotate": (("src", "rotateCode"), cv_rotated),
    "flip": (("src", "flipCode"), cv_flipped),
    "transpose": ((), cv_transposed),
    "getRectSubPix": (("image", "patchSize", "center"), cv_cut),
    "warpAffine": (("src", "M", "dsize", "dst", "flags"), cv_warped),
}
"""Functions of OpenCV that give an image, or draw on one."""
_TURN: dict[str, Wrapped] = {"rotate": (("image", "angle", "resize", "center"), turned_by_angle)}
_KINDS = _all(("img_as_ubyte", "img_as_float", "img_as_float32"), unchanged)
SKIMAGE: dict[str, dict[str, Wrapped]] = {
    "skimage.color.colorconv": _all(("rgb2gray", "rgba2rgb", "gray2rgb", "rgb2hsv", "hsv2rgb", "rgb2lab"), unchanged),
    "skimage.transform._warps": _TURN | _all(("resize", "rescale"), resized),
    "skimage.exposure.exposure": _all(("equalize_hist", "rescale_intensity", "adjust_gamma", "adjust_log"), unchanged),
    "skimage.exposure._adapthist": _all(("equalize_adapthist",), unchanged),
    "skimage.filters._gaussian": _all(("gaussian",), unchanged),
    "skimage.util.dtype": _KINDS,
    "skimage.util": _KINDS,
}
"""By the module that a function is defined in: the packages look it up there when it is used."""
NDIMAGE: dict[str, Wrapped] = {
    "rotate": (("input", "angle"), turned_by_angle),
    **_all(("zoom",), resized),
    **_all(("gaussian_filter", "median_filter", "uniform_filter", "convolve"), unchanged),
}


def known(array: Any) -> Trail:
    """The trail of an array, looked for once."""
    trail = traced.get(array)
    if trail is None:
        trail = trail_of_array(array)
        traced.mark(array, trail)
    return trail


def is_image(value: Any) -> bool:
    """Whether a value is an array that could be an image."""
    shape = getattr(value, "shape", ())
    return len(shape) in (2, 3) and hasattr(value, "__array_interface__") and min(shape) > 0


def wrap(module: Any, name: str, names: tuple[str, ...], geometry: Geometry) -> None:
    """A function that is given an image first and gives an image, alone or as the last of several values."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, KEEPS_TRAIL):  # another release has none
        return

    @wraps(original)
    def function(*given: Any, **keywords: Any) -> Any:
        image: Any = given[0] if given else next((keywords[key] for key in FIRST if key in keywords), None)
        if not is_image(image):
            return original(*given, **keywords)
        trail, size = known(image), (image.shape[1], image.shape[0])
        result = original(*given, **keywords)
        made = result[-1] if isinstance(result, tuple) and result else result
        if is_image(made):
            arguments = {**dict(zip(names, given, strict=False)), **keywords}
            shown = shortened({key: value for key, value in arguments.items() if value is not image})
            traced.mark(made, trail.after(name, shown, geometry(size, (made.shape[1], made.shape[0]), arguments)))
        return result

    setattr(function, KEEPS_TRAIL, True)
    setattr(module, name, function)


def wrap_reading(module: Any) -> None:
    """OpenCV's own readers and its writer of files."""
    read, decode, write = module.imread, module.imdecode, module.imwrite

    @wraps(read)
    def imread(filename: Any, *given: Any, **keywords: Any) -> Any:
        return opened(read(filename, *given, **keywords), files.find_path(filename), "imread")

    @wraps(decode)
    def imdecode(buf: Any, *given: Any, **keywords: Any) -> Any:
        content = bytes(buf) if is_flat_bytes(buf) else b""
        return opened(decode(buf, *given, **keywords), files.find_content(memoryview(content)), "imdecode")

    @wraps(write)
    def imwrite(filename: Any, img: Any, *given: Any, **keywords: Any) -> Any:
        trail = known(img) if is_image(img) else Trail()  # before: the file may be the array's own source
        written = write(filename, img, *given, **keywords)
        if written:
            files.add_path(filename, trail)
        return written

    module.imread, module.imdecode, module.imwrite = imread, imdecode, imwrite


def is_flat_bytes(value: Any) -> bool:
    """Whether an array is the content of a file."""
    return isinstance(value, bytes | bytearray) or str(getattr(value, "dtype", "")) == "uint8"


def opened(array: Any, trail: Trail | None, name: str) -> Any:
    """An array that was read from a file; of one that was turned upright or made smaller the place is unknown."""
    if is_image(array):
        trail, size = trail or Trail(), (array.shape[1], array.shape[0])
        as_stored = trail.matrix != IDENTITY or trail.source_size == size
        traced.mark(array, trail.after(name, {}, IDENTITY if as_stored else None))
    return array


def wrap_cv2(module: Any, show: Callable[[Any], None]) -> None:
    """OpenCV was imported: one thread, for whoever forks; `imshow` gives an image back."""
    if not hasattr(module, "imread") or hasattr(module.resize, KEEPS_TRAIL):  # OpenCV is loaded twice
        return
    module.setNumThreads(1)
    for name, (names, geometry) in CV2.items():
        wrap(module, name, names, geometry)
    wrap_reading(module)
    to_rgb = {3: module.COLOR_BGR2RGB, 4: module.COLOR_BGRA2RGBA}

    def imshow(winname: Any, mat: Any) -> None:
        """Give the image back with the result of this call; blue comes first in it."""
        code = to_rgb.get(mat.shape[2]) if mat.ndim == 3 else None
        show(mat if code is None else module.cvtColor(mat, code))

    def no_window(*given: Any, **keywords: Any) -> int:
        """There is no window, and no key is pressed."""
        return -1

    module.imshow = imshow
    module.waitKey = module.namedWindow = module.destroyAllWindows = module.destroyWindow = no_window


def wrap_all(functions: dict[str, Wrapped]) -> Callable[[Any], None]:
    """For a module with these functions."""

    def change(module: Any) -> None:
        for name, (names, geometry) in functions.items():
            wrap(module, name, names, geometry)

    return change
