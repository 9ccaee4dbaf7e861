// Writes a text the way a filter expression takes it.

// A text for a filter expression, in which characters that nobody sees must be escaped.
export function quoted(text) {
  const escaped = (code) => (code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`);
  return JSON.stringify(text).replace(/(?! )[\p{C}\p{Z}]/gu, (letter) => escaped(letter.codePointAt(0)));
}
