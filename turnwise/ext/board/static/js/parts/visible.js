// Text that a model, a tool or a user wrote, as nodes in which nothing is hidden: marks and control characters show.
import { h } from "board/dom.js";

// Controls, format characters (direction marks, zero-width ones, tags), private use, lone surrogates, odd line ends.
// A joiner inside an emoji stays: it draws.
const HIDDEN = /(?<!\p{Extended_Pictographic}\uFE0F?)\u200D|(?![\n\t\u200D])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu;

const NAMES = {
  0x00: "NUL",
  0x07: "BEL",
  0x08: "BS",
  0x0b: "VT",
  0x0c: "FF",
  0x0d: "CR",
  0x1b: "ESC",
  0x7f: "DEL",
  0xad: "soft hyphen",
  0x61c: "ALM",
  0x200b: "ZWSP",
  0x200c: "ZWNJ",
  0x200d: "ZWJ",
  0x200e: "LRM",
  0x200f: "RLM",
  0x2028: "line sep",
  0x2029: "par sep",
  0x202a: "LRE",
  0x202b: "RLE",
  0x202c: "PDF",
  0x202d: "LRO",
  0x202e: "RLO",
  0x2060: "WJ",
  0x2066: "LRI",
  0x2067: "RLI",
  0x2068: "FSI",
  0x2069: "PDI",
  0xfeff: "BOM",
};

/** "U+202E" of a character. */
export function codePoint(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** A short name for a character that draws nothing. */
export function nameOf(character) {
  return NAMES[character.codePointAt(0)] ?? codePoint(character);
}

/** The text as an array of strings and marks, for `h(...)`. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    nodes.push(h("span", { class: "hidden-char", title: `${codePoint(match[0])}, invisible in the text` }, nameOf(match[0])));
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** The text as one plain string in which hidden characters are written out; for titles, labels and tokens. */
export function visibleText(text) {
  return text.replace(HIDDEN, (character) => `‹${nameOf(character)}›`);
}

/** A token's text with its white space drawn too: "·the↵". */
export function withSpaces(text) {
  return visibleText(text)
    .replace(/ /g, "·")
    .replace(/\u00a0/g, "⍽")
    .replace(/\t/g, "→")
    .replace(/\n/g, "↵\n");
}
