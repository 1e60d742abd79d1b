// Sessions: find them, see a group side by side, and read one as its tree of turns, down to the tokens.
import {card, facts, link, make, message, number, path, request, seconds, status, table, time} from "./page.js";
import {readiness, sessionTable} from "./overview.js";

const PAGE = 50, TURNS = 200, TOKENS_IN_BLOCK = 1000, RARE = -4;
const FILTERS = [["task_id", "Task"], ["group_id", "Group"], ["split", "Split", ["", "train", "eval"]], ["status", "Status", ["", "open", "ended", "expired"]]];

export async function sessions(query) {
  await readiness();
  const wanted = new URLSearchParams(query ?? "");
  const page = await request(`v1/sessions?limit=${PAGE}${wanted.size ? `&${wanted}` : ""}`);
  const older = new URLSearchParams(wanted);
  older.set("after", page.data.at(-1)?.session_id);
  return [make("h2", {}, "Sessions, newest first"), filterForm(wanted), sessionTable(page.data),
    page.data.length ? null : make("p", {className: "quiet"}, "No session matches."),
    wanted.get("group_id") ? sideBySide(page.data) : null, page.has_more ? link(`sessions/${older}`, "Older sessions") : null];
}

function filterForm(wanted) {
  const field = ([name, label, choices]) => make("label", {}, label, choices
    ? make("select", {name}, ...choices.map((value) => make("option", {value, selected: wanted.get(name) === value}, value || "any")))
    : make("input", {name, value: wanted.get(name) ?? "", size: 16}));
  const form = make("form", {className: "filters"}, ...FILTERS.map(field), make("button", {}, "Find"));
  form.onsubmit = (event) => {
    event.preventDefault();
    const given = [...new FormData(form)].filter(([, value]) => value);
    location.hash = `sessions/${new URLSearchParams(given)}`;
  };
  return form;
}

