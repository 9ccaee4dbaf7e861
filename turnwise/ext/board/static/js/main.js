// The shell: the bar on top, a run's header and tabs, which page is shown, the theme, and news from the server.

import { get, runPath, live, onLive, frozen, NO_RUN } from "board/api.js";
import { redraw } from "board/charts.js";
import { h, svg, fill } from "board/dom.js";
import { ago, moment, number, seconds } from "board/format.js";
import { badge, notes, progress, watchBadge } from "board/parts/run.js";
import { lightWhenPrinted } from "board/printing.js";
import { on, page, link, start } from "board/router.js";
import * as beside from "board/pages/beside.js";
import * as compare from "board/pages/compare.js";
import * as config from "board/pages/config.js";
import * as conversation from "board/pages/conversation.js";
import * as curves from "board/pages/curves.js";
import * as group from "board/pages/group.js";
import * as health from "board/pages/health.js";
import * as runs from "board/pages/runs.js";
import * as sample from "board/pages/sample.js";
import * as tokens from "board/pages/tokens.js";
import * as tools from "board/pages/tools.js";
import * as trajectories from "board/pages/trajectories.js";

const TABS = [["curves", "Curves"], ["tools", "Tools & users"], ["trajectories", "Trajectories"], ["health", "Health"], ["config", "Config"]];
const TAB_OF = { group: "trajectories", sample: "trajectories", beside: "trajectories", trajectory: "trajectories" };
const places = new Map(); // where each history entry was scrolled to

on("runs", runs);
on("beside", beside);
on("compare", compare);
on("curves", curves);
on("config", config);
on("tools", tools);
on("health", health);
on("trajectories", trajectories);
on("group", group);
on("sample", sample);
on("trajectory", { render: (node, context) => (context.params.view === "tokens" ? tokens : conversation).render(node, context) });

const SLICE = 500; // milliseconds between two slices of a run that is still being read
const crumbs = h("nav", { class: "crumbs", "aria-label": "Where you are" });
const head = h("div", { class: "run-head", hidden: true });
const main = h("main", { id: "main", tabIndex: -1 });
const shown = { serial: 0, cleanup: null, stop: null, run: null, first: "", watch: null, path: null, entry: 0 };

function shell() {
  const dot = h("span", { class: "live", role: "status" });
  onLive((state) => {
    const words = { live: "live", connecting: "connecting", lost: "no connection", refused: "not live", off: "", frozen: "report" };
    dot.dataset.state = state;
    fill(dot, words[state] ? [h("i", { class: "dot" }), words[state]] : null);
  });
  const skip = h("a", { class: "skip", href: "#main", onClick: (event) => { event.preventDefault(); main.focus(); } }, "Skip to content");
  fill(document.getElementById("app"), skip,
    h("div", { class: "top", role: "banner" }, h("a", { class: "brand", href: link("/") }, mark(), "Turnwise"), crumbs, dot, themeButton()),
    head, main);
  return dot;
}

// Three turns, each answering the one before.
function mark() {
  return svg("svg", { width: 18, height: 18, viewBox: "0 0 18 18", fill: "none", stroke: "currentColor", "stroke-width": 2.2, "stroke-linecap": "round", "aria-hidden": "true" },
    svg("path", { d: "M2 4h9" }), svg("path", { d: "M7 9h9" }), svg("path", { d: "M2 14h6" }));
}

function themeButton() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } }; // a report opened from a file may have no storage
  const button = h("button", { type: "button", class: "icon", onClick: () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", next); } catch { /* then the choice lasts as long as the page */ }
    apply(next);
  } });
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const other = theme === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
    button.title = `Switch to the ${other} theme`;
    fill(button, theme === "dark" ? "☾" : "☀");
    redraw();
  };
  system.addEventListener("change", () => { if (!stored()) apply(system.matches ? "dark" : "light"); });
  apply(stored() ?? (system.matches ? "dark" : "light"));
  return button;
}

