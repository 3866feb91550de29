// Noise on the scores, an adversary with a budget, and your own numbers.
function noiseView() {
  const f = figure({ id: "noise-figure", title: "How far can the output move?", subtitle: "output o = sum p_j v_j with v from 0 (first key) to 1 (last key); 400 noise draws", help: ["Noise shared by all keys cancels; independent noise averages out over the effective number of keys.", "Adversary: with |e_j| <= budget, raise every key on one side of the final output and lower the rest (exact, a few steps).", "Dashed: the certified limit tanh(budget / 2) times the range of the values; nothing can pass it."] });
  let sigma = 0.5, budget = 0.5, family = "normal", shared = 0;
  const out = numbers([["n-clean", "output"], ["n-sd", "sd under noise"], ["n-bias", "bias"], ["n-predicted", "predicted sd"], ["n-adv", "adversary's output"], ["n-limit", "certified limit"]]);
  const values = () => LAB.z.map((_, j) => (LAB.z.length > 1 ? j / (LAB.z.length - 1) : 0));
  function attack(s, v, eps, sign) { // fixed point: a threshold at the final value is the exact optimum
    let t = gibbs(s).p.reduce((a, p, j) => a + p * v[j], 0);
    for (let k = 0; k < 20; k++) { const p = gibbs(s.map((x, j) => x + eps * Math.sign(sign * (v[j] - t)))).p, next = p.reduce((a, q, j) => a + q * v[j], 0); if (Math.abs(next - t) < 1e-12) break; t = next; }
    return t;
  }
  function draw() {
    const s = LAB.z.map((x) => x / LAB.T), v = values(), g = gibbs(s), o = g.p.reduce((a, p, j) => a + p * v[j], 0), r = randomStream(3), hits = [];
    for (let k = 0; k < 400; k++) { const common = r.normal() * sigma * shared; const p = gibbs(s.map((x) => x + common + sigma * Math.sqrt(Math.max(0, 1 - shared * shared)) * (family === "normal" ? r.normal() : family === "laplace" ? r.laplace() / Math.SQRT2 : (r.u() * 2 - 1) * Math.sqrt(3)))).p; hits.push(p.reduce((a, q, j) => a + q * v[j], 0)); }
    const mean = meanOf(hits), sd = Math.sqrt(meanOf(hits.map((x) => (x - mean) ** 2))), own = sigma * sigma * (1 - shared * shared), b = Math.sqrt(own / 2);
    const cv2 = family === "normal" ? Math.exp(own) - 1 : family === "laplace" ? (b < 0.5 ? (b * b * (2 + b * b)) / (1 - 4 * b * b) : NaN) : (() => { const a = Math.sqrt(3 * own); return a > 0 ? a / Math.tanh(a) - 1 : 0; })();
    const predicted = Math.sqrt(cv2 * g.p.reduce((a, p, j) => a + p * p * (v[j] - o) ** 2, 0)), up = attack(s, v, budget, 1), down = attack(s, v, budget, -1), limit = Math.tanh(budget / 2);
    const bins = Array.from({ length: 40 }, (_, i) => (i + 0.5) / 40), count = bins.map((c) => hits.filter((h) => Math.abs(h - c) <= 0.0125).length);
    xy(f, { height: 220, x: { label: "output", domain: [0, 1] }, y: { label: "draws" , include: [0] }, series: [...bins.map((c, i) => ({ name: "", kind: "line", mute: true, width: 9, colour: lineColour(0), x: [c, c], y: [0, count[i]] })), { name: "draws", kind: "dots", r: 2, colour: lineColour(0), x: bins, y: count }, { name: "clean", kind: "rule", at: { x: o }, label: "clean", colour: "var(--ink)" }, { name: "adversary up", kind: "rule", at: { x: up }, label: "worst", colour: "var(--error)" }, { name: "adversary down", kind: "rule", at: { x: down }, label: "", colour: "var(--error)" }] });
    out.show({ "n-clean": fmt(o), "n-sd": fmt(sd, 3), "n-bias": fmt(mean - o, 2), "n-predicted": ok(predicted) ? fmt(predicted, 3) : "tails too heavy", "n-adv": `${fmt(down, 3)} to ${fmt(up, 3)}`, "n-limit": "± " + fmt(limit, 3) });
  }
  const controls = [slider({ id: "n-sigma", label: "noise sd on the scores", min: 0, max: 3, step: 0.05, value: sigma, on: (v) => { sigma = v; draw(); } }), choice({ id: "n-family", label: "noise", options: [["normal", "normal"], ["uniform", "uniform"], ["laplace", "Laplace (heavy tails)"]], value: family, on: (v) => { family = v; draw(); } }), slider({ id: "n-shared", label: "share that hits all keys alike", min: 0, max: 1, step: 0.05, value: 0, on: (v) => { shared = v; draw(); } }), slider({ id: "n-budget", label: "adversary's budget per score", min: 0, max: 3, step: 0.05, value: budget, on: (v) => { budget = v; draw(); } })];
  LAB.watchers.push(draw); redraws.push(draw);
  return { ...lab("noise", "Noise", "Noise and an adversary", "The scores of the first figure, disturbed at random and on purpose.", el("div", { class: "bench" }, f.node, el("div", { class: "controls" }, controls, out))), draw };
}
function pasteView() {
  const box = el("textarea", { id: "paste", rows: 3, spellcheck: "false", placeholder: "2.1, 0.3, -1.7 …  (2 to 64 numbers; [ ] and line breaks are fine)", "aria-label": "your scores" }), said = el("p", { class: "small", id: "paste-said", role: "status" });
  const take = () => {
    const found = box.value.replace(/[[\](){};,\s]+/g, " ").trim().split(" ").filter(Boolean).map(Number);
    const bad = found.findIndex((v) => !ok(v) || Math.abs(v) > 1e4);
    if (found.length < 2) said.textContent = "Give at least two numbers.";
    else if (bad >= 0) said.textContent = `Number ${bad + 1} is not a number between -10000 and 10000; nothing was changed.`;
    else { LAB.z = found.slice(0, 64); LAB.T = 1; said.textContent = found.length > 64 ? `The first 64 of ${found.length} numbers are shown above.` : `${found.length} scores are shown above, at temperature 1.`; changed("paste"); }
  };
  return lab("paste-section", "Your own", "Paste your own scores", "A row of logits from your model. Nothing leaves this page.", box, el("div", { class: "row" }, el("button", { type: "button", id: "paste-use", onclick: take }, "use these scores")), said);
}
