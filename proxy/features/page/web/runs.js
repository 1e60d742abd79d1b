// Curves over updates or time; versions, the buttons that pin, roll back and undo that; what two versions replied.
import {actionButton, ago, card, empty, everyPage, facts, link, make, makeForm, mean, money, number, optional, path, plural, readMetrics, readiness, remembered, request, seconds, select, status, sum, table, trainerWords} from "./page.js";
import {chart} from "./chart.js";

const UPDATES = 500, TASKS = 6, REASONS = 5, REWARDED = 1000, MOST_POINTS = 24, REFRESH_MS = 15_000, COMPARED_SESSIONS = 500, COMPARED_TASKS = 30, SHOWN_VERSIONS = 20, MINUTE_MS = 60_000;
const meanReward = (found) => mean(found.map((each) => each.reward));
const share = (part, ...whole) => part === undefined ? NaN : part / sum(whole.map((each) => each ?? 0));

// Only logprobs under the version that sampled them: otherwise the distance includes what the policy has moved.
const compared = (name) => (m) => m.logprob_gap_coverage === 0 ? NaN : m[name];

// Title, whether the overview shows it, its series: [name, value of an update], and why no update may have a value.
const CHARTS = [
  ["Staleness", true, [["mean", (m) => m.staleness_mean], ["max", (m) => m.staleness_max]]],
  ["Entropy", true, [["entropy", (m) => m.entropy]]],
  ["KL and clipped share", false, [["KL", (m) => m.kl], ["clipped", (m) => m.clip_fraction]]],
  ["Gradient norm", false, [["norm", (m) => m.grad_norm]]],
  ["Trained share of the sampled tokens", true, [["share", (m) => m.trained_share]]],
  ["Loss", false, [["loss", (m) => m.loss]]],
  ["Trained tokens per second", false, [["while training", (m) => m.tokens / m.seconds], ["with waiting", (m) => m.tokens / (m.seconds + (m.waited_seconds ?? 0) + (m.held_seconds ?? 0))]]],
  ["Idle share of trainer and engines", false, [["engines", (m, each) => each.engine_idle_share], ["trainer waits for groups", (m) => share(m.waited_seconds, m.waited_seconds, m.held_seconds, m.seconds)], ["trainer holds back", (m) => share(m.held_seconds, m.waited_seconds, m.held_seconds, m.seconds)]]],
  ["Groups", false, [["claimed", (m) => m.num_groups], ["refused", (m) => m.num_refused_groups], ["equal rewards", (m) => m.num_uniform_groups], ["stale", (m) => m.num_stale_groups]]],
  ["Gap between trainer and engine logprobs", false, [["mean", compared("logprob_gap")], ["max", compared("logprob_gap_max")]],
    "No batch was compared under the version that sampled it: the gap is measured only there."],
];

const finite = (value) => Number.isFinite(value) ? value : NaN;
// The 95 % intervals of the evaluations of versions.
const intervals = (updates, byVersion, position) => updates.flatMap((each) => {
  const found = byVersion.get(each.policy_version)?.metrics?.eval;
  return Number.isFinite(found?.reward_margin) ? [[position(each), found.reward_mean - found.reward_margin, found.reward_mean + found.reward_margin]] : [];
});
const heldOut = (version) => version?.metrics?.eval?.reward_mean ?? version?.metrics?.reward_held_out;

// Rewards of groups of tasks, of live traffic, and of what is held out are no one curve: their tasks and graders differ.
const KINDS = {groups: "groups", singles: "single sessions", held_out: "held-out sessions"};
const kindOf = (each) => each.split === "eval" ? "held_out" : each.group_id === null ? "singles" : "groups";
const byKind = (found) => Object.keys(KINDS).map((kind) => [kind, found.filter((each) => kindOf(each) === kind)]).filter(([, own]) => own.length);

export const policyOf = (version) => version.policy ?? "default";

