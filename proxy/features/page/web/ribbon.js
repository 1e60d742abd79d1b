// Every token of a turn's sequence. Only the blocks near the visible part are in the document: 100,000 tokens scroll.
import {make, makeForm, mean, number, path, request, select, thumbnail} from "./page.js";

const TOKENS_IN_BLOCK = 500, LONGEST_BLOCK = 2 * TOKENS_IN_BLOCK, SHADES = 5;
// Name, title, and the value of a token by its segment and logprob: null where it has none. The last two say what its
// lowest and highest shades mean.
const COLOURS = [
  ["mask", "mask", null],
  ["logprob", "logprob", (segment, logprob) => logprob, "improbable", "certain"],
  ["version", "policy version", (segment) => segment.kind === "sampled" ? segment.policy_version_first : null, "oldest", "newest"],
  ["reward", "reward of the turn", (segment) => segment.reward, "least", "most"],
  ["return", "return of the turn", (segment) => segment.turn_return, "least", "most"],
  ["advantage", "advantage in the last update", (segment) => segment.advantage, "least", "most"],
];
const NOISE = 1e-4; // nats; logprobs are stored as float32
const CHANGE = ["change", "change of logprob since", null, "fell", "rose"];

export async function ribbon(turnId) {
  const found = await request(`v1/turns/${path(turnId)}/tokens`);
  const special = new Set(found.special_ids), box = make("div", {className: "tokens", dir: "auto", tabIndex: 0, role: "group", ariaLabel: `${number(found.token_ids.length)} tokens; arrow keys move from token to token`});
  const answer = make("span", {role: "status", className: "quiet"}), compare = make("button", {type: "button"}, "Compare with the served version");
  const detail = make("p", {className: "token-detail", role: "status"}, "Point at a token, or move with the arrow keys."), legend = make("p", {className: "quiet legend"});
  const form = makeForm("filters", () => {}, select("colour", "Colour by", COLOURS.map(([name, title]) => [name, title]), "mask"), compare, answer);
  const segmentAt = segmentFinder(found.segments), characters = new Map(), imageAt = new Map(found.images.map(({offset, digest}) => [offset, digest]));
  // A character of several tokens is shown at the first of them.
  for (const {start, end, text} of found.characters) for (let at = start; at < end; at += 1) characters.set(at, {text, part: at - start, of: end - start});
  const spelled = (at) => { const shared = characters.get(at), id = found.token_ids[at]; return shared ? shared.part ? "·" : shared.text : found.pieces[id] || `<${id}>`; };
  let shade = () => "", chosen = -1, isMeasured = false;
  const blocks = [];

  const fill = (block) => {
    const start = Number(block.dataset.start), spans = [];
    for (let at = start; at < Number(block.dataset.end); at += 1) {
      const id = found.token_ids[at], segment = segmentAt(at);
      const names = [segment.kind, segment.is_trainable ? "" : "untrained", special.has(id) ? "special" : "", shade(segment, found.logprobs[at], at), at === chosen ? "chosen" : ""];
      const span = make("span", {className: names.filter(Boolean).join(" ")}, spelled(at));
      span.dataset.at = String(at);
      if (imageAt.has(at)) spans.push(thumbnail(imageAt.get(at)));
      spans.push(span);
    }
    block.style.height = "";
    block.replaceChildren(...spans);
    // What has not been shown yet is as high as the first block, so that the scrollbar hardly jumps.
    if (!isMeasured) { isMeasured = true; setHeights(blocks.filter((other) => other !== block), block.offsetHeight); }
  };
  const seen = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      if (isIntersecting && !target.firstChild) fill(target);
      else if (!isIntersecting && target.firstChild) { target.style.height = `${target.offsetHeight}px`; target.replaceChildren(); }
    }
  }, {root: box, rootMargin: "600px"});
  const choose = (at) => {
    if (!(at >= 0 && at < found.token_ids.length)) return;
    chosen = at;
    box.querySelector(".chosen")?.classList.remove("chosen");
    box.querySelector(`[data-at="${at}"]`)?.classList.add("chosen");
    detail.textContent = describe(at, found, segmentAt(at), special, characters.get(at));
  };
  for (const [start, end] of blockRanges(found)) blocks.push(make("div", {dataset: {start: String(start), end: String(end)}}));
  box.append(...blocks);
  for (const block of blocks) { block.style.height = "12rem"; seen.observe(block); }
  box.onpointerover = box.onclick = (event) => { if (event.target.dataset.at) choose(Number(event.target.dataset.at)); };
  box.onkeydown = (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen + step);
    box.querySelector(".chosen")?.scrollIntoView({block: "nearest"});
  };
  form.onchange = () => {
    const colour = [...COLOURS, CHANGE].find(([name]) => name === form.colour.value);
    shade = shader(colour, found, legend);
    box.dataset.colour = colour[0];
    for (const block of blocks) if (block.firstChild) fill(block);
  };
  compare.onclick = async () => {
    compare.disabled = true;
    answer.className = "quiet";
    answer.textContent = "The engine computes the logprobs of this turn's tokens.";
    try {
      answer.textContent = addChanges(found, await request(`v1/turns/${path(turnId)}/logprobs`));
      if (!form.colour.querySelector("[value=change]")) form.colour.append(make("option", {value: CHANGE[0]}, CHANGE[1]));
      form.colour.value = CHANGE[0];
      form.onchange();
    } catch (error) {
      answer.className = "bad";
      answer.textContent = error.message;
    }
    compare.disabled = false;
  };
  form.onchange();
  return make("div", {}, form, legend, box, detail);
}

