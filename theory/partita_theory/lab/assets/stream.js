// One pass over blocks of keys: peak, mass, first moment. And what happens to the digits.
function streamView() {
  const f = figure({ id: "stream-figure", title: "How can one pass know the entropy?", subtitle: "keys in blocks; the shaded ones have been seen", help: ["State: peak m, mass = sum e^(s - m), first = sum (s - m) e^(s - m).", "A new block with a higher peak shifts the old sums: r = e^(m_old - m_new), first <- r (first + (m_old - m_new) mass), mass <- r mass.", "The merge is associative: blocks, threads and machines may come in any order."] });
  let block = 3, seen = 0;
  const out = numbers([["t-peak", "peak m"], ["t-mass", "mass"], ["t-first", "first"], ["t-H", "H so far"], ["t-truth", "H of all keys"]]), step = el("p", { class: "small soft", id: "t-step" });
  const digits = el("table", { id: "digits" });
  const size = slider({ id: "t-block", label: "block of keys", min: 1, max: 16, step: 1, value: block, show: (v) => String(v), on: (v) => { block = Math.round(v); seen = Math.min(seen, blocks()); draw(); } });
  const offset = slider({ id: "t-offset", label: "common offset of the scores", min: 0, max: 4000, step: 10, value: 1000, show: (v) => fmt(v, 4), on: () => precision() });
  const blocks = () => Math.ceil(LAB.z.length / block);
  const buttons = el("div", { class: "presets" }, el("button", { type: "button", id: "t-next", onclick: () => { seen = Math.min(seen + 1, blocks()); draw(); } }, "next block"), el("button", { type: "button", id: "t-back", onclick: () => { seen = Math.max(0, seen - 1); draw(); } }, "back"), el("button", { type: "button", id: "t-all", onclick: () => { seen = blocks(); draw(); } }, "all"), el("button", { type: "button", id: "t-reset", onclick: () => { seen = 0; draw(); } }, "reset"));
  function run() { // the streaming rule itself, not a shortcut through the dense formula
    let m = -Infinity, mass = 0, first = 0, note = "nothing seen: peak -inf, sums 0 (the neutral element)";
    for (let b = 0; b < seen; b++) {
      const part = LAB.z.slice(b * block, (b + 1) * block).map((v) => v / LAB.T), peak = Math.max(m, ...part), d = m === -Infinity ? 0 : m - peak, r = m === -Infinity ? 0 : Math.exp(d);
      first = r * (first + d * mass); mass = r * mass;
      for (const v of part) { const e = Math.exp(v - peak); mass += e; first += e * (v - peak); }
      note = m === -Infinity ? `block 0 sets the peak to ${fmt(peak)}` : peak > m ? `block ${b} raises the peak by ${fmt(peak - m, 3)}: old sums shrink by r = ${fmt(r, 3)}` : `block ${b} keeps the peak`;
      m = peak;
    }
    return { m, mass, first, H: seen ? Math.log(mass) - first / mass : NaN, note };
  }
  function draw() {
    const z = LAB.z.map((v) => v / LAB.T), n = z.length, x = z.map((_, i) => i), r = run();
    xy(f, { height: 200, x: { label: "key", whole: true, domain: [-0.5, n - 0.5] }, y: { label: "score z / T" }, series: [...z.map((v, i) => ({ name: "", kind: "line", mute: true, width: 3, context: i >= seen * block, colour: i >= seen * block ? "var(--soft)" : lineColour(0), x: [i, i], y: [Math.min(0, ...z), v] })), { name: "scores", kind: "dots", r: 4, x, y: z, colours: x.map((i) => (i < seen * block ? lineColour(0) : "rgba(128,128,128,0.6)")) }, ...(seen ? [{ name: "peak", kind: "rule", at: { y: r.m }, label: "peak", colour: lineColour(1) }] : [])] });
    out.show({ "t-peak": seen ? fmt(r.m) : "-inf", "t-mass": fmt(r.mass), "t-first": fmt(r.first), "t-H": seen ? fmt(r.H, 6) : "none yet", "t-truth": fmt(gibbs(LAB.z, LAB.T).H, 6) });
    step.textContent = `${seen} of ${blocks()} blocks: ${r.note}.`;
  }
  function precision() {
    const base = Number(document.getElementById("t-offset")?.value ?? 1000), z = LAB.z.map((v) => v / LAB.T + base), truth = gibbs(LAB.z, LAB.T).H;
    const compute = (round) => {
      const s = z.map(round), naive = s.reduce((a, v) => round(a + round(Math.exp(v))), 0), m = Math.max(...s);
      let mass = 0, first = 0, mean = 0;
      for (const v of s) { const e = round(Math.exp(round(v - m))); mass = round(mass + e); first = round(first + round(e * round(v - m))); mean = round(mean + round(e * v)); }
      return [ok(round(Math.log(naive))) ? round(round(Math.log(naive)) - round(mean / mass)) : NaN, round(round(m + round(Math.log(mass))) - round(mean / mass)), round(round(Math.log(mass)) - round(first / mass))];
    };
    const rows = [["float32", Math.fround], ["bfloat16", half]].map(([name, round]) => [name, ...compute(round)]);
    digits.replaceChildren(el("tr", {}, ["H computed in", "no shift at all", "log Z - E[s], shifted", "log mass - first / mass", "truth"].map((t, i) => el("th", { class: i ? "num" : "" }, t))), ...rows.map((r) => el("tr", {}, el("td", {}, r[0]), r.slice(1).map((v) => el("td", { class: "num" }, ok(v) ? fmt(v, 5) : "overflow")), el("td", { class: "num" }, fmt(truth, 5)))));
  }
  LAB.watchers.push(() => { seen = Math.min(seen, blocks()); draw(); precision(); });
  redraws.push(draw);
  return { ...lab("stream", "Streaming", "One pass, no matrix", "The scores above, a block at a time. Nothing but three numbers is kept per row.", el("div", { class: "bench" }, el("div", {}, f.node, step), el("div", { class: "controls" }, size, buttons, out)), el("div", { class: "bench" }, el("div", {}, el("h3", {}, "Which formula keeps its digits?"), el("div", { class: "scroll" }, digits), el("p", { class: "small soft" }, "In bfloat16 the scores themselves are rounded first: 1000 and 1002 become neighbours.")), el("div", { class: "controls" }, offset))), draw: () => { draw(); precision(); } };
}
