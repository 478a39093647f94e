// Diagnostics: curves that show what a policy is rewarded for. Evidence, no alarms.

import { h, plural, seriesColour } from "./dom.js";
import { get, isFile } from "./data.js";
import { lineChart } from "./charts.js";

let share = 0.5;

export async function diagnosticsPage(ctx, [name]) {
  const run = ctx.run(name);
  let [found, metrics] = await Promise.all([get(`runs/${run.id}/diagnostics`), get(`runs/${run.id}/metrics`)]);
  const charts = h("div", {}), progress = h("p", { class: "dim" }), problems = h("div", {});
  const draw = () => {
    problems.replaceChildren(...(found.problems || []).map((problem) => h("p", { class: "notice error" }, problem)));
    charts.replaceChildren(...sections(ctx, run, found.series, metrics.series));
    const every = found.of < found.steps ? `; ${found.of} of ${plural(found.steps, "step")}, evenly spaced` : "";
    progress.textContent = ctx.run(name).state === "gone" ? ctx.run(name).detail : !found.of ? "This run has no training samples yet. Only RL writes them." : found.done < found.of ? `reading samples: ${found.done} of ${plural(found.of, "step")} …` : `from the samples of ${plural(found.of, "step")}${every}`;
  };
  const more = async () => {
    while (found.done < found.of && charts.isConnected && !isFile) {
      found = await get(`runs/${run.id}/diagnostics`);
      draw();
    }
  };
  draw();
  const last = run.samples?.train?.[1];
  return {
    run, title: `diagnostics, ${run.name}`,
    element: h("div", {}, h("div", { class: "dim" }, run.name), h("h1", {}, "Diagnostics"),
      h("p", {}, "What the policy is rewarded for, step by step. These curves are evidence, not verdicts: click a point and read its samples."), progress,
      problems,
      h("div", { class: "toolbar" }, h("label", {}, "smoothing ", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: share, oninput: (event) => { share = Number(event.target.value); draw(); } }))),
      charts, last !== undefined ? h("p", {}, "To measure the rewards themselves, audit the samples of a step: the command is at the end of ", h("a", { href: `#/step/${encodeURIComponent(run.name)}/train/${last}` }, "each step's page"), ".") : null),
    shown: more,
    async refresh() {
      [found, metrics] = await Promise.all([get(`runs/${run.id}/diagnostics`), get(`runs/${run.id}/metrics`)]);
      draw();
      await more();
    },
  };
}

