// Chooses the view by the address behind #, and refreshes it when the proxy reports a change.
import {byId, make, setKey, showProblem} from "./page.js";
import {listen} from "./live.js";
import {health} from "./health.js";
import {overview} from "./overview.js";
import {runs} from "./runs.js";
import {sessions} from "./sessions.js";
import {session} from "./session.js";

// A view returns {content, wants, refresh, polls}: its elements, whether an event concerns it, how it shows the change,
// and what it does in between for what is no event: pairs of milliseconds and a function.
const VIEWS = {overview, health, runs, sessions, session};
const NONE = {wants: () => false, refresh: () => show()};
let numShows = 0, current = NONE, timers = [], failed = null, stopListening = () => {};

function enter(view) {
  timers.forEach(clearInterval);
  timers = (view.polls ?? []).map(([everyMs, poll]) => setInterval(() => attempt(poll), everyMs));
  current = view;
}

// Does what shows changes, unless nobody sees them. Why it could not is shown until it can.
async function attempt(work) {
  if (document.hidden) return;
  const mine = numShows;
  let problem = null;
  try { await work(); } catch (error) { problem = error; }
  if (mine !== numShows || (problem === null && failed !== work)) return;
  failed = problem === null ? null : work;
  showProblem(problem);
}

async function show() {
  const mine = ++numShows;
  const [given, ...parts] = location.hash.slice(1).split("/");
  const name = Object.hasOwn(VIEWS, given) ? given : "overview";
  const marked = name === "session" ? "sessions" : name;
  for (const anchor of document.querySelectorAll("nav a[data-view]")) {
    if (anchor.dataset.view === marked) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  try {
    // A filter is a query string, which is decoded as such; every other part is one encoded name.
    const view = await VIEWS[name](...parts.map((part) => name === "sessions" ? part : decodeURIComponent(part)));
    if (mine !== numShows) return;
    enter(view);
    replaceContent(current.content);
    current.shown?.();
    showProblem(null);
  } catch (error) {
    if (mine === numShows) showProblem(error);
  }
  byId("main").setAttribute("aria-busy", "false");
}

// The focus stays where it was: on the link with the same address.
function replaceContent(content) {
  const address = document.activeElement?.closest("main")?.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  byId("main").replaceChildren(...content.filter((each) => each !== null && each !== undefined));
  if (address) [...byId("main").querySelectorAll("a")].find((anchor) => anchor.getAttribute("href") === address)?.focus();
}

const refresh = () => attempt(current.refresh);

function startListening() {
  stopListening();
  stopListening = listen({
    onState: (state) => {
      byId("live").replaceChildren(make("span", {className: state === "live" ? "good" : "quiet"}, state));
      if (state === "reconnecting") byId("state").replaceChildren(make("span", {className: "warn"}, "unknown"));
    },
    onEvents: (events) => { if (events.some((event) => event.kind === "lost" || current.wants(event))) refresh(); },
  });
}

// The link that `turnwise up` prints brings the key, which then leaves the address.
function takeKey() {
  const [name, value] = location.hash.slice(1).split("=");
  if (name !== "key" || !value) return false;
  setKey(decodeURIComponent(value));
  history.replaceState(null, "", location.pathname);
  return true;
}

byId("login").onsubmit = (event) => { event.preventDefault(); setKey(byId("key").value.trim()); startListening(); show(); };
window.onhashchange = () => { if (takeKey()) startListening(); byId("main").setAttribute("aria-busy", "true"); byId("main").replaceChildren(); enter(NONE); show(); };
document.addEventListener("visibilitychange", refresh);
document.querySelector(".skip").onclick = (event) => { event.preventDefault(); byId("main").focus(); };
takeKey();
startListening();
show();