function sideBySide(members) {
  const rewards = members.map((each) => each.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
  return make("div", {}, make("h2", {}, `Group: mean reward ${number(mean)} of ${rewards.length} sessions`),
    make("div", {className: "sides"}, ...members.map((each) => card(`Run ${each.run}`, facts([
      ["session", link(`session/${path(each.session_id)}`, each.session_id)], ["status", status(each.status)],
      ["reward", number(each.reward)], ["above the mean", each.reward === null ? "" : number(each.reward - mean)],
      ["turns", number(each.num_turns)], ["ended by", each.termination_reason]])))));
}

async function everyTurn(address) {
  const found = [];
  for (let after = "", more = true; more;) {
    const page = await request(`${address}/turns?limit=${TURNS}${after}`);
    found.push(...page.data);
    more = page.has_more;
    after = `&after=${path(page.data.at(-1)?.turn_id ?? "")}`;
  }
  return found;
}

export async function session(id, chosen) {
  const address = `v1/sessions/${path(id)}`;
  await readiness();
  const [record, turns] = await Promise.all([request(address), everyTurn(address)]);
  const current = turns.find((each) => each.turn_id === chosen) ?? turns.at(-1);
  const group = record.group_id ? link(`sessions/group_id=${path(record.group_id)}`, record.group_id) : "";
  return [make("h2", {}, `Session ${id}`), facts([["status", status(record.status)], ["ended by", record.termination_reason],
      ["reward", number(record.reward)], ["task", record.task_id], ["group", group], ["run", number(record.run)],
      ["trained in", record.trained_in ? JSON.stringify(record.trained_in) : ""], ["opened", time(record.created_at)]]),
    rewardForm(id), turns.length ? make("div", {className: "columns"},
      make("nav", {attributes: {"aria-label": "Turns"}}, make("h3", {}, `${turns.length} turns`), tree(id, turns, current)),
      await turnArticle(current, turns)) : make("p", {className: "quiet"}, "No turn yet.")];
}

function rewardForm(id) {
  const form = make("form", {className: "filters"}, make("label", {}, "Reward", make("input", {name: "value", type: "number", step: "any", required: true})),
    make("label", {}, "Name", make("input", {name: "name", value: "reward", size: 10})), make("button", {}, "Give or revise"),
    make("span", {role: "status", className: "quiet"}));
  form.onsubmit = async (event) => {
    event.preventDefault();
    const body = {session_id: id, value: Number(form.elements.value.value), name: form.elements.name.value, source: "page"};
    try {
      const answer = await request("v1/rewards", {method: "POST", body: JSON.stringify(body)});
      form.lastChild.textContent = `reached ${number(answer.data[0].turns)} turns`;
    } catch (error) {
      form.lastChild.textContent = error.message;
    }
  };
  return form;
}

// A turn with one child stands above it; a turn with several opens a branch for each.
function tree(id, turns, current) {
  const children = new Map();
  for (const each of turns) children.set(each.parent_turn_id, [...(children.get(each.parent_turn_id) ?? []), each]);
  const entry = (each) => make("li", {}, make("a", {href: `#session/${path(id)}/${path(each.turn_id)}`,
    attributes: each === current ? {"aria-current": "true"} : {}}, `Turn ${each.seq}`), " ", status(each.outcome),
    make("span", {className: "quiet"}, [each.role && each.role !== "main" ? ` ${each.role}` : "", each.reason ? ` ${each.reason}` : ""].join("")));
  const list = make("ul", {className: "tree"});
  const open = [...(children.get(null) ?? [])].reverse().map((each) => [each, list]);
  while (open.length) {
    const [each, into] = open.pop();
    const item = entry(each), next = children.get(each.turn_id) ?? [];
    into.append(item);
    if (next.length === 1) open.push([next[0], into]);
    else for (const child of [...next].reverse()) { const branch = make("ul", {}); item.append(branch); open.push([child, branch]); }
  }
  return list;
}

async function turnArticle(each, turns) {
  const versions = each.policy_version_first === each.policy_version_last ? each.policy_version_first : `${each.policy_version_first} to ${each.policy_version_last}`;
  const logprobs = each.logprobs ?? [], mean = logprobs.length ? logprobs.reduce((sum, value) => sum + value, 0) / logprobs.length : null;
  const rewards = each.rewards.map((line) => `${line.name} ${number(line.value)}${line.source ? ` (${line.source})` : ""}`);
  const tokens = make("details", {}, make("summary", {}, "Tokens"));
  tokens.addEventListener("toggle", async () => { if (tokens.open && tokens.children.length === 1) tokens.append(await ribbon(each.turn_id)); }, {once: true});
  return make("article", {}, make("h2", {}, `Turn ${each.seq}, step ${each.step}: `, status(each.outcome), each.reason ? ` (${each.reason})` : ""),
    facts([["id", each.turn_id], ["continues", each.parent_turn_id ?? "nothing: it is the root of a chain"], ["role", each.role], ["rewards", rewards.join(", ")],
      ["tokens", `${number(each.prompt_length)} in the prompt, ${number(each.token_ids.length)} sampled`],
      ["mean logprob", number(mean)], ["finish reason", each.finish_reason], ["policy version", String(versions)], ["dialect", each.dialect],
      ["took", seconds(each.duration_seconds) + (each.ttft_seconds === null ? "" : `, first token after ${seconds(each.ttft_seconds)}`)]]),
    ...split(each, turns), make("h3", {}, "New messages"), ...(each.messages ?? []).map(message), make("h3", {}, "Reply"),
    message({role: "assistant", ...each.response}), tokens);
}

// Where a turn lost the chain that it seemed to continue: the reply that was stored, and what the client sent instead.
function split(each, turns) {
  if (!each.reason || each.seq === 0) return [];
  const before = [...turns].reverse().find((other) => other.seq < each.seq && other.parent_turn_id === each.parent_turn_id);
  if (!before) return [];
  const sent = (each.messages ?? []).find((said) => said.role === "assistant");
  return [make("h3", {}, `Why this is a branch: ${each.reason}`), make("div", {className: "sides"},
    card(`Stored reply of turn ${before.seq}`, message({role: "assistant", ...before.response})),
    card("What the client sent in this turn", sent ? message(sent) : make("p", {className: "quiet"}, "no reply of the model")))];
}

async function ribbon(turnId) {
  const found = await request(`v1/turns/${path(turnId)}/tokens`);
  const {pieces, segments} = found, special = new Set(found.special_ids), box = make("div", {className: "tokens", dir: "auto", tabIndex: 0});
  const kinds = [];
  for (const segment of segments) for (let at = segment.start; at < segment.end; at += 1) kinds[at] = segment;
  const fill = (block, start) => {
    const spans = [];
    for (let at = start; at < Math.min(start + TOKENS_IN_BLOCK, found.token_ids.length); at += 1) {
      const id = found.token_ids[at], segment = kinds[at], logprob = found.logprobs[at];
      const isSampled = segment.kind === "sampled";
      const names = [segment.kind, special.has(id) ? "special" : "", isSampled && logprob < RARE ? "rare" : ""];
      const title = `token ${id}, turn ${segment.seq}, ${segment.kind}${isSampled ? `, logprob ${number(logprob)}, version ${segment.policy_version_first}` : ""}`;
      spans.push(make("span", {className: names.filter(Boolean).join(" "), title}, pieces[id] ?? `<${id}>`));
    }
    block.replaceChildren(...spans);
  };
  const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    seen.unobserve(entry.target);
    fill(entry.target, Number(entry.target.dataset.start));
  }), {root: box, rootMargin: "400px"});
  for (let start = 0; start < found.token_ids.length; start += TOKENS_IN_BLOCK) {
    const block = make("div", {dataset: {start: String(start)}});
    box.append(block);
    seen.observe(block);
  }
  const legend = table(["colour", "meaning"], [["green", "sampled, and trained if the turn is"], ["orange", `sampled with a logprob below ${RARE}`], ["grey", "prompt"]]);
  return make("div", {}, box, legend);
}
