// The page "Health": what the detectors found, worst first, each with what was seen, what to do and where to look.
import { frozen, get, runPath } from "board/api.js";
import { clear, h, svg } from "board/dom.js";
import { count, number } from "board/format.js";
import { warning } from "board/parts/headline.js";
import { link } from "board/router.js";

const WORDS = { alarm: "alarm", watch: "watch", ok: "fine", note: "note" };
const NOTES = new Set(["reading", "too_early"]); // what is said about the checks, not found by one
const POINTS = 120;
const MOST_LINES = 4;

export async function render(node, { run, live }) {
  const heading = h("h1", null, "Health");
  const status = h("div", { class: "insight-status" }, h("p", { class: "loading", role: "status" }, "Looking for signs of trouble…"));
  const body = h("div", { class: "insight-body" });
  node.append(h("div", { class: "insight health" }, heading, status, body));
  const titleBefore = document.title;
  let stopped = false;

  async function refresh() {
    const { findings, warnings } = await get(runPath(run, "health"));
    const names = [...new Set(findings.flatMap((finding) => finding.metrics))].sort();
    // A report holds one answer with every metric.
    const asked = frozen ? { names: "*" } : { names: names.join(","), points: POINTS };
    const { series } = names.length ? await get(runPath(run, "series"), asked) : { series: {} };
    if (stopped) return;
    const alarms = findings.filter((finding) => finding.severity === "alarm").length;
    heading.textContent = alarms ? `Health: ${plural(alarms, "alarm")}` : "Health";
    document.title = alarms ? `(${alarms}) Health · ${run}` : `Health · ${run}`;
    clear(status);
    draw(body, findings, warnings, series, run);
  }

  const say = (text) => status.replaceChildren(h("p", { class: "error", role: "alert" }, text));
  const fail = (error) => say(`The checks could not be made: ${error.message}`);
  await refresh().catch(fail);
  const unlisten = live(() => refresh().catch(fail));
  return () => {
    stopped = true;
    document.title = titleBefore;
    unlisten?.();
  };
}

function draw(body, findings, warnings, series, run) {
  const opened = new Set([...body.querySelectorAll("details[open]")].map((one) => one.dataset.id));
  const held = document.activeElement?.closest?.("[data-id]");
  const focused = body.contains(held) ? [held.dataset.id, document.activeElement.localName] : null;
  const by = (severity) => findings.filter((finding) => finding.severity === severity);
  const fine = by("ok");
  const troubled = [...by("alarm"), ...by("watch")];
  body.replaceChildren(
    summaryLine(findings),
    h("div", { class: "headline-warnings" }, warnings.map(warning)),
    h("div", { class: "findings" }, troubled.map((finding) => card(finding, series, run))),
    h("div", { class: "findings findings-fine" }, fine.map((finding) => fineCard(finding, series, run, opened.has(finding.id)))),
  );
  if (focused) body.querySelector(`[data-id="${CSS.escape(focused[0])}"] ${focused[1]}`)?.focus();
}

function summaryLine(findings) {
  if (!findings.length) return h("p", { class: "empty" }, "Nothing was recorded yet that could be checked.");
  const checks = findings.filter((finding) => !NOTES.has(finding.id));
  const numbers = { alarm: 0, watch: 0, ok: 0 };
  for (const finding of checks) numbers[finding.severity] += 1;
  if (numbers.alarm + numbers.watch === 0) {
    if (checks.length < findings.length) return h("p", { class: "empty", role: "status" }, "Not all can be checked yet; see the note below.");
    return h("p", { class: "all-well", role: "status" }, `None of the ${plural(numbers.ok, "check")} found anything.`);
  }
  const parts = [
    numbers.alarm && plural(numbers.alarm, "alarm"),
    numbers.watch && `${numbers.watch} to watch`,
    numbers.ok && `${numbers.ok} fine`,
  ];
  return h("p", { class: ["health-line", numbers.alarm ? "is-alarm" : "is-watch"], role: "status" }, `${parts.filter(Boolean).join(", ")}.`);
}

function card(finding, series, run) {
  const id = `finding-${finding.id}`;
  return h(
    "article",
    { class: ["finding", `is-${finding.severity}`], "aria-labelledby": id, dataset: { id: finding.id } },
    h("header", null, badge(finding.severity), h("h2", { id }, finding.title), stepsText(finding)),
    h(
      "div",
      { class: "finding-body" },
      h("div", { class: "finding-words" }, h("p", null, finding.text), advice(finding), links(finding, run)),
      lines(finding, series),
    ),
  );
}

