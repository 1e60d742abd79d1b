// The turns from the root of a chain to one leaf, as a conversation; the other leaves are branches beside it.
import {card, facts, link, make, makeForm, mean, message, number, path, plural, request, select, seconds, status, text, time} from "./page.js";
import {ribbon} from "./ribbon.js";
import {seam} from "./summaries.js";

// Earlier turns of a longer conversation are made when somebody asks for them.
const SHOWN = 100;

export function childrenOf(turns) {
  const children = new Map();
  for (const each of turns) {
    if (!children.has(each.parent_turn_id)) children.set(each.parent_turn_id, []);
    children.get(each.parent_turn_id).push(each);
  }
  return children;
}

// The path through the chosen turn to a leaf. Without a choice it ends with the last turn of the main agent.
export function pathThrough(turns, chosen) {
  const byId = new Map(turns.map((each) => [each.turn_id, each])), children = childrenOf(turns), line = [];
  const end = byId.get(chosen) ?? turns.findLast((each) => (each.role ?? "main") === "main") ?? turns.at(-1);
  for (let each = end; each; each = byId.get(each.parent_turn_id)) line.unshift(each);
  for (let next = end && children.get(end.turn_id); next; next = children.get(next.at(-1).turn_id)) line.push(next.at(-1));
  return line;
}

// Shows a path, and later the same path with more turns: what was opened stays open.
export function conversation(sessionId, changed) {
  const box = make("div", {className: "conversation"}), made = new Map();
  let isWhole = false;
  const element = (each, turns, feedback) => {
    const own = feedback.filter((one) => one.turn_id === each.turn_id);
    const state = JSON.stringify([own, each.rewards, each.trained_in, each.role, each.continued_by, turns.filter((other) => other.parent_turn_id === each.parent_turn_id).length]);
    if (made.get(each.turn_id)?.state !== state) made.set(each.turn_id, {state, element: turnElement(each, turns, own, sessionId, changed)});
    return made.get(each.turn_id).element;
  };
  const show = (line, turns, feedback, ending) => {
    const left = isWhole ? 0 : Math.max(0, line.length - SHOWN);
    const earlier = left ? [make("button", {type: "button", onclick: () => { isWhole = true; show(line, turns, feedback, ending); }}, `Show ${number(left)} earlier turns`)] : [];
    const wanted = [...earlier, ...line.slice(left).map((each) => element(each, turns, feedback)), ...ending];
    wanted.forEach((each, at) => { if (box.children[at] !== each) box.insertBefore(each, box.children[at] ?? null); });
    while (box.children.length > wanted.length) box.lastChild.remove();
  };
  return {box, show, find: (turnId) => made.get(turnId)?.element};
}

function turnElement(each, turns, feedback, sessionId, changed) {
  const siblings = turns.filter((other) => other.parent_turn_id === each.parent_turn_id && other !== each && each.parent_turn_id !== null);
  const trained = each.trained_in.at(-1), isExact = each.outcome === "exact";
  const foot = make("div", {className: "foot"}, make("a", {className: "quiet", href: `#session/${path(sessionId)}/${path(each.turn_id)}`}, `Turn ${each.seq}`),
    ...(isExact ? [] : [make("span", {}, status(each.outcome), each.reason ? `: ${each.reason}` : "")]),
    ...(each.not_trained ? [make("span", {className: "warn", title: "Only sft, dpo and correction train such turns."}, `not trained: ${each.not_trained}`)] : []),
    ...rewardChips(each.rewards), trained ? make("span", {className: "quiet"}, `advantage ${number(trained.advantage)}`) : null,
    make("span", {className: "quiet"}, [`${number(each.token_ids.length)} tokens`, seconds(each.duration_seconds && Number(each.duration_seconds.toPrecision(2))), `version ${each.policy_version_last}`].filter(Boolean).join(" · ")),
    opened("Feedback", async () => feedbackForms(each, changed)), opened("Tokens", () => ribbon(each.turn_id)), opened("Details", async () => details(each, turns, sessionId, changed)));
  return make("section", {className: "turn", ariaLabel: `Turn ${each.seq}`, dataset: {turn: each.turn_id}}, ...seam(each, turns, sessionId), ...lostChain(each, turns), ...(each.messages ?? []).map(message),
    Object.keys(each.response ?? {}).length ? message({role: "assistant", ...each.response}) : make("p", {className: "quiet"}, "No reply."), ...feedback.map(given),
    siblings.length ? make("p", {className: "quiet"}, "A branch: the conversation also goes on with ", ...siblings.flatMap((other, at) => [at ? ", " : "", link(`session/${path(sessionId)}/${path(other.turn_id)}`, `Turn ${other.seq}`)]), ".") : null, foot);
}

