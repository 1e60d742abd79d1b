// What all views share: elements, requests with the key, numbers. What is stored is shown as text, never as markup.
const GOOD = new Set(["active", "exact", "open", "ready", "trained", "ok", "ended"]);
const BAD = new Set(["failed", "error", "down", "blocked", "died", "silent"]);
const WARN = new Set(["canary", "aborted", "untrainable", "expired", "dropped"]);
let key = "", numKeys = 0;

// What was read with another key, or without one, is not shown any more.
export const setKey = (value) => { key = value; numKeys++; };
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

// An error of this script means that an answer was not of the form that it expects, such as another server's.
const reason = (error) => error instanceof TypeError || error instanceof SyntaxError ? `An answer is not of the form that this page reads: ${error.message}` : error?.message ?? "";

// Shows an error above the view, or removes the last one.
export function showProblem(error) {
  byId("problem").textContent = reason(error);
  if (error instanceof Unreachable) byId("state").replaceChildren(make("span", {className: "bad"}, "no answer"));
}

const JSON_TYPE = "application/json";

export async function request(path, {expected = JSON_TYPE, ...options} = {}) {
  const headers = {...authorization(), ...(options.body ? {"content-type": JSON_TYPE} : {})};
  const response = await fetch(path, {cache: "no-store", ...options, headers}).catch(() => { throw new Unreachable(); });
  if (response.status === 401) byId("login").hidden = false;
  const type = (response.headers.get("content-type") ?? "").split(";")[0];
  const body = type === JSON_TYPE ? await response.json() : expected === "image/*" ? await response.blob() : await response.text();
  if (body?.error) throw new Error(body.error.message);
  if (type !== expected && !(expected === "image/*" && type.startsWith("image/"))) throw new Error(`${path} was answered with status ${response.status} and ${type || "no content type"}, not ${expected}`);
  return body;
}

// Reads all pages of a list; the next page comes after the last row's `id`.
export async function everyPage(path, id) {
  const pages = [];
  for (let last = null; ;) {
    const page = await request(last === null ? path : `${path}&after=${encodeURIComponent(last)}`), next = page.data.at(-1)?.[id];
    pages.push(page);
    if (!page.has_more) return pages;
    if (next === undefined || next === last) throw new Error(`${path} was answered with pages that do not end`);
    last = next;
  }
}

// Returns a function that reads at most once in so many milliseconds, and gives its last result until then.
export function remembered(everyMs, read) {
  let at = 0, last = null, readWith = 0;
  return async () => {
    if (Date.now() - at > everyMs || readWith !== numKeys) { readWith = numKeys; last = await read(); at = Date.now(); }
    return last;
  };
}

