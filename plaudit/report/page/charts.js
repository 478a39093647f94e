// Charts as SVG: curves over steps or time, histograms.

import { h, s, number, seriesColour } from "./dom.js";

const W = 460, H = 190, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 22;

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
    const ys = smooth(one.y, one.points ? 0 : share);
    const points = one.x.map((x, i) => [x, ys[i], one.y[i]]).filter(([, y]) => y !== null && (!log || y > 0));
    return { ...one, points: one.points, at: points };
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
    if (share && !one.points) {
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

// How often each value occurs; bins of equal width.
export function histogram(values, { title, bins = 20, colour, onPick }) {
  const box = h("div", { class: "card chart" }, h("h3", {}, title));
  if (!values.length) return box;
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= 0.5; high += 0.5; }
  const counts = Array(bins).fill(0);
  for (const x of values) counts[Math.min(bins - 1, Math.floor(((x - low) / (high - low)) * bins))]++;
  const most = Math.max(...counts), height = 120, width = (W - LEFT - RIGHT) / bins;
  const svg = s("svg", { viewBox: `0 0 ${W} ${height + 26}`, role: "img", "aria-label": title });
  for (const y of ticks(0, most, 3)) svg.append(s("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: height - (y / most) * (height - TOP), y2: height - (y / most) * (height - TOP) }), s("text", { x: LEFT - 6, y: height - (y / most) * (height - TOP) + 4, "text-anchor": "end" }, number(y)));
  counts.forEach((count, i) => {
    if (!count) return;
    const tall = Math.max(1.5, (count / most) * (height - TOP)), from = low + (i / bins) * (high - low), to = low + ((i + 1) / bins) * (high - low);
    svg.append(s("rect", { x: LEFT + i * width + 1, y: height - tall, width: width - 2, height: tall, rx: 1.5, style: { fill: colour((from + to) / 2, low, high) }, onclick: onPick ? () => onPick(from, to) : null }, s("title", {}, `${count} between ${number(from, 3)} and ${number(to, 3)}`)));
  });
  for (const x of ticks(low, high, 6)) svg.append(s("text", { x: LEFT + ((x - low) / (high - low)) * (W - LEFT - RIGHT), y: height + 18, "text-anchor": "middle" }, number(x, 3)));
  box.append(svg);
  return box;
}

// Components of a reward, one after another. Negative ones are drawn in front of zero.
export function stackedBar(parts, largest, colours) {
  const bar = h("div", { class: "stack", title: parts.map(([name, x]) => `${name} ${number(x, 3)}`).join("\n") });
  for (const [name, x] of parts) {
    if (!x) continue;
    bar.append(h("i", { style: { width: `${(100 * Math.abs(x)) / (largest || 1)}%`, background: colours[name], opacity: x < 0 ? "0.45" : "1" } }));
  }
  return bar;
}

export function legendOf(names, colours, describe = (name) => name) {
  return h("div", { class: "legend" }, names.map((name) => h("span", {}, h("b", { class: "dot", style: { background: colours[name] } }), describe(name))));
}

export function coloursOf(names) {
  return Object.fromEntries(names.map((name, i) => [name, seriesColour(i)]));
}