// Keeps the logprobs under the served version with the tokens; returns what is said of them.
function addChanges(found, {after, policy_version: version}) {
  const start = found.segments.at(-1).start;
  found.after = new Map(after.map((logprob, at) => [start + at, logprob]).filter(([, logprob]) => logprob !== null));
  found.servedVersion = version;
  const changes = [...found.after.keys()].map((at) => changeAt(found, at));
  return `Under version ${version}, ${number(changes.filter((each) => each > NOISE).length)} of ${number(changes.length)} tokens are more probable than when they were sampled; the mean change is ${number(mean(changes) ?? 0)} nats a token.`;
}

// Takes the height as a number: the browser lays the page out again for each height that is read after one was set.
function setHeights(blocks, height) {
  for (const block of blocks) block.style.height = `${height}px`;
}

// A block is a separate line, so it ends with a token that ends a line, unless none comes in time.
function blockRanges({token_ids: ids, pieces}) {
  const ranges = [];
  for (let start = 0, end = 1; start < ids.length; end += 1) {
    const endsLine = end - start >= TOKENS_IN_BLOCK && pieces[ids[end - 1]]?.endsWith("\n");
    if (end < ids.length && end - start < LONGEST_BLOCK && !endsLine) continue;
    ranges.push([start, Math.min(end, ids.length)]);
    start = end;
  }
  return ranges;
}

const changeAt = (found, at) => found.after?.has(at) ? found.after.get(at) - found.logprobs[at] : null;

function segmentFinder(segments) {
  let last = 0;
  return (at) => {
    if (!(segments[last].start <= at && at < segments[last].end)) last = segments.findIndex((segment) => segment.start <= at && at < segment.end);
    return segments[last];
  };
}

// Returns the class of a token's shade: s0 for the lowest value of the sequence, s4 for the highest.
function shader([name, title, valueOf, least, most], found, legend) {
  const key = (className, text) => make("span", {className: `key ${className}`}, text);
  if (name === "mask") {
    legend.replaceChildren("Colours: ", key("sampled", "sampled, may be trained"), " ", key("sampled untrained", "sampled, not trained"), " ", key("prompt", "text of a message"), " ", key("scaffold", "scaffold of the chat template"), " ", key("special", "special token"));
    return () => "";
  }
  let low = Infinity, high = -Infinity;
  if (name === "change") valueOf = (segment, logprob, at) => changeAt(found, at);
  const values = name === "change" ? [...found.after.keys()].map((at) => Math.abs(changeAt(found, at))) : name === "logprob" ? found.logprobs : found.segments.map((segment) => valueOf(segment));
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (name === "logprob") [low, high] = [Math.max(low, -6), 0];
  if (name === "change") [low, high] = [-Math.max(high, 0.01), Math.max(high, 0.01)];
  if (low > high) { legend.replaceChildren(`No token of this sequence has a value: ${title}.`); return () => ""; }
  legend.replaceChildren(`Colours by ${title}: `, key("s0", `${number(low)}, ${least}`), " … ", key(`s${low === high ? 0 : SHADES - 1}`, `${number(high)}, ${most}`));
  return (segment, logprob, at) => {
    const value = valueOf(segment, logprob, at);
    if (value === null) return "";
    return `s${low === high ? 0 : Math.min(SHADES - 1, Math.max(0, Math.floor(SHADES * (value - low) / (high - low))))}`;
  };
}

function describe(at, found, segment, special, shared) {
  const id = found.token_ids[at], logprob = found.logprobs[at];
  const change = changeAt(found, at);
  const parts = [`Token ${number(at)}: id ${id}, ${shared ? `part ${shared.part + 1} of ${shared.of} of ${JSON.stringify(shared.text)}` : JSON.stringify(found.pieces[id] ?? "")}`, special.has(id) ? "special" : "", `turn ${segment.seq}`, segment.kind === "prompt" ? "text of a message" : segment.kind,
    segment.kind === "sampled" ? (segment.is_trainable ? "may be trained" : "not trained") : "", logprob === null ? "" : `logprob ${number(logprob)} (probability ${number(Math.exp(logprob))})`,
    change === null ? "" : `under version ${found.servedVersion} ${number(found.after.get(at))} (${change > 0 ? "+" : ""}${number(change)})`];
  const versions = segment.policy_version_first === segment.policy_version_last ? segment.policy_version_first : `${segment.policy_version_first} to ${segment.policy_version_last}`;
  if (segment.kind === "sampled") parts.push(`version ${versions}`);
  for (const [name, value] of [["reward", segment.reward], ["return", segment.turn_return], ["advantage", segment.advantage]]) if (value !== null) parts.push(`${name} ${number(value)}`);
  return parts.filter(Boolean).join(", ");
}
