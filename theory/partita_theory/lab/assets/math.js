// One softmax and everything read off it, centred at the peak as in the library.
function gibbs(z, T = 1) {
  const peak = Math.max(...z.map((v) => v / T));
  if (!ok(peak)) return { p: z.map(() => NaN), logZ: NaN, H: NaN, width: NaN, mean: NaN, variance: NaN, top: NaN, peak };
  const e = z.map((v) => Math.exp(v / T - peak)), mass = e.reduce((a, b) => a + b, 0), first = e.reduce((a, v, i) => a + (v > 0 ? v * (z[i] / T - peak) : 0), 0);
  const p = e.map((v) => v / mass), centre = first / mass, variance = p.reduce((a, v, i) => a + (v > 0 ? v * (z[i] / T - peak - centre) ** 2 : 0), 0);
  const H = Math.log(mass) - centre;
  return { p, peak, mass, first, H, width: Math.exp(H), logZ: peak + Math.log(mass), mean: peak + centre, variance, top: Math.max(...p) };
}
// scale for a target entropy: Newton on H(lambda), kept inside a bracket (H falls as lambda grows)
function solveScale(s, target) {
  const n = s.length, peak = Math.max(...s), c = s.map((v) => v - peak), ties = c.filter((v) => v === 0).length, path = [];
  if (target >= Math.log(n) - 1e-12) return { scale: 0, path, why: "every key alike: scale 0" };
  if (target <= Math.log(ties) + 1e-12) return { scale: 1e6, path, why: "sharper than the ties allow: the cap" };
  const spread = c.reduce((a, v) => a + v * v, 0) / n - (c.reduce((a, v) => a + v, 0) / n) ** 2;
  let x = Math.sqrt((2 * (Math.log(n) - target)) / (spread || 1)), lo = 0, hi = Infinity;
  for (let k = 0; k < 60; k++) {
    const g = gibbs(c.map((v) => v * x)), gap = g.H - target;
    path.push([x, Math.abs(gap)]);
    if (Math.abs(gap) < 1e-10) break;
    if (gap > 0) lo = x; else hi = x;
    let next = x + gap / Math.max(g.variance / x, 1e-300);
    if (!(next > lo && next < hi)) next = hi === Infinity ? x * 2 : lo === 0 ? x / 2 : Math.sqrt(lo * hi);
    x = next;
  }
  return { scale: x, path, why: "" };
}
function randomStream(seed) { // mulberry32: the same numbers in every browser
  let a = seed >>> 0;
  const u = () => { a = (a + 0x6d2b79f5) >>> 0; let t = Math.imul(a ^ (a >>> 15), 1 | a); t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t; return ((t ^ (t >>> 14)) >>> 0) / 4294967296; };
  const normal = () => Math.sqrt(-2 * Math.log(Math.max(u(), 1e-12))) * Math.cos(2 * Math.PI * u());
  return { u, normal, laplace: () => { const v = u() - 0.5; return -Math.sign(v) * Math.log(Math.max(1 - 2 * Math.abs(v), 1e-12)); } };
}
function half(x) { // round to bfloat16
  const b = new DataView(new ArrayBuffer(4)); b.setFloat32(0, x);
  const bits = b.getUint32(0), rest = bits & 0xffff, up = rest > 0x8000 || (rest === 0x8000 && (bits >>> 16) & 1) ? 1 : 0;
  b.setUint32(0, (((bits >>> 16) + up) << 16) >>> 0); return b.getFloat32(0);
}
// controls and read-outs shared by the sections
const LAB = { z: [2.2, 1.1, 0.4, -0.3, -1.0, 0.9, -1.6, 0.1], T: 1, target: 0, watchers: [] };
function changed(source) { for (const w of LAB.watchers) w(source); state.z = LAB.z.map((v) => Number(v.toFixed(3))).join(","); state.T = Number(LAB.T.toFixed(4)); writeHash(); }
function slider({ id, label, min, max, step, value, show = (v) => fmt(v, 3), log = false, on }) {
  const from = (v) => (log ? Math.log(v) : v), to = (v) => (log ? Math.exp(v) : v);
  const input = el("input", { type: "range", id, min: from(min), max: from(max), step: step || (log ? "any" : (from(max) - from(min)) / 400), value: from(value), "aria-label": label });
  const out = el("span", { class: "num", id: id + "-value" }, show(value));
  input.addEventListener("input", () => { const v = to(Number(input.value)); out.textContent = show(v); on(v); });
  const node = el("div", { class: "control" }, el("div", { class: "line" }, el("label", { for: id }, label), out), input);
  node.set = (v) => { input.value = from(v); out.textContent = show(v); };
  return node;
}
function choice({ id, label, options, value, on }) {
  const input = el("select", { id, "aria-label": label }, options.map(([v, t]) => el("option", { value: v, selected: v === value }, t)));
  input.addEventListener("change", () => on(input.value));
  const node = el("div", { class: "control" }, el("div", { class: "line" }, el("label", { for: id }, label)), input);
  node.set = (v) => { input.value = v; };
  return node;
}
function numbers(entries) { // [[id, label]] -> a block whose changed numbers light up for a moment
  const cells = new Map(), node = el("div", { class: "numbers" });
  for (const [id, label] of entries) { const b = el("b", { id }); cells.set(id, b); node.append(el("div", {}, el("span", {}, label), b)); }
  node.show = (values) => { for (const [id, text] of Object.entries(values)) flash(cells.get(id), text); };
  return node;
}
function flash(node, text) {
  if (!node || node.textContent === text) return;
  node.textContent = text; node.classList.add("touched");
  clearTimeout(node.timer); node.timer = setTimeout(() => node.classList.remove("touched"), 450);
}
const lab = (id, short, title, lead, ...nodes) => ({ id, short, node: el("section", { id }, el("h2", {}, title), el("p", { class: "lead" }, lead), ...nodes) });
