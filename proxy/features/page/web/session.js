// One session as a conversation with its branches beside it, and what a person does with it: reward, label, end, delete, export.
import {actionButton, ago, chip, chips, download, everyPage, filtered, inlineFacts, lasted, link, make, makeForm, money, number, optional, path, plural, readiness, request, status, sum, time} from "./page.js";
import {childrenOf, conversation, given, pathThrough, rewardChips, rewardForm, tree} from "./conversation.js";

const TURNS = 200;

const everyTurn = async (address) => (await everyPage(`${address}/turns?limit=${TURNS}`, "turn_id")).flatMap((page) => page.data);

export async function session(id, chosen) {
  const address = `v1/sessions/${path(id)}`, about = make("div", {}), labels = make("div", {}), actions = make("div", {className: "filters"});
  const nav = make("nav", {attributes: {"aria-label": "Turns"}}), columns = make("div", {}), shown = conversation(id, refresh);
  let shownLabels = null, shownStatus = null;
  await readiness();
  await refresh();

  // A live turn is added below; what is open above it stays open.
  async function refresh() {
    const [record, turns, feedback] = await Promise.all([request(address), everyTurn(address), optional(`v1/feedback?${new URLSearchParams({session_id: id})}`, {data: []})]);
    const line = pathThrough(turns, chosen), leaves = turns.length - [...childrenOf(turns).keys()].filter((parent) => parent !== null).length;
    about.replaceChildren(sessionFacts(record, turns));
    // A label that somebody types stays while others change the session.
    if (shownLabels !== (shownLabels = JSON.stringify(record.labels))) labels.replaceChildren(labelEditor(address, record.labels, refresh));
    if (shownStatus !== (shownStatus = `${record.status} ${record.train}`)) actions.replaceChildren(...actionButtons(record, address, refresh));
    if (leaves > 1) nav.replaceChildren(make("h3", {}, `${plural(turns.length, "turn")}, ${leaves} branches`), tree(id, turns, line));
    shown.show(line, turns, feedback.data, [...feedback.data.filter((one) => one.turn_id === null).map(given).filter(Boolean), ...ending(record, turns)]);
    columns.className = leaves > 1 ? "columns" : "";
    const wanted = leaves > 1 ? [shown.box, nav] : [shown.box];
    if (columns.children.length !== wanted.length) columns.replaceChildren(...wanted);
  }
  const forms = make("div", {className: "forms"}, make("details", {}, make("summary", {}, "Reward"), rewardForm([["session", "the whole session", {session_id: id}]], refresh)));
  forms.append(make("details", {}, make("summary", {}, "Label"), labels));
  return {
    content: [make("h2", {}, "Session ", make("bdi", {}, id)), about, actions, forms, columns],
    wants: (event) => event.kind === "session" && event.data.session_id === id, refresh,
    shown: () => { if (chosen) shown.find(chosen)?.scrollIntoView(); },
  };
}

function sessionFacts(record, turns) {
  const group = record.group_id && record.group_id !== record.session_id ? filtered("group_id", record.group_id) : "";
  return inlineFacts([["reward", record.reward === null ? make("span", {className: "quiet"}, "none yet") : make("span", {}, make("b", {}, number(record.reward)), rewardParts(record, turns))], ["status", status(record.status)], ["ended by", record.termination_reason], ["not trained", record.train ? notTrained(turns) : make("span", {className: "warn"}, record.record ? "marked `train = false`" : "marked `record = false`: what is said is not stored")],
    ["turns", number(record.num_turns)], ["sampled tokens", number(sum(turns.map((each) => each.token_ids.length)))], ["took", lasted(record)], ["cost", money(record.cost)],
    ["user", filtered("user_id", record.user_id)], ["agent", agentOf(record)],
    ["task", filtered("task_id", record.task_id)], ["group", group], ["run", record.group_id ? number(record.run) : ""], ["split", record.split === "train" ? "" : record.split],
    ["trained in", record.trained_in.map((one) => `update ${one.update_id}, version ${one.policy_version}`).join("; ")], ["continues", record.continues ? link(`session/${path(record.continues)}`, record.continues) : ""], ["opened", ago(record.created_at)],
    ["labels", chips(record.labels)]]);
}