// The versions of one policy, and the updates that made them.
export function ofPolicy({versions, updates}, policy) {
  const own = versions.filter((each) => policyOf(each) === policy), numbers = new Set(own.map((each) => each.version));
  return {versions: own, updates: updates.filter((each) => numbers.has(each.policy_version))};
}

let chosenPolicy = null;

// A choice of one of several policies; that of the key is shown first. Nothing where there is one only.
export function policyChoice(versions, changed) {
  const names = [...new Set(["default", ...versions.map(policyOf)])];
  if (!names.includes(chosenPolicy)) chosenPolicy = names.includes(versions.keyPolicy) ? versions.keyPolicy : "default";
  if (names.length === 1) return {policy: chosenPolicy, form: ""};
  const form = makeForm("filters", () => {}, select("policy", "Policy", names, chosenPolicy));
  form.onchange = () => { chosenPolicy = form.policy.value; changed(); };
  return {policy: chosenPolicy, form};
}

export async function learningData() {
  const [versions, updates] = await Promise.all([everyVersion(), optional(`v1/updates/summaries?limit=${UPDATES}`, {data: []})]);
  return {versions, updates: updates.data};
}

// Without updates, as for versions that were published by hand, the versions' own metrics are the points.
export function learningCharts({versions, updates}, {isWhole = true, x = "update", more = []} = {}) {
  const byVersion = new Map(versions.map((each) => [each.version, each]));
  const points = updates.length ? updates : [...versions].reverse().filter((each) => each.version > 0)
    .map((each) => ({...each, update_id: each.version, policy_version: each.version, reward: null, by_task: {}, by_name: {}, dropped: {}}));
  const isTime = x === "time", position = (each) => isTime ? new Date(each.created_at) / 1000 : x === "version" ? each.policy_version : each.update_id;
  const line = (value) => points.map((each) => [position(each), finite(value(each) ?? NaN)]);
  const held = points.filter((each, at) => points.findIndex((other) => other.policy_version === each.policy_version) === at);
  const add = (title, series, none = "No update has this value: the algorithm does not compute it.") => card(title, chart(title, series, {x, isTime, none}));
  const kinds = ["groups", "singles"].filter((kind) => points.some((each) => each.by_kind?.[kind]));
  const trained = kinds.length > 1 ? kinds.map((kind) => [KINDS[kind], line((each) => each.by_kind?.[kind]?.mean)])
    : [["train", line((each) => each.reward?.mean ?? each.metrics?.reward_mean)]];
  const shown = [add("Reward", [...trained,
    ["held out", held.map((each) => [position(each), finite(heldOut(byVersion.get(each.policy_version)) ?? NaN)]), intervals(held, byVersion, position)]])];
  for (const [title, isBrief, series, none] of CHARTS) {
    if (isWhole || isBrief) shown.push(add(title, series.map(([name, value]) => [name, line((each) => value(each.metrics ?? {}, each))]), none));
  }
  if (isWhole) shown.push(...detailCharts(points, line, add, byVersion));
  return make("div", {className: "charts"}, shown[0], ...more, ...shown.slice(1));
}

// Rewards of the newest sessions over time, which need no trainer: means over equal times.
const newest = remembered(REFRESH_MS, () => optional(`v1/sessions?limit=${REWARDED}`, {data: []}));
const rewardedOf = async (policy) => (await newest()).data.filter((each) => each.reward !== null && (policy === undefined || policyOf(each) === policy)).reverse();
const endOf = (each) => new Date(each.ended_at ?? each.last_active_at);

