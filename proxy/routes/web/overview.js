// The first view: what is served, what is learnt, and the newest sessions.
import {byId, card, facts, link, make, moment, number, path, request, samples, status, table, tally, time} from "./page.js";
import {learningCharts, learningData, versionTable} from "./runs.js";

const SESSIONS = 20;
const COLUMNS = ["session", "labels", "status", "ended by", "reward#", "turns#", "chains#", "task", "split", "opened"];

export function sessionTable(sessions) {
  return table(COLUMNS, sessions.map((each) => [link(`session/${path(each.session_id)}`, each.session_id),
    make("span", {}, ...(each.labels ?? []).map((one) => chip(one.label, one.note))), status(each.status),
    each.termination_reason, number(each.reward), number(each.num_turns), number(each.num_chains),
    each.task_id ? link(`sessions/task_id=${path(each.task_id)}`, each.task_id) : "", each.split, moment(each.created_at)]));
}

export async function readiness() {
  const ready = await request("readyz");
  byId("state").replaceChildren(ready.ready ? status("ready") : make("span", {className: "bad"}, "not ready"));
  return ready;
}

// Counts of a large tenant are not read for every view: then the page says when they were.
const STALE_MS = 5000;
export const countedAt = (counts) => Date.now() - new Date(counts.counted_at) > STALE_MS ? make("p", {className: "quiet"}, `Counted ${time(counts.counted_at)}`) : "";

export const chip = (label, note) => make("a", {className: "chip", href: `#sessions/${new URLSearchParams({label})}`, title: note ?? ""}, label);

export function serving(ready, pinned) {
  const engines = (ready.engines ?? []).map((engine, at) => [`engine ${at + 1}`,
    make("span", {}, status(engine.ready ? "ready" : "down"), engine.ready ? `, ${engine.model ?? ""} version ${engine.policy_version}` : engine.error ? `: ${engine.error}` : "")]);
  const version = ready.policy_version === null ? "no version" : `version ${ready.policy_version}`;
  const kept = pinned === null || pinned === undefined ? "" :
    make("p", {className: "warn"}, `Pinned to version ${pinned}: newer versions are trained and not served until \`turnwise policies follow\`.`);
  return card("Serving", make("b", {}, version), kept, facts([["store", status(ready.store)],
    ["exact continuation", ready.exact_continuation ? "yes" : make("span", {className: "warn"}, "no")], ...engines]),
    make("p", {className: "quiet address"}, (ready.engines ?? []).map((engine) => engine.url).filter(Boolean).join(", ")),
    ready.reload_error ? make("p", {className: "bad"}, `Last reload: ${ready.reload_error}`) : null);
}

function outcomes(found) {
  const counts = {};
  for (const {labels, value} of found.filter((sample) => sample.name === "turnwise_turns_total" && sample.value)) {
    (counts[labels.outcome] ??= []).push([labels.reason, value]);
  }
  return !Object.keys(counts).length ? make("p", {className: "quiet"}, "No call since the proxy started.") : facts(Object.entries(counts).map(([outcome, reasons]) => {
    const total = reasons.reduce((sum, [, value]) => sum + value, 0);
    const named = reasons.filter(([reason]) => reason).map(([reason, value]) => `${reason} ${number(value)}`);
    return [status(outcome), make("span", {}, number(total), make("span", {className: "quiet"}, named.length ? ` (${named.join(", ")})` : ""))];
  }));
}

// What is said first of a trainer that ended without being told to.
export const attention = (trainer) => ["blocked", "died", "silent"].includes(trainer.state) ? [status(trainer.state), " "] : [];

function learning(counts) {
  const lines = (counts.trainers ?? []).map((each) => {
    const left = each.starts_at ? Math.max(0, Math.round((new Date(each.starts_at) - Date.now()) / 1000)) : null;
    return make("p", {className: "quiet"}, ...attention(each), `${each.text}${left === null ? "" : `, starts in ${left} s`} (${time(each.reported_at)})`);
  });
  return card("Groups for the trainer", make("b", {}, number(counts.groups.ready ?? 0)), " ready", tally(counts.groups),
    ...(lines.length ? lines : [make("p", {className: "quiet"}, "No trainer has reported yet.")]));
}

export async function overview() {
  const ready = await readiness();
  const [data, counts, exposition, sessions] = await Promise.all(
    [learningData(), request("v1/counts"), request("metrics"), request(`v1/sessions?limit=${SESSIONS}`)]);
  const pinned = data.versions.find((each) => each.isPinned)?.version;
  return {
    content: [make("div", {className: "cards"}, serving(ready, pinned), card("Calls of this proxy, by outcome", outcomes(samples(exposition))),
        card("Sessions", make("b", {}, number(counts.num_turns)), " turns", tally(counts.sessions), countedAt(counts)), learning(counts)),
      make("h2", {}, "Learning"), learningCharts(data, {isWhole: false}),
      make("h2", {}, "Policy versions"), versionTable(data.versions.slice(0, 8)), make("h2", {}, "Sessions, newest first"), sessionTable(sessions.data),
      sessions.has_more ? link(`sessions/after=${path(sessions.data.at(-1).session_id)}`, "Older sessions") : null],
    wants: () => true, isPolled: true,
  };
}
