// One trajectory as a conversation: a timeline of turns beside what is known about it. `view=tokens` hands over to tokens.js.
import { get, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number, percent } from "board/format.js";
import { badge, words } from "board/parts/badges.js";
import { codeBlock, jsonBlock } from "board/parts/code.js";
import { timeSummary, tokenSummary, waterfall } from "board/parts/figures.js";
import { messageCard, prose } from "board/parts/messages.js";
import { marksOf, messageImages, targetToggle } from "board/parts/pictures.js";
import { replayForm, replayFound } from "board/parts/replay.js";
import { link, setParams } from "board/router.js";
import { placeOf, trajectoryHead } from "board/parts/trajectory_head.js";
import { turnCard } from "board/parts/turns.js";
import { visible } from "board/parts/visible.js";
import { render as renderTokens } from "board/pages/tokens.js";

const NARROW = "(max-width: 900px)";

export async function render(node, context) {
  if (context.params.view === "tokens") return renderTokens(node, context);
  const { run, params } = context;
  fill(node, h("p", { class: "loading late", role: "status" }, "Loading the conversation…"));
  const data = await get(runPath(run, "trajectory"), placeOf(params));
  const head = trajectoryHead(run, data, params, "");
  const article = h("article", { class: ["trajectory", params.targets && "show-targets"] }, head.node, h("div", { class: "columns" }, timeline(run, data, params), aside(run, data)));
  fill(node, article);
  return () => head.stop();
}

function timeline(run, data, params) {
  const every = everyTurn(data);
  const marks = marksOf(data);
  const longest = Math.max(0, ...every.map((turn) => (turn.generate_seconds ?? 0) + (turn.reply_seconds ?? 0)));
  const version = data.turns[0]?.policy_version;
  return h(
    "div",
    { class: "timeline" },
    imageBar(run, data, params),
    data.prompt.map((message) => messageCard(message, marks)),
    looseImages(data, marks),
    data.turns.length === 0 && h("p", { class: "muted" }, "The policy never wrote a turn."),
    data.turns.map((turn) => turnCard(turn, { longest, marks, version })),
    h("p", { class: "the-end" }, `ended: ${words(data.stop_reason)}`),
    data.branches.map((branch) =>
      h(
        "details",
        { class: "more branch", open: true },
        h("summary", null, visible(`Branch: ${branch.name}`), !branch.trained && [" ", badge("not trained", "plain")]),
        branch.prompt.map((message) => messageCard(message, marks)),
        branch.turns.map((turn) => turnCard(turn, { longest, marks, version })),
      ),
    ),
  );
}

/** Images of the sample that no message shows: what tools read, of which the model may have seen a small view only. */
export function looseImages(data, marks) {
  const shown = new Set(data.prompt.flatMap((message) => (message.images ?? []).map((image) => image.url)));
  const card = (title, images) => {
    const loose = images.filter((image) => !shown.has(image.url));
    for (const image of loose) shown.add(image.url);
    if (loose.length === 0) return null;
    return h("div", { class: "message role-tool" }, h("div", { class: "message-head" }, h("span", { class: "role" }, title)), messageImages(loose, marks));
  };
  return [card("What tools read", data.sources ?? []), card("Images of the sample", data.images)];
}

/** The probe that an episode was played under; "none" for any other. */
function probeOf(data) {
  return Object.entries(data.probes).find(([, place]) => place.shard === data.shard)?.[0] ?? "none";
}

/** Above the images: the ground truth's boxes on or off, and the way to the same episode under a probe. */
function imageBar(run, data, params) {
  const toggle = targetToggle(data.targets, Boolean(params.targets), (on) => {
    toggle.closest(".trajectory").classList.toggle("show-targets", on);
    setParams({ targets: on ? "1" : null });
  });
  const others = Object.entries(data.probes).filter(([, place]) => place.shard !== data.shard);
  if (!toggle && others.length === 0) return null;
  const own = probeOf(data);
  const base = data.probes.none;
  const beside = (name) => link(`/run/${run}/beside`, { shard: base.shard, row: base.row, probe: name });
  return h(
    "div",
    { class: "image-bar" },
    toggle,
    base && own !== "none" && h("a", { class: "button", href: beside(own) }, visible(`Beside the episode without the probe ${own}`)),
    base && own === "none" && others.map(([name]) => h("a", { class: "button", href: beside(name) }, visible(`Beside the probe ${name}`))),
  );
}

