"""Code about images as models write it, with OpenCV, scikit-image, scipy and others, at every level of the sandbox."""

import asyncio
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from PIL import Image, ImageDraw

from turnwise.ext.sandbox.config import VISION
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool, not_installed
from turnwise.ext.sandbox.provenance import check_claims
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage, Provenance, Result

ABSENT = [name for name in not_installed() if name in VISION]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"the extra vision is not installed: no {', '.join(ABSENT)}")
NO_GVISOR = pytest.mark.skipif(shutil.which("runsc") is None, reason="gVisor's runsc is not installed")
LEVELS = [SandboxLevel.L2, SandboxLevel.L3, pytest.param(SandboxLevel.L4, marks=NO_GVISOR)]


def scene() -> Image.Image:
    """Five dark discs on white, a line of 200 pixels, a red and a blue square, and shades to tell parts apart."""
    image = Image.new("RGB", (400, 300), "white")
    draw = ImageDraw.Draw(image)
    for x, y in ((40, 40), (100, 40), (160, 40), (40, 100), (100, 100)):
        draw.ellipse((x - 15, y - 15, x + 15, y + 15), fill="black")
    draw.line((50, 250, 250, 250), fill="black", width=3)
    draw.rectangle((280, 30, 319, 69), fill=(220, 20, 20))
    draw.rectangle((280, 130, 319, 169), fill=(20, 20, 220))
    for step in range(16):
        draw.rectangle((330 + 4 * step, 180, 333 + 4 * step, 240), fill=(16 * step, 120, 255 - 16 * step))
    return image


# What each prints, and what its image, if it gives one, shows of the scene.
TRACES: dict[str, tuple[str, str, tuple[float, ...] | None]] = {
    "crop, enlarge and save": (
        "part = img[20:120, 20:120]\nbig = cv2.resize(part, None, fx=3, fy=3, interpolation=cv2.INTER_CUBIC)\n"
        "cv2.imwrite('part.png', big)\nprint('part.png', big.shape)",
        "part.png (300, 300, 3)", (20, 20, 120, 120),
    ),
    "a copy of a part with a box drawn on it": (
        "part = img[0:150, 0:200].copy()\ncv2.rectangle(part, (25, 25), (55, 55), (0, 255, 0), 2)\ncv2.imwrite('a.jpg', part)",
        "", (0, 0, 200, 150),
    ),
    "turn upright": (
        "upright = cv2.rotate(img, cv2.ROTATE_90_CLOCKWISE)\ncv2.imwrite('upright.png', upright)\nprint(upright.shape[:2])",
        "(400, 300)", (0, 0, 400, 300),
    ),
    "blue first, as OpenCV has it, to Pillow": (
        "from PIL import Image\nImage.fromarray(cv2.cvtColor(img, cv2.COLOR_BGR2RGB)).crop((270, 20, 400, 250)).show()",
        "", (270, 20, 400, 250),
    ),
    "a window": ("cv2.imshow('view', img[10:130, 10:190])\ncv2.waitKey(0)\ncv2.destroyAllWindows()", "", (10, 10, 190, 130)),
    "a quarter turn about a point": (
        "M = cv2.getRotationMatrix2D((149.5, 149.5), 90, 1.0)\nshow(cv2.warpAffine(img[:, :300], M, (300, 300)))",
        "", (0, 0, 300, 300),
    ),
    "turned a little": (
        "M = cv2.getRotationMatrix2D((200, 150), 30, 1.0)\nshow(cv2.warpAffine(img, M, (400, 300)))", "", None,
    ),
    "threshold and contours": (
        "gray = cv2.cvtColor(img, cv2.COLOR_BGR2GRAY)\n_, mask = cv2.threshold(gray[:180, :260], 60, 255, cv2.THRESH_BINARY_INV)\n"
        "found, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)\n"
        "print(len([c for c in found if cv2.contourArea(c) > 200]))\nshow(mask)",
        "5", (0, 0, 260, 180),
    ),
    "edges and lines": (
        "edges = cv2.Canny(cv2.cvtColor(img, cv2.COLOR_BGR2GRAY), 50, 150)\n"
        "lines = cv2.HoughLinesP(edges, 1, np.pi / 180, 60, minLineLength=100, maxLineGap=5)\n"
        "length = max(np.hypot(x2 - x1, y2 - y1) for x1, y1, x2, y2 in np.asarray(lines).reshape(-1, 4))\n"
        "print(abs(length - 200) < 6)\nshow(edges)",
        "True", None,
    ),
    "a colour's place": (
        "hsv = cv2.cvtColor(img, cv2.COLOR_BGR2HSV)\nred = cv2.inRange(hsv, (0, 150, 150), (8, 255, 255))\n"
        "ys, xs = np.nonzero(red[:100])\nprint(xs.min(), ys.min(), xs.max(), ys.max())",
        "280 30 319 69", None,
    ),
    "measure a distance with scipy": (
        "from scipy import ndimage\nfrom scipy.spatial import distance\nb, g, r = (img[..., n].astype(int) for n in range(3))\n"
        "red, blue = (r - b > 150) & (g < 60), (b - r > 150) & (g < 60)\n"
        "a, c = ndimage.center_of_mass(red[:, :325]), ndimage.center_of_mass(blue[:, :325])\nprint(round(distance.euclidean(a, c)))",
        "100", None,
    ),
    "count with scipy": (
        "from scipy import ndimage\n_, count = ndimage.label(img[:180, :260].max(axis=2) < 60)\nprint(count)", "5", None,
    ),
    "areas with scikit-image": (
        "from skimage import color, filters, measure\ngray = color.rgb2gray(img[:180, :260, ::-1])\n"
        "regions = measure.regionprops(measure.label(gray < filters.threshold_otsu(gray)))\n"
        "print(len(regions), round(np.mean([one.equivalent_diameter_area for one in regions])))",
        "5 31", None,
    ),
    "read, turn and write with scikit-image": (
        "from skimage import io, transform, util\npage = io.imread(image_path)\n"
        "io.imsave('turned.png', util.img_as_ubyte(transform.rotate(page[:, :200], 90, resize=True)))",
        "", (0, 0, 200, 300),
    ),
    "turn and zoom with scipy": (
        "from scipy import ndimage\nshow(ndimage.zoom(ndimage.rotate(cv2.imread(image_path, 0)[0:150, 0:200], 90), 2, order=1))",
        "", (0, 0, 200, 150),
    ),
    "cluster with scikit-learn": (
        "from sklearn.cluster import DBSCAN, KMeans\nys, xs = np.nonzero(img[:180, :260].max(axis=2) < 60)\n"
        "points = np.stack([xs, ys], axis=1)[::7]\nlabels = DBSCAN(eps=5, min_samples=3).fit_predict(points)\n"
        "km = KMeans(n_clusters=5, n_init=3, random_state=0).fit(points)\nprint(len(set(labels) - {-1}), km.cluster_centers_.shape)",
        "5 (5, 2)", None,
    ),
    "areas with shapely": (
        "from shapely.geometry import Polygon, box\na = Polygon([(0, 0), (4, 0), (4, 3)])\nprint(a.area, a.intersection(box(0, 0, 2, 2)).area)",
        "6.0 1.5", None,
    ),
    "a drawing of its own": (
        "page = np.zeros((80, 200, 3), np.uint8)\ncv2.putText(page, 'answer: 42', (5, 50), cv2.FONT_HERSHEY_SIMPLEX, 1, (255, 255, 255))\n"
        "cv2.imwrite('page.png', page)",
        "", None,
    ),
    "one thread, and nothing of the packages in the environment": (
        "import os\nprint(cv2.getNumThreads(), [name for name in os.environ if 'KMP' in name or 'LD_' in name])", "1 []", None,
    ),
}  # fmt: skip
HEAD = "import cv2\nimport numpy as np\nimg = cv2.imread(image_path)\nassert img.shape == (300, 400, 3)"


