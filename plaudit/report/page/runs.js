// Runs: their state, curves of every metric over each other, how their recipes differ.

import { h, number, duration, plural, seriesColour } from "./dom.js";
import { get, isFile } from "./data.js";
import { lineChart } from "./charts.js";

const FIRST = ["reward", "val/reward", "length", "entropy", "groups_without_signal", "loss", "val/loss", "truncated", "malformed", "dropped", "accuracy", "kl"];
const settings = { share: 0.6, clock: false, log: false, filter: "", hidden: new Set() };

export async function runsPage(ctx) {
  const metrics = await Promise.all(ctx.runs.map((run) => get(`runs/${run.id}/metrics`)));
  const element = h("div", {});
  const charts = h("div", {});

  const draw = () => charts.replaceChildren(...chartSections(ctx, metrics));
  const table = h("div", { class: "scroll" });
  const drawTable = () => table.replaceChildren(runsTable(ctx, draw), ...ctx.runs.flatMap((run) => (run.problems || []).map((problem) => h("p", { class: "notice" }, `${run.name}: ${problem}`))));
  drawTable();
  draw();
  element.append(
    h("h1", {}, ctx.runs.length === 1 ? ctx.runs[0].name : plural(ctx.runs.length, "run")),
    table,
    differences(ctx.runs) ?? "",
    toolbar(draw),
    charts,
  );
  // A dump has no metrics: its curves come from its samples, which take a while to read.
  const more = async () => {
    for (const run of ctx.runs) while (metrics[run.id].done < metrics[run.id].of && element.isConnected && !isFile) {
      metrics[run.id] = await get(`runs/${run.id}/metrics`);
      draw();
    }
  };
  return {
    element,
    title: "runs",
    shown: more,
    async refresh(changed) {
      // Of a run that is deleted, what is shown stays.
      for (const run of changed) if (run.state !== "gone") metrics[run.id] = await get(`runs/${run.id}/metrics`);
      drawTable();
      draw();
    },
  };
}

function runsTable(ctx, draw) {
  const several = ctx.runs.length > 1;
  // By stage, not by what a run has written: one that has just begun has written nothing.
  const stages = new Set(ctx.runs.map((run) => run.stage).filter(Boolean));
  const columns = [...(stages.has("rl") ? ["reward", "val/reward"] : []), ...([...stages].some((stage) => stage !== "rl") ? ["loss", "val/loss"] : [])];
  return h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, h("th", {}, several ? "run (tick to draw it)" : "run"), h("th", {}, "state"), h("th", { class: "n" }, "step"), h("th", { class: "n" }, "time"), columns.map((name) => h("th", { class: "n" }, name)), h("th", {}, "look at"))),
    h("tbody", {}, ctx.runs.map((run) => h("tr", {},
      h("td", {}, several && h("input", { type: "checkbox", "aria-label": `draw ${run.name}`, checked: !settings.hidden.has(run.id), onchange: (event) => { settings.hidden[event.target.checked ? "delete" : "add"](run.id); draw(); } }), several && " ", h("b", { class: "dot", style: { background: seriesColour(run.id) } }), h("b", {}, run.name), h("div", { class: "small dim path" }, run.path)),
      h("td", {}, state(run)),
      h("td", { class: "n", "data-name": "step" }, run.step ?? "–", run.total_steps ? h("span", { class: "dim" }, ` of ${run.total_steps}`) : null, run.progress !== null && run.progress !== undefined && run.state === "training" ? h("div", { class: "meter" }, h("i", { style: { width: `${100 * run.progress}%` } })) : null),
      h("td", { class: "n", "data-name": "time" }, duration(run.seconds)),
      columns.map((name) => h("td", { class: "n", "data-name": name }, name.endsWith("loss") === (run.stage === "rl") ? "" : number(run.last?.[name]))), // RL's loss says little
      h("td", {}, links(run)),
    ))));
}