/** The turns of the main conversation and of the branches. */
function everyTurn(data) {
  return [...data.turns, ...data.branches.flatMap((branch) => branch.turns)];
}

function aside(run, data) {
  const box = h(
    "details",
    { class: "about", open: !matchMedia(NARROW).matches },
    h("summary", null, "Reward, facts and tokens"),
    panel("Reward", waterfall(data.waterfall, data.reward, data.additive)),
    data.verdicts.length > 0 &&
      panel(
        "What the judge said",
        data.verdicts.map((verdict) =>
          h("blockquote", { class: "verdict" }, h("cite", null, visible(words(verdict.name))), prose(verdict.text)),
        ),
      ),
    panel("Ground truth", truth(data.ground_truth)),
    panel("Time", timeSummary(everyTurn(data), data.entry.seconds)),
    panel("Tokens by origin", tokenSummary(data.tokens)),
    panel("Facts", facts(data)),
    data.replay && panel("Replay", replayFound(data.replay)),
    probeOf(data) === "none" && panel("Play it again", replayForm(run, data)), // a replay would not spoil the images
    more("Sample info", data.info),
    more("Found out meanwhile", data.facts),
    more("Artifacts", data.artifacts),
  );
  return h("aside", { "aria-label": "about this trajectory" }, box);
}

function panel(title, ...content) {
  return h("section", { class: "about-part" }, h("h2", null, title), content);
}

function more(title, value) {
  if (value === null || value === undefined || Object.keys(value).length === 0) return null;
  return h("details", { class: "more" }, h("summary", null, title), jsonBlock(value));
}

function truth(value) {
  if (value === null || value === undefined) return h("p", { class: "muted" }, "none recorded");
  return typeof value === "string" ? codeBlock(value) : jsonBlock(value);
}

function facts(data) {
  const entry = data.entry;
  const versions = [...new Set(everyTurn(data).map((turn) => turn.policy_version))];
  const rows = [
    ["Stop reason", words(data.stop_reason)],
    ["Turns", `${entry.turns}${entry.user_turns > 0 ? `, ${entry.user_turns} of the user` : ""}`],
    [
      "Tool calls",
      `${entry.calls}${entry.failed_calls > 0 ? `, ${entry.failed_calls} failed` : ""}${entry.malformed > 0 ? `, ${entry.malformed} malformed` : ""}`,
    ],
    ["Duplicate calls", entry.duplicate_calls > 0 ? badge(entry.duplicate_calls, "warn") : "0"],
    ["Print-only code", entry.print_only > 0 ? badge(entry.print_only, "warn") : "0"],
    ["Funnel", funnel(entry)],
    ["Policy version", versions.length > 0 ? versions.join(", ") : "–"],
    ...(data.reused_from === null || data.reused_from === undefined ? [] : [["Trained on again", `first in step ${data.reused_from}`]]),
    ["Ledger", renderCheck(data.render_check)],
    ["Sampler–learner gap", number(entry.gap)],
    ["Mean entropy", number(entry.entropy)],
    ["Policy share", entry.tokens > 0 ? `${percent(entry.policy_tokens / entry.tokens)} of ${number(entry.tokens)} tokens` : "–"],
  ];
  return h(
    "dl",
    { class: "fact-list" },
    rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
  );
}

function funnel(entry) {
  return h(
    "span",
    { class: "stages" },
    ["called", "ran", "evidence", "used"].map((stage) =>
      h("span", { class: entry[stage] ? "reached" : "missed" }, `${entry[stage] ? "✓" : "✗"} ${stage}`),
    ),
  );
}

function renderCheck(check) {
  if (check === null || check === undefined) return "not compared with a full render";
  if (check.exact) return badge("equals the full render", "good");
  const where = check.position === null ? "" : ` from token ${check.position}`;
  return badge(
    check.same_text ? `same text, other pieces${where}` : `differs from the full render${where}`,
    check.same_text ? "warn" : "bad",
  );
}
