// The first view, and health: what is served, what waits, and what went wrong.
import {byId, card, facts, link, make, number, optional, path, request, samples, seconds, status, table, tally, time} from "./page.js";
import {learningCharts} from "./runs.js";

const SESSIONS = 50;
const COLUMNS = ["session", "status", "ended by", "reward#", "turns#", "chains#", "task", "split", "opened"];

export function sessionTable(sessions) {
  return table(COLUMNS, sessions.map((each) => [link(`session/${path(each.session_id)}`, each.session_id), status(each.status),
    each.termination_reason, number(each.reward), number(each.num_turns), number(each.num_chains),
    each.task_id ? link(`sessions/task_id=${path(each.task_id)}`, each.task_id) : "", each.split, time(each.created_at)]));
}

export async function readiness() {
  const ready = await request("readyz");
  byId("state").replaceChildren(ready.ready ? status("ready") : make("span", {className: "bad"}, "not ready"));
  return ready;
}

function serving(ready, pinned) {
  const engines = (ready.engines ?? []).map((engine, at) => [engine.url ?? `engine ${at + 1}`,
    make("span", {}, status(engine.ready ? "ready" : "down"), engine.ready ? `, ${engine.model ?? ""} version ${engine.policy_version}` : "")]);
  const version = ready.policy_version === null ? "no version" : `version ${ready.policy_version}`;
  const kept = pinned === null || pinned === undefined ? "" :
    make("p", {className: "warn"}, `Pinned to version ${pinned}: newer versions are trained and not served until \`turnwise policies follow\`.`);
  return card("Serving", make("b", {}, version), kept, facts([["store", status(ready.store)],
    ["exact continuation", ready.exact_continuation ? "yes" : make("span", {className: "warn"}, "no")], ...engines]),
    ready.reload_error ? make("p", {className: "bad"}, `Last reload: ${ready.reload_error}`) : null);
}

function outcomes(found) {
  const counts = {};
  for (const {labels, value} of found.filter((sample) => sample.name === "turnwise_turns_total" && sample.value)) {
    (counts[labels.outcome] ??= []).push([labels.reason, value]);
  }
  return facts(Object.entries(counts).map(([outcome, reasons]) => {
    const total = reasons.reduce((sum, [, value]) => sum + value, 0);
    const named = reasons.filter(([reason]) => reason).map(([reason, value]) => `${reason} ${number(value)}`);
    return [status(outcome), make("span", {}, number(total), make("span", {className: "quiet"}, named.length ? ` (${named.join(", ")})` : ""))];
  }));
}

function learning(counts) {
  const lines = (counts.trainers ?? []).map((each) => {
    const left = each.starts_at ? Math.max(0, Math.round((new Date(each.starts_at) - Date.now()) / 1000)) : null;
    return make("p", {className: "quiet"}, `${each.text}${left === null ? "" : `, starts in ${left} s`} (${time(each.reported_at)})`);
  });
  return card("Groups for the trainer", make("b", {}, number(counts.groups.ready ?? 0)), " ready", tally(counts.groups),
    ...(lines.length ? lines : [make("p", {className: "quiet"}, "No trainer has reported yet.")]));
}

function versions(page) {
  const rows = page.data.map((each) => [number(each.version),
    make("span", {}, status(each.status), each.version === page.pinned_version ? " (pinned)" : "", each.on_disk === false ? " (files removed)" : ""),
    number(each.metrics?.reward_mean), time(each.activated_at ?? each.created_at), seconds(each.reload_seconds), each.error ?? each.path]);
  return [make("h2", {}, "Policy versions"), table(["version#", "status", "train reward#", "since", "pause#", "path, or error"], rows)];
}

export async function overview() {
  const ready = await readiness();
  const [known, counts, exposition, sessions] = await Promise.all(
    [request("v1/policies?limit=200"), request("v1/counts"), request("metrics"), request(`v1/sessions?limit=${SESSIONS}`)]);
  return [make("div", {className: "cards"}, serving(ready, known.pinned_version),
      card("Calls of this proxy, by outcome", outcomes(samples(exposition))),
      card("Sessions", make("b", {}, number(counts.num_turns)), " turns", tally(counts.sessions)), learning(counts)),
    make("h2", {}, "Learning"), learningCharts(known.data, ["Reward", "Staleness", "Entropy"]),
    ...versions({...known, data: known.data.slice(0, 8)}), make("h2", {}, "Sessions, newest first"), sessionTable(sessions.data),
    sessions.has_more ? link(`sessions/after=${path(sessions.data.at(-1).session_id)}`, "Older sessions") : null];
}

export async function health() {
  const ready = await readiness();
  const [exposition, counts] = await Promise.all([request("metrics"), optional("v1/counts", {sessions: {}, groups: {}})]);
  const found = samples(exposition).filter((sample) => sample.name.startsWith("turnwise_") && !/_(bucket|created)$/.test(sample.name));
  const rows = found.filter((sample) => sample.value).map((sample) => [sample.name.replace("turnwise_", ""),
    Object.entries(sample.labels).map(([label, value]) => `${label} ${value}`).join(", "), number(sample.value)]);
  return [make("div", {className: "cards"}, serving(ready, null), card("Sessions", tally(counts.sessions)), card("Groups", tally(counts.groups))),
    make("h2", {}, "Metrics of this proxy that are not zero"), table(["metric", "labels", "value#"], rows)];
}