function sections(ctx, run, of, metrics) {
  const weights = Object.fromEntries((run.rewards || []).map((reward) => [reward.label, reward.weight]));
  const colours = Object.fromEntries((run.rewards || []).map((reward, i) => [reward.label, seriesColour(i + 1)]));
  const colour = (label, i) => colours[label] || seriesColour(i + 1);
  const pick = (split) => (_, x) => ctx.goToStep(run, split, x);
  const line = (name, series, more = {}) => ({ name, x: series?.x || [], y: series?.y || [], colour: seriesColour(0), ...more });
  const chart = (title, note, series, more = {}) => (series.some((one) => one.x.length) ? lineChart({ title, note, series, share, onPick: pick("train"), ...more }) : null);
  const parts = Object.keys(of).filter((n) => n.startsWith("part/")).map((n) => n.slice(5)).filter((n) => n !== "unnormalised" && (n in weights || !Object.keys(weights).length));
  const measured = parts.filter((n) => weights[n] === 0), trained = parts.filter((n) => weights[n] !== 0);
  // A single trained component is the total: drawn once.
  const shown = trained.length === 1 ? measured : parts;
  const sets = [
    ["Reward and its components", [
      measured.length && shown === measured ? null : chart(shown.length ? "components and the total" : "reward", shown.length ? "Which component makes the total rise? One that rises alone, while others fall, is what the policy has found." : "Mean over the samples of a step.", [line("total", of.reward), ...shown.map((n, i) => line(weights[n] === 0 ? `${n} (only measured)` : n, of[`part/${n}`], { colour: colour(n, i), dashed: weights[n] === 0 }))]),
      measured.length ? chart("trained reward against measured ones", "Rewards of weight 0 are not trained on. If the total keeps rising while they fall, the policy optimises the reward, not the task.", [line("total", of.reward), ...measured.map((n, i) => line(n, of[`part/${n}`], { colour: colour(n, i), dashed: true }))]) : null,
      metrics["val/reward"] ? chart("validation", `Reward on prompts that it is not trained on.${measured.length ? " Measured rewards of weight 0 are dashed." : ""}`, [line("val/reward", metrics["val/reward"], { points: true }), ...shown.filter((n) => metrics[`val/parts/${n}`]).map((n, i) => line(n, metrics[`val/parts/${n}`], { colour: colour(n, i), dashed: weights[n] === 0, points: true }))], { onPick: pick("val") }) : null,
      shown.length && parts.length > 1 ? chart("component against total, within groups", "Correlation of each component with the total among samples of a prompt: what decides which sample is better?", shown.map((n, i) => line(n, of[`with total/${n}`], { colour: colour(n, i), dashed: weights[n] === 0 })), { bounds: [-1, 1], legend: true }) : null,
      parts.length > 1 ? chart("groups in which a component differs", "Share of groups. Where all samples of a prompt get the same, a component has no say in which of them is better.", parts.map((n, i) => line(n, of[`signal/${n}`], { colour: colour(n, i), dashed: weights[n] === 0 })), { bounds: [0, 1], legend: true }) : null,
      chart("spread within groups", "Standard deviation among the samples of a prompt, mean over groups, before weights. The component with the largest, times its weight, decides most.", parts.map((n, i) => line(n, of[`group_std/${n}`], { colour: colour(n, i), dashed: weights[n] === 0 })), { legend: true }),
      ...Object.keys(of).filter((n) => n.startsWith("agreement/")).map((n) => chart(`judge against rule: ${n.slice(10)}`, "Correlation over the samples that both scored. A judge that disagrees more and more may have been fooled.", [line("correlation", of[n])], { bounds: [-1, 1] })),
    ]],
    ["Length and form", [
      chart("length", "Tokens of a response, or characters where tokens are not known.", [line("mean length", of.length)]),
      chart("reward and length, within groups", "Correlation among samples of the same prompt. Near +1, longer answers are the better ones, whatever they say.", [line("total", of["length correlation"]), ...shown.map((n, i) => line(n, of[`length correlation/${n}`], { colour: colour(n, i), dashed: weights[n] === 0 }))], { bounds: [-1, 1] }),
      chart("echo of the prompt", "How much of a response was copied, in runs of three words; and how many of the prompt's words it repeats.", [line("copied", of["copied from the prompt"]), line("prompt's words repeated", of["words of the prompt"], { colour: seriesColour(1) })], { bounds: [0, 1] }),
      chart("variety", "distinct-2: different word pairs among all word pairs of a step. Duplicates: the same response twice in a group. Both show a policy that repeats itself.", [line("distinct-2", of["distinct-2"]), line("duplicates", of.duplicates, { colour: seriesColour(1) })], { bounds: [0, 1] }),
    ]],
    ["What goes wrong", [
      chart("malformed, failed, truncated", "Shares of the samples. Malformed is the policy's fault, failed any reward's, truncated the length limit's.", ["malformed", "failed", "truncated"].map((n, i) => line(n, of[n], { colour: seriesColour(i) })), { bounds: [0, 1] }),
      chart("groups without signal", "Share of groups in which all rewards are equal: too easy, too hard, or a reward that cannot tell answers apart.", [line("share", of["groups without signal"])], { bounds: [0, 1] }),
    ]],
    ["The policy", [
      chart("entropy", "How undecided the policy is, per token. Near zero it always writes the same.", [line("entropy", metrics.entropy)]),
      chart("KL", "How far the policy is from its reference or from the weights that sampled.", ["kl", "kl_penalty", "policy_kl", "ref_kl"].filter((n) => metrics[n]).map((n, i) => line(n, metrics[n], { colour: seriesColour(i) })), { legend: true }),
      chart("mismatch", "Distance of the sampler's log-probs from the trainer's; large values mean that it trains on something it did not sample.", ["mismatch", "mismatch_kl"].filter((n) => metrics[n]).map((n, i) => line(n, metrics[n], { colour: seriesColour(i) }))),
    ]],
  ];
  return sets.map(([title, all]) => [title, all.filter(Boolean)]).filter(([, all]) => all.length).map(([title, all]) => h("section", {}, h("h2", {}, title), h("div", { class: "charts" }, all)));
}
