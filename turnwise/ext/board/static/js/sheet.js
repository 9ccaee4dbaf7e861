// A sheet of panels under one set of controls: smoothing, the x axis, one zoom for all, and one request for what is in view.

import { chart, linkZoom, smooth } from "board/charts.js";
import { h, fill } from "board/dom.js";
import { number } from "board/format.js";
import { metricsOf } from "board/panels.js";
import { setParams } from "board/router.js";

const AXES = ["step", "time", "tokens"];
const POINTS = 600; // per series and request; the server thins what is longer
const MOST_POINTS = 4800;

// sheet(node, {params, seconds (how long the run took), load(metrics, points) -> Promise, lines(panel) -> [{name, series, colour?, dash?, low?, high?, whiskers?, points?, faint?}], extra?: [Element]})
// -> {show(sections, constant), refresh(), redraw(), destroy()}. `load` fetches series, `lines` says what a panel shows of them.
// Which sections were opened and shut by hand is in the address.
export function sheet(node, options) {
  return new Sheet(node, options);
}

class Sheet {
  constructor(node, { params, seconds = 0, load, lines, extra = [], episodes = null }) {
    this.load = load;
    this.lines = lines;
    this.episodes = episodes; // (first step, last step) -> a link to their trajectories
    this.behind = h("a", { class: "small", hidden: true });
    this.view = { x: AXES.includes(params.x) ? params.x : "step", smooth: clamp(Number(params.smooth ?? 0)) };
    this.titles = { step: "step", time: seconds > 3 * 3600 ? "hours" : "minutes", tokens: "tokens" };
    this.scales = { step: 1, time: seconds > 3 * 3600 ? 3600 : 60, tokens: 1 }; // of one unit of the axis; links keep seconds
    this.points = POINTS;
    this.panels = new Map(); // id -> {panel, figure, fresh}
    this.boxes = new Map(); // section title -> {element, grid, search, note}
    this.find = params.find ?? "";
    this.folds = { open: listed(params.open), shut: listed(params.shut) };
    this.constants = h("details", { class: "fold", hidden: true });
    this.timer = null;
    this.busy = false;
    this.again = false;
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.body = h("div");
    this.zoomButton = h("button", { type: "button", hidden: true, onClick: () => this.link.set(null) });
    this.hint = h("span", { class: "muted small hint" }, "drag to zoom all panels, double-click to reset, click a point for its trajectories");
    this.link = linkZoom([], { range: this.rangeOf(params), onRange: (range) => this.zoomed(range) });
    node.append(this.controls(extra), this.problem, this.body, this.constants);
    this.sayZoom(this.link.range());
  }

