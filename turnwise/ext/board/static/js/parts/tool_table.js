// The table of tools: how often each was called and failed; one that fails in every call is told from one that fails now and
// then, and from a name that no tool has.
import { frozen } from "board/api.js";
import { h } from "board/dom.js";
import { count, percent, seconds } from "board/format.js";
import { link } from "board/router.js";
import { badge } from "board/parts/badges.js";
import { quoted } from "board/parts/filter_text.js";
import { visible } from "board/parts/visible.js";

export const STATUS_COLOURS = {
  ok: "--good",
  malformed: "--series-2",
  bad_arguments: "--series-4",
  unknown_tool: "--series-5",
  refused: "--muted",
  error: "--bad",
  crashed: "--series-8",
  timeout: "--series-6",
  unknown: "--series-7",
};

const MOST_LISTED = 40;
const OFTEN = 0.5;
const FEW = 5; // fewer failures in a row are chance, unless the tool never worked at all

export const total = (numbers) => numbers.reduce((sum, value) => sum + (value ?? 0), 0);

/** Whether this is only a name that the policy made up, or none: no call by it ever met a tool. */
export function isNoTool(tool) {
  const unknown = total(tool.statuses.unknown_tool ?? []);
  const malformed = total(tool.statuses.malformed ?? []);
  return unknown + malformed === total(tool.calls) && (unknown > 0 || tool.nameless === true);
}

/** {step, calls, whole}: since when every call of a tool has failed, and whether that is always; null for one that works. */
export function failingSince(tool) {
  if (isNoTool(tool)) return null;
  let calls = 0;
  let step = null;
  for (let at = tool.calls.length - 1; at >= 0; at -= 1) {
    if (tool.calls[at] === 0) continue;
    if (tool.failed[at] < tool.calls[at]) break;
    calls += tool.calls[at];
    step = tool.step[at];
  }
  const whole = calls > 0 && calls === total(tool.calls);
  return whole || calls >= FEW ? { step, calls, whole } : null;
}

/** A line for each tool that fails in every call, or has done so for a while. */
export function failingTools(tools, run) {
  return Object.entries(tools).flatMap(([name, tool]) => {
    const since = failingSince(tool);
    if (since === null) return [];
    const calls = `${count(since.calls)} ${since.calls === 1 ? "call" : "calls"}`;
    const when = since.whole ? (since.calls === 1 ? "its only call" : `all of its ${calls}`) : `all of its ${calls} since step ${since.step}`;
    const filter = `tool(${quoted(name)}) and failed_calls > 0${since.whole ? "" : ` and step >= ${since.step}`}`;
    const shown = frozen ? null : h("a", { href: link(`/run/${run}/trajectories`, { filter, sort: "failed_calls" }) }, "show them");
    return [h("p", { class: "health-line is-alarm", role: "alert" }, visible(name), ` failed in ${when} (${howFailed(tool)}). `, shown)];
  });
}

// Calls that could not be read, or of a tool that is not there, were never carried out: they took no time worth a chart.
export function everRan(tool) {
  return ["ok", "error", "crashed", "timeout"].some((status) => total(tool.statuses[status] ?? []) > 0);
}

function howFailed(tool) {
  const worst = Object.entries(tool.statuses)
    .map(([status, values]) => [status, total(values)])
    .filter(([status, n]) => status !== "ok" && status !== "unknown" && n > 0)
    .sort((a, b) => b[1] - a[1]);
  return worst.map(([status, n]) => `${status.replaceAll("_", " ")} ${count(n)}`).join(", ") || "none";
}

function verdict(tool, share) {
  const since = failingSince(tool);
  if (since !== null) return badge(since.whole ? "every call failed" : `every call since step ${since.step} failed`, "bad");
  if (tool.nameless) return null;
  if (isNoTool(tool)) return badge("no such tool", "plain", "a name that the policy made up");
  return share >= OFTEN ? badge("fails often", "warn", `at least ${percent(OFTEN, 0)} of its calls`) : null;
}

/** The tools of [name, tool] pairs, in their order. */
export function toolTable(used) {
  const row = ([name, tool]) => {
    const calls = total(tool.calls);
    const failed = total(tool.failed);
    const last = tool.step.length - 1;
    const share = calls ? failed / calls : 0;
    const broken = failingSince(tool) !== null;
    return h(
      "tr",
      { class: broken ? "is-broken" : null },
      h("th", { scope: "row" }, visible(name), " ", verdict(tool, share)),
      h("td", { class: "num" }, count(calls)),
      h("td", { class: "num" }, count(failed)),
      h("td", { class: ["num", broken && "tone-bad"] }, calls ? percent(share) : ""),
      h("td", { class: "num" }, seconds(everRan(tool) ? tool.p50[last] : null)),
      h("td", { class: "num" }, seconds(everRan(tool) ? tool.p90[last] : null)),
      h("td", null, howFailed(tool)),
    );
  };
  const heads = ["tool", "calls", "failed", "share", "p50 now", "p90 now", "how they failed"];
  const head = heads.map((text, index) => h("th", { scope: "col", class: index > 0 && index < 6 ? "num" : null }, text));
  const rest = used.length - MOST_LISTED;
  const caption = rest > 0 ? h("caption", null, `and ${count(rest)} more names that were called less often`) : null;
  return h("table", null, caption, h("thead", null, h("tr", null, head)), h("tbody", null, used.slice(0, MOST_LISTED).map(row)));
}

/** All tools for a CSV. */
export function toolRows(tools) {
  const statuses = Object.keys(STATUS_COLOURS);
  const row = ([name, tool]) => [name, total(tool.calls), total(tool.failed), tool.p50.at(-1), tool.p90.at(-1), ...statuses.map((status) => total(tool.statuses[status] ?? []))];
  return [["tool", "calls", "failed", "p50_seconds_now", "p90_seconds_now", ...statuses], ...Object.entries(tools).map(row)];
}
