// One session as its tree of turns, down to the tokens; with its labels, and rewards given by hand.
import {card, facts, inlineFacts, link, make, message, number, path, plural, request, seconds, select, status, text, time} from "./page.js";
import {chip, readiness} from "./overview.js";
import {ribbon} from "./ribbon.js";

const TURNS = 200;

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
  const address = `v1/sessions/${path(id)}`, about = make("div", {}), labels = make("div", {}), nav = make("nav", {attributes: {"aria-label": "Turns"}});
  await readiness();
  let numTurns = -1, shownLabels = null;
  const [, turns] = await load();
  const current = turns.find((each) => each.turn_id === chosen) ?? turns.at(-1);
  const article = make("div", {}, current ? await turnArticle(current, turns) : make("p", {className: "quiet"}, "No turn: no call of this session has ended."));
  fillTree(turns, current);

  async function load() {
    const [record, turns] = await Promise.all([request(address), everyTurn(address)]);
    const group = record.group_id ? link(`sessions/${new URLSearchParams({group_id: record.group_id})}`, record.group_id) : "";
    about.replaceChildren(inlineFacts([["status", status(record.status)], ["ended by", record.termination_reason],
      ["reward", number(record.reward)], ["task", record.task_id], ["group", group], ["run", number(record.run)], ["split", record.split], ["credit", record.credit],
      ["trained in", record.trained_in.map((one) => `update ${one.update_id}, version ${one.policy_version}`).join("; ")], ["opened", time(record.created_at)]]));
    // A label that somebody types stays while others change the session.
    if (shownLabels !== (shownLabels = JSON.stringify(record.labels))) labels.replaceChildren(labelEditor(address, record.labels, refresh));
    return [record, turns];
  }
  function fillTree(turns, current) {
    numTurns = turns.length;
    nav.replaceChildren(make("h3", {}, plural(turns.length, "turn")), tree(id, turns, current));
  }
  // A live turn changes the tree; the turn that is read stays, unless there was none.
  async function refresh() {
    const [, turns] = await load();
    if (turns.length === numTurns) return;
    if (numTurns === 0) article.replaceChildren(await turnArticle(turns.at(-1), turns));
    fillTree(turns, turns.find((each) => each.turn_id === (chosen ?? current?.turn_id)) ?? turns.at(-1));
  }
  return {
    content: [make("h2", {}, "Session ", make("bdi", {}, id)), about, labels, rewardForm(id, current, refresh), make("div", {className: "columns"}, nav, article)],
    wants: (event) => event.kind === "session" && event.data.session_id === id, refresh,
  };
}

function labelEditor(address, labels, changed) {
  const change = async (label, options) => { await request(`${address}/labels/${path(label)}`, options); await changed(); };
  const shown = labels.map((one) => make("span", {className: "labelled"}, chip(one.label, one.note), one.note ? make("bdi", {className: "quiet"}, ` ${one.note} `) : "",
    make("button", {type: "button", ariaLabel: `Remove label ${one.label}`, onclick: () => change(one.label, {method: "DELETE"})}, "×")));
  const form = make("form", {className: "filters"}, shown.length ? make("span", {}, ...shown) : null, make("label", {}, "Label", make("input", {name: "label", size: 12, maxLength: 64, required: true, pattern: "[^\\/]+", placeholder: "golden"})),
    make("label", {}, "Note", make("input", {name: "note", size: 18, maxLength: 1000})), make("button", {}, "Mark"), make("span", {role: "status", className: "bad"}));
  form.onsubmit = async (event) => {
    event.preventDefault();
    const note = form.elements.note.value;
    try { await change(form.elements.label.value, {method: "PUT", body: JSON.stringify(note ? {note} : {})}); } catch (error) { form.lastChild.textContent = error.message; }
  };
  return form;
}

function rewardForm(id, current, changed) {
  const targets = [["session", "the whole session"], ...(current ? [["step", `step ${current.step}`], ["turn", `turn ${current.seq}`]] : [])];
  const form = make("form", {className: "filters"}, make("label", {}, "Reward", make("input", {name: "value", type: "number", step: "any", required: true, size: 6})),
    select("target", "For", targets, "session"), make("label", {}, "Name", make("input", {name: "name", value: "reward", size: 10, required: true, maxLength: 256})),
    make("button", {}, "Give or revise"), make("span", {role: "status", className: "quiet"}));
  form.onsubmit = async (event) => {
    event.preventDefault();
    const {value, target, name} = form.elements;
    const where = {session: {session_id: id}, step: {session_id: id, step: current?.step}, turn: {turn_id: current?.turn_id}}[target.value];
    try {
      const answer = await request("v1/rewards", {method: "POST", body: JSON.stringify({...where, value: Number(value.value), name: name.value, source: "page"})});
      const {turns, trained_in: update} = answer.data[0];
      form.lastChild.textContent = `Stored; it is for ${plural(turns, "turn")}.${update === null ? "" : ` Update ${update} trained the session before this reward came.`}`;
      await changed();
    } catch (error) {
      form.lastChild.textContent = error.message;
    }
  };
  return form;
}

