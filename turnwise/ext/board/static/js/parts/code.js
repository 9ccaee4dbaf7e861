// Code and JSON as blocks with line numbers, lightly coloured.
import { h } from "board/dom.js";
import { visible } from "board/parts/visible.js";

const PYTHON_WORDS =
  "and as assert async await break class continue def del elif else except finally for from global if import in is lambda " +
  "match None nonlocal not or pass raise return True False try while with yield";
const PYTHON = new RegExp(
  [
    "(?<comment>#[^\\n]*)",
    "(?<string>[rbfuRBFU]{0,2}(?:\"\"\"[\\s\\S]*?\"\"\"|'''[\\s\\S]*?'''|\"(?:\\\\.|[^\"\\\\\\n])*\"|'(?:\\\\.|[^'\\\\\\n])*'))",
    "(?<number>\\b\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?\\b)",
    `(?<word>\\b(?:${PYTHON_WORDS.split(" ").join("|")})\\b)`,
  ].join("|"),
  "g",
);
const JSON_TEXT =
  /(?<word>"(?:\\.|[^"\\])*"(?=\s*:)|\b(?:true|false|null)\b)|(?<string>"(?:\\.|[^"\\])*")|(?<number>-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b)/g;

// Beyond this a block is shown without colours: the page must open at once whatever a tool printed.
const COLOURED = 20_000;

/** Runs of (kind or null, text). */
function runs(text, pattern) {
  if (pattern === null || text.length > COLOURED) return [[null, text]];
  const found = [];
  let from = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > from) found.push([null, text.slice(from, match.index)]);
    found.push([Object.keys(match.groups).find((kind) => match.groups[kind] !== undefined), match[0]]);
    from = match.index + match[0].length;
  }
  if (from < text.length) found.push([null, text.slice(from)]);
  return found;
}

function lines(text, pattern) {
  const rows = [[]];
  for (const [kind, piece] of runs(text, pattern)) {
    piece.split("\n").forEach((part, index) => {
      if (index > 0) rows.push([]);
      if (part) rows.at(-1).push(kind === null ? visible(part) : h("span", { class: `code-${kind}` }, visible(part)));
    });
  }
  return rows;
}

/** A block of code; `language` is "python", "json" or null. One line needs no numbers. */
export function codeBlock(text, language = null) {
  const pattern = { python: PYTHON, json: JSON_TEXT }[language] ?? null;
  const rows = lines(text.replace(/\n+$/, ""), pattern);
  const numbered = rows.length > 1;
  return h(
    "pre",
    { class: numbered ? "code numbered" : "code", tabindex: "0", "aria-label": language ? `${language} code` : "text" },
    rows.map((row, index) => [
      numbered && h("span", { class: "line-number", "aria-hidden": "true", "data-line": String(index + 1) }),
      h("code", null, row, "\n"),
    ]),
  );
}

/** Any JSON value, indented. */
export function jsonBlock(value) {
  return codeBlock(JSON.stringify(value, null, 2) ?? "null", "json");
}

const CODE_NAMES = new Set(["code", "script", "program", "source_code"]);

/** A call's arguments: code as code, long text as text, the rest by name. */
export function argumentsOf(values) {
  const names = Object.keys(values);
  if (names.length === 0) return h("p", { class: "muted" }, "no arguments");
  return names.map((name) => {
    const value = values[name];
    if (typeof value === "string" && (CODE_NAMES.has(name) || value.includes("\n"))) {
      return [
        names.length > 1 && h("div", { class: "argument-name" }, visible(name)),
        codeBlock(value, CODE_NAMES.has(name) ? "python" : null),
      ];
    }
    const short = JSON.stringify(value) ?? "null";
    return h(
      "div",
      { class: "argument" },
      h("span", { class: "argument-name" }, visible(name)),
      short.length > 80 && typeof value === "object"
        ? jsonBlock(value)
        : h("code", null, visible(typeof value === "string" ? value : short)),
    );
  });
}
