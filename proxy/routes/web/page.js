// Elements, requests and numbers. What comes from the store is put into the page as text, never as markup.
const GOOD = new Set(["active", "exact", "open", "ready", "trained", "ok", "ended"]);
const BAD = new Set(["failed", "error", "down", "blocked", "died", "silent"]);
const WARN = new Set(["canary", "aborted", "untrainable", "expired", "dropped"]);
let key = "";

export const setKey = (value) => { key = value; };
export const byId = (id) => document.getElementById(id);

export function make(tag, properties, ...children) {
  const {dataset, attributes, ...rest} = properties ?? {};
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset ?? {});
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const authorization = () => key ? {authorization: `Bearer ${key}`} : {};

class Unreachable extends Error {
  constructor() { super("The proxy does not answer. What is shown below is of before."); }
}

// Shows an error above the view, or removes the last one.
export function showProblem(error) {
  byId("problem").textContent = error?.message ?? "";
  if (error instanceof Unreachable) byId("state").replaceChildren(make("span", {className: "bad"}, "no answer"));
}

export async function request(path, options = {}) {
  const headers = {...authorization(), ...(options.body ? {"content-type": "application/json"} : {})};
  const response = await fetch(path, {cache: "no-store", ...options, headers}).catch(() => { throw new Unreachable(); });
  const isJson = (response.headers.get("content-type") || "").includes("json");
  const body = isJson ? await response.json() : await response.text();
  if (body.error) throw new Error(body.error.message);
  return body;
}

// A route that an older release or the key's role does not have gives the fallback instead of an error.
export async function optional(path, fallback) {
  try { return await request(path); } catch { return fallback; }
}

export const number = (value) => value === null || value === undefined ? "" : Number(value).toLocaleString("en", {maximumFractionDigits: 4}).replace(/^-0$/, "0");
export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
export const time = (value) => value ? new Date(value).toLocaleString() : "";
// A time in a table stays on one line: in a narrow window each row would be two lines high.
export const moment = (value) => make("span", {className: "moment"}, time(value));
export const seconds = (value) => value === null || value === undefined ? "" : `${number(value)} s`;
export const status = (value) => make("span", {className: GOOD.has(value) ? "good" : BAD.has(value) ? "bad" : WARN.has(value) ? "warn" : ""}, value ?? "");
export const link = (hash, text) => make("a", {href: `#${hash}`, title: text.length > 30 ? text : ""}, text);
export const path = (...parts) => parts.map(encodeURIComponent).join("/");

export const select = (name, label, choices, chosen) => make("label", {}, label, make("select", {name}, ...choices.map((choice) => {
  const [value, text] = Array.isArray(choice) ? choice : [choice, choice || "any"];
  return make("option", {value, selected: value === chosen}, text);
})));

// A column whose name ends with # holds numbers.
export function table(columns, rows) {
  const cell = (tag, name, content) => make(tag, {className: name.endsWith("#") ? "number" : ""}, content);
  const head = make("tr", {}, ...columns.map((name) => Object.assign(cell("th", name, name.replace("#", "")), {scope: "col"})));
  const body = rows.map((row) => make("tr", {}, ...row.map((content, at) => cell("td", columns[at], content ?? ""))));
  return make("div", {className: "scroll", tabIndex: 0, role: "region", ariaLabel: columns.map((name) => name.replace("#", "")).join(", ")}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

// Facts in a row, as far as there is room.
export const inlineFacts = (pairs) => make("dl", {className: "inline"}, ...pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
  .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));

export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return make("dl", {}, ...known.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

export const card = (title, ...content) => make("section", {className: "card"}, make("h2", {}, title), ...content);
export const tally = (counts) => facts(Object.entries(counts).map(([name, count]) => [status(name), number(count)]));

export function text(content) {
  if (typeof content === "string") return content;
  const isText = Array.isArray(content) && content.every((part) => part?.type === "text");
  return isText ? content.map((part) => part.text).join("\n") : content ? JSON.stringify(content, null, 2) : "";
}

const toolCall = ({id, function: {name, arguments: given}}) => `(tool call) ${name}(${typeof given === "string" ? given : JSON.stringify(given)})${id ? `  ${id}` : ""}`;

export function message(said) {
  const {role, content, reasoning, tool_calls: calls, ...others} = said;
  const isPlain = Array.isArray(calls) && calls.every((call) => call?.function?.name);
  const unknown = isPlain || calls === undefined ? others : {...others, tool_calls: calls};
  const rest = Object.keys(unknown).length ? JSON.stringify(unknown, null, 2) : "";
  const shown = [reasoning ? `(reasoning) ${reasoning}` : "", text(content), ...(isPlain ? calls.map(toolCall) : []), rest].filter(Boolean).join("\n\n");
  return make("div", {}, make("span", {className: "quiet"}, role ?? "assistant"), make("pre", {dir: "auto", tabIndex: 0}, shown));
}

// Metrics in Prometheus' text format: [{name, labels, value}].
export function samples(exposition) {
  const found = [];
  for (const [, name, labels, value] of exposition.matchAll(/^([a-z_]+)(?:\{(.*)\})? (\S+)$/gm)) {
    const named = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, label, given]) => [label, given.replace(/\\(.)/g, "$1")]);
    found.push({name, labels: Object.fromEntries(named), value: Number(value)});
  }
  return found;
}
