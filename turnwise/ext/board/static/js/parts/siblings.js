// Compares the siblings of a group: which answers were given, and their turns lined up.

/** What an answer comes to: behind ####, inside \boxed{}, else its last line. */
function resultOf(text) {
  const said = text.trim();
  const marked = [...said.matchAll(/####\s*(.+)|\\boxed\{([^{}]*)\}/g)].at(-1);
  return marked ? (marked[1] ?? marked[2]).trim() : said.split("\n").at(-1);
}

/** What the answers come to, without differences of case and white space: {all, distinct, of(sibling)}, the most frequent first. */
export function answersOf(siblings) {
  const norm = (answer) =>
    resultOf(answer ?? "")
      .toLowerCase()
      .replace(/\s+/g, " ");
  const byText = new Map();
  for (const { answer } of siblings) {
    const key = norm(answer);
    const known = byText.get(key);
    if (known) known.count += 1;
    else byText.set(key, { text: resultOf(answer ?? ""), count: 1 });
  }
  const distinct = [...byText.values()].sort((a, b) => b.count - a.count);
  distinct.forEach((answer, index) => {
    answer.letter = index < 26 ? String.fromCharCode(65 + index) : String(index + 1);
    answer.key = Math.min(index, 7);
  });
  return { all: siblings.length, distinct, of: (sibling) => byText.get(norm(sibling.answer)) };
}

/** What was asked first is the same for all; a turn is an assistant's message with everything up to the next one. */
function turnsOf(messages) {
  const turns = [];
  for (const message of messages) {
    if (message.role === "assistant") turns.push([message]);
    else turns.at(-1)?.push(message);
  }
  return turns;
}

/** Rows of cells, one row a turn and one cell a sibling: {messages, sameAs: number of an earlier sibling who wrote the same}. */
export function alignedTurns(siblings) {
  const all = siblings.map((sibling) => turnsOf(sibling.messages));
  const longest = Math.max(0, ...all.map((turns) => turns.length));
  return Array.from({ length: longest }, (_, turn) => {
    const first = new Map();
    return all.map((turns, index) => {
      const messages = turns[turn] ?? [];
      const text = messages[0]?.text;
      const sameAs = text !== undefined && first.has(text) ? first.get(text) : null;
      if (text !== undefined && sameAs === null) first.set(text, siblings[index].sibling);
      return { messages, sameAs };
    });
  });
}
