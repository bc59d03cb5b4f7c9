// Which samples a view shows: filters by what the tables have, with their fields.

const FILTERS = {
  run: (sample, value) => sample.run === Number(value),
  mode: (sample, value) => sample.mode === value,
  env: (sample, value) => sample.env === value,
  source: (sample, value) => sample.source === value,
  index: (sample, value) => sample.index === Number(value),
  outcome: (sample, value) => sample.outcome === value,
  failure: (sample, value) => (value === "any" ? sample.failure !== null : sample.failure?.kind === value),
  step: (sample, value) => sample.step === Number(value),
  min_reward: (sample, value) => sample.reward !== null && sample.reward >= Number(value),
  max_reward: (sample, value) => sample.reward !== null && sample.reward <= Number(value),
  min_length: (sample, value) => sample.length >= Number(value),
  max_length: (sample, value) => sample.length <= Number(value),
  prompt: (sample, value) => sample.problem.prompt.includes(value),
};
// "response" is no filter of the tables: they have its beginning and its end only (report_search.js).
const LABELS = {
  env: "task (environment)", prompt: "prompt contains", response: "response contains",
};
const HINTS = {
  prompt: "searches the first 160 characters of each prompt",
  response: "searches whole responses, in capitals or not; a search unpacks the steps that the other filters leave",
};
const OF_TEXT = ["prompt", "response"];

function filtered(of, query) {
  const asked = Object.entries(FILTERS).filter(([name]) => query[name]);
  return of.filter((sample) => asked.every(([name, holds]) => holds(sample, query[name])));
}

// What a field offers: [value, text] pairs of what the samples have; undefined for a field to write into.
function optionsOf(name) {
  if (name === "run") return report.runs.map((run, number) => [number, run.name]);
  if (!["mode", "env", "source", "outcome", "failure"].includes(name)) return undefined;
  const of = name === "failure" ? ({ failure }) => failure?.kind : (sample) => sample[name];
  const values = [...new Set(samples.map(of))].filter((value) => (value ?? null) !== null).sort();
  return [...(name === "failure" ? [["any", "any failure"]] : []), ...values.map((value) => [value, value])];
}

function filterField(name, query) {
  const id = `filter-${name}`, options = optionsOf(name), value = query[name] ?? "";
  const onchange = (event) => { go({ ...query, [name]: event.target.value }); };
  if (!options) {
    const type = OF_TEXT.includes(name) ? "search" : "number";
    return element("input", { id, type, step: "any", value, onchange, title: HINTS[name] ?? "" });
  }
  const field = element("select", { id, onchange }, ...[["", "all"], ...options].map(([given, text]) => (
    element("option", { value: given, textContent: text }))));
  field.value = value;
  return field;
}

// Fields that change the address.
function filters(query, names) {
  const fields = names.filter((name) => name !== "run" || severalRuns()).map((name) => (
    element("label", {}, LABELS[name] ?? name.replace("_", " "), filterField(name, query))));
  const onclick = () => { go({ view: query.view }); };
  return element("div", { className: "filters" }, ...fields,
    element("button", { textContent: "show all", onclick }));
}
