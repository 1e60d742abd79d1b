// Changes as the proxy streams them. It reads the stream by fetch, because an EventSource cannot send the key.
import {authorization} from "./page.js";

const FIRST_PAUSE_MS = 1000, LONGEST_PAUSE_MS = 30000;

// Calls onEvents with a list of {kind, data}, at most once in `everyMs`, and onState with "live" or "reconnecting".
export function listen({onEvents, onState, everyMs = 1000}) {
  const stop = new AbortController();
  let waiting = [], timer = null;
  const add = (event) => {
    waiting.push(event);
    timer ??= setTimeout(() => { const events = waiting; waiting = []; timer = null; onEvents(events); }, everyMs);
  };
  run(stop.signal, add, onState);
  return () => { stop.abort(); clearTimeout(timer); };
}

async function run(signal, add, onState) {
  let pause = FIRST_PAUSE_MS, isFirst = true;
  while (!signal.aborted) {
    try {
      const response = await fetch("v1/events", {headers: authorization(), cache: "no-store", signal});
      if (response.status === 401 || response.status === 403 || response.status === 404) return onState("not live");
      if (!response.ok) throw new Error(`status ${response.status}`);
      onState("live");
      pause = FIRST_PAUSE_MS;
      if (!isFirst) add({kind: "lost", data: {}});
      isFirst = false;
      await read(response.body, add);
    } catch {
      if (signal.aborted) return;
    }
    onState("reconnecting");
    await new Promise((resume) => setTimeout(resume, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

async function read(body, add) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = /^event: (\w+)\ndata: (.*)$/.exec(block);
      if (found) add({kind: found[1], data: JSON.parse(found[2])});
    }
  }
}