function show(route) {
  const serial = ++shown.serial;
  leave();
  const samePath = shown.path === route.path;
  const back = enter();
  shown.path = route.path;
  fill(crumbs, route.run ? [h("a", { href: link("/") }, "Runs"), " / ", route.run] : h("a", { href: link("/") }, "Runs"));
  document.title = [route.run, route.page === "runs" ? null : route.page, "Turnwise board"].filter(Boolean).join(" · ");
  const callbacks = new Set();
  const news = runNews(route, callbacks);
  const module = page(route.page);
  const node = h("div", { class: `page page-${route.page}` });
  fill(main, node);
  if (!module) {
    fill(node, h("h1", null, "No such page"), h("p", { class: "empty" }, "This address leads nowhere. ", h("a", { href: link("/") }, "Back to the runs")));
    return;
  }
  if (!samePath && shown.entry > 1) main.focus({ preventScroll: true });
  main.setAttribute("aria-busy", "true");
  const context = { run: route.run, params: route.params, info: news.info, live: (callback) => { callbacks.add(callback); news.follow(); return () => callbacks.delete(callback); } };
  Promise.resolve().then(() => module.render(node, context)).then((cleanup) => {
    if (serial !== shown.serial) return cleanup?.();
    shown.cleanup = cleanup ?? null;
    scrollTo(0, back);
  }, (error) => {
    if (serial !== shown.serial) return;
    failed(node, error, () => show(route));
    context.live(() => { if (serial === shown.serial) show(route); }); // the server is back, or the run has what was missing
  }).finally(() => { if (serial === shown.serial) main.removeAttribute("aria-busy"); });
}

function failed(node, error, again) {
  console.warn(error);
  fill(node, h("h1", null, error.answer?.title ?? "This page could not be shown"), h("p", { class: "error", role: "alert" }, error.message),
    h("p", { class: "links" },
      frozen ? null : h("button", { type: "button", onClick: again }, "Try again"),
      /trajectory|group/.test(error.answer?.title) && shown.run ? h("a", { class: "button", href: link(`/run/${shown.run}/trajectories`, { split: "all" }) }, "All trajectories of this run") : null,
      h("a", { class: "button", href: link("/") }, "All runs")));
}

function leave() {
  places.set(shown.entry, scrollY);
  shown.cleanup?.();
  shown.stop?.();
  shown.cleanup = shown.stop = null;
}

// Numbers history entries, so that going back finds the place it left; returns where to scroll.
function enter() {
  const known = history.state?.entry;
  if (known) {
    shown.entry = known;
    return places.get(known) ?? 0;
  }
  shown.entry = Math.max(0, ...places.keys()) + 1;
  history.replaceState({ entry: shown.entry }, "");
  return 0;
}

// The run's header, kept while its pages change, and the page's news: info() is the run's object, asked for once per change.
function runNews(route, callbacks) {
  const tell = coalesced(() => Promise.all([...callbacks].map((callback) => callback())));
  if (!route.run) {
    head.hidden = true;
    shown.run = null;
    const names = (route.params.runs ?? "").split(",").filter(Boolean); // none: all runs, and those yet to come
    const follow = () => { shown.stop ??= live(names, tell); };
    return { info: null, follow };
  }
  let asked = get(runPath(route.run));
  const { serial } = shown;
  let timer = null;
  let waited = false;
  // A long run is read in slices, one each time it is asked for: no news comes of a run that only waits to be read on.
  const readOn = () => {
    timer = null;
    if (serial !== shown.serial) return;
    asked = get(runPath(route.run));
    draw();
  };
  const draw = () => asked.then((body) => {
    if (shown.run === route.run) runLine(body);
    if (!body.pending) askWatch(route.run);
    if (body.pending && !frozen) timer ??= setTimeout(readOn, SLICE);
    else if (waited) tell();
    waited = Boolean(body.pending);
  }, (error) => {
    if (serial === shown.serial && error.answer?.title === NO_RUN) head.hidden = true; // the page says what went wrong
  });
  runTabs(route);
  shown.run = route.run;
  draw();
  const renew = coalesced(async () => {
    asked = get(runPath(route.run));
    beat();
    await Promise.all([draw(), tell()]);
  });
  // Of a run that is not there no news will come.
  const listen = () => { if (serial === shown.serial) shown.stop ??= live([route.run], renew); };
  asked.then(listen, (error) => { if (error.answer?.title !== NO_RUN) listen(); });
  return { info: () => asked, follow: () => {} };
}

