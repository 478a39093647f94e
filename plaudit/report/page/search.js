// Search over responses: text or a regular expression, and filters.

import { h, number, plural, visible } from "./dom.js";
import { get, isFile, embeddedSamples } from "./data.js";

const HITS = 200;

let last = null; // the search that was shown last, with all that it has found: the back button leads there from a sample

export async function searchPage(ctx, [name], query) {
  if (last?.hash === location.hash) return last.page;
  const run = ctx.run(name);
  const results = h("div", {}), status = h("p", { class: "dim" }), more = h("button", { type: "button", hidden: true });
  const field = (key, attributes, ...children) => h(attributes.options ? "select" : "input", { name: key, value: query.get(key) ?? "", ...attributes, options: null }, ...children);
  const option = (key) => ([value, text]) => h("option", { value, selected: (query.get(key) ?? "") === value }, text);
  const text = field("text", { type: "search", placeholder: "text in a response", "aria-label": "text in a response", autocomplete: "off" });
  const form = h("form", { class: "search", onsubmit: (event) => { event.preventDefault(); last = null; ctx.go(`#/search/${encodeURIComponent(run.name)}?${asQuery(form)}`); } },
    h("div", { class: "row" }, text, h("label", {}, h("input", { type: "checkbox", name: "is_regex", value: "true", checked: query.get("is_regex") === "true" }), " regular expression"), h("button", { type: "submit" }, "Search")),
    h("div", { class: "row" },
      h("label", {}, "in ", field("split", { options: true }, [["train", "training"], ["val", "validation"]].map(option("split")))),
      h("label", {}, "reward from ", field("least", { type: "number", step: "any" })), h("label", {}, "to ", field("greatest", { type: "number", step: "any" })),
      h("label", {}, "show ", field("failure", { options: true }, [["", "all samples"], ["any", "a reward failed"], ["malformed", "malformed"], ["truncated", "truncated"], ["timeout", "failed: timeout"], ["exception", "failed: exception"], ["unparsable", "failed: unparsable"], ["given_up", "failed: given up"]].map(option("failure")))),
      h("label", {}, "data source ", field("data_source", { type: "text", size: 14 })), h("label", {}, "step ", field("step", { type: "number", min: 0 }))));
  let next = {}, total = 0, searched = 0, unreadable = 0;
  const search = async () => {
    more.hidden = true;
    status.textContent = "searching …";
    const parameters = new URLSearchParams({ ...Object.fromEntries(query), ...next });
    const answer = isFile ? await searchFile(run, parameters) : await get(`runs/${run.id}/search?${parameters}`);
    results.append(...answer.hits.map((hit) => hitLine(run, hit)));
    total += answer.hits.length;
    searched += answer.searched;
    unreadable += answer.unreadable;
    next = answer.next;
    more.hidden = next === null;
    more.textContent = answer.more ? `show ${Math.min(answer.more, HITS)} more` : "search older steps";
    status.textContent = foundLine(total, answer, searched, unreadable);
    if (next !== null && total === 0 && results.isConnected) await search();
  };
  const report = () => search().catch((error) => { status.textContent = ""; results.append(h("p", { class: "notice error" }, error.message)); });
  more.addEventListener("click", report);
  let isNew = true;
  const page = {
    run, title: `search, ${run.name}`,
    element: h("div", {}, h("div", { class: "dim" }, run.name), h("h1", {}, "Search"), form, status, results, more),
    async shown() {
      if (!isNew) return;
      isNew = false;
      text.focus();
      if ([...query.keys()].length) await report(); else status.textContent = "Finds text in responses, ignoring case. Without text, the filters alone.";
    },
  };
  last = { hash: location.hash, page };
  return page;
}

// "The first 200 of 1,234 samples in 3 steps, newest first; 40 older steps are not searched yet."
function foundLine(total, { more, left }, searched, unreadable) {
  const found = more ? `The first ${total.toLocaleString("en")} of ${plural(total + more, "sample")}` : plural(total, "sample");
  const open = left ? `; ${plural(left, "older step")} ${left === 1 ? "is" : "are"} not searched yet` : "";
  return `${found} in ${plural(searched + (more ? 1 : 0), "step")}, newest first${open}.${unreadable ? ` ${plural(unreadable, "step")} could not be read.` : ""}`;
}

function asQuery(form) {
  const query = new URLSearchParams();
  for (const [key, value] of new FormData(form)) if (value !== "" && !(key === "split" && value === "train")) query.set(key, value);
  if (![...query.keys()].length) query.set("split", "train");
  return query.toString();
}

function hitLine(run, hit) {
  return h("a", { class: "hit", href: `#/sample/${encodeURIComponent(run.name)}/${hit.split}/${hit.step}/${hit.row}` },
    h("div", { class: "row small dim", style: { gap: ".2rem 1rem" } }, h("b", {}, `${hit.split === "val" ? "validation after step" : "step"} ${hit.step}`), h("span", {}, hit.reward === null || hit.reward === undefined ? "no reward" : `reward ${number(hit.reward)}`), hit.data_source ? h("span", {}, visible(hit.data_source)) : null, hit.malformed ? h("span", { class: "warn" }, "malformed") : null, hit.status === "truncated" ? h("span", { class: "warn" }, "truncated") : null, hit.failure ? h("span", { class: "bad" }, visible(hit.failure).slice(0, 120)) : null),
    h("div", { class: "text", dir: "auto" }, visible(hit.before), hit.found ? h("mark", {}, visible(hit.found)) : null, visible(hit.after)));
}

async function searchFile(run, query) {
  const text = query.get("text") || "", split = query.get("split") || "train";
  let pattern;
  try { pattern = new RegExp(query.get("is_regex") === "true" ? text : text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i"); } catch (error) { throw new Error(`the regular expression cannot be read: ${error.message}`); }
  const least = query.get("least"), greatest = query.get("greatest"), failure = query.get("failure"), source = query.get("data_source"), step = query.get("step");
  const samples = await embeddedSamples(run.id, split);
  const hits = [];
  for (const sample of samples) {
    if (least && !(sample.reward !== null && sample.reward >= Number(least))) continue;
    if (greatest && !(sample.reward !== null && sample.reward <= Number(greatest))) continue;
    if (source && sample.data_source !== source) continue;
    if (step && sample.step !== Number(step)) continue;
    const failed = [sample.failure, ...Object.values(sample.rewards || {}).map((one) => one.failure)].filter(Boolean);
    if (failure === "malformed" ? !sample.malformed : failure === "truncated" ? sample.status !== "truncated" : failure === "any" ? !failed.length : failure && !failed.some((one) => one.split(":")[0] === failure)) continue;
    const found = pattern.exec(sample.response || "");
    if (!found) continue;
    const end = found.index + found[0].length;
    hits.push({ ...sample, before: sample.response.slice(Math.max(0, found.index - 80), found.index), found: found[0], after: sample.response.slice(end, end + 160) });
  }
  const from = Number(query.get("from") || 0), more = Math.max(0, hits.length - from - HITS);
  return { hits: hits.slice(from, from + HITS), searched: (from ? 0 : new Set(samples.map((one) => one.step)).size - 1) + (more ? 0 : 1), left: 0, more, unreadable: 0, next: more ? { from: from + HITS } : null };
}
