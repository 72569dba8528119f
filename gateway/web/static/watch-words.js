// Numbers and states of the watch tab as short text.

/** Return a time as text, as protocol/shared/explain.py does: "0.4 ms", "41 ms", "1.2 s", "2 min 5 s". */
export function duration(seconds) {
  if (seconds < 0.00095) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 0.995) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 99.5) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

/** Return a rate with as many digits as help: "0.4", "12", "1,322". */
export function rate(number) {
  return number > 0 && number < 10 ? number.toFixed(1) : count(number);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

/** Return a size in memory as text, as tools/terminal.py does: "50.0 MiB", "1.25 GiB". */
export function memorySize(bytes) {
  const gib = bytes / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(2)} GiB` : `${(gib * 1024).toFixed(1)} MiB`;
}

/** Return the checkpoints of recurrent states by owner. */
export function checkpoints({ total_checkpoints: total = 0, held_checkpoints: held = 0, cached_checkpoints: cached = 0 }) {
  return { requests: held, cached, free: total - held - cached };
}

/** Return what the recurrent states of an engine take, and what they do to the prefix cache, in sentences. */
export function stateWords({ stats, limits }) {
  const { slots = 0, checkpoints: kept = 0 } = stats.state_bytes ?? {};
  const size = `A state takes ${memorySize(limits.state_bytes)}. ${memorySize(slots + kept)} of ${memorySize(stats.reserved_state_bytes ?? 0)} are in use: ${memorySize(slots)} of running requests, ${memorySize(kept)} of checkpoints.`;
  if (!stats.total_checkpoints) return `${size} There are no checkpoints, so each prompt is computed.`;
  const { checkpoints: few = 0, blocks = 0 } = stats.num_evicted_checkpoints ?? {};
  const again = `${count(stats.num_uncovered_tokens ?? 0)} prompt tokens were computed again because no checkpoint followed them.`;
  return `${size} ${again} ${count(few)} checkpoints were evicted for newer ones, and ${count(blocks)} with their blocks.`;
}

/** What a request waits for, by `waits_for` of its row. */
export const WAITS = {
  grammar: "its grammar is compiled",
  slot: "a free slot",
  blocks: "free blocks",
  turn: "requests before it",
  fetch: "its K/V to arrive",
  step: "",
};

/** The stages of a request, with the class of their colour. */
export const STAGES = {
  grammar: "compiling its grammar",
  queued: "in the queue",
  fetching: "fetching K/V",
  encoding: "waiting for an image",
  prefill: "computing the prompt",
  decode: "answering",
  preempted: "preempted",
};

/** Return the state of an engine in sentences, for readers who do not see the charts. */
export function inWords(engine) {
  const { stats, blocks, rates } = engine;
  const name = engine.role ? `${engine.model}, ${engine.role} ${engine.engine}` : engine.model;
  const sentences = [
    `${name}: ${count(stats.running ?? 0)} of ${count(engine.limits?.max_slots ?? 0)} slots are used, and ${count(stats.waiting ?? 0)} requests with ${count(stats.waiting_tokens ?? 0)} tokens wait.`,
    `Of ${count(stats.total_blocks ?? 0)} blocks, ${count(blocks.requests ?? 0)} belong to requests, ${count(blocks.leased ?? 0)} are kept for other engines, ${count(blocks.cached ?? 0)} are cached and ${count(blocks.free ?? 0)} are free.`,
    `${rate(rates.tokens_per_s)} tokens are generated per second, in ${rate(rates.steps_per_s)} steps; the worker is busy ${percent(rates.busy)} of the time.`,
  ];
  if (engine.limits?.state_bytes) {
    const { requests, cached, free } = checkpoints(stats);
    if (stats.total_checkpoints) sentences.push(`Of ${count(stats.total_checkpoints)} checkpoints of recurrent states, ${count(requests)} belong to requests, ${count(cached)} are cached and ${count(free)} are free.`);
    sentences.push(stateWords(engine));
  }
  if (engine.first_token) sentences.push(`Half of the first tokens took at most ${duration(engine.first_token.p50)}, 99 % at most ${duration(engine.first_token.p99)}.`);
  if (engine.gap) sentences.push(`Half of the gaps between tokens took at most ${duration(engine.gap.p50)}, 99 % at most ${duration(engine.gap.p99)}.`);
  if (engine.error) sentences.unshift(`${name} has a problem: ${engine.error}.`);
  return sentences.join(" ");
}
