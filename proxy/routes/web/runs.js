// Curves over policy versions, and two versions side by side.
import {card, link, make, number, request, table} from "./page.js";
import {chart} from "./chart.js";
import {readiness} from "./overview.js";

// Title, and the metrics of a version that it shows: [name of the series, names under which the metric is stored].
const CHARTS = [
  ["Reward", [["train", ["reward_mean"]], ["held out", ["eval/reward_mean", "reward_held_out"]]]],
  ["Staleness", [["mean", ["staleness_mean"]], ["most", ["staleness_max"]]]],
  ["Entropy", [["entropy", ["entropy"]]]],
  ["KL and clipped share", [["KL", ["kl"]], ["clipped", ["clip_fraction"]]]],
  ["Gradient norm", [["norm", ["grad_norm"]]]],
  ["Loss", [["loss", ["loss"]]]],
  ["Trained tokens", [["tokens", ["tokens"]]]],
  ["Seconds", [["update", ["seconds"]], ["waited", ["waited_seconds"]], ["held", ["held_seconds"]]]],
  ["Groups", [["claimed", ["num_groups"]], ["refused", ["num_refused_groups"]], ["equal rewards", ["num_uniform_groups"]]]],
  ["Trainer and engine logprobs apart", [["mean", ["logprob_gap"]], ["most", ["logprob_gap_max"]]]],
];

const metric = (version, names) => {
  const value = names.map((name) => version.metrics?.[name]).find((found) => found !== undefined && found !== null);
  return value === undefined ? NaN : Number(value);
};

export function learningCharts(versions, titles = null) {
  const ordered = versions.filter((each) => each.version > 0).sort((first, second) => first.version - second.version);
  const shown = CHARTS.filter(([title]) => titles === null || titles.includes(title));
  return make("div", {className: "charts"}, ...shown.map(([title, series]) => {
    const lines = series.map(([name, names]) => [name, ordered.map((each) => [each.version, metric(each, names)])]);
    const legend = make("p", {className: "quiet"}, ...lines.flatMap(([name], at) => [make("span", {className: `key${at}`}, "— "), `${name} `]));
    return card(title, chart(title, lines), legend);
  }));
}

async function everyVersion() {
  const found = [];
  for (let after = "", more = true; more;) {
    const page = await request(`v1/policies?limit=1000${after}`);
    found.push(...page.data);
    more = page.has_more;
    after = `&after=${page.data.at(-1)?.version}`;
  }
  return found;
}

function comparison(first, second) {
  const names = [...new Set([...Object.keys(first.metrics), ...Object.keys(second.metrics)])].sort();
  const isNumber = (value) => typeof value === "number";
  const rows = names.map((name) => {
    const [before, after] = [first.metrics[name], second.metrics[name]];
    return [name, ...[before, after].map((value) => isNumber(value) ? number(value) : JSON.stringify(value) ?? ""),
      isNumber(before) && isNumber(after) ? number(after - before) : ""];
  });
  return table(["metric", `version ${first.version}#`, `version ${second.version}#`, "difference#"], rows);
}

function chooser(versions, first, second) {
  const select = (name, chosen) => make("label", {}, name, make("select", {name}, ...versions.map((each) =>
    make("option", {value: each.version, selected: each.version === chosen}, String(each.version)))));
  const form = make("form", {className: "filters"}, select("from", first), select("to", second), make("button", {}, "Compare"));
  form.onsubmit = (event) => { event.preventDefault(); location.hash = `runs/${form.from.value}/${form.to.value}`; };
  return form;
}

export async function runs(from, to) {
  await readiness();
  const versions = await everyVersion();
  const trained = versions.filter((each) => each.version > 0);
  const newest = trained[0]?.version ?? 0, oldest = trained.at(-1)?.version ?? 0;
  const [first, second] = [from === undefined ? oldest : Number(from), to === undefined ? newest : Number(to)];
  const find = (version) => versions.find((each) => each.version === version);
  return [make("h2", {}, `Over ${number(trained.length)} policy versions`), learningCharts(versions),
    make("h2", {}, "Two versions compared"), chooser(versions, first, second),
    find(first) && find(second) ? comparison(find(first), find(second)) : make("p", {className: "quiet"}, "No such version."),
    make("p", {}, link("", "Overview"))];
}
