// Charts: curves over steps or time, columns, histograms, stacked bars.

import { h, s, number, seriesColour } from "./dom.js";

const W = 460, H = 190, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 22;

const FEWEST_SMOOTHED = 20; // points: the smoothed curve of fewer lags far behind them

// A moving average that forgets: s = share · s + (1 − share) · y, corrected for its start.
export function smooth(ys, share) {
  if (!share) return ys;
  let sum = 0, weight = 0;
  return ys.map((y) => {
    if (y === null) return null;
    sum = share * sum + (1 - share) * y;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const nice = [1, 2, 5, 10].map((k) => k * step).find((k) => (high - low) / k <= count) || step;
  const found = [];
  for (let x = Math.ceil(low / nice) * nice; x <= high + nice * 1e-6; x += nice) found.push(Math.abs(x) < nice * 1e-6 ? 0 : x);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) if (10 ** e >= low * 0.999 && 10 ** e <= high * 1.001) found.push(10 ** e);
  return found.length > 1 ? found.filter((_, i) => found.length < 6 || i % 2 === 0) : [low, high];
}

// series: [{name, x, y, colour, dashed, points, faint}]; onPick(series, x) is called with a click.
export function lineChart({ title, note, series, log = false, share = 0, xLabel = "step", formatX = number, onPick, bounds, legend = series.length > 1 }) {
  const drawn = series.map((one) => {
    const smoothed = share > 0 && !one.points && one.y.length >= FEWEST_SMOOTHED;
    const ys = smooth(one.y, smoothed ? share : 0);
    const points = one.x.map((x, i) => [x, ys[i], one.y[i]]).filter(([, y]) => y !== null && (!log || y > 0));
    return { ...one, smoothed, at: points };
  }).filter((one) => one.at.length);
  const box = h("div", { class: "card chart" }, h("h3", {}, title));
  if (!drawn.length) {
    box.append(h("p", {}, note || ""), h("p", { class: "dim" }, log ? "nothing to draw on a log scale" : "no data yet"));
    return box;
  }
  const xs = drawn.flatMap((one) => one.at.map(([x]) => x)), ys = drawn.flatMap((one) => one.at.map(([, y]) => y));
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const x of xs) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
  for (const y of ys) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (bounds && !log) { y0 = Math.min(y0, bounds[0]); y1 = Math.max(y1, bounds[1]); }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const pad = Math.abs(y0) / 10 || 0.5; y0 = log ? y0 / 2 : y0 - pad; y1 = log ? y1 * 2 : y1 + pad; }
  const toX = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const scale = log ? (y) => (Math.log(y) - Math.log(y0)) / (Math.log(y1) - Math.log(y0)) : (y) => (y - y0) / (y1 - y0);
  const toY = (y) => H - BOTTOM - scale(y) * (H - TOP - BOTTOM);
  const svg = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title} by ${xLabel}` });
  for (const y of log ? logTicks(y0, y1) : ticks(y0, y1, 4)) {
    svg.append(s("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: toY(y), y2: toY(y) }), s("text", { x: LEFT - 6, y: toY(y) + 4, "text-anchor": "end" }, number(y, 3)));
  }
  for (const x of ticks(x0, x1, 6).filter((x) => xLabel !== "step" || Number.isInteger(x))) svg.append(s("text", { x: toX(x), y: H - 6, "text-anchor": "middle" }, formatX(x)));
  for (const one of drawn) {
    const path = one.at.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
    if (one.smoothed) {
      const raw = one.at.filter(([, , y]) => !log || y > 0).map(([x, , y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${Math.min(H - BOTTOM, Math.max(TOP, toY(y))).toFixed(1)}`).join("");
      svg.append(s("path", { d: raw, fill: "none", stroke: one.colour, "stroke-width": 1, opacity: 0.22 }));
    }
    svg.append(s("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": 1.7, "stroke-dasharray": one.dashed ? "5 3" : null, "stroke-linejoin": "round" }));
    if (one.points || one.at.length === 1) for (const [x, y] of one.at.length < 150 ? one.at : []) svg.append(s("circle", { cx: toX(x), cy: toY(y), r: 2.6, fill: one.colour }));
  }
  const hair = s("line", { class: "hair", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }), spot = s("circle", { r: 4, visibility: "hidden", fill: "none", "stroke-width": 2 });
  const tip = h("div", { class: "tip", hidden: true });
  svg.append(hair, spot);
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect(), px = ((event.clientX - frame.left) / frame.width) * W, py = ((event.clientY - frame.top) / frame.height) * H;
    let best = null;
    for (const one of drawn) for (const point of one.at) {
      const far = Math.abs(toX(point[0]) - px) * 3 + Math.abs(toY(point[1]) - py);
      if (!best || far < best.far) best = { far, one, point };
    }
    return best;
  };
  svg.addEventListener("pointermove", (event) => {
    const { one, point } = nearest(event), frame = svg.getBoundingClientRect();
    const x = toX(point[0]), y = toY(point[1]);
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) hair.setAttribute(name, value);
    for (const [name, value] of [["cx", x], ["cy", y], ["stroke", one.colour], ["visibility", "visible"]]) spot.setAttribute(name, value);
    tip.hidden = false;
    tip.textContent = `${drawn.length > 1 ? `${one.name}: ` : ""}${number(point[2])} at ${xLabel} ${formatX(point[0])}${onPick ? " · click for its samples" : ""}`;
    const left = (x / W) * frame.width, room = box.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(room, left + 12))}px`;
    tip.style.top = `${svg.offsetTop + (y / H) * frame.height - 34}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; hair.setAttribute("visibility", "hidden"); spot.setAttribute("visibility", "hidden"); });
  if (onPick) svg.addEventListener("click", (event) => { const { one, point } = nearest(event); onPick(one, point[0]); });
  if (note) box.append(h("p", {}, note));
  box.append(svg, tip);
  if (legend) {
    box.append(h("div", { class: "legend" }, drawn.map((one) => h("span", {}, h("i", { class: one.dashed ? "dashed" : "", style: { "border-color": one.colour } }), `${one.name} ${number(one.at.at(-1)[2], 3)}`))));
  }
  return box;
}