function links(run) {
  if (!run.samples || !Object.keys(run.samples).length) return h("span", { class: "dim" }, "no samples");
  const name = encodeURIComponent(run.name), found = [];
  if (run.samples.train) found.push(h("a", { href: `#/step/${name}/train/${run.samples.train[1]}` }, "last step"));
  if (run.samples.val) found.push(h("a", { href: `#/step/${name}/val/${run.samples.val[1]}` }, "last validation"));
  found.push(h("a", { href: `#/diagnostics/${name}` }, "diagnostics"));
  return h("div", { class: "row", style: { gap: ".2rem .8rem" } }, found);
}

export function state(run) {
  return h("div", {}, h("span", { class: `pill ${run.state}` }, run.state), run.detail ? h("div", { class: "small dim" }, run.detail) : null);
}

function toolbar(draw) {
  const change = (name, read) => (event) => { settings[name] = read(event.target); draw(); };
  return h("div", { class: "toolbar" },
    h("input", { type: "search", placeholder: "filter metrics", "aria-label": "filter metrics", value: settings.filter, oninput: change("filter", (i) => i.value) }),
    h("label", {}, "smoothing ", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.share, oninput: change("share", (i) => Number(i.value)) })),
    h("label", {}, "over ", h("select", { onchange: change("clock", (i) => i.value === "time") }, h("option", { value: "steps", selected: !settings.clock }, "steps"), h("option", { value: "time", selected: settings.clock }, "time"))),
    h("label", {}, h("input", { type: "checkbox", checked: settings.log, onchange: change("log", (i) => i.checked) }), " log scale"),
  );
}

// Hours since the start, of a step; between two steps of the thinned clock, a straight line.
function hours(clock, step) {
  if (!clock || !clock.x.length) return step;
  let i = clock.x.findIndex((x) => x >= step);
  if (i < 0) i = clock.x.length - 1;
  if (i === 0 || clock.x[i] === step) return clock.y[i] / 3600;
  const share = (step - clock.x[i - 1]) / (clock.x[i] - clock.x[i - 1]);
  return (clock.y[i - 1] + share * (clock.y[i] - clock.y[i - 1])) / 3600;
}

function chartSections(ctx, metrics) {
  const names = [...new Set(metrics.flatMap((one) => Object.keys(one.series)))];
  const panels = names.filter((name) => !(name.startsWith("val/") && names.includes(name.slice(4))));
  const wanted = panels.filter((name) => name.toLowerCase().includes(settings.filter.toLowerCase()) && varies(metrics, name));
  const rank = (name) => { const i = FIRST.indexOf(name); return i < 0 ? FIRST.length + (name.startsWith("parts/") ? -0.5 : 0) : i; };
  wanted.sort((a, b) => rank(a) - rank(b));
  const sections = [["", wanted.filter((name) => rank(name) < FIRST.length)]];
  for (const name of wanted.filter((n) => rank(n) >= FIRST.length)) {
    const head = name.startsWith("val/") ? "validation" : name.includes("/") ? name.split("/")[0] : "training";
    const known = sections.find(([title]) => title === head);
    if (known) known[1].push(name); else sections.push([head, [name]]);
  }
  if (!wanted.length) return [h("p", { class: "dim" }, names.length ? "No metric has this name." : "No metrics yet.")];
  return sections.filter(([, inside]) => inside.length).map(([title, inside]) => {
    const grid = h("div", { class: "charts" });
    const fillGrid = () => { if (!grid.childElementCount) grid.append(...inside.map((name) => chart(ctx, metrics, name))); };
    if (!title || settings.filter) { fillGrid(); return h("div", {}, title ? h("h2", {}, title) : null, grid); }
    return h("details", { ontoggle: (event) => { opened[event.target.open ? "add" : "delete"](title); fillGrid(); }, open: opened.has(title) }, h("summary", { style: { "font-size": "var(--t2)", padding: ".6rem 0" } }, `${title} (${plural(inside.length, "metric")})`), grid);
  });
}

const opened = new Set(["training"]);

