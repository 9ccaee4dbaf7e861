// Line charts and stacked bars: Plotly with the board's colours, drawn only when in view, zoomed together, readable as a table.

import { h, fill } from "board/dom.js";
import { number, percent } from "board/format.js";
import { fileName, saveCsv } from "board/parts/save.js";
import { css, data, layout, paletteColour, picture, yRange } from "board/plotting.js";

export { paletteColour as colour } from "board/plotting.js";

const TABLE_ROWS = 1000;
const figures = new Set();
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false, scrollZoom: false };

// chart(node, {title, traces: [{name, x, y, steps?, low?, high?, whiskers?, points?, colour?, mode?, dash?, faint?, raw?}], xTitle, yTitle, logY?, percent?, stacked? (shares of one whole), range?, height?, note?})
// -> {update(traces, changes?), destroy(), setRange(range|null), onZoom(callback), onVisible(callback), visible(), element}
// A colour is "#rrggbb" or the name of a CSS variable ("--policy"); a faint trace is the raw line behind a smoothed one of the same name,
// whose own `raw` holds the values that were measured.
export function chart(node, options) {
  return new Figure(node, { kind: "lines", ...options });
}

// bars(node, {title, traces: [{name, x, y, colour?}], xTitle, yTitle, stacked = true, horizontal = false, percent?, height?})
export function bars(node, options) {
  return new Figure(node, { kind: "bars", stacked: true, ...options });
}

// Keeps the x ranges of charts in step: linkZoom(charts, {range, onRange}) -> {add(chart), set(range|null), range()}.
export function linkZoom(charts, { range = null, onRange = null } = {}) {
  const members = new Set();
  let now = range;
  const set = (next) => {
    now = next;
    for (const member of members) member.setRange(next);
    if (onRange) onRange(next);
  };
  const add = (member) => {
    members.add(member);
    member.onZoom(set);
    if (now) member.setRange(now);
  };
  charts.forEach(add);
  return { add, set, range: () => now };
}

