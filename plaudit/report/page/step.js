// A step: its groups, what each sample earned and from which component, what failed and why.

import { h, wholeNumber, number, percent, plural, visible, rewardColour } from "./dom.js";
import { get, isFile } from "./data.js";
import { histogram, stackedBar, legendOf, coloursOf } from "./charts.js";

const ORDERS = {
  "reward, lowest first": (a, b) => (a.mean ?? -Infinity) - (b.mean ?? -Infinity),
  "reward, highest first": (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity),
  spread: (a, b) => (b.std ?? -1) - (a.std ?? -1),
  length: (a, b) => b.length - a.length,
  failures: (a, b) => b.failed - a.failed || b.malformed - a.malformed || 0,
  "as sampled": (a, b) => a.row - b.row,
};
const FILTERS = {
  "all groups": () => true,
  "with signal": (g) => g.signal,
  "without signal": (g) => g.signal === false,
  "with failures": (g) => g.failed > 0,
  malformed: (g) => g.malformed > 0,
  truncated: (g) => g.truncated > 0,
};
const RECORDED = { "with failures": "failed", malformed: "malformed", truncated: "truncated", "with signal": "groups without signal", "without signal": "groups without signal" };
const choice = { order: "spread", filter: "all groups", source: "" };

export async function stepPage(ctx, [name, split, stepText], query) {
  const run = ctx.run(name), step = wholeNumber(stepText, "step");
  let [data, steps] = await Promise.all([get(`runs/${run.id}/${split}/${step}?row=${Number(query.get("row")) || 0}`), ctx.steps(run)]);
  const link = (row) => `#/sample/${encodeURIComponent(run.name)}/${split}/${step}/${row}`;
  const scale = scaleOf(data), groups = h("div", {});
  const components = componentNames(run, data), colours = coloursOf(components);
  const weighted = weightsOf(run);
  const sources = [...new Set(data.groups.map((g) => g.data_source).filter(Boolean))];
  // What an earlier step was narrowed to may not be there in this one.
  const filters = Object.keys(FILTERS).filter((n) => !(n in RECORDED) || data.summary[RECORDED[n]] !== null);
  if (!filters.includes(choice.filter)) choice.filter = "all groups";
  if (!sources.includes(choice.source)) choice.source = "";
  const draw = () => groups.replaceChildren(...groupList(data, { link, scale, components, colours, weighted }));
  draw();
  const pick = (key, options) => h("select", { "aria-label": key, onchange: (event) => { choice[key] = event.target.value; draw(); } }, options.map(([value, text]) => h("option", { value, selected: choice[key] === value }, text)));
  const navigation = h("div", { class: "row" }), beside = () => ctx.neighbours(steps[split], step);
  const drawNavigation = () => {
    const [before, after] = beside();
    navigation.replaceChildren(...[stepButton(ctx, run, split, before, "← previous"), stepButton(ctx, run, split, after, "next →"), stepInput(ctx, run, split, step, steps[split]), splitButtons(ctx, run, split, step, steps)].filter(Boolean));
  };
  drawNavigation();
  const goBeside = (i) => () => beside()[i] !== null && ctx.go(hash(run, split, beside()[i]));
  const element = h("div", {},
    h("div", { class: "row spread" },
      h("div", {}, h("div", { class: "dim" }, run.name), h("h1", {}, split === "val" ? `Validation after step ${step}` : `Step ${step}`)),
      navigation),
    tiles(data),
    pagesOf(run, split, step, data),
    failures(data, link),
    h("div", { class: "two", style: { margin: "1rem 0" } },
      histogram(scale.values, { title: `${scale.name}s of ${data.pages.length > 1 ? "these" : "all"} samples`, colour: (x) => rewardColour(x, scale.low, scale.high) }),
      componentCard(run, data, components, colours, weighted)),
    h("div", { class: "row spread" }, h("h2", { style: { margin: 0 } }, "Groups"), h("div", { class: "row" },
      h("label", {}, "sort by ", pick("order", Object.keys(ORDERS).map((n) => [n, n]))), h("label", {}, "show ", pick("filter", filters.map((n) => [n, n]))),
      sources.length > 1 ? h("label", {}, "data source ", pick("source", [["", "all"], ...sources.map((n) => [n, n])])) : null)),
    h("p", { class: "dim small" }, squares(data, scale)),
    groups,
    h("h2", {}, "Audit these samples"),
    h("p", { class: "dim" }, "Measures what these rewards reward, and what fools them, on the samples of this step", run.kind === "run" ? ":" : ". R.yaml is a recipe with the rewards to measure:"),
    h("div", { class: "command" }, h("code", {}, data.audit), h("button", { type: "button", onclick: (event) => ctx.copy(data.audit, event.target) }, "copy")),
  );
  const openFirst = () => { const [first] = chosenGroups(data); if (first) ctx.go(link(first.row)); };
  return {
    element,
    title: `step ${step}, ${run.name}`,
    keys: { ArrowLeft: goBeside(0), ArrowRight: goBeside(1), j: openFirst, Enter: openFirst },
    run,
    // A run that trains gets further steps; this one stays as it is.
    async refresh() {
      steps = await ctx.steps(ctx.run(name));
      if (!navigation.contains(document.activeElement)) drawNavigation();
    },
  };
}

