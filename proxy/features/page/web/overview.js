// The first view: what is served, what the trainer waits for, what went wrong, and what was said last.
import {ago, card, facts, link, make, number, optional, path, readMetrics, readiness, remembered, request, serving, status, sum, tally, total, trainerWords} from "./page.js";
import {lastMinute, learningCharts, learningData, ofPolicy, policyChoice, rewardChart} from "./runs.js";
import {noSessions, sessionList} from "./sessions.js";

const SESSIONS = 8, FAILED = 4, HOUR_MS = 3_600_000, MINUTE_MS = 60_000, SAMPLE_MS = 2000, REFRESH_MS = 15_000, SEARCH_MS = 20_000;

const activeOf = (versions) => versions.find((each) => each.status === "active");

// What the served version gains over the hold-out, if a share of the sessions is held out.
function lift(versions) {
  const arms = activeOf(versions)?.arms, found = arms?.lift?.reward;
  if (!found) return "";
  const kind = found.low > 0 ? "good" : found.high < 0 ? "bad" : "";
  return make("p", {}, "Reward ", make("span", {className: kind}, `${found.mean > 0 ? "+" : ""}${number(found.mean)}`), ` over version ${arms.control.version}, which is held out (${number(found.low)} to ${number(found.high)})`);
}

function learning(counts) {
  // A single session is a group in the store; several of them count as one for the trainer.
  const {ready: numReady = 0, ...others} = counts.groups, singles = counts.num_ready_singles ?? 0, waiting = numReady - singles;
  const ready = [[waiting, "group"], [singles, "single session"]].filter(([count, noun]) => count || (noun === "group" && !singles));
  return card("Trainer", ...ready.map(([count, noun]) => make("div", {}, make("b", {}, number(count)), ` ${noun}${count === 1 ? " is" : "s are"} ready`)),
    ...trainerWords(counts.trainers ?? []), tally(others));
}

// Sessions of the last hour with a failed call. The search reads many sessions, so it is repeated at most every 20 s.
const failures = remembered(SEARCH_MS, () => optional(`v1/sessions?outcome=error&summary=true&limit=${FAILED}`, {data: []}));
const failuresOfTheHour = async () => (await failures()).data.filter((each) => Date.now() - new Date(each.last_active_at) < HOUR_MS);

function errors(calls, found) {
  const shown = found.map((each) => make("li", {}, link(`session/${path(each.session_id)}`, each.summary.first_message ?? each.session_id), " ", ago(each.last_active_at)));
  return card("Errors of the last hour", make("b", {className: calls ? "bad" : ""}, number(calls)), ` ${calls === 1 ? "call" : "calls"} failed`,
    make("ul", {className: "plain"}, ...shown), calls ? link("sessions/outcome=error", "All sessions with a failed call") : null);
}

// Samples of the proxy's counters while the page is open: {at, turns, tokens}. Another view keeps them.
const seen = [];
function rates(found) {
  const now = {at: Date.now(), turns: total(found, "turnwise_turns_total"), tokens: total(found, "turnwise_tokens_total", {kind: "sampled"})};
  if (seen.length && now.turns < seen.at(-1).turns) seen.length = 0; // the proxy was restarted
  seen.push(now);
  while (seen.length > 2 && now.at - seen[1].at > MINUTE_MS) seen.shift();
  const minutes = (now.at - seen[0].at) / MINUTE_MS, rate = (name) => minutes < 1 / 60 ? null : (now[name] - seen[0][name]) / minutes;
  const outcomes = Object.entries(Object.groupBy(found.filter((sample) => sample.name === "turnwise_turns_total" && sample.value), (sample) => sample.labels.outcome))
    .map(([outcome, each]) => [status(outcome), make("span", {}, number(sum(each.map((sample) => sample.value))), make("span", {className: "quiet"}, reasonsOf(each)))]);
  const explored = total(found, "turnwise_explored_total");
  if (explored) outcomes.push(["explored", make("span", {}, number(explored), make("span", {className: "quiet"}, " greedy calls"))]);
  const sampled = total(found, "turnwise_tokens_total", {kind: "sampled"}), greedy = total(found, "turnwise_greedy_tokens_total");
  if (greedy) outcomes.push(["greedy", make("span", {title: "At temperature 0 no other token could be sampled. The setting explore lets a share of the sessions sample."}, `${number(Math.round(100 * greedy / sampled))} %`, make("span", {className: "quiet"}, " of the tokens, which teach nothing"))]);
  const shown = (name) => make("b", {}, number(Math.round(rate(name))));
  const said = rate("turns") === null ? [make("p", {className: "quiet"}, "Measuring calls and tokens a minute.")] : [shown("turns"), " calls and ", shown("tokens"), " sampled tokens a minute"];
  return card("Calls", ...said,
    outcomes.length ? facts(outcomes) : make("p", {className: "quiet"}, "No call since the proxy started."));
}

function reasonsOf(outcome) {
  const named = outcome.filter((sample) => sample.labels.reason).map((sample) => `${sample.labels.reason} ${number(sample.value)}`);
  return named.length ? ` (${named.join(", ")})` : "";
}

export async function overview() {
  const choice = make("div", {}), cards = make("div", {className: "cards"}), charts = make("div", {}), newest = make("div", {});
  let calls = make("section", {});
  const fill = async () => {
    const ready = await readiness();
    const [data, counts, found, failed, listed] = await Promise.all([learningData(), request("v1/counts"), readMetrics(), failuresOfTheHour(),
      request(`v1/sessions?summary=true&limit=${SESSIONS}`)]);
    const {policy, form} = policyChoice(data.versions, fill), own = ofPolicy(data, policy), [rewards, minute] = await Promise.all([rewardChart(policy), lastMinute(policy, listed.data[0])]);
    if (!choice.contains(document.activeElement)) choice.replaceChildren(form);
    calls = rates(found);
    cards.replaceChildren(serving(ready, own.versions.find((each) => each.isPinned)?.version, lift(own.versions), policy === "default" ? null : activeOf(own.versions) ?? {}), learning(counts), minute, errors(counts.num_failed_calls, failed), calls);
    charts.replaceChildren(own.updates.length ? learningCharts(own, {isWhole: false, more: [rewards]}) : make("div", {className: "charts"}, rewards));
    newest.replaceChildren(listed.data.length ? sessionList(listed.data) : noSessions(), listed.has_more ? link("sessions", `All ${number(sum(Object.values(counts.sessions)))} sessions`) : "");
  };
  await fill();
  // The rates move without an event.
  const measure = async () => {
    const next = rates(await readMetrics());
    calls.replaceWith(next);
    calls = next;
  };
  return {content: [cards, choice, make("h2", {}, "Learning"), charts, make("h2", {}, "Newest sessions"), newest], wants: () => true, refresh: fill, polls: [[SAMPLE_MS, measure], [REFRESH_MS, fill]]};
}