// The mean reward of the last minute, and what was said last.
export async function lastMinute(policy, said) {
  const ended = (await rewardedOf(policy)).filter((each) => Date.now() - endOf(each) < MINUTE_MS);
  const kinds = byKind(ended), of = (kind, own) => kinds.length > 1 ? `${number(own.length)} ${kind === "groups" ? "sessions of groups" : KINDS[kind]}` : plural(own.length, "session");
  return card("Last minute", ...(kinds.length ? kinds.map(([kind, own]) => make("div", {}, make("b", {}, number(Number(meanReward(own).toPrecision(3)))), ` mean reward of ${of(kind, own)}`)) : [make("p", {className: "quiet"}, "No session ended with a reward.")]),
    said ? make("p", {className: "said"}, link(`session/${path(said.session_id)}`, said.summary.first_message ?? said.session_id), " ", said.summary.last_reply ? `→ ${said.summary.last_reply}` : make("span", {className: "quiet"}, "waits for its first reply")) : "");
}

export async function rewardChart(policy) {
  const rewarded = (await rewardedOf(policy)).filter((each) => each.split === "train");
  const times = rewarded.map((each) => endOf(each) / 1000), first = Math.min(...times);
  const means = (own) => { // sessions that are held out are evaluations, with intervals, of a version
    const found = own.map((each) => ({at: endOf(each) / 1000, reward: each.reward})), width = (Math.max(...times) - first) / MOST_POINTS || 1;
    const parts = Map.groupBy(found, (each) => Math.min(MOST_POINTS - 1, Math.floor((each.at - first) / width)));
    return [...parts.values()].map((part) => [Math.round(Math.max(...part.map((each) => each.at))), meanReward(part)]).sort(([one], [other]) => one - other);
  };
  if (!rewarded.length) return card("Reward of sessions", empty("No session has a reward. Give one:", `curl ${location.origin}/v1/rewards -H 'content-type: application/json' -d '{"session_id": "…", "value": 1}'`));
  const kinds = byKind(rewarded);
  return card(`Reward of ${plural(rewarded.length, "session")}`, chart("Reward of sessions", kinds.map(([kind, own]) => [kinds.length > 1 ? KINDS[kind] : "sessions", means(own)]), {x: "session time", isTime: true}));
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
  if (points.some((each) => byVersion.get(each.policy_version)?.arms?.canary.num_sessions)) {
    const arm = (name, field) => [name, line((each) => byVersion.get(each.policy_version)?.arms?.[name][field])];
    shown.push(add("Canary arms: mean reward", [arm("canary", "mean_reward"), arm("control", "mean_reward")]),
      add("Canary arms: share of broken turns", [arm("canary", "broken_share"), arm("control", "broken_share")]));
  }
  for (const currency of new Set(points.flatMap((each) => Object.keys(each.cost ?? {})))) shown.push(add(`Cost, ${currency}`, [["of its sessions", line((each) => Number(each.cost?.[currency] ?? 0))]]));
  shown.push(add("Pause of the engines, seconds", [["reload", line((each) => byVersion.get(each.policy_version)?.reload_seconds)]], "No engine has loaded a version of these updates."));
  return shown;
}

async function everyVersion() {
  const pages = await everyPage("v1/policies?limit=1000&earned=true", "version");
  return Object.assign(pages.flatMap((page) => {
    const pins = new Set([page.pinned_version, ...(page.policies ?? []).map((each) => each.pinned_version)]);
    return page.data.map((each) => ({...each, isPinned: pins.has(each.version)}));
  }), {keyPolicy: pages[0]?.key_policy});
}

const ACTIVATED = "The engines load it now.";

const activate = (version, pin) => request(`v1/policies/${version}/activate`, {method: "POST", body: JSON.stringify({pin})});

// What somebody chose last on this page, and what was chosen before.
let undo = null;

function undoButton(versions, changed) {
  if (!versions.some((each) => each.version === undo?.chosen)) return "";
  const back = async () => { const {version, pin} = undo; await activate(version, pin); undo = null; await changed(); };
  return make("p", {className: "quiet"}, `You chose version ${undo.chosen}. `, actionButton("Undo", undo.pin ? `Pin version ${undo.version} again?` : `Follow the newest version, ${undo.version}, again?`, back));
}

