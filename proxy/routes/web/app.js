// Chooses the view by the address behind #, and refreshes the overview while it is visible.
import {byId, setKey} from "./page.js";
import {health, overview} from "./overview.js";
import {runs} from "./runs.js";
import {session, sessions} from "./sessions.js";

const REFRESH_MS = 5000;
const VIEWS = {
  overview: () => overview(), health: () => health(), runs: (from, to) => runs(from, to),
  sessions: (query) => sessions(query), session: (id, turn) => session(id, turn),
};
let numShows = 0;

async function show() {
  const mine = ++numShows;
  const [given, ...parts] = location.hash.slice(1).split("/");
  const name = Object.hasOwn(VIEWS, given) ? given : "overview";
  for (const anchor of document.querySelectorAll("nav a[data-view]")) {
    if (anchor.dataset.view === name) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  try {
    // A filter is a query string, which is decoded as such; every other part is one encoded name.
    const content = await VIEWS[name](...parts.map((part) => name === "sessions" ? part : decodeURIComponent(part)));
    if (mine !== numShows) return;
    byId("main").replaceChildren(...content.filter((each) => each !== null && each !== undefined));
    byId("problem").textContent = "";
  } catch (error) {
    if (mine === numShows) byId("problem").textContent = error.message;
  }
}

byId("login").onsubmit = (event) => { event.preventDefault(); setKey(byId("key").value.trim()); show(); };
window.onhashchange = () => { byId("main").replaceChildren(); show(); };
setInterval(() => { if (!document.hidden && ["", "#"].includes(location.hash)) show(); }, REFRESH_MS);
show();
