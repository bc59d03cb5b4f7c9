// Searches whole responses. They are in the shards, which are unpacked one after the other when a search asks
// for them; of each only its responses stay in memory.

const responseCache = new Map(); // name of a shard -> its responses, in small letters

async function responsesOf(sample) {
  const name = shardName(sample);
  if (!responseCache.has(name)) {
    const contents = await unpack(name);
    responseCache.set(name, contents.map(({ turns }) => (
      turns.map(({ content }) => content).join("\n").toLowerCase())));
  }
  return responseCache.get(name);
}

// Returns the samples whose response contains the text; tell(done, all) hears how many steps are searched.
async function withResponse(of, text, tell) {
  const wanted = text.toLowerCase(), found = new Set();
  const shards = [...groupBy(of, shardName).values()];
  for (const [i, inShard] of shards.entries()) {
    tell(i, shards.length);
    const responses = await responsesOf(inShard[0]);
    for (const sample of inShard) if (responses[sample.place].includes(wanted)) found.add(sample);
  }
  return of.filter((sample) => found.has(sample));
}