// A turn with one child stands above it; a turn with several opens a branch for each. Of several roots, each opens a list
// with its role and the start of its conversation.
function tree(id, turns, current) {
  const children = new Map();
  for (const each of turns) {
    if (!children.has(each.parent_turn_id)) children.set(each.parent_turn_id, []);
    children.get(each.parent_turn_id).push(each);
  }
  const byTurn = new Map(turns.map((each) => [each.turn_id, each]));
  const roleOf = (each) => byTurn.get(each.parent_turn_id)?.role ?? ((children.get(null) ?? []).length > 1 ? each.role : "main");
  const entry = (each) => make("li", {}, make("a", {href: `#session/${path(id)}/${path(each.turn_id)}`,
    attributes: each.turn_id === current?.turn_id ? {"aria-current": "true"} : {}}, `Turn ${each.seq}`), " ", status(each.outcome),
    make("span", {className: "quiet"}, [each.role && each.role !== roleOf(each) ? ` ${each.role}` : "", each.reason ? ` ${each.reason}` : ""].join("")));
  const list = make("ul", {className: "tree"});
  const roots = children.get(null) ?? [], open = [];
  for (const root of roots) {
    const into = roots.length > 1 ? make("ul", {}) : list;
    if (into !== list) list.append(make("li", {}, make("span", {className: "quiet begins", title: begins(root)}, `${root.role ?? "main"}: ${begins(root)}`), into));
    open.unshift([root, into]);
  }
  while (open.length) {
    const [each, into] = open.pop();
    const item = entry(each), next = children.get(each.turn_id) ?? [];
    into.append(item);
    if (next.length === 1) open.push([next[0], into]);
    else {
      const branches = next.map((child) => [child, make("ul", {})]);
      item.append(...branches.map(([, branch]) => branch));
      open.push(...branches.reverse());
    }
  }
  return list;
}

// The first line of what a person or the main agent wrote first.
function begins(root) {
  const messages = root.messages ?? [], said = messages.find((each) => each.role === "user") ?? messages[0];
  return text(said?.content).trim().slice(0, 200).split("\n")[0];
}

async function turnArticle(each, turns) {
  const versions = each.policy_version_first === each.policy_version_last ? each.policy_version_first : `${each.policy_version_first} to ${each.policy_version_last}`;
  const logprobs = each.logprobs ?? [], mean = logprobs.length ? logprobs.reduce((sum, value) => sum + value, 0) / logprobs.length : null;
  const rewards = each.rewards.map((line) => `${line.name} ${number(line.value)}${line.source ? ` (${line.source})` : ""}`);
  const trained = each.trained_in.map((one) => `update ${one.update_id} with advantage ${number(one.advantage)}`);
  const parent = turns.find((other) => other.turn_id === each.parent_turn_id);
  const tokens = make("details", {className: "ribbon"}, make("summary", {}, "Tokens"));
  tokens.addEventListener("toggle", async () => {
    if (!tokens.open || tokens.children.length > 1) return;
    try { tokens.append(await ribbon(each.turn_id)); } catch (error) { tokens.append(make("p", {className: "bad"}, error.message)); }
  }, {once: true});
  return make("article", {}, make("h2", {}, `Turn ${each.seq}, step ${each.step}: `, status(each.outcome), each.reason ? ` (${each.reason})` : ""),
    facts([["id", each.turn_id], ["continues", parent ? link(`session/${path(each.session_id)}/${path(parent.turn_id)}`, `Turn ${parent.seq}`) : "nothing: it is the root of a chain"], ["role", each.role_reason ? `${each.role} (${each.role_reason})` : each.role], ["rewards", rewards.join(", ")],
      ["trained", trained.join("; ")], ["tokens", `${number(each.prompt_length)} in the prompt, ${number(each.token_ids.length)} sampled`],
      ["mean logprob", number(mean)], ["finish reason", each.finish_reason], ["policy version", String(versions)], ["dialect", each.dialect],
      ["took", seconds(each.duration_seconds) + (each.ttft_seconds === null ? "" : `, first token after ${seconds(each.ttft_seconds)}`)]]),
    ...split(each, turns), tokens, make("h3", {}, "New messages"), ...(each.messages ?? []).map(message), make("h3", {}, "Reply"),
    message({role: "assistant", ...each.response}));
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