// The lines that make the session's reward, as docs/rewards.md says, and those that do not count.
function rewardParts(record, turns) {
  const seqs = new Map(turns.map((each) => [each.turn_id, each.seq])), latest = new Map();
  const lines = [...record.rewards, ...turns.flatMap((each) => each.rewards)].sort((one, other) => one.created_at.localeCompare(other.created_at));
  for (const each of lines) latest.set(JSON.stringify([each.turn_id, each.step, each.name]), each);
  const isWhole = (each) => each.turn_id === null && each.step === null, inForce = [...latest.values()];
  const isCounted = record.credit === "propagate" && inForce.some(isWhole) ? isWhole : () => true;
  if (inForce.length < 2) return "";
  const said = (each) => `${number(each.value)} ${isWhole(each) ? "session" : each.turn_id === null ? `step ${each.step}` : `turn ${seqs.get(each.turn_id)}`}${each.name === "reward" ? "" : ` ${each.name}`}`;
  const counted = inForce.filter(isCounted).map(said), replaced = inForce.filter((each) => !isCounted(each)).map(said);
  return make("span", {className: "quiet"}, ` = ${counted.join(" + ")}`, replaced.length ? ` (in place of ${replaced.join(", ")})` : "");
}

// Which turns are left out of training by their sampling parameters.
function notTrained(turns) {
  const left = turns.filter((each) => each.not_trained), reasons = [...new Set(left.map((each) => each.not_trained))];
  return left.length ? make("span", {className: "warn"}, `${number(left.length)} of ${plural(turns.length, "turn")}: ${reasons.join(", ")}`) : "";
}

export const agentOf = (record) => typeof record.metadata?.agent === "string" ? record.metadata.agent : "";

// What stands below the last turn: how the session ended, and what was given for all of it.
function ending(record, turns) {
  if (!turns.length) return [make("p", {className: "empty"}, "No turn: no call of this session has ended.")];
  const over = record.status === "open" ? "The session is open." : `The session ${record.status === "ended" ? "ended" : "expired"}${record.termination_reason ? `: ${record.termination_reason}` : ""}, ${time(record.ended_at)}.`;
  return [make("p", {className: "foot ending"}, make("span", {className: "quiet"}, over), ...(record.rewards.length ? [make("span", {className: "quiet"}, "For the whole session:"), ...rewardChips(record.rewards)] : []))];
}

function actionButtons(record, address, changed) {
  const id = record.session_id, only = new URLSearchParams({session_id: id});
  return [record.status === "open" ? actionButton("End", `End session ${id}? Its rewards are then ready for training.`, async () => { await request(`${address}/end`, {method: "POST", body: "{}"}); await changed(); }) : null,
    actionButton("Export turns", "", async () => download(`${id}.json`, JSON.stringify(await everyTurn(address), null, 1))),
    actionButton("Export experiences", "", async () => {
      const lines = await request(`v1/experiences?${only}`, {expected: "application/jsonl"});
      if (!lines) throw new Error("There are no experiences yet: a session is trained when it is over and has a reward.");
      download(`${id}.jsonl`, lines);
    }),
    record.train ? actionButton("Never train", `Never train, export or judge session ${id}? This cannot be undone.`, async () => { await request("v1/consent", {method: "POST", body: JSON.stringify({kind: "session", name: id})}); await changed(); }) : null,
    actionButton("Delete", `Delete session ${id} with all its turns and rewards? This cannot be undone.`, async () => { await request(address, {method: "DELETE"}); location.hash = "sessions"; })].filter(Boolean);
}

function labelEditor(address, labels, changed) {
  const change = async (label, options) => { await request(`${address}/labels/${path(label)}`, options); await changed(); };
  const mark = async (form) => {
    const note = form.elements.note.value;
    try { await change(form.elements.label.value, {method: "PUT", body: JSON.stringify(note ? {note} : {})}); } catch (error) { form.lastChild.textContent = error.message; }
  };
  const shown = labels.map((one) => make("span", {className: "labelled"}, chip(one.label, one.note), one.note ? make("bdi", {className: "quiet"}, ` ${one.note} `) : "",
    make("button", {type: "button", ariaLabel: `Remove label ${one.label}`, onclick: () => change(one.label, {method: "DELETE"})}, "×")));
  return makeForm("filters", mark, shown.length ? make("span", {}, ...shown) : null, make("label", {}, "Label", make("input", {name: "label", size: 12, maxLength: 64, required: true, pattern: "[^\\/]+", placeholder: "golden"})),
    make("label", {}, "Note", make("input", {name: "note", size: 18, maxLength: 1000})), make("button", {}, "Mark"), make("span", {role: "status", className: "bad"}));
}
