// A sample: what was asked, what was written, which string was scored, and how the reward came about.

import { h, wholeNumber, number, plural, visible, longText, rewardColour, seriesColour } from "./dom.js";
import { get, isFile } from "./data.js";
import { scaleOf } from "./step.js";

const THOUGHTS = /<(think|thinking|thought|reasoning)>([\s\S]*?)(<\/\1>|$)/;

export async function samplePage(ctx, [name, split, stepText, rowText]) {
  const run = ctx.run(name), step = wholeNumber(stepText, "step"), row = wholeNumber(rowText, "sample");
  const [sample, data] = await Promise.all([get(`runs/${run.id}/${split}/${step}/${row}`), get(`runs/${run.id}/${split}/${step}?row=${row}`)]);
  const group = data.groups.findLast((g) => g.row <= row);
  const mates = data.samples.slice(group.row - data.first, group.row - data.first + group.rows);
  const link = (other) => `#/sample/${encodeURIComponent(run.name)}/${split}/${step}/${other}`;
  const toStep = `#/step/${encodeURIComponent(run.name)}/${split}/${step}${data.first ? `?row=${data.first}` : ""}`;
  const view = { link, scale: scaleOf(data) }, at = data.groups.indexOf(group);
  const element = h("div", {},
    h("div", { class: "row spread" },
      h("div", {},
        h("div", { class: "dim" }, h("a", { href: toStep }, `${run.name}, ${split === "val" ? "validation after step" : "step"} ${step}`), ` · group ${(data.groups_before + at + 1).toLocaleString("en")} of ${data.of_groups.toLocaleString("en")}`),
        h("h1", { style: { "margin-bottom": ".75rem" } }, `Sample ${(sample.index ?? row - group.row) + 1} of ${group.rows}`)),
      h("div", { class: "row" },
        h("button", { type: "button", disabled: row <= 0, onclick: () => ctx.go(link(row - 1)) }, "← ", h("kbd", {}, "k")),
        h("button", { type: "button", disabled: row >= data.of_samples - 1, onclick: () => ctx.go(link(row + 1)) }, h("kbd", {}, "j"), " →"))),
    h("div", { class: "sample" },
      h("div", {}, promptPart(sample), responsePart(sample), truthPart(sample), tokensPart(run, sample), scoredPart(run, sample)),
      h("aside", {}, rewardCard(run, sample, group), groupCard(group, mates, row, view), factsCard(sample), elsewhereCard(ctx, run, sample))));
  const move = (to) => to >= 0 && to < data.of_samples && ctx.go(link(to));
  return {
    element, run, title: `sample ${row} of step ${step}, ${run.name}`,
    keys: { j: () => move(row + 1), k: () => move(row - 1), J: () => move(group.row + group.rows), K: () => move(data.groups[at - 1]?.row ?? group.row - 1), u: () => ctx.go(toStep) },
  };
}

function promptPart(sample) {
  return h("section", {}, h("h3", {}, "Prompt"), sample.prompt.map((message) => h("div", { class: "message" }, h("div", { class: "role" }, visible(message.role || "")), longText(message.content || "", "text box"))),
    sample.tools ? h("details", {}, h("summary", {}, "tools"), longText(sample.tools, "text box")) : null);
}

function responsePart(sample) {
  const text = sample.response || "", found = THOUGHTS.exec(text);
  const box = h("div", { class: "response" });
  if (found) {
    const inside = found[2].trim();
    if (found.index > 0) box.append(longText(text.slice(0, found.index)));
    box.append(h("details", { class: "thoughts" }, h("summary", {}, `thoughts, ${inside.length.toLocaleString("en")} characters${found[3] ? "" : ", never closed"}`), longText(inside)));
    box.append(longText(text.slice(found.index + found[0].length).trimStart()));
  } else box.append(text ? longText(text) : h("span", { class: "dim" }, "(empty)"));
  return h("section", {}, h("h3", { style: { "margin-top": "1rem" } }, "Response"), box, sample.status === "truncated" ? h("p", { class: "warn small" }, "It reached the length limit and was cut off here.") : null);
}

function truthPart(sample) {
  const parts = [];
  if (sample.ground_truth !== null) parts.push(h("h3", { style: { "margin-top": "1rem" } }, "Ground truth"), longText(sample.ground_truth, "text box"));
  if (sample.extra_info) parts.push(h("details", {}, h("summary", {}, "extra_info"), longText(sample.extra_info, "text box")));
  return parts.length ? h("section", {}, parts) : null;
}

