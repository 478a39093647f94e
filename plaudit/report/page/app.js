// Which page is shown, the bar on top, keys, and following a run that is training.

import { h } from "./dom.js";
import { get, isFile, fileNote, setToken } from "./data.js";
import { runsPage, state } from "./runs.js";
import { stepPage } from "./step.js";
import { samplePage } from "./sample.js";
import { diagnosticsPage } from "./diagnostics.js";
import { searchPage } from "./search.js";

const PAGES = { "": runsPage, runs: runsPage, step: stepPage, sample: samplePage, diagnostics: diagnosticsPage, search: searchPage };
const FOLLOW_MS = 2000;
const main = document.getElementById("main"), bar = document.getElementById("top");
let page = null, shown = 0;
const stepsOf = new Map();

const ctx = {
  runs: [],
  run(name) {
    // A link may have been made with more or fewer runs next to each other, which decides how much of its path names a run.
    const alike = (run) => run.name.endsWith(`/${name}`) || String(name).endsWith(`/${run.name}`);
    const found = this.runs.find((run) => run.name === name) || (name === undefined ? this.runs[0] : this.runs.find(alike));
    if (!found) throw new Error(`There is no run ${name} here; this page has ${this.runs.map((run) => run.name).join(", ")}.`);
    return found;
  },
  go(hash) { if (location.hash === hash) render(); else location.hash = hash; },
  async steps(run) {
    const key = `${run.id} ${JSON.stringify(run.samples)}`;
    if (!stepsOf.has(key)) stepsOf.set(key, await get(`runs/${run.id}/steps`));
    return stepsOf.get(key);
  },
  neighbours(steps, step) {
    const before = steps.filter((one) => one < step).at(-1), after = steps.find((one) => one > step);
    return [before ?? null, after ?? null];
  },
  // The nearest step that has samples.
  async goToStep(run, split, step) {
    const steps = (await this.steps(run))[split];
    if (!steps.length) return;
    const near = steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    this.go(`#/step/${encodeURIComponent(run.name)}/${split}/${near}`);
  },
  async copy(text, button) {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { button.textContent = "select it and copy"; }
  },
};

// As it stands, if someone has typed a % that is none.
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decoded);
  return { name, rest, query: new URLSearchParams(query || "") };
}

async function render() {
  const turn = ++shown, { name, rest, query } = parse();
  try {
    if (!Object.hasOwn(PAGES, name)) throw new Error(`There is no page ${name}.`);
    const next = await PAGES[name](ctx, rest, query);
    if (turn !== shown) return;
    const same = page && page.name === name;
    page = { ...next, name };
    main.replaceChildren(next.element);
    document.title = `${next.title} · plaudit view`;
    drawBar();
    const place = history.state?.place; // of an entry that the back button leads to; a new one has none
    if (place !== undefined || !same) window.scrollTo(0, place ?? 0);
    next.shown?.();
  } catch (error) {
    if (turn !== shown) return;
    page = null;
    drawBar();
    main.replaceChildren(error.status === 401 ? tokenForm() : h("div", { class: "notice error" }, error.message));
  }
}

function tokenForm() {
  const input = h("input", { type: "password", "aria-label": "token", autocomplete: "off" });
  return h("form", { onsubmit: (event) => { event.preventDefault(); setToken(input.value); start(); } }, h("h1", {}, "Token"), h("p", {}, "This server was started with --token-env. Enter that token to see the runs."), h("div", { class: "row" }, input, h("button", { type: "submit" }, "Continue")));
}

