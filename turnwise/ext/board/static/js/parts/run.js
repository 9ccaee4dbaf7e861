// What is shown of a run wherever it appears: its state, how far it is, its accuracy, and the shape of its reward.

import { h, svg } from "board/dom.js";
import { number, percent } from "board/format.js";
import { visible, visibleText } from "board/parts/visible.js";

export function badge(state) {
  return h("span", { class: "badge", dataset: { state } }, state);
}

// watchWords({ alarm: 1, watch: 2 }) -> "1 alarm, 2 to watch"; null when there is neither.
export function watchWords({ alarm, watch }) {
  return [alarm && `${alarm} alarm${alarm === 1 ? "" : "s"}`, watch && `${watch} to watch`].filter(Boolean).join(", ") || null;
}

export function watchBadge(found) {
  const words = watchWords(found);
  return words && h("span", { class: ["tally", found.alarm ? "is-alarm" : "is-watch"], title: words }, String(found.alarm + found.watch), h("span", { class: "sr" }, ` (${words})`));
}

// What a person wrote on the run: its tags, each by `choose` or as it stands, and the note below them.
export function notes({ tags, note }, choose = null) {
  const tag = (text) => (choose ? h("button", { type: "button", class: "tag", title: `Runs with the tag ${visibleText(text)}`, onClick: () => choose(text) }, visible(text)) : h("span", { class: "tag" }, visible(text)));
  return [tags.length ? h("span", { class: "tags" }, tags.map(tag)) : null, note ? h("div", { class: "note" }, visible(note)) : null];
}

// "12 / 40" with a bar; without a known end only the step.
export function progress({ step, steps, state, command }) {
  if (command === "eval") return h("span", { class: "muted" }, "evaluation"); // it has no steps
  if (step === null || step === undefined) return null;
  const share = steps ? Math.min(1, step / steps) : null;
  return h("span", { class: "progress", dataset: { state } },
    share === null ? null : h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${100 * share}%` } })),
    h("span", null, "step ", h("b", null, number(step)), steps ? ` of ${number(steps)}` : null));
}

// The last one measured, with its standard error, and of a training the step that it is of: the reward beside it is newer.
export function accuracy(run) {
  const error = typeof run.accuracy_error === "number" ? h("span", { class: "muted" }, ` ± ${(100 * run.accuracy_error).toFixed(1)}`) : null;
  const step = run.command !== "eval" && typeof run.accuracy_step === "number" ? h("div", { class: "muted small" }, `at step ${number(run.accuracy_step)}`) : null;
  return [percent(run.accuracy), error, step];
}

export function sparkline(values, { width = 120, height = 28, of = "reward" } = {}) {
  const points = values.filter((value) => value !== null);
  if (points.length < 2) return null;
  const low = Math.min(...points);
  const span = Math.max(...points) - low || 1;
  const at = points.map((value, index) => [2 + (index / (points.length - 1)) * (width - 6), height - 3 - ((value - low) / span) * (height - 6)]);
  const path = at.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const [endX, endY] = at.at(-1);
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${of} from ${number(points[0])} to ${number(points.at(-1))}` },
    svg("path", { d: `${path}L${endX.toFixed(1)} ${height}L2 ${height}Z`, fill: "currentColor", opacity: 0.1 }),
    svg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linejoin": "round" }),
    svg("circle", { cx: endX, cy: endY, r: 2.2, fill: "currentColor" }));
}
