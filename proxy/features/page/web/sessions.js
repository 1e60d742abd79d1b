// Sessions: what was said in them; found by what they are and by what they hold; and a group side by side.
import {ago, card, chip, chips, empty, facts, filtered, lasted, link, make, makeForm, mean, message, money, number, optional, path, plural, readiness, request, select, status} from "./page.js";
import {agentOf} from "./session.js";
import {rateSessions} from "./rate.js";

const PAGE = 50, COMPARED = 16, TURNS = 50;
const OUTCOMES = ["", "exact", "retokenised", "aborted", "error", "untrainable"];
// Name, label, and choices or the type of the input.
const TEXT = ["text", "Text", "search"];
const MORE = [["label", "Label"], ["user_id", "User"], ["task_id", "Task"], ["group_id", "Group"], ["status", "Status", ["", "open", "ended", "expired"]],
  ["metadata", "Metadata, KEY=VALUE"], ["split", "Split", ["", "train", "eval"]], ["outcome", "Outcome of a turn", OUTCOMES], ["reason", "Reason of the outcome"], ["policy_version", "Sampled by version", "number"],
  ["min_reward", "Reward from", "number"], ["max_reward", "Reward to", "number"], ["termination_reason", "Ended by"]];
const SEARCHED = new Set(["text", "outcome", "reason", "policy_version", "min_reward", "max_reward", "termination_reason"]);
// Filters that are often wanted. Every filter is an address, so a person keeps others as bookmarks.
const KEPT = [["All", ""], ["Open", "status=open"], ["With a failed call", "outcome=error"], ["Reward 0 or less", "max_reward=0"], ["Held out", "split=eval"]];

export async function sessions(query, policy) {
  if (query === "rate") return rateSessions(policy);
  await readiness();
  const wanted = new URLSearchParams(query ?? ""), results = make("div", {});
  const fill = async () => results.replaceChildren(...await found(wanted));
  await fill();
  const kept = KEPT.map(([title, filter]) => make("a", {href: `#sessions${filter ? `/${filter}` : ""}`, attributes: wanted.toString() === filter ? {"aria-current": "page"} : {}}, title));
  kept.push(link("sessions/rate", "Rate these"));
  return {content: [make("h2", {}, "Sessions, newest first"), make("p", {className: "kept"}, ...kept), filterForm(wanted), results], refresh: fill,
    wants: (event) => event.kind === "session" && !wanted.has("after") && (!wanted.has("group_id") || event.data.group_id === wanted.get("group_id"))};
}

async function found(wanted) {
  const page = await request(`v1/sessions?summary=true&limit=${PAGE}${wanted.size ? `&${wanted}` : ""}`);
  const older = new URLSearchParams(wanted), isSearch = [...wanted.keys()].some((name) => SEARCHED.has(name));
  older.set("after", page.next_after ?? page.data.at(-1)?.session_id);
  const looked = isSearch ? `${number(page.data.length)} found among ${number(page.num_searched)} sessions${page.has_more ? "; there are older ones" : ""}.` : "";
  const none = page.data.length ? "" : wanted.size ? make("p", {className: "empty"}, "No session matches.") : noSessions();
  return [make("p", {className: "quiet", role: "status"}, looked), none || (wanted.get("group_id") ? await sideBySide(wanted.get("group_id"), page.data) : sessionList(page.data)),
    page.has_more ? link(`sessions/${older}`, isSearch ? "Search in older sessions" : "Older sessions") : ""];
}

export const noSessions = () => empty("No session yet. Point any agent at this proxy:", `OPENAI_BASE_URL=${location.origin}/v1 OPENAI_API_KEY=none your-agent`);

// Each session as what was said in it, with its reward and numbers. The sessions have summaries.
export const sessionList = (found) => make("ul", {className: "sessions"}, ...found.map((each) => make("li", {},
  make("div", {className: "reward"}, each.reward === null ? make("span", {className: "quiet", title: "no reward"}, "–") : make("b", {title: "reward"}, number(Number(each.reward.toPrecision(3))))),
  make("div", {className: "said"}, make("a", {href: `#session/${path(each.session_id)}`, title: each.session_id}, make("bdi", {}, each.summary.first_message ?? each.session_id)),
    make("p", {className: "reply"}, each.summary.last_reply ? make("bdi", {}, each.summary.last_reply) : make("span", {className: "quiet"}, each.num_turns ? "no reply" : "no call yet"))),
  make("p", {className: "numbers quiet"}, ...dotted([plural(each.num_turns, "turn"), each.summary.num_sampled_tokens === null ? "" : plural(each.summary.num_sampled_tokens, "token"),
    money(each.cost), lasted(each), ago(each.created_at),
    each.status === "ended" ? each.termination_reason : make("span", {}, status(each.status)), each.summary.last_outcome && each.summary.last_outcome !== "exact" ? status(each.summary.last_outcome) : "",
    ...["task", "user"].map((noun) => each[`${noun}_id`] ? make("span", {}, `${noun} `, filtered(`${noun}_id`, each[`${noun}_id`])) : ""), agentOf(each), each.split === "eval" ? "held out" : "", each.train ? "" : "not to be trained", each.rating, ...each.labels.map((one) => chip(one.label, one.note))])))));

const dotted = (parts) => parts.filter(Boolean).flatMap((part, at) => at ? [" · ", part] : [part]);

function filterForm(wanted) {
  const field = ([name, label, kind]) => Array.isArray(kind) ? select(name, label, kind, wanted.get(name) ?? "")
    : make("label", {}, label, make("input", {name, type: kind ?? "text", step: "any", value: wanted.get(name) ?? "", size: 14}));
  const used = MORE.filter(([name]) => wanted.has(name)).map(([name, label]) => `${label.toLowerCase()} ${wanted.get(name)}`);
  const more = make("details", {}, make("summary", {}, ["More filters", ...used].join(", ")), make("div", {className: "filters"}, ...MORE.map(field)));
  const find = (form) => { location.hash = `sessions/${new URLSearchParams([...new FormData(form)].filter(([, value]) => value))}`; };
  return make("search", {}, makeForm("filters", find, field(TEXT), make("button", {}, "Find"), more));
}

async function sideBySide(groupId, members) {
  const rewards = members.map((each) => each.reward).filter((reward) => reward !== null), average = mean(rewards);
  const ordered = [...members].sort((first, second) => first.run - second.run).slice(0, COMPARED);
  const turns = await Promise.all(ordered.map((each) => optional(`v1/sessions/${path(each.session_id)}/turns?limit=${TURNS}`, {data: []})));
  const compared = ordered.map((each, at) => {
    const own = turns[at].data, advantages = own.flatMap((turn) => turn.trained_in.slice(-1).map((one) => one.advantage));
    const last = own.at(-1);
    return card(link(`session/${path(each.session_id)}`, `Run ${each.run}`), facts([["status", each.status === "ended" ? "" : status(each.status)], ["reward", number(each.reward)], ["above the mean", each.reward === null || average === null ? "" : number(each.reward - average)],
      ["mean advantage", number(mean(advantages))], ["turns", number(each.num_turns)], ["ended by", each.termination_reason],
      ["labels", chips(each.labels)]]),
      last ? message({role: "assistant", ...last.response}) : null);
  });
  return make("div", {}, make("h2", {}, "Group ", make("bdi", {}, groupId), `: ${average === null ? "no reward yet" : `mean reward ${number(average)} of ${plural(rewards.length, "session")}`}`), make("div", {className: "sides"}, ...compared));
}
