// Turns numbers into the few characters a person reads; what is missing is a dash.

export const MISSING = "–";

function missing(x) {
  return x === null || x === undefined || typeof x !== "number" || Number.isNaN(x);
}

// number(0.123456) -> "0.123", number(1234567) -> "1,234,567", number(0.0000123) -> "1.23e-5"
export function number(x, digits = 3) {
  if (missing(x)) return MISSING;
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e15 || size < 10 ** -(digits + 1)) return minus(x.toExponential(Math.max(0, digits - 1)).replace("e+", "e"));
  if (Number.isInteger(x)) return minus(grouped(x, 0));
  const whole = Math.floor(Math.log10(size)) + 1;
  const decimals = whole > 0 ? Math.max(0, digits + 1 - whole) : digits - Math.min(0, whole);
  return minus(grouped(x, Math.min(decimals, 12)));
}

export function percent(x, digits = 1) {
  return missing(x) ? MISSING : `${minus((100 * x).toFixed(digits))}%`;
}

// seconds(0.0034) -> "3.4 ms", seconds(12.34) -> "12.3 s", seconds(4000) -> "1 h 7 min"
export function seconds(s) {
  if (missing(s)) return MISSING;
  if (s < 0) return minus(`-${seconds(-s)}`);
  if (s === 0) return "0 s";
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function ago(epoch, now = Date.now() / 1000) {
  if (missing(epoch)) return MISSING;
  const gone = now - epoch;
  if (gone < 5) return "just now";
  if (gone < 60) return `${Math.floor(gone)} s ago`;
  if (gone < 3600) return `${Math.floor(gone / 60)} min ago`;
  if (gone < 86400) return `${Math.floor(gone / 3600)} h ago`;
  return `${Math.floor(gone / 86400)} d ago`;
}

// count(999) -> "999", count(12345) -> "12.3k", count(4.2e6) -> "4.2M"
export function count(n) {
  if (missing(n)) return MISSING;
  const size = Math.abs(n);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      const scale = letter === "k" ? 1e3 : unit;
      return minus(`${(n / scale).toFixed(size / scale < 100 ? 1 : 0)}${letter}`);
    }
  }
  return minus(grouped(n, Number.isInteger(n) ? 0 : 1));
}

export function signed(x, digits = 3) {
  if (missing(x)) return MISSING;
  return x > 0 ? `+${number(x, digits)}` : number(x, digits);
}

// The moment as the reader's own clock has it.
export function moment(epoch) {
  return missing(epoch) ? MISSING : new Date(epoch * 1000).toLocaleString();
}

function grouped(x, decimals) {
  return x.toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: decimals });
}

function minus(text) {
  return text.replace(/^-/, "−");
}
