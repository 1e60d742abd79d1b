// Health: engines, store, queues, limits and keys, live curves while the view is open, and what the doctor finds.
import {card, countedAt, facts, make, mean, money, number, optional, readMetrics, readiness, request, serving, status, table, tally, time, total, trainerWords} from "./page.js";
import {chart} from "./chart.js";

const SAMPLE_MS = 2000, KEPT = 150;
const VERDICTS = {ok: "good", warn: "warn", fail: "bad"};

export async function health() {
  const parts = make("div", {className: "cards"}), curves = make("div", {className: "charts"}), rows = make("div", {}), points = [];
  const show = async () => {
    const ready = await readiness();
    const [found, counts, budget, keys] = await Promise.all([readMetrics(), optional("v1/counts", {sessions: {}, groups: {}, trainers: []}), optional("v1/budget", null), optional("v1/keys", null)]);
    points.push(measure(found));
    if (points.length > KEPT) points.shift();
    parts.replaceChildren(serving(ready, null), queues(found), limits(found, budget), card("Sessions", Object.keys(counts.sessions).length ? tally(counts.sessions) : make("p", {className: "quiet"}, "No session yet."), countedAt(counts)), card("Trainer", tally(counts.groups), ...trainerWords(counts.trainers)), ...(keys ? [keyCard(keys)] : []));
    curves.replaceChildren(...liveCurves(points));
    rows.replaceChildren(metricTable(found));
  };
  await show();
  return {content: [parts, make("h2", {}, "While this view is open"), curves, make("h2", {}, "Doctor"), doctor(), make("h2", {}, "Metrics of this proxy that are not zero"), rows],
    wants: () => false, refresh: show, polls: [[SAMPLE_MS, show]]};
}

function queues(found) {
  const commits = total(found, "turnwise_commit_seconds_count"), waited = total(found, "turnwise_commit_seconds_sum");
  return card("Queues", facts([["calls in flight", number(total(found, "turnwise_calls_in_flight"))], ["calls that wait for a limit", number(total(found, "turnwise_queued_calls"))],
    ["writes that wait", number(total(found, "turnwise_writer_queue"))], ["mean wait for a commit", commits ? `${number(Number((1000 * waited / commits).toPrecision(3)))} ms` : ""],
    ["listeners to events", number(total(found, "turnwise_event_listeners"))], ["failures in the background", number(total(found, "turnwise_background_errors_total"))]]));
}

function limits(found, budget) {
  const refused = found.filter((sample) => sample.name === "turnwise_limited_total" && sample.value).map((sample) => [`429 by ${sample.labels.limit}`, number(sample.value)]);
  const spent = (name, of) => of.token_budget === null ? [name, "no budget"] : [name, `${number(of.tokens_used)} of ${number(of.token_budget)} tokens`];
  return card("Limits", facts([...(budget ? [spent("this key", budget.key), spent("tenant", budget.tenant)] : []), ...refused, ...(refused.length ? [] : [["429 answers", "0"]])]));
}

function keyCard(keys) {
  const alive = keys.data.filter((each) => each.revoked_at === null && (each.expires_at === null || new Date(each.expires_at) > Date.now()));
  return card("Keys", keys.data.length ? facts(alive.map((each) => [each.name || each.key_id, `${each.role}, last used ${each.last_used_at ? time(each.last_used_at) : "never"}${money(each.cost) && `, ${money(each.cost)}`}`]))
    : make("p", {className: "warn"}, "There are no keys: everybody on this machine may do everything."));
}

function measure(found) {
  return {at: Date.now() / 1000, calls: total(found, "turnwise_calls_in_flight"), queued: total(found, "turnwise_queued_calls"), writes: total(found, "turnwise_writer_queue"),
    sampled: total(found, "turnwise_tokens_total", {kind: "sampled"}), turns: total(found, "turnwise_turns_total"),
    engines: total(found, "turnwise_engine_up"), idle: found.filter((sample) => sample.name === "turnwise_engine_calls" && sample.value === 0).length};
}

function liveCurves(points) {
  const line = (value) => points.map((each) => [each.at, value(each)]);
  const rate = (name) => points.slice(1).map((each, at) => [each.at, (each[name] - points[at][name]) / (each.at - points[at].at)]);
  const add = (title, series) => card(title, chart(title, series, {x: "now", isTime: true}));
  const idle = points.map((each, at) => { const seen = points.slice(Math.max(0, at - 14), at + 1).filter((one) => one.engines); return [each.at, mean(seen.map((one) => Math.min(1, one.idle / one.engines)))]; });
  return [add("Calls", [["in flight", line((each) => each.calls)], ["queued", line((each) => each.queued)], ["writes", line((each) => each.writes)]]),
    add("Sampled tokens per second", [["tokens", rate("sampled")]]), add("Idle share of the engines, 30 s", [["idle", idle]])];
}

function doctor() {
  const results = make("div", {}), button = make("button", {type: "button"}, "Examine");
  button.onclick = async () => {
    button.disabled = true;
    results.replaceChildren(make("p", {className: "quiet", role: "status"}, "Examining: each engine gets a few calls of one token."));
    try {
      const {data} = await request("v1/doctor");
      results.replaceChildren(table(["check", "verdict", "found"], data.map((each) => [each.check, make("span", {className: VERDICTS[each.verdict] ?? ""}, each.verdict), each.text])));
    } catch (error) {
      results.replaceChildren(make("p", {className: "bad"}, error.message));
    }
    button.disabled = false;
  };
  return make("div", {}, make("p", {className: "quiet"}, "What turnwise doctor says about the engines and the database of this proxy."), button, results);
}

function metricTable(found) {
  const shown = found.filter((sample) => sample.name.startsWith("turnwise_") && !/_(bucket|created)$/.test(sample.name) && sample.value);
  return table(["metric", "labels", "value#"], shown.map((sample) => [sample.name.replace("turnwise_", ""),
    Object.entries(sample.labels).map(([label, value]) => `${label} ${value}`).join(", "),
    sample.name.endsWith("_timestamp_seconds") ? time(1000 * sample.value) : number(sample.value)]));
}
