"""Images, crops and boxes before a real browser: on the page, among the tokens, around a probe, and in a report."""

import re

import pytest
from looking import FIRST, SECOND, SIDE, TARGET
from page_checks import CONTRAST, WIDE

from turnwise.ext.board.standalone_html import freeze

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None
SHARD = "shard=trajectories/step_000001"
LOOKED = f"#/run/looked/trajectory?{SHARD}&row=0"
EVIL = f"#/run/looked/trajectory?{SHARD}&row=1"
BESIDE = "#/run/probed/beside?shard=eval/step_000000&row=1&probe=blank"
# Where boxes lie on their picture, as shares of its sides: [[number or "", left, top, right, bottom]].
BOXES = """(figure) => {
  const whole = figure.querySelector("img").getBoundingClientRect();
  const share = (box) => [(box.left - whole.left) / whole.width, (box.top - whole.top) / whole.height, (box.right - whole.left) / whole.width, (box.bottom - whole.top) / whole.height];
  return [...figure.querySelectorAll("rect.box-line")].map((rect) => [rect.getAttribute("class"), ...share(rect.getBoundingClientRect())]);
}"""
SHOWN = (
    "() => [...document.querySelectorAll('.picture img')].every((image) => image.complete && image.naturalWidth > 0)"
)


@pytest.fixture(scope="module")
def board(picture_board):
    return picture_board


def boxes(figure):
    expect(figure.locator("svg.boxes")).to_be_attached()
    return figure.evaluate(BOXES)


def near(found, box, side=SIDE):
    return all(abs(edge - wanted / side) < 0.02 for edge, wanted in zip(found, box, strict=True))


def test_crops_are_numbered_boxes_on_what_the_tool_read(open_page):
    page = open_page(LOOKED)
    read = page.locator(".message", has_text="What tools read").locator("figure")
    first, second, claimed = (one for one in boxes(read) if "target" not in one[0])
    assert near(first[1:], FIRST) and near(second[1:], SECOND) and near(claimed[1:], (16, 16, 48, 48))
    assert "claimed" in claimed[0] and "claimed" not in first[0]
    assert read.locator(".box-label").all_inner_texts() == ["1", "2", "3"]
    assert (
        read.locator("img").get_attribute("alt").endswith("1: 32, 160, 96, 224; 2: 0, 128, 128, 256; 3: 16, 16, 48, 48")
    )
    where, crop = page.locator("#turn-1 figure").all()
    drawn = [one for one in boxes(where) if "target" not in one[0]]
    assert [("faint" in one[0]) for one in drawn] == [True, False], "crops before this one stay, faintly"
    expect(crop.locator("figcaption")).to_contain_text("crop [0, 128, 128, 256] → rotate -90 → resize [64, 64]")
    expect(crop.locator(".mark-good")).to_have_text("checked")
    expect(page.locator("#turn-2 .mark-bad")).to_have_text("contradicted")
    expect(page.locator("#turn-2")).to_contain_text("said to be: [16, 16, 48, 48]")
    page.wait_for_function(SHOWN)


def test_the_judges_words_and_grade_stand_in_their_turn(open_page):
    page = open_page(LOOKED)
    expect(page.locator("#turn-0 blockquote")).to_contain_text("the crop shows the digit")
    expect(page.locator("#turn-0 blockquote .mark")).to_have_text("0.75")
    expect(page.locator("#turn-1 blockquote")).to_have_count(0)


def test_targets_are_shown_when_asked_by_keyboard_and_the_address_keeps_it(open_page):
    page = open_page(LOOKED)
    toggle = page.get_by_role("button", name="Target box")
    target = page.locator("rect.box-line.target")
    expect(target.first).to_be_attached()
    expect(page.locator("rect.box-line.target:visible")).to_have_count(0)
    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    expect(page).to_have_url(re.compile("targets=1"))
    page.reload()
    expect(page.get_by_role("button", name="Target box")).to_have_attribute("aria-pressed", "true")
    expect(target.first).to_be_visible()
    read = page.locator(".message", has_text="What tools read").locator("figure")
    assert near(next(one for one in boxes(read) if "target" in one[0])[1:], TARGET)
    # In a crop that was turned it lies where its pixels went: a quarter clockwise, at half the size.
    turned = next(one for one in boxes(page.locator("#turn-1 figure").nth(1)) if "target" in one[0])
    left, top, right, bottom = (TARGET[0] / 2, (TARGET[1] - 128) / 2, TARGET[2] / 2, (TARGET[3] - 128) / 2)
    assert near(turned[1:], (64 - bottom, left, 64 - top, right), 64)


def test_a_picture_grows_and_shrinks_by_keyboard(open_page):
    page = open_page(LOOKED)
    frame = page.locator("#turn-0 .picture-frame").nth(1)
    expect(frame.locator("img.small-image")).to_be_visible()
    before = frame.bounding_box()["width"]
    frame.focus()
    page.keyboard.press("Enter")
    expect(frame).to_have_attribute("aria-expanded", "true")
    assert frame.bounding_box()["width"] > 2 * before
    page.keyboard.press("Space")
    expect(frame).to_have_attribute("aria-expanded", "false")
    assert frame.bounding_box()["width"] == before


