// Says what Plotly draws: the board's traces as Plotly's, with colours and fonts from the style sheet's variables.

const COLOURS = 8;

// css("--policy") -> the variable's value in the theme now; "#rrggbb" stays; nothing -> null.
export function css(colour) {
  if (!colour) return null;
  return colour.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(colour).trim() : colour;
}

export function paletteColour(index) {
  return css(`--series-${(index % COLOURS) + 1}`);
}

export function data(view) {
  const byName = new Map();
  for (const trace of view.traces) if (!byName.has(trace.name)) byName.set(trace.name, byName.size);
  return view.traces.flatMap((trace) => {
    const colour = css(trace.colour) ?? paletteColour(byName.get(trace.name));
    const visible = !view.hidden.has(trace.name);
    return view.kind === "bars" ? [bar(view, trace, colour, visible)] : lines(view, trace, colour, visible);
  });
}

function lines(view, trace, colour, visible) {
  if (view.stacked) return stacked(view, trace, colour, visible);
  const sparse = trace.x.length <= 24;
  const line = {
    type: "scatter", name: plain(trace.name), x: trace.x, y: trace.y, visible, connectgaps: true,
    mode: trace.mode ?? (sparse && !trace.faint ? "lines+markers" : "lines"),
    line: { color: trace.faint ? tint(colour, 0.3) : colour, width: trace.faint ? 1 : 1.75, dash: trace.dash ?? "solid" },
    marker: { size: 4, color: colour },
    hovertemplate: view.percent ? "%{y:.1%}" : "%{y:.4~g}",
  };
  if (trace.points) Object.assign(line, points(trace, colour));
  const format = view.percent ? ".1%" : ".4~g";
  if (trace.raw) Object.assign(line, { customdata: trace.raw, hovertemplate: `%{y:${format}} (raw %{customdata:${format}})` });
  if (!trace.low || !trace.high) return [trace.faint ? quiet(line) : line];
  line.customdata = trace.low.map((low, index) => [low, trace.high[index]]);
  line.hovertemplate = `%{y:${format}} (%{customdata[0]:${format}} to %{customdata[1]:${format}})`;
  if (trace.whiskers) {
    // Between evaluations nothing was measured: an error bar at each, no band.
    const from = (edge) => edge.map((value, index) => (value === null || trace.y[index] === null ? null : Math.abs(value - trace.y[index])));
    line.error_y = { type: "data", symmetric: false, array: from(trace.high), arrayminus: from(trace.low), color: tint(colour, trace.faint ? 0.3 : 0.55), thickness: 1, width: 2 };
    return [trace.faint ? quiet(line) : line];
  }
  const edge = { type: "scatter", mode: "lines", x: trace.x, hoverinfo: "skip", visible, line: { width: 0, color: colour }, connectgaps: true };
  return [{ ...edge, y: trace.low }, { ...edge, y: trace.high, fill: "tonexty", fillcolor: tint(colour, 0.14) }, trace.faint ? quiet(line) : line];
}

// What was measured now and then: marks, with a thin line to guide the eye where there are more than two.
function points(trace, colour) {
  const marks = trace.x.length < 3 || trace.faint;
  return {
    mode: marks ? "markers" : "lines+markers",
    line: { color: tint(colour, 0.5), width: 1, dash: "dot" },
    marker: { size: trace.faint ? 4 : 7, color: trace.faint ? tint(colour, 0.4) : colour, symbol: trace.dash === "dot" ? "circle-open" : "circle" },
  };
}

// Shares of one whole, each on top of those before it; of a smoothed one the raw values are in its hover only.
function stacked(view, trace, colour, visible) {
  if (trace.faint) return [];
  const format = view.percent ? ".1%" : ".4~g";
  const value = trace.raw ? `%{customdata:${format}}` : `%{y:${format}}`;
  return [{
    type: "scatter", mode: "lines", name: plain(trace.name), x: trace.x, y: trace.y, visible, stackgroup: "all", customdata: trace.raw,
    line: { color: colour, width: 1 }, fillcolor: tint(colour, 0.45), hovertemplate: value,
  }];
}

function quiet(line) {
  return { ...line, hoverinfo: "skip", hovertemplate: undefined, customdata: undefined };
}

function bar(view, trace, colour, visible) {
  const along = view.horizontal ? { x: trace.y, y: trace.x, orientation: "h" } : { x: trace.x, y: trace.y };
  const value = view.horizontal ? "x" : "y";
  return {
    type: "bar", name: plain(trace.name), ...along, visible, marker: { color: colour },
    hovertemplate: view.percent ? `%{${value}:.1%}` : `%{${value}:.4~g}`,
  };
}