// News that comes while the last is still being worked on is worked on once, after it.
function coalesced(work) {
  let running = false;
  let again = false;
  return async () => {
    again = true;
    if (running) return;
    running = true;
    while (again) {
      again = false;
      try {
        await work();
      } catch (error) {
        console.warn(error); // what the page showed stays; the dot says if the server is gone
      }
    }
    running = false;
  };
}

// The tabs change at once; the line above them when the run has answered.
function runTabs(route) {
  const tab = TAB_OF[route.page] ?? route.page;
  head.hidden = false;
  if (shown.run !== route.run) fill(head, h("div", { class: "run-line" }, h("span", { class: "run-name" }, route.run)), h("nav", { class: "tabs", "aria-label": "Pages of this run" }));
  const current = (name) => (tab === name ? "page" : null);
  if (shown.run !== route.run) Object.assign(shown, { first: TABS[0][1], watch: null });
  const mark = (name) => (name === "health" && shown.watch ? watchBadge(shown.watch) : null);
  fill(head.lastElementChild, TABS.map(([name, title], index) => h("a", { href: link(`/run/${route.run}/${name}`), dataset: { tab: name }, "aria-current": current(name) }, index ? title : shown.first, mark(name))));
  const tabs = head.lastElementChild;
  const here = tabs.querySelector("[aria-current]");
  if (here) tabs.scrollLeft = here.offsetLeft - (tabs.clientWidth - here.offsetWidth) / 2; // on a phone not all fit
}

// How much there is to look at, once the run has been read: on the tab, whichever page is open.
function askWatch(run) {
  get(runPath(run, "watch")).then((found) => {
    if (shown.run !== run) return;
    shown.watch = found;
    const tab = head.querySelector('[data-tab="health"]');
    if (tab) fill(tab, "Health", watchBadge(found));
  }, (error) => console.warn(error)); // the page of Health says what is wrong
}

function runLine(body) {
  shown.first = body.results ? "Results" : body.probe ? "Probe" : TABS[0][1];
  fill(head.lastElementChild.firstElementChild, shown.first);
  const failing = body.reason && body.state !== "running" && body.state !== "finished";
  fill(head.firstElementChild, h("span", { class: "run-name" }, body.name), badge(body.state), progress(body),
    h("span", { class: "muted" }, [body.task, body.model, body.seconds ? seconds(body.seconds) : null].filter(Boolean).join(" · ")),
    body.updated && !frozen ? h("span", { class: "muted", title: moment(body.updated) }, "updated ", h("span", { dataset: { updated: body.updated } }, ago(body.updated))) : null,
    body.pending ? h("span", { class: "muted", role: "status" }, `reading trajectories, ${number(body.pending)} files left`) : null,
    body.left_out ? h("p", { class: "muted", role: "note" }, leftOut(body.left_out)) : null,
    body.tags.length || body.note ? h("div", { class: "run-notes" }, notes(body)) : null,
    failing ? h("p", { class: `run-why why-${body.state}` }, body.reason) : null, unread(body.problems ?? []));
}

// A run longer than the board holds in memory: what its lists, health and spreads are of.
function leftOut({ trajectories, files, step }) {
  return `The oldest ${number(trajectories)} trajectories (${number(files)} files, up to step ${number(step)}) are not listed, searched or checked here; the curves show every step, and a link to one of them still opens.`;
}

// Files of the run that the board could not read: never silently less.
function unread(problems) {
  if (!problems.length) return null;
  return h("details", { class: "unread" }, h("summary", null, problems.length === 1 ? "1 file could not be read" : `${problems.length} files could not be read`),
    h("ul", null, problems.slice(0, 50).map((text) => h("li", null, text)), problems.length > 50 ? h("li", null, `and ${problems.length - 50} more`) : null));
}

function beat() {
  dot.classList.remove("beat");
  requestAnimationFrame(() => dot.classList.add("beat"));
}

setInterval(() => {
  for (const cell of document.querySelectorAll("[data-updated]")) cell.textContent = ago(Number(cell.dataset.updated));
}, 5000);
history.scrollRestoration = "manual";
const dot = shell();
lightWhenPrinted();
start(show);