def test_an_image_is_one_chip_among_the_tokens_with_its_picture(open_page):
    page = open_page(f"{LOOKED}&view=tokens")
    chips = page.locator(".image-chip")
    expect(chips).to_have_count(4)
    assert set(chips.all_inner_texts()) == {"[image, 16 tokens]"}
    assert page.locator(".token").count() == 4 + 2 + 3 * 4 + 1, "no placeholder beside the chips"
    chips.nth(1).hover()
    card = page.locator(".token-card")
    expect(card.locator("img")).to_be_visible()
    page.wait_for_function("() => document.querySelector('.token-image').naturalWidth === 64")
    chips.nth(1).click()
    expect(card).to_contain_text("21 to 36 /")
    for key, place in (
        ("ArrowRight", "37 /"),
        ("ArrowLeft", "21 to 36 /"),
        ("ArrowLeft", "20 /"),
        ("ArrowRight", "21 to"),
    ):
        page.keyboard.press(key)
        expect(card.locator("dd").nth(1)).to_contain_text(place)
    page.keyboard.press("2")
    expect(page.get_by_role("button", name="2 loss mask")).to_have_attribute("aria-pressed", "true")
    expect(chips.nth(1)).to_have_class(re.compile("image-chip .*mask-off"))


def test_what_a_task_with_images_measures_has_curves(open_page):
    page = open_page("#/run/looked/curves")
    titles = ["P(evidence | correct)", "P(evidence)", "Needless tool use", "Tool calls per episode"]
    section = page.locator("details", has=page.get_by_role("heading", name="Looking"))
    for title in titles:
        expect(section.get_by_text(title, exact=True)).to_be_attached()
    expect(section.locator(".plot")).to_have_count(4)
    for same in ("P(evidence | correct), eval: tinylook/read 0.5", "Looked up, eval 0.7"):  # in every evaluation
        expect(page.locator(".constants")).to_contain_text(same)


def test_a_probe_before_and_after(open_page):
    page = open_page("#/run/probed/curves")
    expect(page.locator(".tabs a").first).to_have_text("Probe")
    row = page.locator("table.probe-shares tbody tr")
    expect(row).to_contain_text("100.0% ± 10.0")
    expect(row).to_contain_text("50.0% ± 35.0")
    expect(row).to_contain_text("−50.0 ± 50.0 points")
    whisker, bar = (row.locator(f".share-{part}").last.bounding_box()["width"] for part in ("error", "bar"))
    assert abs(whisker / bar - 0.7) < 0.03
    page.locator("table.probe-pairs tbody tr").first.get_by_role("link", name="wrong").click()
    expect(page.locator(".beside-side h2").nth(1)).to_contain_text("Blank")
    left, right = page.locator(".beside-cell").nth(0), page.locator(".beside-cell").nth(1)
    expect(left.locator("figure")).to_have_count(2)
    expect(right.locator("figure")).to_have_count(3)
    expect(right.locator(".instead")).to_contain_text("shown instead")
    page.wait_for_function(SHOWN)
    assert left.bounding_box()["y"] == right.bounding_box()["y"], "a turn stands beside itself"
    assert page.locator(".beside-side .mark").all_inner_texts() == ["✓ right", "✗ wrong"]
    page.get_by_role("link", name="the whole trajectory").last.click()
    page.get_by_role("link", name="Beside the episode without the probe blank").click()
    expect(page.locator(".beside-grid")).to_be_visible()


def test_a_pair_that_is_not_there_is_told(open_page, watch):
    watch.expected = ("not played under such a probe",)
    page = open_page("#/run/probed/beside?shard=eval/step_000000&row=0&probe=__proto__")
    expect(page.get_by_role("heading", level=1)).to_have_text("No such pair of trajectories")


def test_hostile_images_do_no_harm(open_page, watch):
    watch.expected = ("status of 404",)  # the file that is gone
    page = open_page(f"{EVIL}&targets=1")
    calls = page.locator("#turn-0")
    expect(calls.get_by_text("image not kept in the run")).to_have_count(1)  # the SVG
    expect(calls.get_by_text("image cannot be shown")).to_have_count(2)  # no PNG, and no file
    expect(calls.get_by_text("outside the image")).to_have_count(1)
    for figure in page.locator("figure:has(svg.boxes)").all():
        for _, *edges in figure.evaluate(BOXES):
            assert all(-0.05 < edge < 1.05 for edge in edges), "a box leaves its picture"
    expect(page.locator("aside")).to_contain_text("Ground truth")
    page.goto(page.url.partition("#")[0] + f"{EVIL}&view=tokens")
    expect(page.locator(".image-chip")).to_have_count(1)


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.long)])
def test_pages_with_images_fit_and_can_be_read(open_page, watch, width):
    watch.expected = ("status of 404",)
    page = open_page(f"{LOOKED}&targets=1", width=width)
    for path in (f"{LOOKED}&targets=1", EVIL, f"{LOOKED}&view=tokens", "#/run/probed/curves", BESIDE):
        page.goto(page.url.partition("#")[0] + path)
        page.wait_for_selector("main:not([aria-busy]) h1", state="attached")
        for theme in ("light", "dark"):
            if page.locator("html").get_attribute("data-theme") != theme:
                page.get_by_role("button", name=f"Switch to the {theme} theme").click()
            assert page.evaluate(WIDE) == [], (path, theme)
            assert page.evaluate(CONTRAST)[0] == [], (path, theme)


def test_a_report_has_the_images_inside(browser, pictured, tmp_path, watch):
    out = tmp_path / "report.html"
    out.write_bytes(freeze(pictured / "probed").content)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    context.set_default_timeout(60_000)
    page = context.new_page()
    watch.listen(page)
    page.goto(f"{out.as_uri()}{BESIDE}")
    expect(page.locator(".beside-grid figure")).to_have_count(2 + 2 + 3)
    page.wait_for_function(SHOWN)
    assert near(boxes(page.locator(".beside-cell figure").first)[0][1:], FIRST)
    page.get_by_role("link", name="the whole trajectory").last.click()
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.locator(".image-chip").first.hover()
    expect(page.locator(".token-image")).to_be_visible()
    page.wait_for_function("() => document.querySelector('.token-image').naturalWidth === 64")
    context.close()
    watch.check((out.as_uri(), "data:", "blob:"))