// Each reward: the string it saw, its failure, its judge's prompt and answer.
function scoredPart(run, sample) {
  const order = (run.rewards || []).map((reward) => reward.label);
  const names = Object.keys(sample.rewards).sort((a, b) => order.indexOf(a) - order.indexOf(b));
  if (!names.length) return null;
  const kinds = Object.fromEntries((run.rewards || []).map((reward) => [reward.label, reward.kind]));
  return h("section", {}, h("h2", {}, "What each reward saw"), names.map((name) => {
    const { view, failure, trace } = sample.rewards[name];
    const value = sample.parts[name];
    const same = view !== null && view === sample.response;
    return h("div", { class: "card", style: { margin: ".6rem 0" } },
      h("div", { class: "row spread" }, h("h3", {}, name, kinds[name] && kinds[name] !== name ? h("span", { class: "dim" }, ` (${kinds[name]})`) : null), h("b", { class: "num" }, failure ? h("span", { class: "bad" }, "failed") : number(value))),
      failure ? h("p", { class: "notice error text" }, visible(failure)) : null,
      view === null ? h("p", { class: "dim" }, value === undefined && !failure ? "It does not apply to this sample." : "The scored string was not recorded.") : same ? h("p", { class: "dim" }, failure ? "It was to score the response exactly as it stands above." : "It scored the response exactly as it stands above.") : [h("p", { class: "dim" }, failure ? "It was to score exactly this string:" : "It scored exactly this string:"), view ? longText(view, "text box") : h("p", { class: "text box dim" }, "(an empty string)")],
      subparts(sample, name),
      trace ? traceOf(trace) : null);
  }));
}

function subparts(sample, name) {
  const inside = Object.entries(sample.parts).filter(([part]) => part.startsWith(`${name}/`));
  return inside.length ? h("p", {}, inside.map(([part, x]) => h("span", { class: "nowrap" }, h("span", { class: "dim" }, `${part.slice(name.length + 1)} `), number(x), "  "))) : null;
}

function traceOf(trace) {
  const order = ["prompt", "answer"], names = [...order.filter((n) => n in trace), ...Object.keys(trace).filter((n) => !order.includes(n))];
  const words = { prompt: "the judge's prompt", answer: "the judge's answer" };
  return names.map((n) => {
    const text = typeof trace[n] === "string" ? trace[n] : JSON.stringify(trace[n], null, 1);
    if (text.length < 60 && !text.includes("\n")) return h("p", {}, h("span", { class: "dim" }, `${words[n] || n}: `), h("span", { class: "text" }, visible(text)));
    return h("details", { open: n !== "prompt" }, h("summary", {}, words[n] || n), longText(text, "text box"));
  });
}

function rewardCard(run, sample, group) {
  const missing = sample.reward === null, failed = missing && Boolean(sample.failure);
  // A run's advantages are per token: this is their mean.
  const what = run.kind === "run" ? "advantage, mean over its tokens " : "advantage ";
  return h("div", { class: "card" }, h("h3", {}, "Reward"),
    h("div", { class: "row", style: { "align-items": "baseline" } }, h("b", { style: { "font-size": "var(--t4)" } }, missing ? h("span", { class: failed ? "bad" : "dim" }, failed ? "none" : "–") : number(sample.reward)),
      sample.advantage !== null ? h("span", { class: "dim", title: "how much better it was than expected: the policy is moved towards it if positive, away from it if negative" }, what, h("b", { class: sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "" }, (sample.advantage > 0 ? "+" : "") + number(sample.advantage))) : null),
    failed ? h("p", { class: "notice error text" }, visible(sample.failure)) : missing ? h("p", { class: "dim" }, run.kind === "run" ? "No reward applies to it." : "The total was not recorded.") : null,
    formula(run, sample),
    group.rows > 1 && !missing ? h("p", { class: "small dim" }, `Its group: mean ${number(group.mean)}, standard deviation ${number(group.std)}.${group.signal !== false ? "" : " All are equal: no signal, so it does not move the policy."}`) : null);
}

// total = weight · x, combined in the order of the recipe
function formula(run, sample) {
  const rewards = (run.rewards || []).filter((reward) => reward.label in sample.parts);
  if (!rewards.length) {
    const parts = Object.entries(sample.parts);
    return parts.length ? h("dl", { class: "facts" }, parts.map(([name, x]) => [h("dt", {}, name), h("dd", { class: "num" }, number(x))])) : null;
  }
  const signs = { add: "+", multiply: "×", min: "min", max: "max" };
  const largest = Math.max(...rewards.map((reward) => Math.abs((reward.weight || 1) * sample.parts[reward.label])), 1e-9);
  const counted = rewards.filter((reward) => reward.weight !== 0);
  const normalised = "unnormalised" in sample.parts;
  return h("div", {}, h("table", {}, h("tbody", {}, rewards.map((reward, i) => {
    const x = sample.parts[reward.label], term = reward.weight * x;
    return h("tr", {}, h("td", { class: "dim", style: { "padding-right": ".4rem" } }, reward.weight === 0 ? "" : counted[0] === reward ? "" : signs[reward.combine] || "+"),
      h("td", {}, h("b", { class: "dot", style: { background: seriesColour(i) } }), reward.label, h("div", { class: "small dim" }, reward.weight === 0 ? "only measured, weight 0" : `${number(reward.weight)} × ${number(x)}`)),
      h("td", { class: "n" }, reward.weight === 0 ? h("span", { class: "dim" }, number(x)) : number(term)),
      h("td", { style: { width: "5rem", "vertical-align": "middle", "padding-right": 0 } }, h("div", { class: "meter", style: { width: "100%" } }, h("i", { style: { width: `${(100 * Math.abs(term)) / largest}%`, background: seriesColour(i), opacity: term < 0 ? 0.5 : 1 } }))));
  }))), normalised ? h("p", { class: "small dim" }, `Components are normalised before they are added; without that the total is ${number(sample.parts.unnormalised)}.`) : null);
}

