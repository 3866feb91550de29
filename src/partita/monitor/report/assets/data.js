// The record: packed numbers -> arrays. value(run, metric, head index, step index)
const METRICS = {
  normalized_entropy: { label: "H / log n, mean over rows", short: "mean H / log n", domain: [0, 1], note: "1 is an average over all keys, 0 is one key" },
  effective_width: { label: "width exp(H), mean over rows", short: "mean width", note: "how many keys a row really uses" },
  max_score: { label: "largest score of any row", short: "largest score", note: "the larger, the fewer digits half precision has left" },
  log_partition: { label: "log Z, mean over rows", short: "mean log Z", note: "drifts when scores grow as a whole" },
  score_variance: { label: "variance of the score, mean over rows", short: "mean variance", note: "how fast the entropy answers to the scale: dH/d log(scale) = -variance" },
  sink_first: { label: "mass on key 0, mean over rows", short: "key 0", domain: [0, 1], note: "a sink parks attention there" },
  sink_top: { label: "mass on the strongest key", short: "strongest", domain: [0, 1], note: "the one key that gets most over all rows" },
  top_mass: { label: "largest probability, mean over rows", short: "mean largest p", domain: [0, 1], note: "how sure a row is" },
  critical: { label: "critical scale / scale, median row", short: "critical / scale", note: "above 1 the best key of a typical row is outweighed by those that compete with it" },
};
function bytes(text) { const raw = atob(text), out = new Uint8Array(raw.length); for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i); return out; }
async function inflate(text) {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
async function unpack(packed, steps) {
  const raw = await inflate(packed.data), n = packed.count, out = new Float64Array(n);
  if (packed.encoding === "f32") { const view = new DataView(raw.buffer); for (let i = 0; i < n; i++) out[i] = view.getFloat32(4 * i, true); return out; }
  const wide = packed.encoding === "u16", top = wide ? 65535 : 255, modulus = top + 1, span = (packed.hi - packed.lo) / (top - 1);
  let previous = 0;
  for (let i = 0; i < n; i++) {
    const delta = wide ? raw[i] * 256 + raw[n + i] : raw[i];
    previous = i % steps === 0 ? delta : (previous + delta) % modulus;
    out[i] = previous === top ? NaN : packed.lo + previous * span;
  }
  return out;
}
async function openRun(packed) {
  const run = { ...packed, values: {}, index: [], offset: [] };
  let at = 0;
  packed.sites.forEach((site, layer) => { run.offset.push(at); for (let h = 0; h < site.heads; h++) run.index.push([layer, h]); at += site.heads; });
  for (const [name, block] of Object.entries(packed.metrics)) run.values[name] = await unpack(block, packed.steps.length);
  run.at = (metric, layer, head, step) => { const v = run.values[metric]; return v && layer < run.offset.length && head < packed.sites[layer].heads ? v[(run.offset[layer] + head) * packed.steps.length + step] : NaN; };
  run.line = (metric, layer, head) => packed.steps.map((_, s) => run.at(metric, layer, head, s));
  return run;
}
function domainOf(run, metric) {
  if (METRICS[metric].domain) return METRICS[metric].domain;
  const range = extent(run.values[metric] || []);
  return range ? (range[0] === range[1] ? [range[0] - 0.5, range[1] + 0.5] : range) : [0, 1];
}
// a step may carry the name of what was read there
const stepAt = (run, step) => { const name = ((run.provenance || {}).step_names || {})[step]; return `${run.unit} ${step ?? "none"}${name ? ` (${clip(name, 40)})` : ""}`; };
const stepName = (run, t) => stepAt(run, run.steps[t]);
// a curve needs three points; fewer are said
const few = (run, what, steps, values) => `${what} was seen at ${steps.length === 1 ? "one " + run.unit : `${steps.length} ${run.unit}s`}, which is no curve: ${values.map((v) => fmt(v, 4)).join(", ")}.`;
const place = (layer, head) => `layer ${layer} head ${head}`;