function choiceButtons(each, pinned, changed, newest) {
  const choose = (pin) => async () => {
    await activate(each.version, pin);
    undo = {chosen: each.version, version: pinned?.version ?? newest.version, pin: pinned !== undefined};
    await changed();
  };
  if (each.on_disk === false) return "";
  if (each.isPinned) return make("span", {className: "quiet"}, "pinned");
  if (each.status === "active") return actionButton("Pin", `Pin version ${each.version}? It stays served, whatever is published later.`, choose(true));
  return actionButton("Roll back", `Serve version ${each.version} and pin it? ${ACTIVATED}`, choose(true));
}

const signed = (value) => `${value < 0 ? "−" : "+"}${number(Math.abs(value))}`;

// What the trainer estimated before engines got a version, or why it could not.
function estimatedChange(found) {
  if (!found) return "";
  const slices = found.slices.filter((each) => each.change !== null).map((each) => `${each.by} ${each.value}: ${signed(each.change)} (${signed(each.low)} to ${signed(each.high)})`);
  if (found.change === null) return make("span", {className: found.is_off ? "warn" : "quiet", title: found.reason}, found.is_off ? "cannot know: wrong probabilities" : "cannot know");
  const title = [`${signed(found.low)} to ${signed(found.high)} with 90 %, from ${plural(found.num_sessions, "session")}; ${number(100 * found.logged_share)} % of what it would do was logged`, ...slices].join("\n");
  return make("span", {title}, signed(found.change));
}

function versionTable(versions, changed) {
  const pinned = versions.find((each) => each.isPinned), newest = versions[0];
  const follow = pinned ? make("p", {className: "warn"}, `Version ${pinned.version} is pinned: newer versions are not served, and a trainer that is too far ahead of it waits, or goes on from its weights (when_pinned). `, actionButton("Follow the newest", `Serve version ${newest.version}, and each later one? ${ACTIVATED}`,
    async () => { await activate(newest.version, false); undo = null; await changed(); })) : "";
  const columns = [["version#", (each) => make("span", {title: each.path ?? ""}, number(each.version))], ["status", (each) => make("span", {}, status(each.status), each.on_disk === false ? " (files removed)" : "")],
    ["served", (each) => choiceButtons(each, pinned, changed, newest)], ["earned#", (each) => each.earned ? make("span", {title: `${plural(each.earned.num_sessions, "session")} that it sampled, with the 95 % interval of their mean`}, `${number(each.earned.mean)}${each.earned.margin === null ? "" : ` ± ${number(each.earned.margin)}`} (${number(each.earned.num_sessions)})`) : ""],
    ["estimated change#", (each) => estimatedChange(each.metrics?.estimate)],
    ["reward of the batch that made it#", (each) => number(each.metrics?.reward_mean)], ["held out#", (each) => number(heldOut(each))],
    ["since", (each) => ago(each.activated_at ?? each.created_at)], ["pause#", (each) => seconds(each.reload_seconds)], ["error", (each) => each.error ?? each.alarm ?? ""]];
  const rows = versions.slice(0, SHOWN_VERSIONS).map((each) => columns.map(([, value]) => value(each))), known = columns.map((_, at) => rows.some((row) => row[at] !== ""));
  return make("div", {}, follow, undoButton(versions, changed), table(columns.map(([name]) => name).filter((_, at) => known[at]), rows.map((row) => row.filter((_, at) => known[at]))));
}

