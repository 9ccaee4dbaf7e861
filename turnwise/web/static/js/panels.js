// Decides which panels a run's metric names make: sections a person looks for, and everything else at the end.

const FAMILY = /^(.+)\/(mean|max|min)$/;
const KL = /(^|[/_])kl([/_]|$)/;

// panelSections(names, spreads) -> [{title, note, panels: [{id, title, percent, lines: [{label, metric, low, high, spread}]}], searchable}]
// A line's low and high are metric names too; spread names a series of /spread, whose band replaces them.
export function panelSections(names, spreads = []) {
  const left = new Set(names);
  const spread = new Set(spreads);
  const sections = [
    { title: "Reward", panels: reward(left, spread) },
    { title: "Accuracy", note: "by data source; train is the policy sampling, eval the held-out samples", panels: accuracy(left) },
    { title: "Entropy and KL", panels: entropyAndKl(left) },
    { title: "Sampler against learner", note: "how far the log-probabilities of the engine that sampled are from those of the one that learns", panels: families(left, ["rollout_corr/", "mismatch/", "training/rollout_probs_diff"]) },
    { title: "Lengths and turns", note: "mean, with the shortest and longest as a band", panels: families(left, ["response_length/", "prompt_length/", "num_turns/", "tool_call_counts/"]) },
    { title: "Learning", panels: learning(left) },
    { title: "Time and throughput", panels: time(left) },
    { title: "All other metrics", panels: families(left, [""]), searchable: true },
  ];
  return sections.filter((section) => section.panels.length > 0);
}

// One metric a panel, for comparing runs: the same sections without the lines that share a panel.
export function singleSections(names) {
  return panelSections(names).map((section) => ({
    ...section,
    panels: section.panels.flatMap((panel) => panel.lines.map((line) => ({
      ...panel, id: line.metric, lines: [{ label: line.label, metric: line.metric }],
      title: panel.lines.length > 1 ? `${panel.title}: ${line.label}` : panel.title,
    }))),
  }));
}

export function metricsOf(panel) {
  return panel.lines.flatMap((line) => [line.metric, line.low, line.high]).filter(Boolean);
}

function reward(left, spread) {
  const panels = [];
  const score = take(left, "critic/score/mean");
  ["critic/score/max", "critic/score/min"].forEach((name) => left.delete(name));
  if (score || spread.has("reward")) panels.push(panel("Reward", [{ label: "reward", metric: score, spread: "reward" }]));
  const parts = new Map();
  for (const name of takeAll(left, "reward_parts/")) {
    const path = name.split("/").slice(1); // a data source may have slashes of its own, a part has none
    const part = path.pop();
    parts.set(part, [...(parts.get(part) ?? []), { label: path.join("/") || part, metric: name }]);
  }
  for (const key of spread) if (key.startsWith("part/") && !parts.has(key.slice(5))) parts.set(key.slice(5), []);
  for (const [part, bySource] of parts) {
    const band = spread.has(`part/${part}`) ? `part/${part}` : null;
    const lines = bySource.length === 1 ? [{ ...bySource[0], label: part, spread: band }] : bySource;
    if (band && bySource.length !== 1) lines.unshift({ label: "all sources", metric: null, spread: band });
    panels.push(panel(`Part: ${part}`, lines));
  }
  const after = take(left, "critic/rewards/mean");
  if (after) panels.push(panel("Reward after the KL penalty", [{ label: "reward", metric: after }]));
  return panels;
}

const ACCURACIES = [["train/accuracy", "train"], ["val/accuracy", "eval"], ["val/greedy_accuracy", "eval, greedy"], ["val/first_accuracy", "eval, before the user speaks"], ["val/greedy_first_accuracy", "greedy, before the user speaks"]];

