// Sessions: find them by what they are and by what they hold, and see a group side by side.
import {card, facts, link, make, message, number, optional, path, plural, request, select, status} from "./page.js";
import {chip, readiness, sessionTable} from "./overview.js";

const PAGE = 50, COMPARED = 16, TURNS = 50;
const OUTCOMES = ["", "exact", "retokenised", "aborted", "error", "untrainable"];
// Name, label, and choices or the type of the input.
const FIRST = [["text", "Text", "search"], ["label", "Label"], ["user_id", "User"], ["task_id", "Task"], ["group_id", "Group"], ["status", "Status", ["", "open", "ended", "expired"]]];
const MORE = [["metadata", "Metadata, KEY=VALUE"], ["split", "Split", ["", "train", "eval"]], ["outcome", "Outcome of a turn", OUTCOMES], ["reason", "Reason of the outcome"], ["policy_version", "Sampled by version", "number"],
  ["min_reward", "Reward from", "number"], ["max_reward", "Reward to", "number"], ["termination_reason", "Ended by"]];
const SEARCHED = new Set(["text", "outcome", "reason", "policy_version", "min_reward", "max_reward", "termination_reason"]);

export async function sessions(query) {
  await readiness();
  const wanted = new URLSearchParams(query ?? ""), results = make("div", {});
  const fill = async () => results.replaceChildren(...await found(wanted));
  await fill();
  return {content: [make("h2", {}, "Sessions, newest first"), filterForm(wanted), results], refresh: fill,
    wants: (event) => event.kind === "session" && !wanted.has("after") && (!wanted.has("group_id") || event.data.group_id === wanted.get("group_id"))};
}

async function found(wanted) {
  const page = await request(`v1/sessions?limit=${PAGE}${wanted.size ? `&${wanted}` : ""}`);
  const older = new URLSearchParams(wanted), isSearch = [...wanted.keys()].some((name) => SEARCHED.has(name));
  older.set("after", page.next_after ?? page.data.at(-1)?.session_id);
  const looked = isSearch ? `${number(page.data.length)} found among ${number(page.num_searched)} sessions${page.has_more ? "; there are older ones" : ""}.` : "";
  return [make("p", {className: "quiet", role: "status"}, looked || (page.data.length ? "" : "No session matches.")), page.data.length ? sessionTable(page.data) : "",
    page.has_more ? link(`sessions/${older}`, isSearch ? "Search in older sessions" : "Older sessions") : "",
    wanted.get("group_id") ? await sideBySide(wanted.get("group_id"), page.data) : ""];
}

function filterForm(wanted) {
  const field = ([name, label, kind]) => Array.isArray(kind) ? select(name, label, kind, wanted.get(name) ?? "")
    : make("label", {}, label, make("input", {name, type: kind ?? "text", step: "any", value: wanted.get(name) ?? "", size: 14}));
  const more = make("details", {open: MORE.some(([name]) => wanted.has(name))}, make("summary", {}, "More filters"), make("div", {className: "filters"}, ...MORE.map(field)));
  const form = make("form", {className: "filters", attributes: {role: "search"}}, ...FIRST.map(field), make("button", {}, "Find"), more);
  form.onsubmit = (event) => {
    event.preventDefault();
    location.hash = `sessions/${new URLSearchParams([...new FormData(form)].filter(([, value]) => value))}`;
  };
  return form;
}

const average = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

async function sideBySide(groupId, members) {
  const rewards = members.map((each) => each.reward).filter((reward) => reward !== null), mean = average(rewards);
  const ordered = [...members].sort((first, second) => first.run - second.run).slice(0, COMPARED);
  const turns = await Promise.all(ordered.map((each) => optional(`v1/sessions/${path(each.session_id)}/turns?limit=${TURNS}`, {data: []})));
  const compared = ordered.map((each, at) => {
    const own = turns[at].data, advantages = own.flatMap((turn) => turn.trained_in.slice(-1).map((one) => one.advantage));
    const last = own.at(-1);
    return card(`Run ${each.run}`, facts([["session", link(`session/${path(each.session_id)}`, each.session_id)], ["status", status(each.status)],
      ["reward", number(each.reward)], ["above the mean", each.reward === null || mean === null ? "" : number(each.reward - mean)],
      ["mean advantage", number(average(advantages))], ["turns", number(each.num_turns)], ["ended by", each.termination_reason],
      ["labels", each.labels.length ? make("span", {}, ...each.labels.map((one) => chip(one.label, one.note))) : ""]]),
      last ? make("details", {}, make("summary", {}, `Reply of turn ${last.seq}`), message({role: "assistant", ...last.response})) : null);
  });
  return make("div", {}, make("h2", {}, "Group ", make("bdi", {}, groupId), `: ${mean === null ? "no reward yet" : `mean reward ${number(mean)} of ${plural(rewards.length, "session")}`}`), make("div", {className: "sides"}, ...compared));
}