const hash = (run, split, step) => `#/step/${encodeURIComponent(run.name)}/${split}/${step}`;

function stepButton(ctx, run, split, step, text) {
  return h("button", { type: "button", disabled: step === null, onclick: () => ctx.go(hash(run, split, step)) }, text);
}

function stepInput(ctx, run, split, step, steps) {
  return h("label", {}, "step ", h("input", { type: "number", value: step, min: steps[0], max: steps.at(-1), style: { width: "6rem" }, "aria-label": "go to step", onchange: (event) => ctx.goToStep(run, split, Number(event.target.value)) }));
}

function splitButtons(ctx, run, split, step, steps) {
  if (!steps.train.length || !steps.val.length) return null;
  return h("div", { class: "row", style: { gap: ".25rem" } }, ["train", "val"].filter((one) => steps[one].length).map((one) => h("button", { type: "button", "aria-pressed": String(one === split), onclick: () => ctx.goToStep(run, one, step) }, one === "train" ? "training" : "validation")));
}

// Colours stand for rewards; in a dump without the total reward (TRL's with several reward functions), for advantages.
export function scaleOf(data) {
  const name = data.summary.reward === null && data.samples.some((x) => x.advantage !== undefined) ? "advantage" : "reward";
  const values = data.samples.map((x) => x[name]).filter((x) => x !== undefined);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const most = Math.max(-low, high); // an advantage of 0 is grey
  return name === "reward" ? { name, values, low, high } : { name, values, low: -most, high: most };
}

function squares(data, { name, values, low, high }) {
  if (!values.length) return data.summary.failed ? "A square is a sample. None has a reward: rewards failed." : "A square is a sample. No rewards were recorded.";
  const marks = [data.summary.failed === null ? "" : " Striped: a reward failed, so it has none.", data.summary.malformed === null && data.summary.truncated === null ? "" : " A dot: malformed or truncated."];
  return [`A square is a sample; its colour is its ${name}`, h("span", { class: "nowrap" }, ` (${number(low, 3)}`, h("i", { class: "scale" }), `${number(high, 3)}).`), ...marks, data.summary.reward === null ? " The total reward was not recorded." : " A group in which all rewards are equal has no signal: it does not move the policy."];
}

