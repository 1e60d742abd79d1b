// Rate these: one session at a time, as it was drawn, rated by keys alone.
import {inlineFacts, link, make, makeForm, message, number, path, plural, readiness, request} from "./page.js";

const TURNS = 50;
const KEYS = [["y", "good"], ["n", "bad"], ["c", "comment"], ["a", "the first of two replies is better"], ["b", "the second one"], ["s", "cannot say"], ["z", "the last one again"]];
// Two windows are two raters: they get two sessions.
const rater = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
let last = null, numRated = 0;

export async function rateSessions(policy) {
  await readiness();
  const asked = new URLSearchParams(policy ? {policy, rater} : {rater});
  const box = make("section", {className: "card", tabIndex: -1, ariaLabel: "The session to rate"}), said = make("p", {className: "quiet", attributes: {role: "status"}});
  let now = null, isBusy = false, better = null;

  async function show(drawn) {
    now = drawn; better = null;
    if (!drawn.session_id) {
      box.replaceChildren(make("p", {className: "empty"}, "No session is left to rate: a session that is over and has no reward is drawn."));
      return;
    }
    const [summary, turns, other] = await Promise.all([request(`v1/ratings?${asked.has("policy") ? new URLSearchParams({policy}) : ""}`), request(`v1/sessions/${path(drawn.session_id)}/turns?limit=${TURNS}`),
      drawn.pair ? request(`v1/turns/${path(drawn.pair.other_turn_id)}`) : null]);
    const missing = summary.missing === 1 ? "1 rating is missing" : `${number(summary.missing)} ratings are missing`;
    box.replaceChildren(inlineFacts([["session", link(`session/${path(drawn.session_id)}`, drawn.session_id)], ["drawn with", `probability 1 / ${number(drawn.num_candidates)}`], ["rated so far", number(numRated)], ["next version", missing]]),
      ...turns.data.flatMap((turn) => [...(turn.messages ?? []).map(message), message({role: "assistant", ...turn.response})]),
      ...(turns.has_more ? [make("p", {className: "quiet"}, `The first ${plural(TURNS, "turn")} are shown.`)] : []), ...(other ? pair(drawn, turns.data, other) : []), noteForm());
    box.focus();
  }

  function pair(drawn, turns, other) {
    const own = turns.find((turn) => turn.turn_id === drawn.pair.turn_id);
    const side = (key, turn) => make("section", {className: "card", dataset: {side: key}}, make("button", {type: "button", ariaLabel: `The reply ${key} is better`, onclick: () => choose(key)}, key), turn ? message({role: "assistant", ...turn.response}) : null);
    return [make("h3", {}, "Two replies to the same prompt: which is better?"), make("div", {className: "sides"}, side("a", own), side("b", other))];
  }

  function choose(key) {
    if (!now?.pair) return;
    better = key === "a" ? {better: now.pair.turn_id, over: now.pair.other_turn_id} : {better: now.pair.other_turn_id, over: now.pair.turn_id};
    for (const side of box.querySelectorAll("[data-side]")) side.classList.toggle("chosen", side.dataset.side === key);
    said.textContent = `Reply ${key} is better; now rate the session.`;
  }

  function noteForm() {
    const field = make("textarea", {name: "comment", rows: 2, maxLength: 10000});
    field.onkeydown = (event) => {
      if (event.key === "Escape") box.focus();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(null); }
    };
    return makeForm("note", () => send(null), make("label", {}, "Comment: what was wrong? Ctrl + Enter sends it, Esc leaves it", field), make("button", {}, "Send the comment"));
  }

  // A comment that is typed is sent with the thumb; alone it counts as a thumb down.
  async function send(value, skip = false) {
    if (!now?.session_id || isBusy) return;
    isBusy = true;
    try {
      const comment = skip ? "" : box.querySelector("textarea").value.trim();
      if (value === null && !comment && !skip) return;
      const body = skip ? {skip} : {...(value === null ? {} : {value}), ...(comment ? {comment} : {}), ...better};
      await request("v1/ratings", {method: "POST", body: JSON.stringify({session_id: now.session_id, ...body})});
      if (!skip) { if (now.rated_at === null) numRated++; last = now; }
      said.textContent = skip ? "Left to another rater." : `Rated ${value === null ? "by a comment" : value ? "good" : "bad"}: ${now.session_id}`;
      await show(await request(`v1/ratings/next?${asked}`));
    } catch (error) {
      said.textContent = error.message;
    } finally { isBusy = false; }
  }

  const acts = {y: () => send(true), n: () => send(false), s: () => send(null, true), a: () => choose("a"), b: () => choose("b"), c: () => box.querySelector("textarea")?.focus(), z: () => last && show({...last, rated_at: last.rated_at ?? ""})};
  const onKey = (event) => {
    if (!box.isConnected) return document.removeEventListener("keydown", onKey);
    if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey || event.repeat || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  };
  document.addEventListener("keydown", onKey);
  await show(await request(`v1/ratings/next?${asked}`));
  const buttons = [["Good", "y"], ["Bad", "n"], ["Cannot say", "s"]].map(([title, key]) => make("button", {type: "button", onclick: () => acts[key]()}, `${title} `, make("span", {className: "key"}, key)));
  return {content: [make("h2", {}, "Rate these"), make("p", {className: "quiet"}, "Keys: ", ...KEYS.flatMap(([key, what], at) => [at ? ", " : "", make("span", {className: "key"}, key), ` ${what}`])), make("p", {}, ...buttons.flatMap((button) => [button, " "])), said, box],
    wants: () => false, refresh: async () => { if (!now?.session_id) await show(await request(`v1/ratings/next?${asked}`)); }, shown: () => box.focus()};
}
