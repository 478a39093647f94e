// What `plaudit doctor --html` found and measured.

import { h, number, plural, showReport, table, visible } from "./dom.js";
import { binChart, coloursOf, limitedBars } from "./charts.js";

const found = JSON.parse(document.getElementById("embedded").textContent);
const STATES = { "✓": ["good", "fine"], "!": ["warn", "warning"], "✗": ["fail", "will fail"] };
const VERDICTS = { fits: ["good", "✓ fits"], tight: ["warn", "! tight"], "too much": ["fail", "✗ too much"] };

const bytes = (size) => (size >= 1e8 ? `${(size / 1e9).toFixed(1)} GB` : `${(size / 1e6).toFixed(0)} MB`);

function summary() {
  const count = (mark) => found.findings.filter((one) => one.mark === mark).length;
  const what = found.stage === "score" ? "Scoring" : "Training";
  return h("p", { class: `verdict ${found.passed ? "good" : "fail"}` }, found.passed ? `✓ ${what} can start` : `✗ ${what} will fail`,
    h("span", { class: "dim" }, `${plural(count("✗"), "failure")}, ${plural(count("!"), "warning")}, ${count("✓")} fine`));
}

function findings() {
  return h("section", {}, h("h2", {}, "Findings"), h("div", { class: "findings" }, found.findings.map(({ mark, check, text }) => {
    const [colour, word] = STATES[mark];
    return h("div", { class: "finding" }, h("span", { class: `state ${colour}` }, `${mark} ${word}`), h("b", {}, check), h("span", { dir: "auto" }, visible(text)));
  })));
}

// Of the components that take turns on a device, only the largest counts.
function partsOf(device, phase) {
  const size = (need) => need.sizes[phase] ?? 0;
  const turns = device.needs.filter((need) => need.in_turn).sort((a, b) => size(b) - size(a));
  const counted = device.needs.filter((need) => size(need) && (!need.in_turn || need === turns[0]));
  return counted.flatMap((need) => [[need.name, size(need) - need.elastic, false], [need.name, need.elastic, true]]).filter(([, part]) => part > 0);
}

function memoryOf(device) {
  const colours = coloursOf(device.needs.map((need) => need.name)), { phases, needs } = device;
  const rows = phases.map((name, i) => ({ name, parts: partsOf(device, i), total: device.totals[i] }));
  const lines = needs.map((need) => [h("div", {}, h("b", { class: `dot${need.elastic && need.elastic >= Math.max(...need.sizes) ? " soft" : ""}`, style: { background: colours[need.name] } }), visible(need.name)), ...need.sizes.map((size) => amount(size))]);
  const [colour, verdict] = VERDICTS[device.verdict] || ["dim", ""];
  const inTurn = needs.filter((need) => need.in_turn).length > 1;
  return h("div", { class: "card" }, h("div", { class: "row spread" }, h("h3", {}, `${device.device}${device.available === null ? "" : `, ${bytes(device.available)}`}`), h("b", { class: colour }, verdict)),
    limitedBars({ rows, limit: device.available, colours, format: bytes }),
    amounts(["", ...phases], [...lines, [h("b", {}, inTurn ? "total, one offloaded at a time" : "total"), ...device.totals.map((size) => h("b", {}, bytes(size)))]]),
    needs.some((need) => need.elastic) ? h("p", { class: "small dim" }, "Striped: used if there is room; it works with less.") : null);
}

const amount = (size) => (size === null ? "–" : bytes(size));

// A table whose columns are amounts, after the first.
function amounts(heads, rows) {
  const element = table(heads, rows);
  for (const row of element.querySelectorAll("tr")) for (const cell of [...row.cells].slice(1)) cell.className = "n";
  return element;
}

function memory() {
  if (!found.memory.length) return null;
  return h("section", {}, h("h2", {}, "Memory"), h("p", { class: "dim" }, "Estimated from the model's config and these rows, without loading anything: what each device holds in each phase of a step."), h("div", { class: "stacked" }, found.memory.map(memoryOf)));
}

function shardings() {
  if (!found.shardings.length) return null;
  const rows = found.shardings, names = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))], colours = coloursOf(names);
  const bars = rows.map((row) => ({ name: row.cells.sharding, parts: Object.entries(row.parts), total: Object.values(row.parts).reduce((a, b) => a + b, 0) }));
  const heads = Object.keys(rows[0].cells);
  return h("section", {}, h("h2", {}, "What processes divide among themselves"), h("p", { class: "dim" }, "The least that each process takes with each cluster.sharding, in its heaviest phase and without a cache."),
    h("div", { class: "card" }, limitedBars({ rows: bars, limit: rows[0].available, colours, format: bytes }),
      h("div", { class: "legend" }, names.map((name) => h("span", {}, h("b", { class: "dot", style: { background: colours[name] } }), name))),
      amounts(heads, rows.map((row) => heads.map((head) => row.cells[head]))),
      h("p", { class: "small dim" }, "activations: with logits and gathered layers; engine: with all of the cache that it can use.")));
}

function lengths() {
  if (!found.lengths.length) return null;
  return h("section", {}, h("h2", {}, "Lengths"), h("div", { class: "two" }, found.lengths.map((one) => binChart(one, {
    title: one.title, note: one.note, limits: one.limits.map(({ at }) => ({ at, text: number(at) })),
    legend: h("div", { class: "legend" }, one.limits.map(({ name, at, over }) => h("span", {}, h("i", { class: "dashed limit" }), `${name}: ${number(at)} (${over ? `${number(over)} longer` : "none is longer"})`))),
  }))));
}

function excerpts() {
  return found.excerpts.map(({ title, pieces }) => h("section", {}, h("h2", {}, visible(title)), h("pre", { dir: "auto" }, pieces.map(([text, marked]) => (marked ? h("mark", {}, visible(text)) : visible(text))))));
}

showReport("doctor",
  h("h1", { class: "path" }, visible(found.recipe)), h("p", { class: "dim" }, `for plaudit ${found.stage}`),
  summary(), findings(), memory(), shardings(), lengths(), excerpts(),
);
