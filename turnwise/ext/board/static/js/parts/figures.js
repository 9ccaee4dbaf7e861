// The small drawings of a trajectory: reward waterfall, time per turn, tokens by origin.
import { h, svg } from "board/dom.js";
import { count, number, seconds, signed } from "board/format.js";
import { words } from "board/parts/badges.js";
import { visible } from "board/parts/visible.js";

/** The reward as a sum: one bar per part from where the last one ended, and the total; parts that are no summands begin at 0. */
export function waterfall(steps, reward, additive) {
  if (steps.length === 0) return h("p", { class: "muted" }, reward === null ? "not scored" : `reward ${number(reward)}, no parts`);
  const ends = steps.flatMap((step) => [step.total, step.total - step.value]);
  const low = Math.min(0, ...ends, reward ?? 0);
  const high = Math.max(0, ...ends, reward ?? 0);
  const span = high - low || 1;
  const at = (value) => (100 * (value - low)) / span;
  const row = (name, from, to, text, tone) => {
    const left = at(Math.min(from, to));
    const width = Math.max(Math.abs(at(to) - at(from)), 0.8);
    return [
      h("span", { class: "fall-name", title: name }, visible(name)),
      svg(
        "svg",
        { class: "fall-bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("line", { x1: at(0), x2: at(0), y1: 0, y2: 10, class: "fall-zero" }),
        svg("rect", { x: Math.min(left, 99.2), y: 1, width, height: 8, class: `fall-${tone}` }),
      ),
      h("span", { class: "fall-number" }, text),
    ];
  };
  return h(
    "div",
    { class: "waterfall" },
    steps.map((step) =>
      row(
        words(step.name),
        step.total - step.value,
        step.total,
        additive ? signed(step.value) : number(step.value),
        step.value < 0 ? "minus" : step.value > 0 ? "plus" : "none",
      ),
    ),
    reward !== null && h("div", { class: "fall-total" }, row("reward", 0, reward, number(reward), "sum")),
    !additive && h("p", { class: "muted fall-note" }, "The parts are measured; the scorer makes the reward of them in its own way."),
  );
}

/** How long a turn took: writing, then tools or the user; `longest` makes the bars of all turns comparable. */
export function turnTiming(turn, longest) {
  const written = turn.generate_seconds ?? 0;
  const replied = turn.reply_seconds ?? 0;
  const share = (part) => `${longest > 0 ? (100 * part) / longest : 0}%`;
  const who = turn.calls.length > 0 ? "tools" : "reply";
  return h(
    "div",
    { class: "timing", title: `writing ${seconds(written)}, ${who} ${seconds(replied)}` },
    h(
      "span",
      { class: "timing-track", "aria-hidden": "true" },
      h("span", { class: "timing-write", style: { width: share(written) } }),
      h("span", { class: "timing-reply", style: { width: share(replied) } }),
    ),
    h("span", { class: "timing-text" }, `${seconds(written)} writing`, replied > 0.0005 && ` · ${seconds(replied)} ${who}`),
  );
}

/** All turns' time as one bar with its key. */
export function timeSummary(turns, total) {
  const written = turns.reduce((sum, turn) => sum + (turn.generate_seconds ?? 0), 0);
  const replied = turns.reduce((sum, turn) => sum + (turn.reply_seconds ?? 0), 0);
  const rest = Math.max(0, (total ?? 0) - written - replied);
  const parts = [
    ["write", "writing", written],
    ["reply", "tools and users", replied],
    ["rest", "waiting", rest],
  ].filter(([, , value]) => value > 0);
  const sum = parts.reduce((all, [, , value]) => all + value, 0) || 1;
  return shares(parts.map(([kind, name, value]) => ({ kind: `timing-${kind}`, name, text: seconds(value), share: value / sum })));
}

const ORIGINS = ["prompt", "policy", "tool", "user", "template"];

/** Tokens by who wrote them. */
export function tokenSummary(tokens) {
  const parts = ORIGINS.map((name) => [name, tokens[name] ?? 0]).filter(([, value]) => value > 0);
  if (parts.length === 0) return h("p", { class: "muted" }, "none recorded");
  const sum = parts.reduce((all, [, value]) => all + value, 0) || 1;
  return shares(parts.map(([name, value]) => ({ kind: `origin-${name}`, name, text: count(value), share: value / sum })));
}

function shares(parts) {
  return h(
    "div",
    { class: "shares" },
    h(
      "div",
      { class: "shares-bar", "aria-hidden": "true" },
      parts.map((part) => h("span", { class: part.kind, style: { width: `${100 * part.share}%` } })),
    ),
    h(
      "ul",
      { class: "shares-key" },
      parts.map((part) =>
        h("li", null, h("span", { class: `swatch ${part.kind}`, "aria-hidden": "true" }), `${part.name} `, h("b", null, part.text)),
      ),
    ),
  );
}