// Of all samples of the step, also of those on other pages.
function tiles(data) {
  const of = data.summary, signal = of["groups without signal"];
  const tile = (value, text, title) => h("div", { class: "tile", title }, h("b", {}, value), h("span", {}, text));
  const share = (value, text, title) => (value === null ? tile("–", `${text}: not recorded`, "whatever saved these samples did not record it") : tile(percent(value), text, title));
  return h("div", { class: "tiles" },
    of.reward === null ? tile("–", of.failed ? "mean reward: none, rewards failed" : "mean reward: not recorded") : tile(number(of.reward), "mean reward"), of.reward === null ? null : tile(number(of.reward_std), "standard deviation"),
    tile(number(of.length, 3), `mean length, ${data.unit}`),
    signal === null ? null : tile(percent(signal), "groups without signal", "all samples of the group have the same reward"),
    share(of.malformed, "malformed", "the policy's fault: no answer to be found, broken thoughts"),
    share(of.failed, "a reward failed", "any reward's fault, also of one that is only measured: a timeout, an exception"),
    share(of.truncated, "truncated", "the response reached the length limit"),
    tile(data.of_samples.toLocaleString("en"), `sample${data.of_samples === 1 ? "" : "s"} in ${plural(data.of_groups, "group")}`));
}

// A very large step has several pages.
function pagesOf(run, split, step, data) {
  if (data.pages.length < 2) return null;
  const last = data.first + data.samples.length, text = ([from, to]) => `${(from + 1).toLocaleString("en")}–${to.toLocaleString("en")}`;
  return h("p", { class: "notice" }, `Below are samples ${text([data.first, last])} of ${data.of_samples.toLocaleString("en")}. `, isFile ? "The others are not in this file." : ["Others: ", data.pages.filter(([from]) => from !== data.first).map((page, i) => [i ? ", " : "", h("a", { href: `${hash(run, split, step)}?row=${page[0]}` }, text(page))])]);
}

function failures(data, link) {
  const causes = new Map();
  for (const sample of data.samples) {
    const all = { ...(sample.failure ? { "": sample.failure } : {}), ...(sample.failures || {}) };
    for (const [reward, text] of Object.entries(all)) {
      if (reward === "" && sample.failures) continue;
      const cause = `${reward}|${text.split(":")[0]}`;
      if (!causes.has(cause)) causes.set(cause, { reward, cause: text.split(":")[0], text, rows: [] });
      causes.get(cause).rows.push(sample.row);
    }
  }
  if (!causes.size) return null;
  const rows = [...causes.values()].sort((a, b) => b.rows.length - a.rows.length);
  return h("div", {}, h("h2", {}, "What failed, and why"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "reward"), h("th", {}, "cause"), h("th", { class: "n" }, "samples"), h("th", {}, "message of the first"), h("th", {}, ""))),
    h("tbody", {}, rows.map((r) => h("tr", {}, h("td", {}, r.reward || "all"), h("td", {}, r.cause), h("td", { class: "n" }, r.rows.length), h("td", { class: "text" }, visible(r.text.slice(r.cause.length + 1).trim().slice(0, 300))), h("td", {}, h("a", { href: link(r.rows[0]) }, "look"))))))));
}

export function weightsOf(run) {
  return Object.fromEntries((run.rewards || []).map((reward) => [reward.label, reward.weight ?? 1]));
}

// The rewards of the recipe; without one (a dump), every number that was saved with the samples.
export function componentNames(run, data) {
  const found = [...new Set(data.groups.flatMap((g) => Object.keys(g.parts)))];
  const labels = (run.rewards || []).map((reward) => reward.label).filter((label) => found.includes(label));
  return labels.length ? labels : found.filter((name) => name !== "unnormalised");
}

function componentCard(run, data, components, colours, weighted) {
  if (!components.length) return null; // a dump that has the total only
  const rows = components.map((name) => {
    const having = data.samples.filter((x) => x.parts && name in x.parts).map((x) => x.parts[name]);
    return { name, weight: weighted[name], n: having.length, mean: having.length ? having.reduce((a, b) => a + b, 0) / having.length : null, least: Math.min(...having), greatest: Math.max(...having) };
  });
  const other = [...new Set(data.groups.flatMap((g) => Object.keys(g.parts)))].filter((name) => !components.includes(name));
  return h("div", { class: "card" }, h("h3", {}, "Components"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "reward"), h("th", { class: "n" }, "weight"), h("th", { class: "n" }, "mean"), h("th", { class: "n" }, "min"), h("th", { class: "n" }, "max"), h("th", { class: "n" }, "samples"))),
    h("tbody", {}, rows.map((r) => h("tr", {}, h("td", {}, h("b", { class: "dot", style: { background: colours[r.name] } }), r.name, r.weight === 0 ? h("div", { class: "small dim" }, "only measured") : null), h("td", { class: "n" }, number(r.weight)), h("td", { class: "n" }, number(r.mean)), h("td", { class: "n" }, number(r.least)), h("td", { class: "n" }, number(r.greatest)), h("td", { class: "n" }, r.n)))))),
    other.length ? h("p", { class: "small dim" }, `Also recorded: ${other.join(", ")}.`) : null);
}