// Offers a text as a file: what needs a key cannot be a link.
export function download(name, content) {
  const address = URL.createObjectURL(new Blob([content]));
  make("a", {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

// A route that an older release or the key's role does not have gives the fallback instead of an error.
export async function optional(path, fallback) {
  return request(path).catch(() => fallback);
}

export const number = (value) => value === null || value === undefined ? "" : Number(value).toLocaleString("en", {maximumFractionDigits: 4}).replace(/^-0$/, "0");
export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
export const time = (value) => value ? new Date(value).toLocaleString() : "";
// A time in a table stays on one line: in a narrow window each row would be two lines high.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
// A duration in one unit, as people say it.
export function duration(length) {
  if (length < 10) return `${number(Math.round(10 * length) / 10)} s`;
  const [size, unit] = UNITS.find(([least]) => length >= least);
  return `${number(Math.round(length / size))} ${unit}`;
}
export const ago = (value) => make("span", {className: "moment", title: time(value)}, `${duration(Math.max(0, Math.round((Date.now() - new Date(value)) / 1000)))} ago`);
export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const mean = (values) => values.length ? sum(values) / values.length : null;
export const seconds = (value) => value === null || value === undefined ? "" : `${number(value)} s`;
export const status = (value) => make("span", {className: GOOD.has(value) ? "good" : BAD.has(value) ? "bad" : WARN.has(value) ? "warn" : ""}, value ?? "");
export const link = (hash, text) => make("a", {href: `#${hash}`, title: text.length > 30 ? text : ""}, text);
// A link to the sessions with a value in a field; empty without one.
export const filtered = (field, value) => value ? link(`sessions/${new URLSearchParams({[field]: value})}`, value) : "";
export const lasted = (session) => duration((new Date(session.ended_at ?? session.last_active_at) - new Date(session.created_at)) / 1000);
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

// A command to copy, in the text of a view that has nothing to show yet.
export const empty = (before, command, after = "") => make("p", {className: "empty"}, before, " ", make("code", {}, command), after);

// A form without an address of its own.
export function makeForm(className, act, ...children) {
  const form = make("form", {className}, ...children);
  form.onsubmit = (event) => { event.preventDefault(); act(form); };
  return form;
}

// A button that asks before it acts, and shows why it could not.
export function actionButton(label, question, act) {
  const button = make("button", {type: "button"}, label);
  button.onclick = async () => {
    if (question && !window.confirm(question)) return;
    button.disabled = true;
    try { await act(); } catch (error) { showProblem(error); }
    button.disabled = false;
  };
  return button;
}

const known = (pairs) => pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);

// Facts in a row, as far as there is room.
export const inlineFacts = (pairs) => make("dl", {className: "inline"}, ...known(pairs).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));

export function facts(pairs) {
  return make("dl", {}, ...known(pairs).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

export const card = (title, ...content) => make("section", {className: "card"}, make("h2", {}, title), ...content);
export const tally = (counts) => facts(Object.entries(counts).map(([name, count]) => [status(name), number(count)]));

export function text(content) {
  if (typeof content === "string") return content;
  const parts = Array.isArray(content) ? content.filter((part) => !IMAGE.test(part?.image_url?.url ?? "")) : null;
  return parts?.every((part) => part?.type === "text") ? parts.map((part) => part.text).join("\n") : content ? JSON.stringify(content, null, 2) : "";
}

const IMAGE = /^image:([0-9a-f]{64})$/;
const imagesOf = (content) => (Array.isArray(content) ? content : []).map((part) => IMAGE.exec(part?.image_url?.url ?? "")?.[1]).filter(Boolean);

// A small picture of a stored image. It needs the viewer's key, so it is read and shown as a data URL.
export function thumbnail(digest) {
  const picture = make("img", {className: "thumbnail", alt: `image ${digest.slice(0, 8)}`, title: digest});
  const shown = (blob) => { const reader = new FileReader(); reader.onload = () => { picture.src = reader.result; }; reader.readAsDataURL(blob); };
  request(`v1/images/${digest}`, {expected: "image/*"}).then(shown, (error) => { picture.alt = error.message; });
  return picture;
}

const LINE = 90, LONG = 1500;
const whole = (content) => make("pre", {dir: "auto", ...(content.length > LONG ? {className: "long", tabIndex: 0} : {})}, content);

// One line that opens to the whole text; a text of one line has nothing to open.
function folded(label, content, line = content.trim()) {
  const head = [make("span", {className: "quiet"}, label), " ", make("bdi", {className: "clip"}, line.replace(/\s+/g, " ").slice(0, 2 * LINE))];
  return line.length <= LINE && !line.includes("\n") ? make("p", {className: "fold"}, ...head) : make("details", {className: "fold"}, make("summary", {}, ...head), whole(content));
}

// A tool's arguments are JSON in a string, if the model wrote them well.
function toolCall({function: {name, arguments: given}}) {
  try {
    const values = typeof given === "string" ? JSON.parse(given) : given ?? {};
    return folded(`calls ${name}`, JSON.stringify(values, null, 2), JSON.stringify(values));
  } catch {
    return folded(`calls ${name}`, String(given));
  }
}

// A message as it was said: the text is shown, and what a person reads only at times is folded.
export function message(said) {
  const {role = "assistant", content, reasoning, tool_calls: calls, tool_call_id: callId, ...others} = said;
  const isPlain = Array.isArray(calls) && calls.every((call) => call?.function?.name);
  const unknown = Object.fromEntries(Object.entries(isPlain || calls === undefined || calls === null ? others : {...others, tool_calls: calls}).filter(([, value]) => value !== null && value !== undefined));
  const words = text(content), isFolded = role === "system" || role === "developer" || role === "tool";
  return make("div", {className: `message ${isFolded ? "aside" : role}`},
    ...imagesOf(content).map(thumbnail), isFolded ? folded(role === "tool" ? "tool result" : role, words) : make("span", {className: "quiet who"}, role),
    reasoning ? folded("reasoning", reasoning) : null, words && !isFolded ? whole(words) : null,
    ...(isPlain ? calls : []).map(toolCall),
    Object.keys(unknown).length ? folded("other fields", JSON.stringify(unknown, null, 2)) : null);
}

// The proxy's metrics, which are in Prometheus' text format: [{name, labels, value}].
export async function readMetrics() {
  const exposition = await request("metrics", {expected: "text/plain"}), found = [];
  for (const [, name, labels, value] of exposition.matchAll(/^([a-z_]+)(?:\{(.*)\})? (\S+)$/gm)) {
    const named = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, label, given]) => [label, given.replace(/\\(.)/g, "$1")]);
    found.push({name, labels: Object.fromEntries(named), value: Number(value)});
  }
  return found;
}