@dataclass
class Played:
    """What came of each trace, with the host's findings about its images."""

    by_name: dict[str, Result]


@pytest.fixture(scope="module", params=LEVELS)
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    file = io.BytesIO()
    scene().save(file, "PNG")
    given = [InputImage("27.png", file.getvalue())]

    async def work() -> dict[str, Result]:
        preload = ("numpy", "PIL.Image", *VISION)
        async with SandboxPool(PoolSettings(level=request.param, preload=preload, warm=0)) as pool:
            async with pool.session(images=given) as session:
                first = await session.run(HEAD)
                assert first.status is ExecutionStatus.OK, first.text()
                return {name: await session.run(code) for name, (code, _, _) in TRACES.items()}

    yield Played({name: check_claims(result, given) for name, result in asyncio.run(work()).items()})


@pytest.mark.parametrize("name", TRACES)
def test_traces_run_and_the_host_knows_what_their_images_show(played: Played, name: str) -> None:
    _, printed, box = TRACES[name]
    result = played.by_name[name]
    assert result.status is ExecutionStatus.OK, result.text()
    assert result.stdout.strip() == printed
    origins: list[Provenance] = [image.provenance for image in result.images]
    if box is None:
        assert not any(origin.verified for origin in origins)
    else:
        assert [(origin.source, origin.box, origin.verified) for origin in origins] == [("27.png", box, True)]


def test_an_image_that_is_no_part_is_not_taken_for_one(played: Played) -> None:
    edges, turned, own = (
        played.by_name[name].images[0].provenance
        for name in ("edges and lines", "turned a little", "a drawing of its own")
    )
    assert edges.source == turned.source == "27.png" and edges.box is turned.box is None
    assert own.source is None