// Content that is made when it is opened first.
function opened(title, fill) {
  const element = make("details", {}, make("summary", {}, title));
  element.addEventListener("toggle", async () => {
    if (!element.open || element.children.length > 1) return;
    try { element.append(await fill()); } catch (error) { element.append(make("p", {className: "bad"}, error.message)); }
  });
  return element;
}

// What a person said about a turn, or about the session. A thumb or a rating is also a reward, which is shown as such.
export function given(one) {
  const said = {comment: "comment", demonstration: one.value === null ? "chosen over other replies" : "better reply"}[one.kind];
  if (!said) return "";
  return make("div", {className: "message feedback"}, make("span", {className: "quiet"}, [said, one.name === "feedback" ? "" : one.name, one.source].filter(Boolean).join(", ")), one.value === null ? null : make("pre", {dir: "auto"}, String(one.value)),
    one.training_note ? make("p", {className: "quiet"}, one.training_note) : null);
}

const NOTE = {name: "value", required: true, rows: 3};
const post = (turnId, kind, value) => request("v1/feedback", {method: "POST", body: JSON.stringify({turn_id: turnId, kind, value, source: "page"})});

function feedbackForms(each, changed) {
  const answer = make("p", {role: "status", className: "quiet"});
  const send = async (kind, value, said) => {
    try { await post(each.turn_id, kind, value); answer.textContent = said; await changed(); } catch (error) { answer.textContent = error.message; }
  };
  const form = (label, button, kind, value, said) => {
    const field = make("textarea", {...NOTE, value});
    return makeForm("note", () => send(kind, field.value, said), make("label", {}, label, field), make("button", {}, button));
  };
  const thumb = (value, label, sign) => make("button", {type: "button", ariaLabel: label, title: label, onclick: () => send("boolean", value, "Stored as a reward of this turn.")}, sign);
  const pin = async () => {
    try { await request(`v1/examples/${path(each.turn_id)}`, {method: "PUT", body: "{}"}); answer.textContent = "Pinned: each version answers this prompt before it is published, and must not reply this again."; await changed(); } catch (error) { answer.textContent = error.message; }
  };
  return make("div", {}, make("p", {}, thumb(true, "Good reply", "👍"), " ", thumb(false, "Bad reply", "👎"), " ", make("button", {type: "button", onclick: pin}, "Must not come again")), form("Comment", "Comment", "comment", "", "The comment is stored."),
    form("A better reply, which SFT and DPO learn from", "Store the better reply", "demonstration", text(each.response?.content), "The better reply is stored, as a group of sessions with rewards 1 and 0."), answer);
}

// Reward lines in order of arrival; a line that a later one of the same name and target replaces is struck out.
export function rewardChips(lines) {
  const target = (line) => `${line.name}/${line.turn_id ?? ""}/${line.step ?? ""}`;
  return lines.map((line, at) => {
    const isRevised = lines.slice(at + 1).some((later) => target(later) === target(line));
    const said = `${line.name === "reward" ? "reward" : `reward ${line.name}`} ${number(line.value)}`;
    return make("span", {className: "given", title: [line.turn_id ? "for this turn" : line.step === null ? "for the session" : `for step ${line.step}`, line.source, time(line.created_at)].filter(Boolean).join(", ")}, isRevised ? make("s", {}, said) : said);
  });
}