function groupCard(group, mates, row, view) {
  return h("div", { class: "card" }, h("h3", {}, "Its group"), h("div", { class: "mates" }, mates.map((x) => h("a", { href: view.link(x.row), "aria-current": String(x.row === row) },
    square(x, view.scale), h("span", { class: "num" }, x.failure && x.reward === undefined ? "failed" : number(x[view.scale.name], 3)), h("span", { class: "text", dir: "auto" }, visible(x.text))))));
}

function square(x, { name, low, high }) {
  const kind = x[name] !== undefined ? "" : x.failure ? " failed" : " unknown";
  return h("span", { class: `cell${kind}`, style: kind ? {} : { background: rewardColour(x[name], low, high) } });
}

function factsCard(sample) {
  const facts = { status: sample.status, tokens: sample.tokens, malformed: sample.malformed ? "yes: the policy's fault" : null, "mean log-prob": sample.mean_logprob, "data source": sample.data_source, prompt: sample.prompt_id, "sampled by": sample.version === null ? null : `weights after ${plural(sample.version, "step")}` };
  const shown = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("div", { class: "card" }, h("h3", {}, "Facts"), h("dl", { class: "facts" }, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : visible(value))])));
}

function elsewhereCard(ctx, run, sample) {
  const box = h("div", { class: "card" }, h("h3", {}, "The same prompt in other steps"));
  if (isFile || !sample.prompt_id) { box.append(h("p", { class: "dim small" }, isFile ? "Only with the server." : "The prompt has no id.")); return box; }
  const list = h("div", {}), start = h("button", { type: "button" }, "look for it");
  const search = async () => {
    start.disabled = true;
    for (;;) {
      const answer = await get(`runs/${run.id}/prompt?id=${encodeURIComponent(sample.prompt_id)}`);
      const others = answer.found.filter((one) => one.step !== sample.step || one.split !== sample.split);
      list.replaceChildren(h("div", { class: "row", style: { gap: ".2rem .8rem" } }, others.slice(0, 60).map((one) => h("a", { href: `#/sample/${encodeURIComponent(run.name)}/${one.split}/${one.step}/${one.row}` }, `${one.split === "val" ? "validation " : "step "}${one.step}`))),
        h("p", { class: "small dim" }, answer.searched < answer.of ? `looked through ${answer.searched} of ${answer.of} files …` : others.length ? "" : "It was sampled in no other step."));
      if (answer.searched >= answer.of || !box.isConnected) break;
    }
    start.remove();
  };
  start.addEventListener("click", () => search().catch((error) => list.replaceChildren(h("p", { class: "bad" }, error.message))));
  box.append(start, list);
  return box;
}

// Tokens on demand: a value per token as colour.
function tokensPart(run, sample) {
  if (!sample.token_names || !sample.token_names.length) return null;
  const box = h("div", {}), names = sample.token_names.filter((n) => n !== "text");
  let tokens = null;
  const draw = async (name) => {
    tokens = tokens || await get(`runs/${run.id}/${sample.split}/${sample.step}/${sample.row}/tokens`);
    const values = tokens[name].filter((x) => x !== null), low = Math.min(...values), high = Math.max(...values), most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const colour = (x) => (x === null ? "transparent" : x < 0 ? `color-mix(in oklab, var(--low) ${Math.round((85 * -x) / most)}%, transparent)` : `color-mix(in oklab, var(--high) ${Math.round((85 * x) / most)}%, transparent)`);
    box.replaceChildren(h("p", { class: "small dim" }, `${name}: from ${number(low)} to ${number(high)}; orange below zero, blue above.`), h("div", { class: "tokens response" }, tokens.text.map((text, i) => h("span", { style: { background: colour(tokens[name][i]) }, title: names.map((n) => `${n} ${number(tokens[n][i])}`).join("\n") }, visible(text).replace(/\n/g, "↵\n")))));
  };
  return h("section", {}, h("div", { class: "row", style: { "margin-top": "1rem" } }, h("h3", { style: { margin: 0 } }, "Tokens"), names.map((name) => h("button", { type: "button", onclick: (event) => { for (const b of event.target.parentElement.querySelectorAll("button")) b.setAttribute("aria-pressed", String(b === event.target)); draw(name).catch((error) => box.replaceChildren(error.message)); } }, name))), box);
}