function varies(metrics, name) {
  return settings.filter || metrics.some((one) => [name, `val/${name}`].some((n) => { const y = one.series[n]?.y; return y && y.some((v) => v !== y[0]); }));
}

function chart(ctx, metrics, name) {
  const series = [];
  for (const run of ctx.runs) {
    if (settings.hidden.has(run.id)) continue;
    const { series: all, seconds } = metrics[run.id];
    for (const metric of [name, `val/${name}`]) {
      if (!all[metric]) continue;
      const validation = metric.startsWith("val/");
      const one = { run, metric, steps: all[metric].x, y: all[metric].y, points: validation, dashed: validation && metric !== name };
      one.x = settings.clock ? one.steps.map((step) => hours(seconds, step)) : one.steps;
      one.colour = ctx.runs.length > 1 ? seriesColour(run.id) : metric === name ? "var(--c0)" : "var(--c1)";
      one.name = ctx.runs.length > 1 ? `${run.name}${validation && metric !== name ? " (validation)" : ""}` : metric;
      series.push(one);
    }
  }
  return lineChart({
    title: name, series, log: settings.log, share: settings.share, xLabel: settings.clock ? "hour" : "step", legend: series.length > 1 || ctx.runs.length > 1,
    onPick: (one, x) => ctx.goToStep(one.run, one.metric.startsWith("val/") ? "val" : "train", settings.clock ? one.steps[one.x.indexOf(x)] : x),
  });
}

// What differs between the runs. Settings that only some of the stages have (an RL run next to an SFT run) are folded, by stage.
function differences(runs) {
  const withRecipe = runs.filter((run) => run.recipe && Object.keys(run.recipe).length);
  if (!withRecipe.length) return null;
  const names = [...new Set(withRecipe.flatMap((run) => Object.keys(run.recipe)))];
  const shown = (run, name) => (name in run.recipe ? JSON.stringify(run.recipe[name]) : "not set");
  const table = (chosen, of = withRecipe) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), of.map((run) => h("th", {}, run.name)))), h("tbody", {}, chosen.map((name) => h("tr", {}, h("td", { class: "nowrap" }, name), of.map((run) => h("td", { style: { "overflow-wrap": "anywhere" } }, shown(run, name))))))));
  const all = h("details", {}, h("summary", {}, withRecipe.length > 1 ? "all settings" : "the recipe, all settings"), table(names));
  if (withRecipe.length === 1) return all;
  const stages = [...new Set(withRecipe.map((run) => run.stage))], stagesOf = (name) => stages.filter((stage) => withRecipe.some((run) => run.stage === stage && name in run.recipe));
  const shared = names.filter((name) => stagesOf(name).length === stages.length);
  const differ = shared.filter((name) => new Set(withRecipe.map((run) => shown(run, name))).size > 1 && name !== "run.dir");
  const byStages = [...new Set(names.filter((name) => !shared.includes(name)).map((name) => stagesOf(name).join(", ")))];
  const folded = byStages.map((has) => {
    const only = names.filter((name) => stagesOf(name).join(", ") === has && !shared.includes(name));
    return h("details", {}, h("summary", {}, `settings that only ${has} has (${only.length}: ${someOf(only.map((name) => name.split(".")[0]))})`), table(only, withRecipe.filter((run) => has.split(", ").includes(run.stage))));
  });
  const both = stages.length > 1 ? ` in what ${stages.join(" and ")} have in common` : "";
  if (!differ.length) return h("div", {}, h("p", { class: "dim" }, `Their recipes do not differ${both}, besides run.dir.`), folded, all);
  return h("div", {}, h("details", { open: differ.length <= 8 }, h("summary", {}, `how their recipes differ${both} (${plural(differ.length, "setting")}: ${someOf(differ)})`), table(differ)), folded, all);
}

function someOf(names) {
  const different = [...new Set(names)];
  return different.length > 6 ? `${different.slice(0, 6).join(", ")}, …` : different.join(", ");
}
