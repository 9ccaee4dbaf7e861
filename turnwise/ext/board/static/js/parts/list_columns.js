// The columns of the trajectory list: those always there, and those a filter or a sort brings in.
import { h } from "board/dom.js";
import { count, number, seconds, signed } from "board/format.js";
import { link } from "board/router.js";
import { words } from "board/parts/badges.js";
import { visibleText, visible } from "board/parts/visible.js";

function verdict(row) {
  const [sign, tone, text] = { true: ["✓", "good", "right"], false: ["✗", "bad", "wrong"] }[String(row.right)] ?? [
    "·",
    "plain",
    "not graded",
  ];
  return h(
    "span",
    { class: `verdict-sign tone-${tone}`, title: text },
    h("span", { "aria-hidden": "true" }, sign),
    h("span", { class: "sr" }, text),
  );
}

function calls(row) {
  const failed = row.failed_calls > 0 && h("span", { class: "tone-bad", title: `${row.failed_calls} failed` }, ` ✗${row.failed_calls}`);
  const malformed = row.malformed > 0 && h("span", { class: "tone-warn", title: `${row.malformed} malformed` }, ` ⚠${row.malformed}`);
  return h(
    "span",
    { title: row.tools.length > 0 ? visibleText(row.tools.join(", ")) : "no tool was called" },
    String(row.calls),
    failed,
    malformed,
  );
}

function ending(row) {
  const tone =
    row.stop_reason === "failed" ? "tone-bad" : row.stop_reason === "answered" || row.stop_reason === "user_ended" ? "" : "tone-warn";
  return h("span", { class: tone, title: row.failure === null ? null : visibleText(row.failure) }, words(row.stop_reason));
}

function reward(row) {
  const parts = Object.entries(row.parts ?? {})
    .map(([name, value]) => `${name} ${number(value)}`)
    .join(", ");
  return h("span", { title: parts === "" ? null : visibleText(parts) }, number(row.reward));
}

function advantage(row) {
  const tone = row.advantage === null || row.advantage === 0 ? "" : row.advantage > 0 ? "tone-good" : "tone-bad";
  return h("span", { class: tone }, signed(row.advantage, 2));
}

/** Always shown, in this order; `wide` ones leave when the page is narrower. */
function always(run) {
  return [
    { name: "right", label: "Right", cell: verdict },
    { name: "reward", label: "Reward", num: true, cell: reward },
    { name: "advantage", label: "Adv.", num: true, cell: advantage },
    { name: "question", label: "Question and answer", main: true },
    { name: "step", label: "Step", num: true, cell: (row) => String(row.step) },
    {
      name: "sibling",
      label: "Group",
      cell: (row) =>
        h(
          "a",
          {
            class: "group-link",
            href: link(`/run/${run}/group`, { shard: row.shard, sample: row.sample_id }),
            title: `siblings of ${visibleText(row.sample_id)} side by side`,
          },
          `#${row.sibling}`,
          h("span", { class: "sr" }, " group"),
        ),
    },
    { name: "turns", label: "Turns", num: true, cell: (row) => h("span", { title: `${row.user_turns} of the user` }, String(row.turns)) },
    { name: "calls", label: "Calls", num: true, cell: calls },
    {
      name: "policy_tokens",
      label: "Tokens",
      num: true,
      cell: (row) =>
        h("span", { title: `${number(row.policy_tokens)} of ${number(row.tokens)} tokens are the policy's` }, count(row.policy_tokens)),
    },
    { name: "seconds", label: "Time", num: true, wide: true, cell: (row) => seconds(row.seconds) },
    { name: "stop_reason", label: "Ended", wide: true, cell: ending },
    { name: "data_source", label: "Source", wide: true, cell: (row) => visible(row.data_source) },
  ];
}

function plain(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return visible(typeof value === "string" ? value : JSON.stringify(value));
}

/** Fields a filter names or the sort uses that have no column of their own yet. */
function asked(state, fields, taken) {
  const named = new Set((state.filter.replace(/"[^"]*"|'[^']*'/g, "").match(/[A-Za-z_]\w*/g) ?? []).concat(state.sort));
  return fields
    .filter((field) => named.has(field.name) && !taken.has(field.name))
    .map((field) => ({
      name: field.name,
      label: words(field.name).replace(/^./, (letter) => letter.toUpperCase()),
      num: field.type.startsWith("number"),
      cell: (row) => plain(row[field.name]),
    }))
    .filter(
      (column) =>
        !["sample_id", "answer", "failure", "tools", "parts", "failed_calls", "malformed", "tokens", "user_turns"].includes(column.name),
    );
}

/** The columns for what is asked: `state` is {filter, sort}, `fields` what the server says there is. */
export function columnsFor(run, state, fields, rows) {
  // One source says nothing in every row.
  const sources = new Set(rows.map((row) => row.data_source));
  const base = always(run).filter(
    (column) => column.name !== "data_source" || rows.length === 0 || sources.size > 1 || state.sort === column.name,
  );
  const extra = asked(state, fields, new Set(base.map((column) => column.name))).filter(
    (column) => rows.length === 0 || column.name in rows[0],
  );
  const at = base.findIndex((column) => column.main) + 1;
  return [...base.slice(0, at), ...extra.slice(0, 4), ...base.slice(at)];
}