// What each policy holds, side by side; the default policy alone is not compared with anything.
const summaries = remembered(REFRESH_MS, () => optional("v1/policies?summary=true&limit=1", {policies: [], trained_shares: []}));
async function policyComparison(versions) {
  const {policies} = await summaries();
  const cost = policies.some(({summary}) => money(summary.cost)) ? ["cost#"] : [];
  if (policies.length < 2 && !cost.length) return null;
  const lift = (name) => versions.find((each) => (each.policy ?? "default") === name && each.arms?.lift?.reward)?.arms.lift.reward;
  const rows = policies.map(({name, base_version: base, archived_at: archived, summary: own}) => [
    archived ? `${name} (archived)` : name, own.served_version ?? (base === null ? "the model" : `the base ${base}`), number(own.num_versions),
    lift(name) ? make("span", {title: `${signed(lift(name).low)} to ${signed(lift(name).high)}`}, signed(lift(name).mean)) : "",
    number(own.num_sessions), number(own.num_trained_tokens), own.trained_share === null ? "" : number(own.trained_share), own.last_update_at ? ago(own.last_update_at) : "", own.num_bytes === null ? "" : number(own.num_bytes / 1e6), ...cost.map(() => money(own.cost))]);
  return card("Policies", table(["policy", "serves", "versions#", "lift over the hold-out#", "sessions#", "trained tokens#", "trained share#", "last update", "MB on disk#", ...cost], rows));
}

// Of which agents, keys and policies the newest sessions were trained, and why the other tokens were not.
async function trainedShares() {
  const why = (each) => Object.entries(each.left_out).map(([reason, size]) => `${reason} ${number(size)}`).join(", ");
  const rows = (await summaries()).trained_shares.map((each) => [each.by, each.name, number(each.num_sampled), number(each.num_trained / (each.num_sampled || 1)), why(each)]);
  return rows.length ? card("What was trained of the newest sessions", table(["by", "name", "sampled tokens#", "trained share#", "tokens of the others"], rows)) : "";
}

// The versions of each policy beside its name; those of the default policy alone need none.
function policyTables(versions, changed) {
  const policies = [...Map.groupBy(versions, (each) => each.policy ?? "default")].sort(([one], [other]) => (other === "default") - (one === "default") || one.localeCompare(other));
  if (policies.length === 1) return versionTable(versions, changed);
  return make("div", {}, ...policies.map(([name, own]) => make("section", {}, make("h3", {}, `Policy ${name}`), versionTable(own, changed))));
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
  return makeForm("filters", (form) => { location.hash = `runs/${form.from.value}/${form.to.value}`; },
    select("from", "From version", numbers, String(first)), select("to", "To version", numbers, String(second)), make("button", {}, "Compare"));
}

const byTask = (found) => Map.groupBy(found.filter((each) => each.task_id !== null), (each) => each.task_id);

// The rewards of two versions on the tasks that both have played, and a reply of each.
async function taskComparison(first, second) {
  const read = async (version) => (await optional(`v1/sessions?summary=true&limit=${COMPARED_SESSIONS}&policy_version=${version}`, {data: []})).data.filter((each) => each.reward !== null);
  const played = await Promise.all([read(first), read(second)]), [before, after] = played.map(byTask);
  const all = make("p", {}, [first, second].map((version, at) => `Version ${version}: ${played[at].length ? `mean reward ${number(meanReward(played[at]))} over ${plural(played[at].length, "session")}` : "no rewarded session"}`).join("; "), ".");
  const both = [...before.keys()].filter((task) => after.has(task));
  if (!both.length) return make("div", {}, all, make("p", {className: "empty"}, "Among the newest sessions, no task was played by both versions. Sessions with the same task_id are compared here."));
  const rows = both.map((task) => ({task, was: meanReward(before.get(task)), is: meanReward(after.get(task))})).sort((one, other) => Math.abs(other.is - other.was) - Math.abs(one.is - one.was));
  const reply = (found) => link(`session/${path(found.at(0).session_id)}`, found.at(0).summary.last_reply ?? "no reply");
  return make("div", {}, all, make("p", {}, `Over ${plural(both.length, "task")} that both versions played: mean reward ${number(mean(rows.map((each) => each.was)))} with version ${first}, ${number(mean(rows.map((each) => each.is)))} with version ${second}.`),
    table(["task", "reward", `a reply of version ${first}`, `a reply of version ${second}`], rows.slice(0, COMPARED_TASKS).map(({task, was, is}) => [
      link(`sessions/${new URLSearchParams({task_id: task})}`, task), `${number(was)} → ${number(is)}`, reply(before.get(task)), reply(after.get(task))])),
    rows.length > COMPARED_TASKS ? make("p", {className: "quiet"}, `The ${COMPARED_TASKS} tasks with the largest differences.`) : null);
}

