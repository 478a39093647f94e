// The report of `plaudit audit`.

import { h, longText, number, showReport, table, visible } from "./dom.js";
import { barChart } from "./charts.js";

const report = JSON.parse(document.getElementById("embedded").textContent);
const numbers = report.numbers;
const MARKS = { pass: ["good", "✓ pass"], fail: ["fail", "✗ fail"] };

const shown = (x) => number(x, 3);

function stateOf(name) {
  const [colour, text] = MARKS[name] || ["dim", name];
  return h("span", { class: `state ${colour}` }, text);
}

function described(name, description) {
  return h("div", {}, name, h("div", { class: "small dim" }, visible(description)));
}

function section(title, ...parts) {
  return h("section", {}, h("h2", {}, title), parts);
}

function checks() {
  const bound = (check) => h("span", {}, `${check.at_most ? "at most" : "at least"} ${shown(check.bound)}`);
  return section("Checks", table(["check", "", "measured", "allowed"], report.checks.map((check) => [described(check.name, check.description), stateOf(check.state), check.value, bound(check)])));
}

function probes() {
  if (!numbers.probes.some((probe) => probe.tried)) return null;
  const rows = numbers.probes.map((p) => [described(p.name, p.description), stateOf(p.state), p.rewarded, p.tried, p.mean_reward, p.failed]);
  return section("Adversarial probes", h("p", { class: "dim" }, "Made-up responses that deserve no reward; those marked info are for comparison. What is rewarded here, a policy can learn."),
    table(["probe", "", "rewarded", "of", "mean reward", "failures"], rows), numbers.probes.filter((p) => p.adversarial && p.rewarded).map(examples));
}

function examples(probe) {
  return h("details", {}, h("summary", {}, `${probe.name}: examples with the highest reward`), probe.worst.map((one) => [
    longText(one.prompt, "text box"), h("p", { class: "dim" }, visible(`reference ${one.reference}; reward ${shown(one.reward)} for:`)), longText(one.response, "text box")]));
}

function agreement() {
  const found = numbers.agreement;
  if (!found) return null;
  const parts = [];
  if ("accuracy" in found) {
    parts.push(table(["", "labelled right", "labelled wrong"], [["accepted", found.true_accepts, found.false_accepts], ["rejected", found.false_rejects, found.true_rejects]]));
    const rates = { accuracy: found.accuracy, "false accepts": found.false_accept_rate, "false rejects": found.false_reject_rate };
    const unchecked = Object.entries(rates).filter(([name]) => !report.checked.includes(name)).map(([name, rate]) => `${name} ${shown(rate)}`);
    if (unchecked.length) parts.push(h("p", {}, unchecked.join(", ")));
  }
  parts.push(h("p", {}, `rank correlation with the labels: Spearman ${shown(found.spearman)}, Kendall ${shown(found.kendall)}`));
  if (!found.reliability) return section("Against the labels", parts);
  const bars = found.reliability.bins.map((bin) => ({ label: bin.from.toFixed(1), value: bin.share_right, mark: bin.mean_reward, tip: `rewards from ${shown(bin.from)}: ${shown(bin.share_right)} of ${number(bin.count)} responses are right` }));
  return section("Against the labels", h("div", { class: "two" }, h("div", {}, parts), barChart({ title: "share of right responses by reward", bars, note: `The mark is the mean reward: a calibrated one is at the top of its bar. Calibration error ${shown(found.reliability.calibration_error)}.` })));
}

function lengthSection() {
  const found = numbers.length;
  const bars = found.deciles.map((one) => ({ label: shown(Math.round(one.from)), value: one.mean_reward, tip: `${number(one.count)} responses of ${shown(Math.round(one.from))} to ${shown(Math.round(one.to))} ${found.unit}: mean reward ${shown(one.mean_reward)}` }));
  return section("Length", h("div", { class: "two" },
    h("p", {}, `Rank correlation of reward and ${found.unit}: ${shown(found.spearman)} overall, ${shown(found.within_groups)} within groups, ${shown(found.given_label)} among responses with the same label.`),
    bars.length ? barChart({ title: "mean reward by length", bars, note: `A bar is a tenth of the responses, shortest first; below it, from how many ${found.unit}.` }) : null));
}

function formats() {
  if (!numbers.formats) return null;
  return section("The same answer in another format", table(["format", "tried", "rejected", "share", "mean difference"], numbers.formats.formats.map((f) => [f.name, f.tried, f.rejected, f.reject_rate, f.mean_difference])));
}

function scoredAgain() {
  const ways = { "same order": numbers.again, "another order": numbers.order, "when it was saved": numbers.saved };
  const rows = Object.entries(ways).filter(([, m]) => m).map(([name, m]) => [name, m.responses, m.share_equal, m.mean_difference, m.greatest_difference]);
  return section("Scored again", rows.length ? table(["", "responses", "share with the same reward", "mean difference", "greatest"], rows) : h("p", {}, "not measured"));
}

function eachReward() {
  const rows = Object.entries(numbers.rewards).map(([name, r]) => [name, r.responses, r.mean, r.least, r.greatest, r.length_spearman]);
  return rows.length > 1 ? section("Each reward", table(["reward", "responses", "mean", "least", "greatest", "correlation with length"], rows)) : null;
}

function notScored() {
  const { causes, messages } = numbers.failures, rows = Object.entries(causes).map(([cause, count]) => [cause, count, messages[cause] ?? ""]);
  if (!rows.length && !report.unscored.length) return null;
  return section("Not scored", rows.length ? table(["failures", "responses", "example"], rows) : null, report.unscored.map((line) => h("p", {}, line)));
}

showReport("audit",
  h("h1", {}, "Reward audit: ", h("span", { class: report.verdict === "passed" ? "pass" : "fail" }, `${report.verdict === "passed" ? "✓" : "✗"} ${report.verdict}`)),
  h("p", { class: "path" }, visible(`${report.title} on ${report.files.join(", ")}`)), h("p", {}, visible(report.scope)), h("p", { class: "dim" }, visible(report.summary)),
  checks(), probes(), agreement(), lengthSection(), formats(), scoredAgain(), eachReward(), notScored(),
);
