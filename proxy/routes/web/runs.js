// Curves over updates or time, versions with their reloads, and two versions side by side.
import {card, facts, make, moment, number, optional, request, samples, seconds, select, status, table} from "./page.js";
import {chart} from "./chart.js";
import {readiness} from "./overview.js";

const UPDATES = 500, TASKS = 6, REASONS = 5;
const share = (part, ...whole) => part === undefined ? NaN : part / whole.reduce((sum, each) => sum + (each ?? 0), 0);

// Title, whether the overview shows it, and its series: [name, value of an update].
const CHARTS = [
  ["Staleness", true, [["mean", (m) => m.staleness_mean], ["max", (m) => m.staleness_max]]],
  ["Entropy", true, [["entropy", (m) => m.entropy]]],
  ["KL and clipped share", false, [["KL", (m) => m.kl], ["clipped", (m) => m.clip_fraction]]],
  ["Gradient norm", false, [["norm", (m) => m.grad_norm]]],
  ["Loss", false, [["loss", (m) => m.loss]]],
  ["Trained tokens per second", false, [["while training", (m) => m.tokens / m.seconds], ["with waiting", (m) => m.tokens / (m.seconds + (m.waited_seconds ?? 0) + (m.held_seconds ?? 0))]]],
  ["Idle share of trainer and engines", false, [["engines", (m, each) => each.engine_idle_share], ["trainer waits for groups", (m) => share(m.waited_seconds, m.waited_seconds, m.held_seconds, m.seconds)], ["trainer holds back", (m) => share(m.held_seconds, m.waited_seconds, m.held_seconds, m.seconds)]]],
  ["Groups", false, [["claimed", (m) => m.num_groups], ["refused", (m) => m.num_refused_groups], ["equal rewards", (m) => m.num_uniform_groups], ["stale", (m) => m.num_stale_groups]]],
  ["Gap between trainer and engine logprobs", false, [["mean", (m) => m.logprob_gap], ["max", (m) => m.logprob_gap_max]]],
];

const finite = (value) => Number.isFinite(value) ? value : NaN;
const heldOut = (version) => version?.metrics?.eval?.reward_mean ?? version?.metrics?.reward_held_out;

export async function learningData() {
  const [versions, updates] = await Promise.all([everyVersion(), optional(`v1/updates/summaries?limit=${UPDATES}`, {data: []})]);
  return {versions, updates: updates.data};
}

// Without updates, as for versions that were published by hand, the versions' own metrics are the points.
export function learningCharts({versions, updates}, {isWhole = true, x = "update"} = {}) {
  const byVersion = new Map(versions.map((each) => [each.version, each]));
  const points = updates.length ? updates : [...versions].reverse().filter((each) => each.version > 0)
    .map((each) => ({...each, update_id: each.version, policy_version: each.version, reward: null, by_task: {}, by_name: {}, dropped: {}}));
  const isTime = x === "time", position = (each) => isTime ? new Date(each.created_at) / 1000 : x === "version" ? each.policy_version : each.update_id;
  const line = (value) => points.map((each) => [position(each), finite(value(each) ?? NaN)]);
  const held = points.filter((each, at) => points.findIndex((other) => other.policy_version === each.policy_version) === at);
  const add = (title, series) => card(title, chart(title, series, {x, isTime}));
  const shown = [add("Reward", [["train", line((each) => each.reward?.mean ?? each.metrics?.reward_mean)],
    ["held out", held.map((each) => [position(each), finite(heldOut(byVersion.get(each.policy_version)) ?? NaN)])]])];
  for (const [title, isBrief, series] of CHARTS) {
    if (isWhole || isBrief) shown.push(add(title, series.map(([name, value]) => [name, line((each) => value(each.metrics ?? {}, each))])));
  }
  if (isWhole) shown.push(...detailCharts(points, line, add, byVersion));
  return make("div", {className: "charts"}, ...shown);
}

function detailCharts(points, line, add, byVersion) {
  const counted = (field) => {
    const sizes = new Map();
    for (const each of points) for (const [name, value] of Object.entries(each[field])) sizes.set(name, (sizes.get(name) ?? 0) + (value.num_sessions ?? value));
    return [...sizes].sort((first, second) => second[1] - first[1]).map(([name]) => name);
  };
  const repeated = counted("by_task").filter((task) => points.filter((each) => each.by_task[task]).length > 1);
  const names = counted("by_name"), reasons = counted("dropped").slice(0, REASONS), shown = [];
  if (repeated.length) shown.push(add("Reward by task", repeated.slice(0, TASKS).map((task) => [task, line((each) => each.by_task[task]?.mean)])));
  if (names.length > 1) shown.push(add("Reward by name", names.slice(0, TASKS).map((name) => [name, line((each) => each.by_name[name]?.mean)])));
  if (reasons.length) shown.push(add("Dropped groups by reason", reasons.map((reason) => [reason, line((each) => each.dropped[reason] ?? 0)])));
  if (points.some((each) => byVersion.get(each.policy_version)?.arms)) {
    const arm = (name, field) => [name, line((each) => byVersion.get(each.policy_version)?.arms?.[name][field])];
    shown.push(add("Canary arms: mean reward", [arm("canary", "mean_reward"), arm("control", "mean_reward")]),
      add("Canary arms: share of broken turns", [arm("canary", "broken_share"), arm("control", "broken_share")]));
  }
  shown.push(add("Pause of the engines, seconds", [["reload", line((each) => byVersion.get(each.policy_version)?.reload_seconds)]]));
  return shown;
}

