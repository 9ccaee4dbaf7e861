// What tokens can be coloured by: each channel reads one number per token and sorts it into a few named bins.
import { number, signed } from "board/format.js";

/** The policy's number among the origins. */
export const POLICY = 1;

/** The bin of a token that has no number (not the policy's, or not computed). */
export const NOTHING = -1;

/** A scale of bins between thresholds: {classes, labels, binOf}. */
function steps(thresholds, classes, label) {
  const labels = classes.map((_, index) => label(thresholds[index - 1], thresholds[index]));
  const binOf = (value) => {
    let bin = 0;
    while (bin < thresholds.length && value >= thresholds[bin]) bin += 1;
    return bin;
  };
  return { classes, labels, binOf };
}

function between(show) {
  return (low, high) => (low === undefined ? `< ${show(high)}` : high === undefined ? `≥ ${show(low)}` : `${show(low)} to ${show(high)}`);
}

function heat(count, downwards) {
  const names = Array.from({ length: count }, (_, index) => `heat-${index}`);
  return downwards ? names.reverse() : names;
}

const TWO_SIDED = ["below-4", "below-3", "below-2", "below-1", "even", "above-1", "above-2", "above-3", "above-4"];

/** Probabilities: unlikely tokens are hot. Fixed bins, so that two trajectories can be compared by eye. */
function probability() {
  const at = [0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99];
  const scale = steps(
    at,
    heat(9, true),
    between((p) => String(p)),
  );
  return { ...scale, unit: "probability", binOf: (logprob) => scale.binOf(Math.exp(logprob)) };
}

function entropy() {
  return { ...steps([0.01, 0.05, 0.2, 0.5, 1, 1.5, 2, 3], heat(9, false), between(String)), unit: "nats" };
}

/** Fixed two-sided bins around zero. */
function around(sizes, unit) {
  const at = [...[...sizes].reverse().map((size) => -size), ...sizes];
  return {
    ...steps(
      at,
      TWO_SIDED,
      between((value) => signed(value)),
    ),
    unit,
  };
}

/** Two-sided bins as wide as this trajectory's own numbers ask for. */
function fitted(values, unit) {
  let widest = 0;
  for (const value of values) if (value !== null) widest = Math.max(widest, Math.abs(value));
  const size = 10 ** Math.floor(Math.log10(widest || 1));
  const round = [1, 2, 4, 10].find((factor) => factor * size >= (widest || 1)) * size;
  return around(
    [0.025, 0.25, 0.5, 0.75].map((share) => round * share),
    unit,
  );
}

function ratio() {
  const at = [0.5, 0.8, 0.9, 0.99, 1.01, 1.1, 1.25, 2];
  return {
    ...steps(
      at,
      TWO_SIDED,
      between((value) => number(value)),
    ),
    unit: "new / old probability",
  };
}

/** One bin for each version of the weights, the oldest first; neighbours share one when there are many. */
function versions(values) {
  const known = [...new Set(values.filter((value) => value !== null))].sort((one, other) => one - other);
  const count = Math.min(known.length, 8);
  const binOf = (value) => Math.floor((known.indexOf(value) * count) / known.length);
  const classes = Array.from({ length: count }, (_, bin) => `heat-${1 + Math.round((bin * 7) / Math.max(1, count - 1))}`);
  const labels = classes.map((_, bin) => {
    const here = known.filter((version) => binOf(version) === bin);
    return here.length > 1 ? `${here[0]} to ${here.at(-1)}` : String(here[0]);
  });
  return { classes, labels, binOf, unit: "version of the weights" };
}

const NUMBERS = [
  { name: "logprob", key: "logprobs", title: "sampler log-probability", scale: probability },
  { name: "entropy", key: "entropies", title: "entropy", scale: entropy },
  { name: "advantage", key: "advantages", title: "advantage", scale: (values) => fitted(values, "advantage") },
  { name: "ratio", key: "ratios", title: "update ratio", scale: ratio },
  { name: "gap", key: "gaps", title: "sampler–learner gap", scale: () => around([0.001, 0.01, 0.1, 0.5], "learner − sampler, nats") },
  { name: "value", key: "values", title: "critic's value", scale: (values) => fitted(values, "value") },
  { name: "ref_logprob", key: "ref_logprobs", title: "reference log-probability", scale: probability },
  { name: "reward", key: "rewards", title: "token reward", scale: (values) => fitted(values, "reward") },
  { name: "version", key: "versions", title: "policy version", scale: versions },
];

/** The channels this trajectory has numbers for; each {name, title, unit, classes, labels, bins(segment) -> Int8Array}. */
export function channelsOf(data) {
  const names = data.origin_names;
  const found = [
    {
      name: "origin",
      title: "origin",
      unit: "who wrote it",
      classes: names.map((name) => `origin-${name}`),
      labels: names,
      bins: (segment) => Int8Array.from(segment.origins),
    },
    {
      name: "mask",
      title: "loss mask",
      unit: "trained or not",
      classes: ["mask-off", "mask-on"],
      labels: ["not trained", "trained"],
      bins: (segment) => Int8Array.from(segment.origins, (origin) => Number(origin === POLICY)),
    },
  ];
  for (const { name, key, title, scale } of NUMBERS) {
    const values = data.segments.flatMap((segment) => segment[key] ?? []);
    if (!values.some((value) => value !== null)) continue;
    const { classes, labels, binOf, unit } = scale(values);
    const bins = (segment) =>
      segment[key]
        ? Int8Array.from(segment[key], (value) => (value === null ? NOTHING : binOf(value)))
        : new Int8Array(segment.ids.length).fill(NOTHING);
    found.push({ name, title, unit, classes, labels, bins });
  }
  return found;
}

/** Every number a token has: [[title, text]]. */
export function numbersOf(segment, index) {
  const rows = [];
  for (const { name, key, title } of NUMBERS) {
    const value = segment[key]?.[index];
    if (value === null || value === undefined) continue;
    if (name === "version") {
      rows.push([title, String(value)]);
      continue;
    }
    const likely = name === "logprob" || name === "ref_logprob" ? ` (p ${number(Math.exp(value))})` : "";
    rows.push([title, `${Math.abs(value) < 1e-4 && value !== 0 ? value.toExponential(2) : value.toFixed(5)}${likely}`]);
  }
  return rows;
}
