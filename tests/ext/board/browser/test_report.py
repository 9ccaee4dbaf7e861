"""A report opened from a file: the same pages without a server, and nothing is asked of anybody."""

import argparse
import re

import pytest

from turnwise.ext.board import report_command as report

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None


@pytest.fixture(scope="module")
def report_file(growing, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    chosen = ["--filter", "step == 12", "--trajectories", "18"]
    assert report.run(parser.parse_args([str(growing.run.path), "--out", str(out), *chosen])) == 0
    return out


def test_a_report_opens_from_a_file_offline(browser, report_file, watch):
    context = browser.new_context(viewport={"width": 390, "height": 900}, offline=True)
    context.set_default_timeout(60_000)
    page = context.new_page()
    watch.listen(page)
    start = report_file.as_uri()
    page.goto(start)
    expect(page.locator(".run-name")).to_have_text("live")
    expect(page.locator(".live")).to_have_text("report")
    expect(page.locator(".plot .main-svg").first).to_be_visible()
    for name in ("save as a picture: Reward", "save the numbers: Reward"):
        with page.expect_download():
            page.get_by_label(name, exact=True).click()
    headline = page.get_by_label("Headline", exact=True)
    expect(headline).to_contain_text(re.compile(r"Accuracy.*55\.0% → 60\.0%"))
    expect(headline.get_by_role("link", name="to watch")).to_be_visible()
    page.locator("[data-tab=health]").click()
    expect(page.locator(".page-health h1")).to_contain_text("Health")
    page.get_by_role("link", name="Tools & users").click()
    expect(page.locator(".page-tools h1")).to_be_attached()
    with page.expect_download() as download:
        page.locator(".csv").nth(1).click()
    assert download.value.path().read_text().startswith("tool,calls,failed,")
    page.get_by_role("link", name="Trajectories", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    assert len(download.value.path().read_text().splitlines()) >= 19, "what is inside the report"
    page.locator("tr", has_text="hacked").locator(".row-link").first.click()
    expect(page.locator(".timeline")).to_contain_text("<script>")
    page.get_by_role("link", name="Over steps and runs").click()
    expect(page.locator("table.history a.episode")).to_have_count(2)
    page.go_back()
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.locator(".written .token").nth(2).hover()
    expect(page.locator(".token-card")).to_contain_text(re.compile(r"id\d+"))
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("window.hacked ?? null") is None
    page.goto(f"{start}#/run/live/trajectory?shard=trajectories/step_000001&row=0")
    expect(page.locator("main [role=alert]")).to_contain_text("not part of this report")
    page.goto(f"{start}#/run/elsewhere/curves")
    expect(page.get_by_role("heading", level=1)).to_have_text("No such run")
    context.close()
    watch.expected = ("not part of this report", "there is no run elsewhere")
    watch.check((start, "data:", "blob:"))
