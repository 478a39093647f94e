// Elements, and text that a model wrote: always inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, one] of Object.entries(value)) element.style.setProperty(property, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Characters that a terminal would obey, or that hide or reorder text, are written out: ⟨U+202E⟩.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/;
const HIDDEN_RUNS = new RegExp(HIDDEN.source, "g");
const SHOWN = 20000;

export function visible(text) {
  return text.replace(HIDDEN_RUNS, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// A text in full; a very long one in steps, so that the page stays quick.
export function longText(text, className = "text") {
  const element = h("div", { class: className, dir: "auto" });
  let end = 0;
  const more = h("button", { type: "button", class: "small" });
  const show = (upTo) => {
    const part = text.slice(end, upTo);
    end = Math.min(upTo, text.length);
    more.remove();
    appendVisible(element, part);
    if (end < text.length) {
      more.textContent = `show more (${(text.length - end).toLocaleString("en")} of ${text.length.toLocaleString("en")} characters left)`;
      element.append(more);
    }
  };
  more.addEventListener("click", () => show(end === SHOWN ? end + 10 * SHOWN : text.length));
  show(SHOWN);
  return element;
}

function appendVisible(element, text) {
  let start = 0;
  HIDDEN_RUNS.lastIndex = 0;
  for (const found of text.matchAll(HIDDEN_RUNS)) {
    if (found.index > start) element.append(text.slice(start, found.index));
    element.append(h("span", { class: "hidden-char", title: "a character that cannot be seen" }, visible(found[0])));
    start = found.index + found[0].length;
  }
  element.append(text.slice(start));
}

// Columns of numbers are right-aligned; cells are texts, numbers, elements or null. A table that is too wide scrolls by itself.
export function table(heads, rows) {
  const numeric = heads.map((_, i) => rows.every((row) => row[i] === null || typeof row[i] === "number"));
  const cell = (tag, value, i) => h(tag, { class: numeric[i] ? "n" : null }, tag === "td" && numeric[i] ? number(value, 3) : typeof value === "string" ? visible(value) : value);
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head, i) => cell("th", head, i)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, i) => cell("td", value, i)))))));
}

// A page of its own, made by a command: the bar on top and the parts below it.
export function showReport(command, ...parts) {
  document.body.className = "report";
  document.getElementById("top").append(h("div", { class: "inner" }, h("span", { class: "brand" }, h("b", {}, "plaudit"), ` ${command}`)));
  document.getElementById("main").append(...parts.flat().filter(Boolean));
}

// Numbers

// Of a part of an address.
export function wholeNumber(text, what) {
  if (!/^\d{1,15}$/.test(text ?? "")) throw new Error(text ? `${text} is not the number of a ${what}.` : `This address has no number of a ${what}.`);
  return Number(text);
}

export function number(x, digits = 4) {
  if (!Number.isFinite(x)) return "–";
  if (Number.isInteger(x) && Math.abs(x) < 1e9) return x.toLocaleString("en");
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-3) return x.toExponential(2).replace("e+", "e");
  return size >= 100 ? x.toFixed(1) : String(Number(x.toPrecision(digits)));
}

export function percent(x) {
  if (x === null || x === undefined) return "–";
  return `${(100 * x).toFixed(x > 0 && x < 0.0995 ? 1 : 0)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = seconds / 60, hours = minutes / 60;
  if (hours >= 48) return `${(hours / 24).toFixed(1)} d`;
  if (hours >= 1) return `${Math.floor(hours)} h ${Math.round(minutes % 60)} min`;
  return minutes >= 1 ? `${Math.floor(minutes)} min ${Math.round(seconds % 60)} s` : `${Math.round(seconds)} s`;
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

// Rewards as colour: low to high by orange, grey, blue.

export function rewardColour(value, low, high) {
  if (value === null || value === undefined) return "transparent";
  const share = high > low ? (value - low) / (high - low) : 0.5;
  const [from, to, part] = share < 0.5 ? ["--low", "--none", share * 2] : ["--none", "--high", share * 2 - 1];
  return `color-mix(in oklab, var(${to}) ${Math.round(100 * part)}%, var(${from}))`;
}

export function seriesColour(index) {
  const colour = `var(--c${index % 8})`;
  return index < 8 ? colour : `color-mix(in oklab, ${colour} 55%, var(--ink))`;
}