// The exponential moving average with the start's bias taken out; weight 0 leaves the values alone, gaps stay gaps.
export function smooth(values, weight) {
  // A curve of few points (evaluations) would mostly show its own past: it is averaged over a tenth of it at most.
  weight = Math.min(weight, 1 - 10 / Math.max(values.length, 10));
  if (!(weight > 0)) return values;
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// Draws every chart again, after the theme changed.
export function redraw() {
  for (const figure of figures) figure.change();
}

// Paper waits for nothing: every chart that has values is drawn now, so many pixels wide; null gives them back to the window.
export function drawForPaper(width) {
  for (const figure of figures) figure.onPaper(width);
}

class Figure {
  constructor(node, options) {
    this.options = options;
    this.traces = options.traces ?? [];
    this.range = options.range ?? null;
    this.logY = Boolean(options.logY);
    this.hidden = new Set();
    this.inView = false;
    this.dirty = true;
    this.drawn = false;
    this.tableShown = false;
    this.zoomed = new Set();
    this.seen = new Set();
    this.clicked = new Set();
    this.build();
    node.append(this.element);
    figures.add(this);
    warm().catch(() => {}); // told where it is drawn
    this.watch();
  }

  build() {
    const { title, note, kind, height = 220 } = this.options;
    this.last = h("div", { class: "panel-last" });
    this.logButton = h("button", { type: "button", class: "mini", "aria-pressed": this.logY, onClick: () => this.toggleLog() }, "log");
    this.tableButton = h("button", { type: "button", class: "mini", "aria-pressed": false, onClick: () => this.toggleTable() }, "table");
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot", tabIndex: 0, role: "img", style: { height: `${height}px` }, onKeydown: (event) => this.key(event) });
    this.table = h("div", { class: "plot-table", hidden: true, tabIndex: 0, style: { maxHeight: `${height}px` } });
    const mini = (label, words, onClick) => h("button", { type: "button", class: "mini", title: words, "aria-label": `${words}: ${title}`, onClick }, label);
    this.element = h("section", { class: "panel" },
      h("header", { class: "panel-head" },
        h("h3", { title: note }, title),
        h("span", { class: "panel-tools" }, kind === "lines" ? this.logButton : null, this.tableButton,
          mini("png", "save as a picture", () => this.savePicture()), mini("csv", "save the numbers", () => this.saveNumbers()))),
      this.last, this.legend, this.plot, this.table);
    this.label();
  }

  // Drawing waits until the panel is near the window; a panel out of view only remembers that it is out of date.
  watch() {
    this.viewing = new IntersectionObserver((entries) => {
      this.inView = entries.at(-1).isIntersecting;
      if (!this.inView) return;
      for (const callback of this.seen) callback(this);
      this.draw();
    }, { rootMargin: "200px 0px" });
    this.viewing.observe(this.element);
    this.sizing = new ResizeObserver(() => {
      if (this.drawn && this.inView && !this.tableShown) globalThis.Plotly.Plots.resize(this.plot);
    });
    this.sizing.observe(this.plot);
  }

  update(traces, changes) {
    this.traces = traces;
    if (changes) Object.assign(this.options, changes);
    if (changes && "range" in changes) this.range = changes.range;
    this.change();
  }

  setRange(range) {
    if (this.range === range) return;
    this.range = range;
    this.change();
  }

  change() {
    this.dirty = true;
    this.draw();
  }

  draw() {
    if (!this.inView || !this.dirty || this.gone || (!this.drawn && !this.traces.length)) return;
    this.label();
    if (this.tableShown) this.fillTable();
    warm().then(() => inTurn(this), (error) => fill(this.plot, h("p", { class: "error" }, error.message)));
  }

  paint() {
    if (!this.inView || !this.dirty || this.gone) return;
    this.dirty = false;
    this.react({});
  }

  react(size) {
    const view = { ...this.options, range: this.range, logY: this.logY, hidden: this.hidden, traces: this.traces };
    if (this.options.kind === "lines") Object.assign(view, { yRange: yRange(view), xRange: this.range ?? padded(extent(this.traces)) });
    globalThis.Plotly.react(this.plot, data(view), { ...layout(view), ...size }, CONFIG);
    if (!this.drawn) this.listen();
    this.drawn = true;
  }

  onPaper(width) {
    this.dirty = true;
    if (width === null || !globalThis.Plotly || !this.traces.length) return this.draw();
    this.label();
    this.react({ width, height: this.options.height ?? 220, autosize: false });
  }

  // Plotly also tells of ranges it chose itself; only those a person dragged are a zoom.
  listen() {
    let dragging = false;
    this.plot.addEventListener("mousedown", () => { dragging = true; }, true);
    this.plot.on("plotly_relayout", (event) => {
      const range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
      if (dragging && range.every((edge) => typeof edge === "number")) this.zoom(range);
      dragging = false;
    });
    this.plot.on("plotly_click", (event) => { for (const callback of this.clicked) callback(event.points[0].x); });
    this.plot.on("plotly_doubleclick", () => this.zoom(null));
  }

  zoom(range) {
    this.range = range;
    this.change();
    for (const callback of this.zoomed) callback(range);
  }

  // Arrows move the window, + and - change it, 0 or Escape shows everything.
  key(event) {
    if (this.options.kind !== "lines" || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = this.range ?? extent(this.traces);
    const width = high - low;
    const moves = {
      ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
      "+": [low + width / 5, high - width / 5], "=": [low + width / 5, high - width / 5], "-": [low - width / 4, high + width / 4],
    };
    if (event.key === "0" || event.key === "Escape") this.zoom(null);
    else if (event.key in moves && width > 0) this.zoom(moves[event.key]);
    else return;
    event.preventDefault();
  }

  toggleLog() {
    this.logY = !this.logY;
    this.logButton.setAttribute("aria-pressed", String(this.logY));
    this.change();
  }

  toggleTable() {
    this.tableShown = !this.tableShown;
    this.tableButton.setAttribute("aria-pressed", String(this.tableShown));
    this.plot.hidden = this.tableShown;
    this.table.hidden = !this.tableShown;
    if (this.tableShown) this.fillTable();
    else this.change();
  }

  // The heading's last value, the legend and the words a screen reader says.
  label() {
    const shown = this.traces.filter((trace) => !trace.faint);
    const lines = this.options.kind === "lines";
    // Where all lines end at one step it is said once, else with each.
    const ends = new Set(shown.map((trace) => this.lastOf(trace).step));
    const together = lines && shown.length > 1 && ends.size === 1;
    const named = new Set(this.traces.map((trace) => trace.name)).size; // a mean stands before the lines that it is of
    fill(this.last, lines && named === 1 && shown.length === 1 ? this.lastWords(shown[0]) : together ? ["last values", atStep(...ends)] : null);
    const focused = [...this.legend.children].indexOf(document.activeElement);
    fill(this.legend, named > (lines ? 1 : 0) ? shown.map((trace, index) => this.legendKey(trace, index, lines ? this.lastWords(trace).slice(0, together ? 1 : 2) : null)) : null);
    if (focused >= 0) this.legend.children[focused]?.focus();
    const words = shown.slice(0, 8).map((trace) => `${trace.name} last ${this.lastWords(trace).map((part) => part?.textContent ?? "").join("")}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.options.title}: ${words || "no values yet"}`);
    this.element.classList.toggle("panel-empty", shown.every((trace) => trace.y.length === 0));
  }

  // Beside a smoothed line the last raw value is said: the smoothed one was never measured.
  lastOf(trace) {
    const values = trace.raw ?? trace.y;
    const at = values.findLastIndex((value) => value !== null);
    const steps = trace.steps ?? (this.options.xTitle === "step" ? trace.x : []);
    return at < 0 ? { value: null, step: null } : { value: values[at], step: steps[at] ?? null };
  }

  // [the last value, the step it is of]
  lastWords(trace) {
    const { value, step } = this.lastOf(trace);
    return [h("b", null, this.options.percent ? percent(value) : number(value, 3)), atStep(step)];
  }

  async savePicture() {
    await warm();
    const view = { ...this.options, range: this.range, logY: this.logY, hidden: this.hidden, traces: this.traces };
    if (this.options.kind === "lines") Object.assign(view, { yRange: yRange(view), xRange: this.range ?? padded(extent(this.traces)) });
    await globalThis.Plotly.downloadImage(picture(view), { format: "png", width: 1000, height: 520, scale: 2, filename: fileName(this.options.title) });
  }

  // One line a number, so that lines with other steps stand beside each other; bands have their edges.
  saveNumbers() {
    const axis = this.options.xTitle || "x";
    const rows = this.traces.filter((trace) => !trace.faint).flatMap((trace) => trace.x.map((x, index) => [
      trace.name, ...(axis === "step" ? [] : [trace.steps?.[index] ?? ""]), x, (trace.raw ?? trace.y)[index], trace.low?.[index] ?? "", trace.high?.[index] ?? ""]));
    saveCsv(fileName(this.options.title), [["series", ...(axis === "step" ? [] : ["step"]), axis, "value", "low", "high"], ...rows]);
  }

  legendKey(trace, index, value) {
    const off = this.hidden.has(trace.name);
    const toggle = () => {
      if (!this.hidden.delete(trace.name)) this.hidden.add(trace.name);
      this.change();
      this.legend.children[index]?.focus();
    };
    const tint = css(trace.colour) ?? paletteColour(index);
    return h("button", { type: "button", class: "legend-key", "aria-pressed": !off, title: off ? "show" : "hide", onClick: toggle },
      h("i", { class: "swatch", style: { background: tint } }), h("span", { class: "legend-name" }, trace.name), value);
  }

  fillTable() {
    const shown = this.traces.filter((trace) => !trace.faint);
    const rows = new Map();
    shown.forEach((trace, column) => trace.x.forEach((x, index) => {
      if (!rows.has(x)) rows.set(x, Array.from({ length: shown.length }, () => null));
      rows.get(x)[column] = trace.y[index];
    }));
    const [low, high] = this.range ?? [-Infinity, Infinity];
    let keys = [...rows.keys()];
    if (keys.every((key) => typeof key === "number")) keys = keys.filter((x) => x >= low && x <= high).sort((a, b) => b - a);
    const cut = keys.length > TABLE_ROWS ? h("caption", null, `the last ${TABLE_ROWS} of ${keys.length}`) : null;
    const cell = (x) => h("td", { class: "num" }, typeof x === "number" ? number(x, 4) : x ?? "");
    fill(this.table, h("table", { class: "data" }, cut,
      h("thead", null, h("tr", null, h("th", { scope: "col", class: "num" }, this.options.xTitle ?? "x"), shown.map((trace) => h("th", { scope: "col", class: "num" }, trace.name)))),
      h("tbody", null, keys.slice(0, TABLE_ROWS).map((x) => h("tr", null, h("th", { scope: "row", class: "num" }, typeof x === "number" ? number(x, 4) : x), rows.get(x).map(cell))))));
  }

  // How much there is along x, whatever the zoom.
  width() {
    const [low, high] = extent(this.traces);
    return Math.max(0, high - low);
  }

  onZoom(callback) {
    this.zoomed.add(callback);
  }

  onPoint(callback) {
    this.clicked.add(callback);
  }

  onVisible(callback) {
    this.seen.add(callback);
    if (this.inView) callback(this);
  }

  visible() {
    return this.inView;
  }

  destroy() {
    this.gone = true;
    figures.delete(this);
    this.viewing.disconnect();
    this.sizing.disconnect();
    if (this.drawn) globalThis.Plotly.purge(this.plot);
    this.element.remove();
  }
}

// The global Plotly. Its script is large: index.html only names it, and the first page with a chart loads it.
let loading = null;
export function warm() {
  loading ??= new Promise((resolve, reject) => {
    if (globalThis.Plotly) return resolve();
    const script = h("script", { src: document.querySelector('script[src$="plotly.js"]').getAttribute("src") });
    script.addEventListener("load", () => resolve());
    script.addEventListener("error", () => reject(new Error("plotly.js could not be loaded")));
    document.head.append(script);
  });
  return loading;
}

// One drawing at a time, with a breath between them in which the page scrolls and answers.
const waiting = new Set();
function inTurn(figure) {
  if (waiting.has(figure)) return;
  waiting.add(figure);
  if (waiting.size === 1) setTimeout(paintNext);
}

function paintNext() {
  const [figure] = waiting;
  try {
    figure.paint();
  } finally {
    waiting.delete(figure);
    if (waiting.size) setTimeout(paintNext);
  }
}

function atStep(step) {
  return step === null ? null : h("span", { class: "legend-step" }, ` at step ${number(step)}`);
}

function padded([low, high]) {
  if (low > high) return [0, 1];
  const pad = (high - low) * 0.02 || 0.5;
  return [low - pad, high + pad];
}

function extent(traces) {
  let low = Infinity;
  let high = -Infinity;
  for (const trace of traces) {
    for (const x of trace.x) {
      if (x === null) continue;
      if (x < low) low = x;
      if (x > high) high = x;
    }
  }
  return [low, high];
}