function fineCard(finding, series, run, open) {
  const inside = h("div", { class: "finding-body" });
  const fillOnce = () => {
    if (inside.childElementCount) return;
    inside.append(h("div", { class: "finding-words" }, h("p", null, finding.text), links(finding, run)), lines(finding, series) ?? "");
  };
  if (open) fillOnce();
  return h(
    "details",
    { class: ["finding", "is-ok"], dataset: { id: finding.id }, open, onToggle: fillOnce },
    h("summary", null, badge(NOTES.has(finding.id) ? "note" : "ok"), h("h2", null, finding.title), h("span", { class: "finding-short" }, finding.text)),
    inside,
  );
}

const badge = (severity) => h("span", { class: "badge", dataset: { state: severity } }, WORDS[severity]);

function stepsText(finding) {
  if (!finding.steps) return null;
  const [from, to] = finding.steps;
  return h("span", { class: "finding-steps" }, from === to ? `step ${from}` : `steps ${from} to ${to}`);
}

const advice = (finding) => finding.advice && h("p", { class: "advice" }, h("strong", null, "What to do. "), finding.advice);

function links(finding, run) {
  if (!finding.filter) return null;
  const many = finding.count === null ? "its trajectories" : `the ${count(finding.count)} trajectories`;
  const what = finding.count === 1 ? "Show the trajectory" : `Show ${many}`;
  const href = link(`/run/${run}/trajectories`, { filter: finding.filter, split: finding.split });
  return h("p", { class: "links" }, h("a", { href, title: finding.filter }, what));
}

// ---- small lines of the metrics, with the steps of the finding shaded ----

function lines(finding, series) {
  const wanted = finding.metrics.flatMap((name) => matching(name, series));
  if (!wanted.length) return null;
  const left = wanted.length - MOST_LINES;
  return h(
    "div",
    { class: "finding-lines" },
    wanted.slice(0, MOST_LINES).map((name) => line(name, series[name], finding)),
    left > 0 && h("p", { class: "muted small" }, `and ${plural(left, "more metric")} on the page Curves`),
  );
}

function matching(name, series) {
  const found = name.endsWith("*") ? Object.keys(series).filter((one) => one.startsWith(name.slice(0, -1))) : [name];
  return found.filter((one) => series[one]?.value.some((value) => value !== null));
}

function line(name, points, finding) {
  const pairs = points.step.map((step, index) => [step, points.value[index]]).filter(([, value]) => value !== null);
  const steps = pairs.map(([step]) => step);
  const values = pairs.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const x = (step) => (last === first ? 50 : (100 * (step - first)) / (last - first));
  const y = (value) => (high === low ? 20 : 37 - (34 * (value - low)) / (high - low));
  const drawn = pairs.map(([step, value]) => `${x(step).toFixed(2)},${y(value).toFixed(2)}`).join(" ");
  const now = number(values[values.length - 1]);
  const course = `from ${number(values[0])} at step ${first} to ${now} at step ${last}`;
  const label = `${name}: ${course}, between ${number(low)} and ${number(high)}`;
  return h(
    "figure",
    { class: "line" },
    h("figcaption", null, h("span", { class: "line-name" }, name), h("span", { class: "line-now" }, now)),
    svg(
      "svg",
      { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("title", null, label),
      band(finding.steps, x, first, last),
      pairs.length > 1
        ? svg("polyline", { points: drawn, class: "line-path" })
        : svg("line", { x1: 46, x2: 54, y1: 20, y2: 20, class: "line-path" }),
    ),
    h(
      "div",
      { class: "line-scale", "aria-hidden": "true" },
      h("span", null, `lowest ${number(low)}`),
      h("span", null, `highest ${number(high)}`),
    ),
  );
}

function band(steps, x, first, last) {
  if (!steps || last === first) return null;
  const from = x(Math.max(first, Math.min(last, steps[0])));
  const to = x(Math.min(last, Math.max(first, steps[1])));
  return svg("rect", { x: from, width: Math.max(1, to - from), y: 0, height: 40, class: "line-band" });
}

const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
