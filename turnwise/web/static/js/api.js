// Asks the server, or answers from what a report froze; the only module that talks to anything.

export const frozen = typeof globalThis.FROZEN === "object" && globalThis.FROZEN !== null;

const listeners = new Set();
let liveState = frozen ? "frozen" : "off"; // off | connecting | live | lost | frozen

// The canonical address: parameters sorted by name, empty ones (null, undefined, "") left out.
export function url(path, params) {
  const kept = Object.entries(params ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  kept.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  const query = kept.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`).join("&");
  return query ? `${path}?${query}` : path;
}

// runPath("my run", "series") -> "/api/runs/my%20run/series"
export function runPath(run, tail) {
  const base = `/api/runs/${encodeURIComponent(run)}`;
  return tail ? `${base}/${tail}` : base;
}

export async function get(path, params, signal) {
  const address = url(path, params);
  if (frozen) {
    if (address in globalThis.FROZEN) return globalThis.FROZEN[address];
    throw new Error("not part of this report");
  }
  let response;
  try {
    response = await fetch(address, { signal, headers: { Accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the board's server does not answer; is `turnwise board` still running?");
  }
  const text = await response.text();
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Error(`${response.status} ${response.statusText}: the answer is not JSON`);
  }
  if (!response.ok) throw new Error(body.error ?? `${response.status} ${response.statusText}`);
  return body;
}

// Calls onChange({run, version, step, state}) whenever one of these runs' files changed, or any run's if none is named; returns stop().
export function live(runs, onChange) {
  if (frozen) return () => {};
  announce("connecting");
  const source = new EventSource(url("/api/events", { runs: runs.join(",") }));
  source.onopen = () => announce("live");
  source.onerror = () => announce("lost"); // the browser tries again by itself
  source.addEventListener("change", (event) => onChange(JSON.parse(event.data)));
  return () => {
    source.close();
    announce("off");
  };
}

// Tells callback the connection's state now and on every change; returns stop().
export function onLive(callback) {
  listeners.add(callback);
  callback(liveState);
  return () => listeners.delete(callback);
}

function announce(state) {
  liveState = state;
  for (const callback of listeners) callback(state);
}