let chosenX = "update";
const AXES = ["update", "version", "time"];

// Only one trainer's updates are drawn: curves of two runs on one store are compared by choosing the other.
let chosenTrainer = null;

// Calls of each arm and results of canaries, since the proxy started.
function canaries(found) {
  const of = (name, label) => found.filter((sample) => sample.name === name && sample.value).map((sample) => [`${label} ${Object.values(sample.labels)[0]}`, number(sample.value)]);
  const rows = [...of("turnwise_canary_calls_total", "calls of the arm"), ...of("turnwise_canaries_total", "canaries")];
  return rows.length ? card("Canaries since the proxy started", facts(rows)) : null;
}

export async function runs(from, to) {
  const charts = make("div", {}), heading = make("h2", {}), words = make("div", {}), axis = make("div", {}), served = make("div", {}), compared = make("div", {});
  const fill = async () => {
    await readiness();
    const [data, metrics, counts] = await Promise.all([learningData(), readMetrics(), optional("v1/counts", {trainers: []}), newest()]);
    const {versions} = data, {policy, form: choice} = policyChoice(versions, fill), {updates, versions: own} = ofPolicy(data, policy), trainers = [...new Set(updates.map((each) => each.trainer_id))];
    if (!trainers.includes(chosenTrainer)) chosenTrainer = trainers.at(-1) ?? null;
    const rewards = await rewardChart(policy);
    const draw = () => charts.replaceChildren(updates.length || versions.some((each) => each.version > 0)
      ? learningCharts({versions: own, updates: updates.filter((each) => each.trainer_id === chosenTrainer)}, {x: chosenX, more: [rewards]})
      : make("div", {className: "charts"}, rewards));
    const form = makeForm("filters", () => {}, select("x", "Horizontal axis", AXES, chosenX), trainers.length > 1 ? select("trainer", "Run of trainer", trainers, chosenTrainer) : null);
    form.onchange = () => { chosenX = form.x.value; chosenTrainer = form.trainer?.value ?? chosenTrainer; draw(); };
    // A choice that somebody makes stays while updates arrive.
    if (!axis.contains(document.activeElement)) axis.replaceChildren(choice, ...(updates.length ? [form] : []));
    draw();
    heading.textContent = `${plural(updates.length, "update")}, ${plural(versions.filter((each) => each.version > 0).length, "policy version")}`;
    words.replaceChildren(...trainerWords(counts.trainers ?? []));
    const policies = await policyComparison(versions);
    served.replaceChildren(policies ?? "", await trainedShares(), versions.length ? policyTables(versions, fill) : empty("No version is published. A trainer publishes one after each update:", "turnwise up"), canaries(metrics) ?? "");
    return versions;
  };
  const versions = await fill(), trained = versions.filter((each) => each.version > 0);
  const [first, second] = [from === undefined ? versions.at(-1)?.version ?? 0 : Number(from), to === undefined ? trained[0]?.version ?? 0 : Number(to)];
  const find = (version) => versions.find((each) => each.version === version);
  if (find(first) && find(second)) {
    compared.append(await taskComparison(first, second), make("details", {}, make("summary", {}, "Metrics of both versions"), comparison(find(first), find(second))));
  } else if (versions.length) compared.append(make("p", {className: "quiet"}, "No such version."));
  return {
    content: [heading, words, axis, charts, make("h2", {}, "Versions"), served, ...(versions.length > 1 ? [make("h2", {}, "Two versions compared"), chooser(versions, first, second), compared] : [])],
    wants: (event) => event.kind === "update" || event.kind === "policy", refresh: fill, polls: [[REFRESH_MS, fill]],
  };
}