  controls(extra) {
    const value = h("output", null, number(this.view.smooth));
    const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: this.view.smooth, onInput: () => {
      this.view.smooth = Number(slider.value);
      fill(value, number(this.view.smooth));
      setParams({ smooth: this.view.smooth || null });
      this.redraw();
    } });
    this.axisButtons = AXES.map((x) => h("button", { type: "button", "aria-pressed": this.view.x === x, dataset: { x }, onClick: () => this.setAxis(x) }, x));
    return h("div", { class: "controls", role: "group", "aria-label": "How the curves are drawn" },
      h("label", { class: "field" }, "Smoothing", slider, value),
      h("span", { class: "field", role: "group", "aria-label": "Horizontal axis" }, h("span", { class: "muted" }, "Over "), h("span", { class: "segments" }, this.axisButtons)),
      extra, this.zoomButton, this.behind, this.hint);
  }

  setAxis(x) {
    this.view.x = x;
    for (const button of this.axisButtons) button.setAttribute("aria-pressed", String(button.dataset.x === x));
    setParams({ x: x === "step" ? null : x });
    this.link.set(null);
    this.redraw();
  }

  rangeOf(params) {
    const range = [Number(params.from ?? NaN), Number(params.to ?? NaN)].map((edge) => edge / this.scales[this.view.x]);
    return range.every(Number.isFinite) && range[0] < range[1] ? range : null;
  }

  zoomed(range) {
    const edges = range ? range.map((edge) => Number((edge * this.scales[this.view.x]).toPrecision(6))) : [null, null];
    setParams({ from: edges[0], to: edges[1] });
    this.sayZoom(range);
    this.finer(range);
  }

  // A long run's series come thinned; a zoom asks for as many points as it leaves in view of a whole one.
  finer(range) {
    const whole = Math.max(...[...this.panels.values()].map((item) => item.figure.width()), 0);
    const wanted = range && whole ? Math.min(MOST_POINTS, POINTS * Math.ceil(whole / (range[1] - range[0]))) : POINTS;
    if (!(wanted > this.points)) return;
    this.points = wanted;
    this.refresh();
  }

  sayZoom(range) {
    this.zoomButton.hidden = !range;
    this.hint.hidden = Boolean(range);
    this.sayBehind(range ? Math.ceil(range[0]) : 1, range ? Math.floor(range[1]) : 0);
    if (range) fill(this.zoomButton, `${this.titles[this.view.x]} ${number(range[0])} to ${number(range[1])}`, h("span", { "aria-hidden": "true" }, "✕"), h("span", { class: "sr" }, "reset zoom"));
  }

  // From a stretch, or from a point that was clicked, to what happened there.
  sayBehind(first, last) {
    this.behind.hidden = !this.episodes || this.view.x !== "step" || last < first;
    if (this.behind.hidden) return;
    this.behind.setAttribute("href", this.episodes(first, last));
    fill(this.behind, first === last ? `trajectories of step ${first}` : `trajectories of steps ${first} to ${last}`);
  }

  // Shows these sections; panels that were there stay as they are, with their zoom, scale and place.
  show(sections, constant = []) {
    const kept = new Set();
    sections.forEach((section, place) => {
      const box = this.box(section);
      fill(box.count, `${section.panels.length} ${section.panels.length === 1 ? "panel" : "panels"}`);
      putAt(this.body, place, box.element);
      section.panels.forEach((panel, index) => {
        kept.add(panel.id);
        const item = this.panels.get(panel.id) ?? this.add(panel, box.grid);
        item.panel = panel;
        putAt(box.grid, index, item.figure.element);
      });
    });
    for (const [id, item] of this.panels) {
      if (kept.has(id)) continue;
      item.figure.destroy();
      this.panels.delete(id);
    }
    for (const box of this.boxes.values()) box.element.hidden = box.grid.children.length === 0;
    this.sayConstant(constant);
    this.filter();
  }

  // What never changed is one line; unfolded it says each value.
  sayConstant(constant) {
    const said = JSON.stringify(constant);
    if (said === this.constants.dataset.said) return; // what is open, or has the focus, stays as it is
    this.constants.dataset.said = said;
    this.constants.hidden = constant.length === 0;
    fill(this.constants, h("summary", null, `constant: ${constant.length} ${constant.length === 1 ? "metric" : "metrics"}`),
      h("ul", { class: "constants" }, constant.map(({ title, metric, value }) => h("li", { title: metric }, title, " ", h("b", null, number(value))))));
  }

  box(section) {
    const known = this.boxes.get(section.title);
    if (known) return known;
    const grid = h("div", { class: "panels" });
    const search = section.searchable ? h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric among all others", value: this.find, onInput: () => {
      this.find = search.value;
      setParams({ find: this.find });
      this.filter();
    } }) : null;
    const count = h("span", { class: "section-count" });
    const none = h("p", { class: "empty", hidden: true }, "No metric has this in its name.");
    const heading = h("summary", { onClick: () => this.fold(section, !element.open) }, h("h2", null, section.title), count, section.note ? h("span", { class: "section-note" }, section.note) : null);
    const element = h("details", { class: "fold panel-section", open: this.unfolded(section) }, heading, search, grid, none);
    const box = { element, grid, search, none, count };
    this.boxes.set(section.title, box);
    return box;
  }

  unfolded({ title, folded, searchable }) {
    const name = slug(title);
    return this.folds.open.has(name) || (searchable && this.find !== "") || (!folded && !this.folds.shut.has(name));
  }

  // The address names only what a person changed.
  fold({ title, folded }, open) {
    const name = slug(title);
    for (const names of Object.values(this.folds)) names.delete(name);
    if (open && folded) this.folds.open.add(name);
    if (!open && !folded) this.folds.shut.add(name);
    setParams({ open: [...this.folds.open].join(","), shut: [...this.folds.shut].join(",") });
  }

  add(panel, grid) {
    const figure = chart(grid, { title: panel.title, note: metricsOf(panel).join("\n"), percent: panel.percent, stacked: panel.stacked, traces: [], xTitle: this.titles[this.view.x], height: 200 });
    const item = { panel, figure, fresh: false };
    this.panels.set(panel.id, item);
    this.link.add(figure);
    figure.onPoint((x) => this.sayBehind(x, x));
    figure.onVisible(() => { if (!item.fresh) this.soon(); });
    return item;
  }

  filter() {
    const text = this.find.trim().toLowerCase();
    for (const box of this.boxes.values()) {
      if (!box.search) continue;
      const inBox = [...this.panels.values()].filter((item) => item.figure.element.parentElement === box.grid);
      for (const item of inBox) item.figure.element.hidden = !metricsOf(item.panel).some((name) => name.toLowerCase().includes(text));
      box.none.hidden = inBox.some((item) => !item.figure.element.hidden);
    }
  }

  // Panels come into view one by one; they are asked for together.
  soon() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.ask();
    }, 20);
  }

  async ask() {
    if (this.busy) {
      this.again = true;
      return;
    }
    const wanted = [...this.panels.values()].filter((item) => !item.fresh && item.figure.visible());
    if (!wanted.length) return;
    this.busy = true;
    for (const item of wanted) item.fresh = true;
    try {
      await this.load([...new Set(wanted.flatMap((item) => metricsOf(item.panel)))], this.points === POINTS ? null : this.points);
      this.problem.hidden = true;
      for (const item of wanted) this.draw(item);
    } catch (error) {
      for (const item of wanted) item.fresh = false; // asked for again with the next news, or when it comes into view
      this.problem.hidden = false;
      fill(this.problem, error.message);
    } finally {
      this.busy = false;
      if (this.again) {
        this.again = false;
        this.soon();
      }
    }
  }

  // News: everything is out of date, what is in view is asked for now, the rest when it comes into view.
  refresh() {
    for (const item of this.panels.values()) item.fresh = false;
    this.soon();
  }

  redraw() {
    for (const item of this.panels.values()) if (item.figure.traces.length) this.draw(item);
  }

  draw(item) {
    item.figure.update(this.lines(item.panel).flatMap((line) => this.traces(line)), { xTitle: this.titles[this.view.x] });
  }

  traces({ name, series, colour, dash, low, high, whiskers, points, faint }) {
    const along = { step: series.step, time: series.seconds, tokens: series.tokens }[this.view.x] ?? series.step;
    const scale = this.scales[this.view.x];
    const raw = { name, colour, dash, x: scale === 1 ? along : along.map((x) => (x === null ? null : x / scale)), y: series.value, steps: series.step, low, high, whiskers, points, faint };
    const smoothed = this.view.smooth ? smooth(series.value, this.view.smooth) : series.value;
    if (smoothed === series.value || series.value.length < 3) return [raw];
    if (faint) return [{ ...raw, y: smoothed }];
    return [{ ...raw, faint: true }, { ...raw, y: smoothed, raw: series.value, low: undefined, high: undefined, points: false, dash: points ? "dot" : dash }];
  }

  destroy() {
    clearTimeout(this.timer);
    for (const item of this.panels.values()) item.figure.destroy();
    this.panels.clear();
  }
}

// The edges of values and their standard errors; those of shares stay inside the shares that there are.
export function around(values, errors, areShares) {
  const [lowest, highest] = areShares ? [0, 1] : [-Infinity, Infinity];
  const edge = (sign) => values.map((value, index) => (value === null || errors[index] === null ? value : Math.min(highest, Math.max(lowest, value + sign * errors[index]))));
  return { low: edge(-1), high: edge(1) };
}

// An element that is moved loses focus and scroll, so one that is in its place is left there.
function putAt(parent, index, element) {
  if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
}

function listed(text) {
  return new Set((text ?? "").split(",").filter(Boolean));
}

// "Time and throughput" -> "time-and-throughput": short in an address.
function slug(title) {
  return title.toLowerCase().replaceAll(" ", "-");
}

function clamp(x) {
  return Number.isFinite(x) ? Math.min(0.98, Math.max(0, x)) : 0;
}
