// The configuration of each run, and how those of several runs differ.

function configurationView(query) {
  const given = report.runs.map((run) => ({ ...run.configuration, ...softwareOf(run) }));
  const keys = [...new Set(given.flatMap(Object.keys))], text = (query.key ?? "").toLowerCase();
  const values = (key) => given.map((of) => (key in of ? JSON.stringify(of[key]) : null));
  const differs = (key) => new Set(values(key)).size > 1;
  const isAll = !severalRuns() || query.all === "1";
  const contains = (key) => [key, ...values(key)].some((one) => one?.toLowerCase().includes(text));
  const shownKeys = keys.filter((key) => (isAll || differs(key)) && contains(key));
  const rows = shownKeys.map((key) => [key, ...values(key).map((value) => value ?? "–")]);
  const count = severalRuns()
    ? `${keys.filter(differs).length} of ${keys.length} keys differ; ${rows.length} are shown`
    : `${rows.length} of ${keys.length} keys`;
  const lacking = report.runs.filter(({ configuration }) => !configuration).map(({ name }) => name);
  const names = severalRuns()
    ? report.runs.map(({ name }, number) => element("span", {}, swatch(colourOf(number)), name)) : ["value"];
  return [
    configurationFields(query),
    lacking.length ? note(`There is no config.yaml of ${lacking.join(", ")}.`, "note absent") : null,
    Object.assign(note(count), { id: "count" }),
    rows.length ? plainTable("configuration", ["key", ...names], rows) : null,
  ];
}

// The commit and the versions of packages, as keys beside those of the configuration.
function softwareOf({ state: { software } }) {
  const { packages = {}, ...rest } = software ?? {};
  const named = Object.entries(packages).map(([name, version]) => [`packages.${name}`, version]);
  return Object.fromEntries([...Object.entries(rest), ...named].map(([name, one]) => [`software.${name}`, one]));
}

function configurationFields(query) {
  const found = element("input", {
    id: "key", type: "search", value: query.key ?? "", placeholder: "such as lr",
    onchange: () => { go({ ...query, key: found.value }); },
  });
  const all = element("input", {
    id: "all-keys", type: "checkbox", checked: query.all === "1",
    onchange: () => { go({ ...query, all: all.checked ? "1" : "" }); },
  });
  return element("div", { className: "filters" },
    element("label", {}, "key or value contains", found),
    severalRuns() ? element("label", {}, "all keys, also equal ones", all) : null);
}