function accuracy(left) {
  const bySource = new Map();
  const overall = [];
  for (const [prefix, label] of ACCURACIES) {
    if (take(left, prefix)) overall.push({ label, metric: prefix });
    for (const name of takeAll(left, `${prefix}/`)) {
      const source = name.slice(prefix.length + 1);
      bySource.set(source, [...(bySource.get(source) ?? []), { label, metric: name }]);
    }
  }
  const panels = [...bySource].map(([source, lines]) => panel(source, lines, { percent: true }));
  if (overall.length && bySource.size !== 1) panels.unshift(panel("All sources", overall, { percent: true }));
  return [...panels, ...families(left, ["val/", "train/"])];
}

function entropyAndKl(left) {
  const names = [take(left, "actor/entropy"), take(left, "actor/ppo_kl"), ...[...left].filter((name) => KL.test(name))].filter(Boolean);
  names.forEach((name) => left.delete(name));
  return names.map((name) => panel(words(name), [{ label: words(name), metric: name }]));
}

const LEARNING = [
  ["Policy loss", ["actor/pg_loss"]], ["Clipped share", ["actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"]],
  ["Gradient norm", ["actor/grad_norm", "critic/grad_norm"]], ["Learning rate", ["actor/lr", "critic/lr"]],
  ["Value loss", ["critic/vf_loss"]], ["Explained variance of the values", ["critic/vf_explained_var"]],
];

function learning(left) {
  const panels = LEARNING.map(([title, names]) => [title, names.filter((name) => take(left, name))])
    .filter(([, names]) => names.length)
    .map(([title, names]) => panel(title, names.map((name) => ({ label: words(name), metric: name }))));
  return [...panels, ...families(left, ["critic/advantages/", "critic/returns/", "critic/values/", "actor/", "critic/", "loss"])];
}

function time(left) {
  const phases = [...left].filter((name) => /^timing_s\/[^/]+$/.test(name));
  phases.forEach((name) => left.delete(name));
  const panels = phases.length ? [panel("Seconds per phase", phases.map((name) => ({ label: words(name), metric: name })))] : [];
  return [...panels, ...families(left, ["perf/throughput", "perf/", "timing_s/", "timing_per_token_ms/"])];
}

// Panels for every name with one of the prefixes; mean, max and min of one thing are a line with a band.
function families(left, prefixes) {
  return prefixes.flatMap((prefix) => {
    const bases = new Map();
    for (const name of takeAll(left, prefix)) {
      const [, base, kind] = FAMILY.exec(name) ?? [null, name, "only"];
      bases.set(base, { ...bases.get(base), [kind]: name });
    }
    return [...bases].map(([base, member]) => {
      const main = member.only ?? member.mean ?? member.max ?? member.min;
      const lines = [{ label: words(base), metric: main, low: member.mean && member.min, high: member.mean && member.max }];
      if (member.only && member.mean) lines.push({ label: `${words(base)} mean`, metric: member.mean });
      return panel(prefix === "" ? base : words(base), lines, { percent: /(ratio|rate|share|frac)$/.test(base) });
    });
  });
}

function panel(title, lines, more) {
  const id = lines.map((line) => line.metric ?? line.spread).join(" ");
  return { id, title, lines, percent: false, ...more };
}

function take(left, name) {
  return left.delete(name) ? name : null;
}

function takeAll(left, prefix) {
  const names = [...left].filter((name) => name.startsWith(prefix)).sort();
  names.forEach((name) => left.delete(name));
  return names;
}

const SAID_BY_SECTION = /^(actor|timing_s|perf|rollout_corr|mismatch|agent_loop)\//;

// "actor/ppo_kl" -> "PPO KL": the name as a person says it; the exact one is in the panel's tooltip.
function words(name) {
  let rest = name;
  while (SAID_BY_SECTION.test(rest)) rest = rest.replace(SAID_BY_SECTION, "");
  const text = rest.replaceAll("/", " ").replaceAll("_", " ").replace(/^num /, "").replace(/\b(kl|ppo|pg|lr|vf|mfu|ess|ppl)\b/g, (word) => word.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
}