export function layout(view) {
  const text = css("--muted");
  const axis = {
    color: text, gridcolor: css("--grid"), zerolinecolor: css("--grid"), linecolor: css("--line"), tickfont: { size: 11 },
    ticks: "", title: { font: { size: 11 }, standoff: 6 },
  };
  const x = { ...axis, title: { ...axis.title, text: plain(view.xTitle ?? "") }, showgrid: view.kind === "lines", zeroline: false };
  if (view.xRange) {
    Object.assign(x, { range: [...view.xRange], autorange: false });
    if (view.xTitle === "step" && view.xRange[1] - view.xRange[0] < 5) Object.assign(x, { tick0: 0, dtick: 1 }); // there is no half step
  }
  const y = { ...axis, title: { ...axis.title, text: plain(view.yTitle ?? "") }, fixedrange: true, type: view.logY ? "log" : undefined };
  const narrow = view.yRange && !view.logY && view.yRange[1] - view.yRange[0] < 0.05; // whole percents would read alike
  if (view.percent) (view.horizontal ? x : y).tickformat = narrow ? ".1%" : ".0%";
  if (view.yRange) {
    Object.assign(y, { range: view.yRange, autorange: false });
    if (!view.logY && Math.max(...view.yRange.map(Math.abs)) < 1e-3) y.exponentformat = "e"; // 2e-5 says more than 20µ
  }
  if (view.kind === "bars") {
    y.automargin = true;
    Object.assign(view.horizontal ? x : y, { rangemode: "tozero" });
    x.fixedrange = true;
    if (view.horizontal) Object.assign(y, { autorange: "reversed", showgrid: false });
  }
  if (view.kind === "lines") x.unifiedhovertitle = { text: `${plain(view.xTitle ?? "")} %{x:,.6~g}` };
  // A drag on a touch screen belongs to the page: it scrolls.
  const touch = matchMedia("(pointer: coarse)").matches;
  return {
    xaxis: x, yaxis: y, showlegend: false, hovermode: view.horizontal ? "y unified" : "x unified", hoverdistance: 40,
    dragmode: touch || view.kind === "bars" ? false : "zoom", barmode: view.stacked ? "stack" : "group", bargap: 0.15,
    margin: { l: view.horizontal ? 90 : view.yTitle ? 58 : 46, r: 8, t: 6, b: view.xTitle ? 34 : 22 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--sans"), size: 12, color: text },
    hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--line"), font: { color: css("--text"), size: 12, family: css("--sans") }, namelength: 40 },
    uirevision: "stay", transition: { duration: 0 },
  };
}

// A panel as a picture of its own: with its title, a legend and a ground, which the page has around it.
export function picture(view) {
  const base = layout(view);
  const named = new Set();
  const traces = data(view).map((trace) => {
    const first = trace.name !== undefined && trace.hoverinfo !== "skip" && !named.has(trace.name);
    if (first) named.add(trace.name);
    return { ...trace, showlegend: first && trace.visible };
  });
  const font = { color: css("--text") };
  return {
    data: traces,
    layout: {
      ...base, title: { text: plain(view.title), font: { ...font, size: 18 }, x: 0.02, xanchor: "left" }, showlegend: named.size > 1,
      legend: { orientation: "h", y: -0.18, font }, paper_bgcolor: css("--surface"), plot_bgcolor: css("--surface"), margin: { ...base.margin, l: 70, r: 24, t: 54, b: 60 },
    },
  };
}

// The y range of what the x range shows, so that zooming in on steps zooms in on their values too.
export function yRange(view) {
  if (view.stacked && !view.logY) return [0, 1];
  const [from, to] = view.range ?? [-Infinity, Infinity];
  let low = Infinity;
  let high = -Infinity;
  for (const trace of view.traces) {
    if (view.hidden.has(trace.name)) continue;
    for (const values of [trace.y, trace.low, trace.high]) {
      if (!values) continue;
      for (let index = 0; index < values.length; index += 1) {
        const value = values[index];
        if (value === null || trace.x[index] < from || trace.x[index] > to || (view.logY && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  if (low > high) return view.logY ? [-1, 1] : [0, 1];
  if (view.logY) [low, high] = [Math.log10(low), Math.log10(high)];
  const pad = (high - low) * 0.07 || Math.abs(high) * 0.1 || (view.logY ? 0.5 : 0.1);
  return [low - pad, high + pad];
}

function tint(colour, alpha) {
  const digits = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(colour);
  if (!digits) return colour;
  return `rgba(${digits.slice(1).map((pair) => parseInt(pair, 16)).join(",")},${alpha})`;
}

// Plotly reads a few tags in its texts; a name out of a run must stay a name.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}
