// The seam of a compaction: the long context, its summary and the context after it, each with its tokens and its credit.
import {facts, link, make, number, path} from "./page.js";

const WHY = {not_continued: "no later context has what it says", another_attempt: "the context goes on from another attempt", partial: "the client stopped it"};
const credit = (turn) => turn?.trained_in.at(-1) ? `, advantage ${number(turn.trained_in.at(-1).advantage)}` : "";

// What stands above a turn whose context goes on from summaries, or that is a summary.
export function seam(each, turns, sessionId) {
  const byId = new Map(turns.map((turn) => [turn.turn_id, turn]));
  const named = (turn) => link(`session/${path(sessionId)}/${path(turn.turn_id)}`, `Turn ${turn.seq}`);
  const found = (each.continues_summary ?? []).map((id) => byId.get(id)).filter(Boolean);
  return [...found.map((summary) => crossed(each, summary, byId.get(summary.parent_turn_id), named)), ...(each.role === "summary" ? [ownSeam(each, byId, named)] : [])];
}

function crossed(each, summary, before, named) {
  const long = before ?? summary, size = before ? before.prompt_length + before.token_ids.length : summary.prompt_length;
  return make("div", {className: "seam"}, make("h3", {}, "This context goes on from a summary"), facts([
    ["context before", make("span", {}, named(long), `: ${number(size)} tokens${credit(before)}`)],
    ["summary", make("span", {}, named(summary), `: ${number(summary.token_ids.length)} tokens${credit(summary)}`)],
    ["context after", `${number(each.prompt_length)} tokens${credit(each)}`]]));
}

function ownSeam(each, byId, named) {
  const after = (each.continued_by ?? []).map((id) => byId.get(id)).filter(Boolean);
  const left = each.summary_left_out ? make("span", {className: "warn"}, ` Not trained: ${WHY[each.summary_left_out] ?? each.summary_left_out}.`) : "";
  return make("p", {className: "quiet"}, "A summary of the conversation up to here", ...after.flatMap((turn, at) => [at ? ", " : "; it goes on in ", named(turn)]), ".", left);
}
