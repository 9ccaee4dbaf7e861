"""What a session says of its images, compared with the source: honest work holds, and no lie does."""

import asyncio
import io

import numpy
import pytest
from PIL import Image, ImageDraw

from turnwise.ext.sandbox.inside.pixels import pixels_of_image
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.provenance import check_claims
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage, Picture, Provenance, Result

SIZE = (320, 240)


def scene() -> Image.Image:
    """Smooth ground, fine noise, shapes and a page of writing with much white around it."""
    random = numpy.random.default_rng(7)
    across, down = numpy.meshgrid(numpy.arange(SIZE[0]), numpy.arange(SIZE[1]))
    ground = numpy.stack([across * 0.5, down * 0.8, (across + down) * 0.3], -1) + random.normal(0, 12, (*SIZE[::-1], 3))
    image = Image.fromarray(ground.clip(0, 255).astype(numpy.uint8))
    draw = ImageDraw.Draw(image)
    draw.rectangle((160, 0, 320, 120), fill="white")
    for line in range(6):
        draw.text((170, 8 + 18 * line), f"line {line} says {random.integers(10**6)}", fill="black")
    draw.ellipse((40, 40, 110, 120), fill="red", outline="blue", width=5)
    draw.polygon([(200, 150), (300, 160), (240, 230)], fill="yellow")
    draw.rectangle((0, 200, 60, 240), fill=(90, 90, 90))
    return image


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


HONEST = {
    "whole": "show(img0)",
    "crop": "show(img0.crop((30, 30, 120, 130)))",
    "crop of writing": "show(img0.crop((165, 5, 300, 40)))",
    "fractions": "show(img0.crop((30.4, 30.6, 120.2, 129.7)))",
    "enlarged": "show(img0.crop((165, 5, 215, 25)).resize((500, 200), Image.LANCZOS))",
    "enlarged without smoothing": "show(img0.crop((165, 5, 215, 25)).resize((400, 160), Image.NEAREST))",
    "reduced": "show(img0.resize((80, 60)))",
    "reduced without smoothing": "show(img0.crop((30, 30, 190, 150)).resize((60, 45), Image.NEAREST))",
    "resized with a box": "show(img0.resize((200, 100), box=(100, 50, 250, 125)))",
    "stretched": "show(img0.crop((30, 30, 130, 80)).resize((64, 256)))",
    "thumbnail": "a = img0.copy(); a.thumbnail((100, 100)); show(a)",
    "quarter turn": "show(img0.crop((30, 30, 130, 110)).rotate(90, expand=True))",
    "half turn": "show(img0.rotate(180))",
    "mirrored": "show(ImageOps.mirror(img0.crop((150, 100, 310, 235))))",
    "transposed": "show(img0.crop((160, 130, 310, 235)).transpose(Image.Transpose.TRANSVERSE))",
    "beyond the edges": "show(img0.crop((-40, -20, 100, 100)))",
    "beyond all edges, enlarged": "show(img0.crop((-50, -50, 370, 290)).resize((840, 680)))",
    "grey": "show(img0.crop((30, 30, 130, 130)).convert('L'))",
    "brighter, more contrast": "show(ImageEnhance.Contrast(ImageEnhance.Brightness(img0).enhance(1.2)).enhance(1.3))",
    "sharper": "show(ImageEnhance.Sharpness(img0.crop((160, 0, 320, 120)).resize((640, 480))).enhance(2))",
    "inverted": "show(ImageOps.invert(img0.crop((160, 0, 320, 120))))",
    "stretched shades": "show(ImageOps.autocontrast(img0.crop((30, 30, 130, 130)).convert('L')))",
    "through an array": "show(Image.fromarray(numpy.asarray(img0)[30:130, 40:140]))",
    "an array": "show(numpy.asarray(img0)[30:130, 40:140])",
    "saved as JPEG": "img0.crop((30, 30, 130, 130)).save('a.jpg', quality=80)",
    "a box drawn on it": "a = img0.copy(); ImageDraw.Draw(a).rectangle((40, 40, 110, 120), outline='lime', width=3); show(a)",
    "flat": "show(img0.crop((5, 205, 55, 235)))",
    "flat, enlarged": "show(img0.crop((5, 205, 55, 235)).resize((300, 200)))",
    "one pixel": "show(img0.crop((50, 60, 51, 61)))",
    "opened by its name": "show(Image.open('scene.png').crop((30, 30, 130, 130)))",
    "with transparency": "show(img0.convert('RGBA').crop((30, 30, 130, 130)))",
}
LIE = """
import sys
trail = sys.modules['turnwise.ext.sandbox.inside.image_trails']
def pretend(image, box, frame=None, source='scene.png'):
    made = trail.Trail(source, (320, 240), (1, 0, box[0], 0, 1, box[1]), (('crop', {'box': list(box)}),))
    class Told(trail.Trail):
        def report(self, size):
            return {'source': source, 'box': list(box), 'frame': frame, 'steps': [{'name': 'crop', 'arguments': {'box': list(box)}}]}
    trail.mark(image, Told())
    show(image)
"""
LIES = {
    "another part": "pretend(img0.crop((30, 30, 130, 130)), (160, 20, 260, 120))",
    "other writing": "pretend(img0.crop((165, 5, 300, 40)), (165, 41, 300, 76))",
    "a blank page for writing": "pretend(Image.new('RGB', (135, 35), 'white'), (165, 5, 300, 40))",
    "writing for a blank page": "pretend(img0.crop((165, 5, 300, 40)), (5, 205, 55, 235))",
    "a larger part than is shown": "pretend(img0.crop((200, 150, 260, 200)).resize((120, 100)), (160, 120, 320, 240))",
    "a smaller part than is shown": "pretend(img0.crop((160, 120, 320, 240)), (200, 150, 260, 200))",
    "a box beside its frame": "pretend(img0.crop((30, 30, 130, 130)), (160, 20, 260, 120), frame=[30, 30, 130, 130])",
    "noise": "pretend(Image.effect_noise((100, 100), 64).convert('RGB'), (30, 30, 130, 130))",
    "one colour": "pretend(Image.new('RGB', (100, 100), (128, 128, 128)), (30, 30, 130, 130))",
    "outside the source": "pretend(Image.new('RGB', (100, 100)), (400, 400, 500, 500))",
    "no area": "pretend(img0.crop((30, 30, 130, 130)), (30, 30, 30, 130))",
    "turned inside out": "pretend(img0.crop((30, 30, 130, 130)), (130, 130, 30, 30))",
    "no frame of this world": "pretend(img0, (0, 0, 320, 240), frame=[-9e8, -9e8, 9e8, 9e8])",
    "black in a frame that makes the source a speck": "pretend(Image.new('RGB', (100, 75)), (0, 0, 320, 240), frame=[-9e6, -9e6, 9e6, 9e6])",
    "a drawing in a frame of black": "a = Image.new('RGB', (140, 50)); ImageDraw.Draw(a).rectangle((0, 0, 106, 49), fill='white'); "
    "pretend(a, (200, 0, 320, 50), frame=[200, 0, 357, 50])",
    "an image that was not given": "pretend(img0.crop((30, 30, 130, 130)), (30, 30, 130, 130), source='other.png')",
    "no image": "pretend(img0.crop((30, 30, 130, 130)), (30, 30, 130, 130), source='broken.png')",
    "a turn that is no rectangle": "show(img0.rotate(30))",
    "drawn": "show(Image.new('RGB', (50, 50), 'red'))",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Result]:
    """All in one session each, because every image is looked at by itself."""
    given = [InputImage("scene.png", png(scene())), InputImage("broken.png", b"\x89PNG\r\n\x1a\n" + bytes(50))]

    async def work() -> dict[str, Result]:
        found = {}
        async with SandboxPool(PoolSettings(preload=("numpy", "PIL.Image"), warm=0)) as pool:
            for prelude, codes in (("", HONEST), (LIE, LIES)):
                async with pool.session(images=given) as session:
                    await session.run(
                        "import numpy\nfrom PIL import Image, ImageDraw, ImageEnhance, ImageOps\n" + prelude
                    )
                    for name, code in codes.items():
                        found[name] = await session.run(code)
        return found

    return {name: check_claims(result, given) for name, result in asyncio.run(work()).items()}


