"""The board by keyboard, on a narrow screen, in both themes: reachable, readable, and never wider than the page."""

import re

import pytest
from page_checks import CONTRAST, WIDE

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None
SHARD = "shard=trajectories/step_000012"
PAGES = {
    "runs": "",
    "compare": "#/compare?runs=live,eval-a",
    "curves": "#/run/live/curves",
    "tools": "#/run/live/tools",
    "trajectories": "#/run/live/trajectories",
    "group": "#/run/live/group?shard=trajectories/step_000002&sample=train:8",
    "sample": "#/run/live/sample?sample=test:1",
    "conversation": f"#/run/live/trajectory?{SHARD}&row=16",
    "tokens": f"#/run/live/trajectory?{SHARD}&row=16&view=tokens",
    "health": "#/run/live/health",
    "underway": "#/run/live/underway",
    "config": "#/run/live/config",
}


# What fits and can be read on a telephone is wider on a desk.
@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.long)])
def test_every_page_fits_and_can_be_read(open_page, width):
    """In both themes; the pages hold what a hostile policy wrote, which must stay text here too."""
    page = open_page(width=width, theme="light")
    problems = {}
    for name, path in PAGES.items():
        go(page, path)
        expect(page.locator(f".page-{'trajectory' if name in ('conversation', 'tokens') else name} h1")).to_have_count(
            1
        )
        page.wait_for_selector("main:not([aria-busy])")
        assert page.locator("main .error:visible").all_inner_texts() == [], name
        if name == "tokens":
            page.locator(".prompt-fold summary").click()
            expect(page.locator(".token").first).to_be_visible()
        for theme in ("light", "dark"):
            if page.locator("html").get_attribute("data-theme") != theme:
                page.get_by_role("button", name=f"Switch to the {theme} theme").click()
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
            wide = page.evaluate(WIDE)
            low, seen = page.evaluate(CONTRAST)
            assert seen > 5, name
            if wide or low:
                problems[f"{name}, {theme}"] = (wide, low)
    assert problems == {}


def go(page, path):
    """To another page of the board, as a link does."""
    page.goto(page.url.partition("#")[0] + (path or "#/"))


def tab_to(page, wanted, most=60):
    """Presses Tab until the focus is on what `wanted` selects, and checks that the focus can be seen on the way."""
    for _ in range(most):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """(wanted) => {
              const element = document.activeElement;
              const style = getComputedStyle(element);
              const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
              return [element.matches(wanted), ring || style.boxShadow !== "none", element.outerHTML.slice(0, 120)];
            }""",
            wanted,
        )
        assert found[1], f"no visible focus on {found[2]}"
        if found[0]:
            return
    raise AssertionError(f"Tab does not reach {wanted} within {most} steps")


def test_by_keyboard_alone_from_the_runs_to_a_token(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    tab_to(page, "a[href='#/run/live/curves']")
    page.keyboard.press("Enter")
    expect(page.locator(".page-curves h1")).to_be_attached()
    page.evaluate("document.activeElement.blur(); document.querySelector('.skip').focus()")
    tab_to(page, "a[href='#/run/live/trajectories']")
    page.keyboard.press("Enter")
    expect(page.locator(".row-link").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.className") == "row-link"
    page.keyboard.press("Enter")
    expect(page.locator(".page-trajectory .timeline")).to_be_visible()
    here = page.url
    page.keyboard.press("j")
    expect(page).not_to_have_url(here)
    row = re.search(r"row=(\d+)", page.url)[1]
    expect(page.locator(".replay-form")).to_contain_text(f"--sample {row}")  # the next one's page, not the last one's
    page.wait_for_selector("main:not([aria-busy]) .timeline")
    tab_to(page, "a[href*='view=tokens']")
    page.keyboard.press("Enter")
    expect(page.locator(".token").first).to_be_visible()
    tab_to(page, ".token")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    card = page.locator(".token-card")
    expect(card).to_be_visible()
    expect(card.locator("dd").nth(1)).to_have_text(re.compile("^2 "))
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_the_zoom_is_within_reach_of_the_keyboard(open_page):
    page = open_page("#/run/live/curves")
    plot = page.locator(".plot:has(.main-svg)").first
    plot.focus()
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("from="))
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("from="))


def test_the_theme_is_the_system_s_until_one_is_chosen(open_page):
    page = open_page(theme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Switch to the light theme").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_pages_that_are_not_there_say_so(open_page, watch):
    watch.expected = ("status of 404", "nowhere", "there is no row", "no trajectory", "has no sample")
    page = open_page("#/run/nowhere/curves")
    expect(page.locator("main [role=alert]")).to_contain_text("nowhere")
    expect(page.get_by_role("heading", level=1)).to_have_text("No such run")
    expect(page.locator(".live")).to_have_text("")
    expect(page.locator(".run-head")).to_be_hidden()
    for lost in (
        "trajectory?shard=trajectories/step_000001&row=999",
        "trajectory?shard=eval/nothing&row=0",
        "trajectory",
    ):
        go(page, f"#/run/live/{lost}")
        expect(page.get_by_role("heading", level=1)).to_have_text("No such trajectory")
        expect(page.get_by_role("link", name="All trajectories of this run")).to_be_visible()
    go(page, "#/run/live/group?shard=trajectories/step_000001&sample=nobody")
    expect(page.get_by_role("heading", level=1)).to_have_text("No such group")
    go(page, "#/nothing")
    expect(page.get_by_role("heading", level=1)).to_have_text("No such page")
