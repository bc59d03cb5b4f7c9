// What the page holds: head (curves and one row per sample of every run), and shards (samples with texts).

const shardCache = new Map();
let report = null; // the head: stages, runs
let samples = []; // one object per row of every run

async function unpackText(id) {
  const packed = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function unpack(id) {
  return JSON.parse(await unpackText(id));
}

function shardName({ run, shard }) {
  return `shard-${run}-${shard}`;
}

function shardOf(sample) {
  const id = shardName(sample);
  if (!shardCache.has(id)) shardCache.set(id, unpack(id));
  return shardCache.get(id);
}

async function contentsOf(sample) {
  return (await shardOf(sample))[sample.place];
}

async function load() {
  report = await unpack("head");
  samples = report.runs.flatMap((run, number) => rowsOf(run, number));
}

function rowsOf(run, number) {
  const problems = run.problems.map(([source, index, env, prompt], place) => (
    { place, source, index, env, prompt, name: source === null ? env : `${source} ${index}` }));
  const failures = run.failures.map(([kind, reason]) => ({ kind, reason }));
  const { rows } = run;
  return rows.shard.map((shard, i) => {
    const { mode, step } = run.shards[shard];
    const problem = problems[rows.problem[i]];
    return {
      run: number, shard, mode, step, problem,
      place: rows.place[i], group: rows.group[i], generation: rows.generation[i],
      env: problem.env, source: problem.source, index: problem.index,
      reward: rows.reward[i], length: rows.length[i], outcome: rows.outcome[i],
      failure: rows.failure[i] === null ? null : failures[rows.failure[i]],
      response: rows.response[i],
      parts: run.components[rows.components[i]].map((name, k) => [name, rows.parts[i][k]]),
    };
  });
}

function groupBy(items, key) {
  const found = new Map();
  for (const item of items) {
    const name = key(item);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(item);
  }
  return found;
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// What a table says of several samples; failed ones have no reward and no part in the mean.
function summaryOf(of) {
  const rewards = of.map(({ reward }) => reward).filter((reward) => reward !== null);
  return {
    count: of.length,
    reward: mean(rewards),
    best: rewards.length ? Math.max(...rewards) : null,
    length: mean(of.map((sample) => sample.length)),
    failed: of.filter((sample) => sample.failure).length,
  };
}

// One entry for each problem of a run and mode: how its samples did at the first and the latest of its steps.
function problemsOf(of) {
  const groups = groupBy(of, (sample) => `${sample.run} ${sample.mode} ${sample.problem.place}`);
  return [...groups.values()].map((all) => {
    const steps = all.map((sample) => sample.step);
    const first = Math.min(...steps), latest = Math.max(...steps);
    const at = (step) => mean(all.filter((sample) => sample.step === step).map((sample) => sample.reward));
    const { run, mode, problem, env } = all[0];
    const [before, now] = [at(first), at(latest)];
    const change = first === latest || before === null || now === null ? null : now - before;
    return { ...summaryOf(all), run, mode, problem, env, steps: new Set(steps).size, before, now, change };
  });
}

function failuresOf(of) {
  const failed = of.filter((sample) => sample.failure);
  const groups = groupBy(failed, ({ run, mode, env, failure }) => `${run} ${mode} ${env} ${failure.kind}`);
  return [...groups.values()].map((all) => {
    const { run, mode, env, failure } = all[0];
    const latest = Math.max(...all.map(({ step }) => step));
    return { run, mode, env, ...failure, count: all.length, latest };
  }).sort((one, other) => other.count - one.count);
}
