"""Nothing a model wrote is ever run, in any view, width or theme; and nothing is hidden in it."""

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None
SHARD = "shard=trajectories/step_000012"
PAGES = {
    "list": "#/run/live/trajectories?filter=step == 12&sort=tokens",
    "search": "#/run/live/trajectories?text=script",
    "conversation": f"#/run/live/trajectory?{SHARD}&row=16",
    "failed conversation": f"#/run/live/trajectory?{SHARD}&row=17",
    "tokens": f"#/run/live/trajectory?{SHARD}&row=16&view=tokens",
    "tools": "#/run/live/tools",
    "curves": "#/run/live/curves",
    "health": "#/run/live/health",
}


def test_hostile_transcripts_are_only_text(open_page):
    page = open_page()
    for name, path in PAGES.items():
        page.goto(page.url.partition("#")[0] + path)
        expect(page.locator(f".page-{path.split('?')[0].rsplit('/', 1)[-1]} h1")).to_be_attached()
        page.wait_for_selector("main:not([aria-busy])")
        if name not in ("curves", "health"):
            expect(page.locator("main"), name).to_contain_text("script>" if name != "tokens" else "hacked")
        page.evaluate("() => document.querySelectorAll('main details').forEach((one) => { one.open = true; })")
        assert page.locator("main script, main img[src='x'], main svg[onload], main a[href^='javascript']").count() == 0
        assert page.evaluate("window.hacked ?? null") is None, name
        if name == "conversation":  # direction marks are shown by name
            expect(page.locator(".timeline .hidden-char").first).to_have_text("RLO")
            assert "\u202e" not in page.locator(".timeline").inner_text()
        if name == "tools":  # a link whose filter holds the hostile name
            page.locator(".source-funnel a", has_text="hacked").click()
            expect(page.locator("tbody tr.row")).to_have_count(1)
        if name == "list":
            page.locator("tr", has_text="hacked").first.locator(".group-link").click()
            expect(page.get_by_role("heading", level=1)).to_contain_text("<script>")
            expect(page.locator(".sibling-head")).to_have_count(2)


def test_the_server_tells_the_browser_to_run_only_its_own_scripts(open_page, board, watch):
    watch.expected = ("Content Security Policy", "status of 404")
    page = open_page()
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.injected = true";
      document.body.append(script);
      const image = document.createElement("div");
      image.innerHTML = "<img src=x onerror='window.injected = true'>";
      document.body.append(image);
    }""")
    page.wait_for_function("() => document.querySelector('img[src=x]').complete")
    assert page.evaluate("window.injected ?? null") is None
    assert any("Content Security Policy" in text for text in watch.said)