export const total = (found, name, labels = {}) => sum(found.filter((sample) => sample.name === name && Object.entries(labels).every(([label, value]) => sample.labels[label] === value)).map((sample) => sample.value));

export async function readiness() {
  const ready = await request("readyz");
  byId("state").replaceChildren(ready.ready ? status("ready") : make("span", {className: "bad"}, "not ready"));
  return ready;
}

// Counts of a large tenant are not read for every view: then the page says when they were.
const STALE_MS = 5000;
export const countedAt = (counts) => Date.now() - new Date(counts.counted_at) > STALE_MS ? make("p", {className: "quiet"}, `Counted ${time(counts.counted_at)}`) : "";

// A cost by currency; nothing without prices.
export const money = (cost) => Object.entries(cost ?? {}).map(([currency, amount]) => `${amount} ${currency}`).join(" + ");

export const chip = (label, note) => make("a", {className: "chip", href: `#sessions/${new URLSearchParams({label})}`, title: note ?? ""}, label);

export const chips = (labels) => labels.length ? make("span", {}, ...labels.map((one) => chip(one.label, one.note))) : "";

// `own` is the served version of a named policy; that of the default one is the proxy's.
export function serving(ready, pinned, gain = "", own = null) {
  const engines = (ready.engines ?? []).map((engine, at) => [`engine ${at + 1}`,
    make("span", {}, status(engine.ready ? "ready" : "down"), engine.ready ? ", " : "", engine.ready ? shortName(engine.model) : "")]);
  // A reason has the card's whole width: one line of it, which opens to the rest.
  const opening = (label, words) => make("details", {className: "fold"}, make("summary", {}, label, words), whole(words));
  const reasons = (ready.engines ?? []).flatMap((engine, at) => engine.ready || !engine.error ? [] : [opening(make("span", {className: "quiet"}, `engine ${at + 1}: `), engine.error)]);
  const served = (own === null ? ready.policy_version : own.version) ?? null;
  const version = served !== null ? `version ${served}` : own === null ? "no version" : "no version of its own";
  const kept = pinned === null || pinned === undefined ? "" :
    make("p", {className: "warn"}, `Pinned to version ${pinned}: newer versions are not served until you follow the newest in `, link("runs", "Runs"), ".");
  return card("Serving", make("b", {}, version), kept, gain, facts([["store", status(ready.store)],
    ["exact continuation", ready.exact_continuation ? "yes" : make("span", {className: "warn"}, "no")], ...engines]), ...reasons,
    ready.engines_error ? opening(make("span", {className: "bad"}, "Engines: "), ready.engines_error) : null,
    ready.reload_error ? opening(make("span", {className: "bad"}, "Last reload: "), ready.reload_error) : null);
}

// The name of a model that is a directory is the directory's last part.
const shortName = (model) => make("span", {title: model ?? ""}, (model ?? "").split("/").filter(Boolean).at(-1) ?? "");

// What each trainer said last; one that waits for a time counts down to it.
export function trainerWords(trainers) {
  if (!trainers.length) return [empty("No trainer has reported.", "turnwise train --model DIR", " starts one.")];
  return trainers.map((each) => {
    const left = each.starts_at ? Math.max(0, Math.round((new Date(each.starts_at) - Date.now()) / 1000)) : null;
    return make("p", {}, ...(each.state === "running" ? [] : [status(each.state), each.text === each.state ? "" : ": "]), each.text === each.state ? "" : each.text, left === null ? "" : `, starts in ${left} s`, make("span", {className: "quiet"}, " (reported ", ago(each.reported_at), ")"));
  });
}