@pytest.mark.parametrize("name", HONEST)
def test_honest_work_is_verified(outcomes: dict[str, Result], name: str) -> None:
    result = outcomes[name]
    assert result.status is ExecutionStatus.OK and len(result.images) == 1, result.text()
    provenance = result.images[0].provenance
    assert provenance.source == "scene.png" and provenance.box is not None and provenance.verified, provenance


@pytest.mark.parametrize("name", LIES)
def test_a_claim_that_the_pixels_do_not_bear_out_is_not(outcomes: dict[str, Result], name: str) -> None:
    result = outcomes[name]
    assert result.status is ExecutionStatus.OK and len(result.images) == 1, result.text()
    assert not result.images[0].provenance.verified, result.images[0].provenance


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
def test_sources_of_every_mode_are_compared(mode: str) -> None:
    made = scene().convert("L").convert("I").point(lambda value: value * 200) if mode[0] == "I" else scene()
    source = made.convert(mode)
    file = io.BytesIO()
    source.save(file, "TIFF" if mode in ("CMYK", "YCbCr", "F", "I", "I;16") else "PNG")
    shown = Image.open(io.BytesIO(file.getvalue())).crop((40, 30, 140, 110))
    pixels = pixels_of_image(shown)
    picture = Picture("show", pixels.mode, pixels.size, pixels.data, Provenance("a", (40.0, 30.0, 140.0, 110.0)))
    result = Result(ExecutionStatus.OK, images=(picture,))
    given = [InputImage("a", file.getvalue())]
    assert check_claims(result, given).images[0].provenance.verified
    lie = Provenance("a", (180.0, 130.0, 280.0, 210.0))
    told = Result(ExecutionStatus.OK, images=(Picture("show", pixels.mode, pixels.size, pixels.data, lie),))
    assert not check_claims(told, given).images[0].provenance.verified


def test_two_images_of_one_name_are_both_looked_at() -> None:
    first, second = png(scene()), png(Image.effect_noise((90, 90), 80))
    noise = Image.open(io.BytesIO(second)).crop((10, 10, 60, 60))
    picture = Picture("show", "L", noise.size, noise.tobytes(), Provenance("a", (10.0, 10.0, 60.0, 60.0)))
    given = [InputImage("a", first), InputImage("a", second)]
    assert check_claims(Result(ExecutionStatus.OK, images=(picture,)), given).images[0].provenance.verified