function details(each, turns, sessionId, changed) {
  const versions = each.policy_version_first === each.policy_version_last ? each.policy_version_first : `${each.policy_version_first} to ${each.policy_version_last}`;
  const trained = each.trained_in.map((one) => `update ${one.update_id} with advantage ${number(one.advantage)}`);
  const parent = turns.find((other) => other.turn_id === each.parent_turn_id);
  return make("div", {}, facts([["id", each.turn_id], ["step", number(each.step)], ["outcome", make("span", {}, status(each.outcome), each.reason ? ` (${each.reason})` : "")],
    ["continues", parent ? `Turn ${parent.seq}` : "nothing: it is the root of a chain"], ["role", each.role_reason ? `${each.role} (${each.role_reason})` : each.role],
    ["rewards", each.rewards.map((line) => `${line.name} ${number(line.value)}${line.source ? ` (${line.source})` : ""}`).join(", ")],
    ["trained", trained.join("; ")], ["tokens", `${number(each.prompt_length)} in the prompt, ${number(each.token_ids.length)} sampled`],
    ["mean logprob", number(mean(each.logprobs ?? []))], ["finish reason", each.finish_reason], ["sampling", Object.entries(each.sampling ?? {}).filter(([, value]) => value !== null && typeof value !== "object").map(([name, value]) => `${name} ${value}`).join(", ")], ["policy", each.policy], ["policy version", String(versions)], ["dialect", each.dialect],
    ["took", seconds(each.duration_seconds) + (each.ttft_seconds === null ? "" : `, first token after ${seconds(each.ttft_seconds)}`)]]),
    rewardForm([["turn", `turn ${each.seq}`, {turn_id: each.turn_id}], ["step", `step ${each.step}`, {session_id: sessionId, step: each.step}]], changed));
}

// Targets are [value, label, fields of the reward line].
export function rewardForm(targets, changed) {
  const give = async (form) => {
    const {value, target, name} = form.elements, [, , where] = targets.find(([each]) => each === (target?.value ?? targets[0][0]));
    try {
      const answer = await request("v1/rewards", {method: "POST", body: JSON.stringify({...where, value: Number(value.value), name: name.value, source: "page"})});
      const {turns, trained_in: update} = answer.data[0];
      form.lastChild.textContent = `Stored; it is for ${plural(turns, "turn")}.${update === null ? "" : ` Update ${update} trained the session before this reward came.`}`;
      await changed();
    } catch (error) {
      form.lastChild.textContent = error.message;
    }
  };
  return makeForm("filters", give, make("label", {}, "Reward", make("input", {name: "value", type: "number", step: "any", required: true, size: 6})),
    targets.length > 1 ? select("target", "For", targets, targets[0][0]) : null, make("label", {}, "Name", make("input", {name: "name", value: "reward", size: 10, required: true, maxLength: 256})),
    make("button", {}, "Give or revise"), make("span", {role: "status", className: "quiet"}));
}

// Where a turn lost the chain that it seemed to continue: the reply that was stored, and what the client sent instead.
function lostChain(each, turns) {
  if (!each.reason || each.seq === 0) return [];
  const before = turns.findLast((other) => other.seq < each.seq && other.parent_turn_id === each.parent_turn_id);
  if (!before) return [];
  const sent = (each.messages ?? []).find((said) => said.role === "assistant");
  return [make("h3", {}, `Why this is a branch: ${each.reason}`), make("div", {className: "sides"},
    card(`Stored reply of turn ${before.seq}`, message({role: "assistant", ...before.response})),
    card("What the client sent in this turn", sent ? message(sent) : make("p", {className: "quiet"}, "no reply of the model")))];
}

// All turns as a tree. A turn with one child stands above it; a turn with several opens a branch for each. Of several
// roots, each opens a list with its role and the start of its conversation.
export function tree(id, turns, shown) {
  const children = childrenOf(turns), byTurn = new Map(turns.map((each) => [each.turn_id, each])), onPath = new Set(shown.map((each) => each.turn_id));
  const roleOf = (each) => byTurn.get(each.parent_turn_id)?.role ?? ((children.get(null) ?? []).length > 1 ? each.role : "main");
  const entry = (each) => make("li", {}, make("a", {href: `#session/${path(id)}/${path(each.turn_id)}`,
    attributes: onPath.has(each.turn_id) ? {"aria-current": "true"} : {}}, `Turn ${each.seq}`), each.outcome === "exact" ? "" : " ", each.outcome === "exact" ? "" : status(each.outcome),
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
