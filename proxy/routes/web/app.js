// Chooses the view by the address behind #, and refreshes it when the proxy reports a change.
import {byId, make, setKey, showProblem} from "./page.js";
import {listen} from "./live.js";
import {health} from "./health.js";
import {overview} from "./overview.js";
import {runs} from "./runs.js";
import {sessions} from "./sessions.js";
import {session} from "./session.js";

const REFRESH_MS = 15000;
// A view returns {content, wants, refresh}: its elements, whether an event concerns it, and how it shows the change.
const VIEWS = {overview, health, runs, sessions, session};
let numShows = 0, current = {wants: () => false}, stopListening = () => {};

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
    current.close?.();
    current = {wants: () => false, ...view};
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

async function refresh() {
  if (document.hidden) return;
  if (!current.refresh) return show();
  const mine = numShows;
  try {
    await current.refresh();
    if (mine === numShows) showProblem(null);
  } catch (error) {
    if (mine === numShows) showProblem(error);
  }
}

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

byId("login").onsubmit = (event) => { event.preventDefault(); setKey(byId("key").value.trim()); startListening(); show(); };
window.onhashchange = () => { byId("main").setAttribute("aria-busy", "true"); byId("main").replaceChildren(); current.close?.(); current = {wants: () => false}; show(); };
document.addEventListener("visibilitychange", refresh);
// Gauges and what trainers report are not events.
setInterval(() => { if (current.isPolled) refresh(); }, REFRESH_MS);
document.querySelector(".skip").onclick = (event) => { event.preventDefault(); byId("main").focus(); };
startListening();
show();
