// A row of attention over n keys: does it dilute, under which scale policy, and what does a sink do to it?
const POLICIES = {
  "1/sqrt(d)": (n, d) => 1 / Math.sqrt(d),
  "log n / d": (n, d) => Math.log(n) / d,
  "log n / log 512 / sqrt(d)": (n, d) => Math.log(Math.max(n, 4)) / Math.log(512) / Math.sqrt(d),
  "1/sqrt(d) + 0.1 log n / d": (n, d) => 1 / Math.sqrt(d) + (0.1 * Math.log(n)) / d,
  "sqrt(log n / log 512) / sqrt(d)": (n, d) => Math.sqrt(Math.log(Math.max(n, 4)) / Math.log(512)) / Math.sqrt(d),
};
function attendView() {
  const rows = figure({ id: "attend-map", title: "What does each query see?", subtitle: "causal attention, random queries and keys; dark is little", help: ["p(j|i) = exp(scale_i <q_i, k_j>) / Z_i for j <= i.", "Square root of the probability is drawn, so that small weights stay visible.", "With a sink, the first column brightens."] });
  const width = figure({ id: "attend-width", title: "Does the width follow the length?", subtitle: "mean effective width of the last row, 24 random rows, by number of keys", help: ["H = log n - (scale sigma)^2 / 2 for Gaussian scores: with a fixed scale the width grows like n.", "A flatter line keeps its focus at greater length. Dashed: every key alike.", "log n / d with sigma = sqrt(d) hardly acts at these lengths: the constant matters, not only the law."] });
  let n = 64, d = 64, policy = "1/sqrt(d)", sink = 0, gain = 1;
  const out = numbers([["a-width", "width, last row"], ["a-norm", "H / log n"], ["a-scale", "scale there"], ["a-sink", "mass on the sink"]]);
  const rng = () => randomStream(11), sample = (rowsN, keys, dim) => { const r = rng(), q = Array.from({ length: rowsN }, () => Array.from({ length: dim }, () => r.normal())), k = Array.from({ length: keys }, () => Array.from({ length: dim }, () => r.normal())); return { q, k }; };
  const dot = (a, b) => { let t = 0; for (let i = 0; i < a.length; i++) t += a[i] * b[i]; return t; };
  let cache = null;
  const data = () => { if (!cache || cache.d !== d) cache = { d, ...sample(256, 256, d) }; return cache; };
  function row(i, visible, law) {
    const { q, k } = data(), scale = POLICIES[law](visible, d) * gain, s = [];
    for (let j = 0; j < visible; j++) s.push(scale * dot(q[i], k[j]));
    if (sink > 0) s[0] = Math.max(...s) + Math.log(sink / Math.max(1e-6, 1 - sink)) + Math.log(s.slice(1).reduce((a, v) => a + Math.exp(v - Math.max(...s)), 0) || 1);
    return { ...gibbs(s), scale };
  }
  let lines = null;
  function curves() {
    const sizes = [4, 8, 16, 32, 64, 128, 256], key = `${d},${gain},${sink}`;
    if (!lines || lines.key !== key) lines = { key, sizes, y: Object.keys(POLICIES).map((law) => sizes.map((m) => meanOf(Array.from({ length: 24 }, (_, i) => row(i * 7, m, law).width)))) };
    return lines;
  }
  function draw() {
    const g = Array.from({ length: n }, (_, i) => row(i, i + 1, policy));
    heat(rows, { rows: n, columns: n, height: Math.min(300, (rows.body.clientWidth || 300) * 0.8), value: (r, c) => (c <= r ? g[r].p[c] : NaN), colour: (v) => cividis(Math.sqrt(v)), rowLabel: "query", columnLabel: "key", describe: (r, c, v) => (c <= r ? `query ${r}, key ${c}: p ${fmt(v)}; width of the row ${fmt(g[r].width, 3)}` : `query ${r} does not see key ${c}`) });
    const c = curves();
    xy(width, { height: 270, x: { label: "keys", log: true }, y: { label: "width", log: true }, series: [{ name: "every key alike", kind: "line", dash: true, mute: true, colour: "var(--soft)", x: c.sizes, y: c.sizes }, ...Object.keys(POLICIES).map((law, i) => ({ name: law, kind: "line", label: law === policy ? "chosen" : "", context: law !== policy, colour: law === policy ? lineColour(0) : "var(--ink)", x: c.sizes, y: c.y[i] })), { name: "here", kind: "rule", at: { x: n }, label: `n = ${n}`, colour: "var(--soft)" }] });
    const last = g[n - 1];
    out.show({ "a-width": fmt(last.width, 3), "a-norm": fmt(last.H / Math.log(n), 3), "a-scale": fmt(last.scale, 3), "a-sink": fmt(last.p[0], 3) });
  }
  const controls = [slider({ id: "a-n", label: "keys n", min: 2, max: 256, step: 1, value: n, show: (v) => String(v), on: (v) => { n = Math.round(v); draw(); } }), slider({ id: "a-d", label: "dimension d", min: 4, max: 128, step: 4, value: d, show: (v) => String(v), on: (v) => { d = Math.round(v); draw(); } }), choice({ id: "a-policy", label: "scale policy", options: Object.keys(POLICIES).map((k) => [k, k]), value: policy, on: (v) => { policy = v; draw(); } }), slider({ id: "a-gain", label: "extra factor on the scale", min: 0.25, max: 8, value: 1, log: true, on: (v) => { gain = v; draw(); } }), slider({ id: "a-sink-mass", label: "mass taken by a sink (key 0)", min: 0, max: 0.95, step: 0.05, value: 0, on: (v) => { sink = v; draw(); } })];
  redraws.push(draw);
  return { ...lab("attend", "Attention", "Attention at length", "The same scores spread over more keys as the length grows, unless the scale knows how many there are.", el("div", { class: "bench" }, el("div", {}, rows.node, width.node), el("div", { class: "controls" }, controls, out))), draw };
}