// Columns from left to right: {value, tip, colour, mark, onclick}. Labels and lines have places in columns: 2.5 is the middle of the third.
function columnChart({ title, note, columns, labels, lines = [], legend }) {
  const box = h("div", { class: "card chart" }, h("h3", {}, title), note ? h("p", {}, note) : null);
  if (!columns.length) return box;
  const top = TOP + 13 * lines.length, height = 112 + top, width = (W - LEFT - RIGHT) / columns.length, gap = Math.min(width / 5, 8);
  const heights = columns.flatMap((one) => [one.value, one.mark ?? 0]), low = Math.min(0, ...heights), high = Math.max(low === 0 && Math.max(...heights) <= 0 ? 1 : 0, ...heights);
  const toX = (place) => LEFT + place * width, toY = (y) => height - ((y - low) / (high - low)) * (height - top);
  const svg = s("svg", { viewBox: `0 0 ${W} ${height + 26}`, role: "img", "aria-label": title });
  for (const y of ticks(low, high, 3)) svg.append(s("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: toY(y), y2: toY(y) }), s("text", { x: LEFT - 6, y: toY(y) + 4, "text-anchor": "end" }, number(y, 3)));
  columns.forEach(({ value, tip, colour = "var(--bar)", mark, onclick }, i) => {
    const tall = value ? Math.max(1.5, Math.abs(toY(value) - toY(0))) : 0;
    if (tall) svg.append(s("rect", { x: toX(i) + gap / 2, y: value < 0 ? toY(0) : toY(0) - tall, width: width - gap, height: tall, rx: 1.5, style: { fill: colour }, onclick }, s("title", {}, tip)));
    if (mark !== undefined) svg.append(s("line", { class: "mark", x1: toX(i), x2: toX(i + 1), y1: toY(mark), y2: toY(mark) }));
  });
  for (const { at, text } of labels) svg.append(s("text", { x: toX(at), y: height + 18, "text-anchor": "middle" }, text));
  [...lines].sort((a, b) => b.at - a.at).forEach(({ at, text }, i) => { // so that no line crosses a label
    const beyond = at > columns.length, x = toX(Math.min(at, columns.length));
    if (!beyond) svg.append(s("line", { class: "limit", x1: x, x2: x, y1: 13 * i, y2: height }));
    const left = beyond || x > W / 2;
    svg.append(s("text", { class: "limit", x: x + (left ? -4 : 4), y: 10 + 13 * i, "text-anchor": left ? "end" : "start" }, beyond ? `${text} →` : text));
  });
  box.append(svg);
  if (legend) box.append(legend);
  return box;
}

// Bars under their labels, each with an optional mark: [{label, value, tip, mark}].
export function barChart({ title, note, bars }) {
  return columnChart({ title, note, columns: bars, labels: bars.map(({ label }, i) => ({ at: i + 0.5, text: label })) });
}

// How often each value occurs; bins of equal width.
export function histogram(values, { bins = 20, ...options }) {
  let low = Infinity, high = -Infinity;
  for (const x of values) { low = Math.min(low, x); high = Math.max(high, x); }
  if (low === high) { low -= 0.5; high += 0.5; }
  const counts = Array(values.length ? bins : 0).fill(0);
  for (const x of values) counts[Math.min(bins - 1, Math.floor(((x - low) / (high - low)) * bins))]++;
  return binChart({ low, high, counts }, options);
}

// Values that have been counted: equal bins from low to high. Limits are lines: [{at, text}].
export function binChart({ low, high, counts }, { title, note, colour = () => "var(--bar)", onPick, limits = [], legend }) {
  const edge = (i) => low + (i / counts.length) * (high - low), place = (x) => ((x - low) / (high - low)) * counts.length;
  const columns = counts.map((count, i) => {
    const [from, to] = [edge(i), edge(i + 1)];
    return { value: count, tip: `${number(count)} between ${number(from, 3)} and ${number(to, 3)}`, colour: colour((from + to) / 2, low, high), onclick: onPick ? () => onPick(from, to) : null };
  });
  const labels = columns.length ? ticks(low, high, 6).map((x) => ({ at: place(x), text: number(x, 3) })) : [];
  return columnChart({ title, note, columns, labels, lines: limits.map(({ at, text }) => ({ at: place(at), text })), legend });
}

// Parts one after another: [name, size, soft]; soft ones are striped. Negative ones are drawn in front of zero.
export function stackedBar(parts, largest, colours) {
  const bar = h("div", { class: "stack", title: parts.map(([name, x]) => `${name} ${number(x, 3)}`).join("\n") });
  for (const [name, x, soft] of parts) {
    if (!x) continue;
    bar.append(h("i", { class: soft ? "soft" : null, style: { width: `${(100 * Math.abs(x)) / (largest || 1)}%`, background: colours[name], opacity: x < 0 ? "0.45" : "1" } }));
  }
  return bar;
}

// Stacked bars under each other against a limit: rows of {name, parts, total}. A limit that would make slivers of them is only named.
export function limitedBars({ rows, limit, colours, format }) {
  const most = Math.max(...rows.map((row) => row.total)), drawn = limit !== null && most > limit / 12;
  const scale = drawn ? Math.max(most, limit) * 1.02 : most;
  const bars = rows.map(({ name, parts, total }) => {
    const bar = stackedBar(parts.map(([part, size, soft]) => [part, size, soft]), scale, colours);
    bar.title = parts.map(([part, size]) => `${part}: ${format(size)}`).join("\n");
    return h("div", { class: "limited" }, h("span", {}, name), h("div", { class: "lane" }, bar, drawn ? h("i", { class: "limit", style: { left: `${(100 * limit) / scale}%` } }) : null), h("span", { class: `num${limit !== null && total > limit ? " fail" : ""}` }, format(total)));
  });
  const note = limit === null ? "How much the device has is not known." : drawn ? `The line is what the device has, ${format(limit)}.` : `The device has ${format(limit)}, ${number(Math.floor(limit / most))} times the longest bar.`;
  return h("div", { class: "bars" }, bars, h("p", { class: "small dim" }, note));
}

export function legendOf(names, colours, describe = (name) => name) {
  return h("div", { class: "legend" }, names.map((name) => h("span", {}, h("b", { class: "dot", style: { background: colours[name] } }), describe(name))));
}

export function coloursOf(names) {
  return Object.fromEntries(names.map((name, i) => [name, seriesColour(i)]));
}