function chosenGroups(data) {
  return data.groups.filter((g) => FILTERS[choice.filter](g) && (!choice.source || g.data_source === choice.source)).sort(ORDERS[choice.order]);
}

function groupList(data, view) {
  const chosen = chosenGroups(data);
  if (!chosen.length) return [h("p", { class: "dim" }, "No group of this step is like that.")];
  const term = (group, name) => (view.weighted[name] ?? 1) * (group.parts[name] ?? 0);
  const drawn = view.components.filter((name) => (view.weighted[name] ?? 1) !== 0);
  const largest = Math.max(...data.groups.map((g) => drawn.reduce((sum, name) => sum + Math.abs(term(g, name)), 0)));
  const head = h("div", { class: "group head" }, h("span", {}, "prompt"), h("span", {}, "samples"), h("span", {}, !drawn.length ? "" : Object.keys(view.weighted).length ? "components × weight, mean" : "components, mean"), h("span", { class: "n", title: "mean of the group" }, "reward"), h("span", { class: "n", title: "standard deviation of the rewards in the group" }, "spread"), h("span", { class: "n" }, "length"), h("span", { class: "n" }, ""));
  const lines = chosen.slice(0, 500).map((g) => h("div", { class: "group" },
    h("a", { class: "prompt", href: view.link(g.row), dir: "auto" }, visible(g.prompt) || "(empty prompt)"),
    h("div", { class: "cells" }, data.samples.slice(g.row - data.first, g.row - data.first + g.rows).map((x) => cell(x, view))),
    h("div", { class: "stack-cell" }, drawn.length ? stackedBar(drawn.map((name) => [name, term(g, name)]), largest, view.colours) : null),
    h("span", { class: "n", "data-name": "reward" }, number(g.mean, 3)), h("span", { class: "n", "data-name": "spread" }, number(g.std, 2)), h("span", { class: "n", "data-name": "length" }, number(g.length, 3)),
    h("span", { class: "n small" }, g.failed ? h("span", { class: "bad" }, `${g.failed} failed`) : g.signal === false ? h("span", { class: "dim" }, "no signal") : g.malformed ? h("span", { class: "warn" }, `${g.malformed} malformed`) : g.truncated ? h("span", { class: "warn" }, `${g.truncated} truncated`) : "")));
  const more = chosen.length > 500 ? [h("p", { class: "dim" }, `${chosen.length - 500} more groups; narrow the filter to see them.`)] : [];
  return [drawn.length > 1 ? legendOf(drawn, view.colours, (name) => (name in view.weighted ? `${name} × ${number(view.weighted[name])}` : name)) : null, head, ...lines, ...more].filter(Boolean);
}

export function cell(sample, view, here = false) {
  const value = sample[view.scale.name], failed = value === undefined && sample.failure !== undefined;
  const kind = `cell${failed ? " failed" : value === undefined ? " unknown" : ""}${sample.malformed ? " malformed" : ""}${sample.status === "truncated" ? " truncated" : ""}${here ? " here" : ""}`;
  const words = [failed ? "failed" : value === undefined ? "no reward" : `${view.scale.name} ${number(value)}`, sample.malformed && "malformed", sample.status === "truncated" && "truncated"].filter(Boolean).join(", ");
  return h("a", { class: kind, href: view.link(sample.row), title: `${words}\n${visible(sample.text).slice(0, 160)}`, "aria-label": `sample ${sample.index ?? sample.row}: ${words}`, style: failed ? {} : { background: rewardColour(value, view.scale.low, view.scale.high) } });
}