function drawBar() {
  const { name } = parse(), run = page?.run || ctx.runs[0];
  const at = run ? encodeURIComponent(run.name) : "", samples = run?.samples || {};
  const split = samples.train ? "train" : "val";
  const links = [["#/", "Runs", ["", "runs"]]];
  if (run && samples[split]) links.push([`#/step/${at}/${split}/${samples[split][1]}`, "Steps", ["step", "sample"]], [`#/diagnostics/${at}`, "Diagnostics", ["diagnostics"]], [`#/search/${at}`, "Search", ["search"]]);
  const choose = ctx.runs.length > 1 && name !== "" && run ? h("select", { "aria-label": "run", onchange: (event) => ctx.go(sameElsewhere(ctx.runs[Number(event.target.value)])) }, ctx.runs.map((one) => h("option", { value: one.id, selected: one === run || one.name === run.name }, one.name))) : null;
  const training = ctx.runs.find((one) => one.state === "training");
  bar.replaceChildren(h("div", { class: "inner" }, h("a", { class: "brand", href: "#/" }, h("b", {}, "plaudit"), " view"), h("nav", { "aria-label": "pages" }, links.map(([href, text, names]) => h("a", { href, "aria-current": names.includes(name) ? "page" : null }, text))), choose,
    h("div", { class: "right" }, training && !isFile ? h("span", { class: "pill training", title: "this page follows it" }, `training, step ${training.step}${training.total_steps ? ` of ${training.total_steps}` : ""}`) : null, h("button", { type: "button", class: "hint", title: "keys", onclick: showKeys }, "?"))),
    ...(fileNote ? [h("div", { class: "inner small dim" }, fileNote)] : []));
}

function sameElsewhere(run) {
  const { name, rest } = parse(), at = encodeURIComponent(run.name), span = run.samples?.train || run.samples?.val;
  if (!span) return "#/";
  return name === "step" || name === "sample" ? `#/step/${at}/${run.samples.train ? "train" : "val"}/${Math.min(span[1], Math.max(span[0], Number(rest[2])))}` : `#/${name}/${at}`;
}

function showKeys() {
  const old = document.getElementById("keys");
  if (old) { old.remove(); return; }
  const keys = [["j  k", "next, previous sample"], ["J  K", "next, previous group"], ["← →", "previous, next step"], ["u", "from a sample up to its step"], ["/", "search"], ["g", "runs"], ["d", "diagnostics"], ["?", "these keys"]];
  document.body.append(h("div", { id: "keys", class: "card", role: "dialog", "aria-label": "keys", style: { position: "fixed", right: "1.25rem", top: "3.5rem", "z-index": 9, "box-shadow": "0 4px 24px rgb(0 0 0 / .25)" }, onclick: (event) => event.currentTarget.remove() }, h("h3", {}, "Keys"), h("dl", { class: "facts" }, keys.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]))));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { document.getElementById("keys")?.remove(); document.activeElement?.blur?.(); return; }
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const run = page?.run || ctx.runs[0], at = run ? encodeURIComponent(run.name) : "";
  const general = { "/": () => { const field = document.querySelector("form.search input"); if (field) field.focus(); else ctx.go(`#/search/${at}`); }, g: () => ctx.go("#/"), d: () => ctx.go(`#/diagnostics/${at}`), "?": showKeys };
  const act = page?.keys?.[event.key] || general[event.key];
  if (act) { event.preventDefault(); act(); }
});

async function follow() {
  if (document.hidden || !ctx.runs.length) return;
  try {
    const runs = await get("runs");
    const changed = runs.filter((run, i) => run.version !== ctx.runs[i]?.version || run.state !== ctx.runs[i]?.state || JSON.stringify(run.samples) !== JSON.stringify(ctx.runs[i]?.samples));
    lost(null);
    if (!changed.length) return;
    ctx.runs = runs;
    if (page?.run) page.run = runs.find((run) => run.id === page.run.id);
    drawBar();
    if (page?.refresh) await page.refresh(changed);
  } catch (error) {
    lost(error);
  }
}

function lost(error) {
  const old = document.getElementById("lost");
  if (!error) { old?.remove(); return; }
  if (!old) main.prepend(h("div", { id: "lost", class: "notice error" }, `${error.message} What is shown stays as it was.`));
}

async function start() {
  main.replaceChildren(h("p", { class: "dim" }, "reading …"));
  try {
    ctx.runs = await get("runs");
    await render();
  } catch (error) {
    drawBar();
    main.replaceChildren(error.status === 401 ? tokenForm() : h("div", { class: "notice error" }, error.message));
  }
}

history.scrollRestoration = "manual"; // a page has to be there before it can be scrolled
window.addEventListener("scrollend", () => history.replaceState({ place: window.scrollY }, ""));
window.addEventListener("hashchange", render);
start();
if (!isFile) setInterval(follow, FOLLOW_MS);
