// Saves what a page shows as a file of the reader's own: made in the page, sent nowhere.

import { h } from "board/dom.js";

const FORMULA = /^[=+\-@\t\r]/; // a spreadsheet would run such a name

// fileName("Reward: all sources") -> "reward-all-sources"
export function fileName(title) {
  return title.toLowerCase().replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-|-$/g, "").slice(0, 80) || "panel";
}

export function saveCsv(name, rows) {
  const text = rows.map((row) => row.map(cell).join(",")).join("\r\n");
  const url = URL.createObjectURL(new Blob([text, "\r\n"], { type: "text/csv;charset=utf-8" }));
  const anchor = h("a", { href: url, download: `${name}.csv` });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // some browsers read it a moment later
}

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = FORMULA.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