async function everyVersion() {
  const found = [];
  for (let after = "", more = true; more;) {
    const page = await request(`v1/policies?limit=1000${after}`);
    found.push(...page.data.map((each) => ({...each, isPinned: each.version === page.pinned_version})));
    more = page.has_more;
    after = `&after=${page.data.at(-1)?.version}`;
  }
  return found;
}

export function versionTable(versions) {
  return table(["version#", "status", "train reward#", "held out#", "since", "pause#", "path, or error"], versions.map((each) => [number(each.version),
    make("span", {}, status(each.status), each.isPinned ? " (pinned)" : "", each.on_disk === false ? " (files removed)" : ""),
    number(each.metrics?.reward_mean), number(heldOut(each)), moment(each.activated_at ?? each.created_at), seconds(each.reload_seconds), each.error ?? each.path]));
}

function flat(metrics) {
  return Object.fromEntries(Object.entries(metrics).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(flat(value)).map(([inner, found]) => [`${name}/${inner}`, found]) : [[name, value]]));
}

function comparison(first, second) {
  const [before, after] = [flat(first.metrics), flat(second.metrics)];
  const isNumber = (value) => typeof value === "number";
  const rows = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort().map((name) => [name,
    ...[before[name], after[name]].map((value) => isNumber(value) ? number(value) : JSON.stringify(value) ?? ""),
    isNumber(before[name]) && isNumber(after[name]) ? number(after[name] - before[name]) : ""]);
  return table(["metric", `version ${first.version}#`, `version ${second.version}#`, "difference#"], rows);
}

function chooser(versions, first, second) {
  const numbers = versions.map((each) => String(each.version));
  const form = make("form", {className: "filters"}, select("from", "From version", numbers, String(first)), select("to", "To version", numbers, String(second)), make("button", {}, "Compare"));
  form.onsubmit = (event) => { event.preventDefault(); location.hash = `runs/${form.from.value}/${form.to.value}`; };
  return form;
}

let chosenX = "update";
const AXES = ["update", "version", "time"];

// Only one trainer's updates are drawn: curves of two runs on one store are compared by choosing the other.
let chosenTrainer = null;

// Calls of each arm and results of canaries, since the proxy started.
function canaries(found) {
  const of = (name, label) => found.filter((sample) => sample.name === name && sample.value).map((sample) => [`${label} ${Object.values(sample.labels)[0]}`, number(sample.value)]);
  const rows = [...of("turnwise_canary_calls_total", "calls of the arm"), ...of("turnwise_canaries_total", "canaries"), ...of("turnwise_reloads_total", "reloads")];
  return rows.length ? card("Canaries and reloads since the proxy started", facts(rows)) : null;
}

export async function runs(from, to) {
  await readiness();
  const [{versions, updates}, exposition] = await Promise.all([learningData(), request("metrics")]);
  const trainers = [...new Set(updates.map((each) => each.trainer_id))];
  if (!trainers.includes(chosenTrainer)) chosenTrainer = trainers.at(-1) ?? null;
  const charts = make("div", {}), draw = () => charts.replaceChildren(
    learningCharts({versions, updates: updates.filter((each) => each.trainer_id === chosenTrainer)}, {x: chosenX}));
  const axis = make("form", {className: "filters"}, select("x", "Horizontal axis", AXES, chosenX), trainers.length > 1 ? select("trainer", "Run of trainer", trainers, chosenTrainer) : null);
  axis.onsubmit = (event) => event.preventDefault();
  axis.onchange = () => { chosenX = axis.x.value; chosenTrainer = axis.trainer?.value ?? chosenTrainer; draw(); };
  draw();
  const trained = versions.filter((each) => each.version > 0);
  const [first, second] = [from === undefined ? trained.at(-1)?.version ?? 0 : Number(from), to === undefined ? trained[0]?.version ?? 0 : Number(to)];
  const find = (version) => versions.find((each) => each.version === version);
  return {
    content: [make("h2", {}, `Over ${number(updates.length)} updates and ${number(trained.length)} policy versions`), axis, charts,
      make("h2", {}, "Versions and reloads"), versionTable(versions.slice(0, 20)), canaries(samples(exposition)),
      make("h2", {}, "Two versions compared"), chooser(versions, first, second),
      find(first) && find(second) ? comparison(find(first), find(second)) : make("p", {className: "quiet"}, "No such version.")],
    wants: (event) => event.kind === "update" || event.kind === "policy",
  };
}
