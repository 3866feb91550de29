// Drag the scores, turn the temperature: p, H, width, log Z, and how fast the entropy answers.
function knobs() {
  const bars = figure({ id: "bars", title: "What does the softmax make of these scores?", subtitle: "drag a handle, or focus one and use the arrow keys; filled: probability, line: score" , help: ["p_j = exp(z_j / T) / sum_k exp(z_k / T)", "Blue bars are probabilities, dots the scores you drag; dashed: every key alike.", "A common shift of all scores changes log Z and nothing else."] });
  const curve = figure({ id: "curve", title: "How does the entropy answer to the temperature?", subtitle: "nats; the tangent has slope Var(z) / T^3, exactly", help: ["H(T) for these scores; dH/dT = Var_p(z) / T^3.", "Where the variance is large, a small change of temperature changes the width a lot.", "Flat ends: one key left (T small) or every key alike (T large)."] });
  const say = el("div", { class: "equation", id: "knob-equation" });
  const out = numbers([["k-H", "entropy H, nats"], ["k-width", "width exp(H), keys"], ["k-logZ", "log Z, nats"], ["k-top", "largest p"], ["k-var", "Var(z / T)"], ["k-slope", "dH / dT"]]);
  const heat_ = slider({ id: "T", label: "temperature T", min: 0.05, max: 20, value: LAB.T, log: true, on: (v) => { LAB.T = v; changed("T"); } });
  const count = slider({ id: "n", label: "keys", min: 2, max: 64, step: 1, value: LAB.z.length, show: (v) => String(Math.round(v)), on: (v) => { const rng = randomStream(7); const z = LAB.z.slice(0, Math.round(v)); while (z.length < Math.round(v)) z.push(rng.normal() * 1.2); LAB.z = z; changed("n"); } });
  const presets = el("div", { class: "presets" }, Object.entries({ tie: [2, 2, -1, -1, -1, -1], "one outlier": [5, 0, 0, 0, 0, 0, 0, 0], sink: [3.5, ...Array.from({ length: 15 }, (_, i) => 0.4 * Math.sin(i))], "heavy tail": [4, 2, 1.2, 0.7, 0.3, 0, -0.2, -0.4, -0.5, -0.6], flat: [0, 0, 0, 0, 0, 0], "large offset": [102, 101, 100.5, 99, 98] }).map(([name, z]) => el("button", { type: "button", onclick: () => { LAB.z = z.slice(); LAB.T = 1; changed("preset"); } }, name)));
  let held = -1, nodes = null;
  function drawBars() {
    const z = LAB.z, g = gibbs(z, LAB.T), W = Math.max(260, bars.body.clientWidth || 480), H = 260, M = { l: 40, r: 12, t: 12, b: 26 }, n = z.length, slot = (W - M.l - M.r) / n;
    const [a, b] = extent(z) || [0, 0], mid = Math.abs(a) > 20 || Math.abs(b) > 20 ? (a + b) / 2 : 0, reach = Math.max(4, Math.abs(a - mid), Math.abs(b - mid)) * 1.12;
    const Y = axisScale([mid - reach, mid + reach], [H - M.b, M.t]), P = axisScale([0, 1], [H - M.b, M.t]);
    bars.Y = Y; bars.slot = slot;
    if (!nodes || nodes.n !== n || nodes.W !== W || nodes.dark !== dark()) {
      const svg = sv("svg", { class: "drag", viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": "scores and probabilities" });
      nodes = { n, W, dark: dark(), p: [], line: [], dot: [], text: [], svg, uniform: sv("line", { stroke: "var(--soft)", "stroke-dasharray": "4 4" }), zero: sv("line", { stroke: "var(--hair)" }) };
      svg.append(nodes.zero, nodes.uniform);
      for (let j = 0; j < n; j++) {
        nodes.p.push(sv("rect", { rx: 2, fill: "var(--accent)", "fill-opacity": 0.35 })); nodes.line.push(sv("line", { stroke: "var(--soft)" })); nodes.text.push(sv("text", { class: "tick", "text-anchor": "middle" }));
        const dot = sv("circle", { class: "handle", r: Math.max(4, Math.min(8, slot / 3)), fill: "var(--accent)", tabindex: 0, role: "slider", "aria-label": `score of key ${j}`, id: `score-${j}` });
        dot.addEventListener("pointerdown", (e) => { held = j; svg.setPointerCapture(e.pointerId); e.preventDefault(); dot.focus(); });
        dot.addEventListener("keydown", (e) => { const d = { ArrowUp: 0.1, ArrowDown: -0.1, PageUp: 1, PageDown: -1 }[e.key]; if (d) { LAB.z[j] = Math.round((LAB.z[j] + d) * 1000) / 1000; changed("score"); e.preventDefault(); } });
        nodes.dot.push(dot);
      }
      svg.append(...nodes.p, ...nodes.line, ...nodes.text, ...nodes.dot, sv("text", { class: "axis", x: 2, y: H - 8 }, "p"));
      svg.addEventListener("pointermove", (e) => { if (held < 0) return; const box = svg.getBoundingClientRect(); LAB.z[held] = Math.round(Math.min(Math.max(bars.Y.invert(((e.clientY - box.top) / box.height) * H), -400), 400) * 100) / 100; changed("score"); });
      for (const kind of ["pointerup", "pointercancel"]) svg.addEventListener(kind, () => { held = -1; });
      bars.svg = svg; bars.body.replaceChildren(svg);
    }
    nodes.zero.setAttribute("x1", M.l); nodes.zero.setAttribute("x2", W - M.r); nodes.zero.setAttribute("y1", Y(mid)); nodes.zero.setAttribute("y2", Y(mid));
    nodes.uniform.setAttribute("x1", M.l); nodes.uniform.setAttribute("x2", W - M.r); nodes.uniform.setAttribute("y1", P(1 / n)); nodes.uniform.setAttribute("y2", P(1 / n));
    for (let j = 0; j < n; j++) {
      const x = M.l + (j + 0.5) * slot, w = Math.max(2, slot * 0.62), y = P(ok(g.p[j]) ? g.p[j] : 0);
      for (const [k, v] of Object.entries({ x: x - w / 2, y, width: w, height: H - M.b - y })) nodes.p[j].setAttribute(k, v);
      for (const [k, v] of Object.entries({ x1: x, x2: x, y1: Y(mid), y2: Y(z[j]) })) nodes.line[j].setAttribute(k, v);
      nodes.dot[j].setAttribute("cx", x); nodes.dot[j].setAttribute("cy", Y(z[j])); nodes.dot[j].setAttribute("aria-valuenow", z[j]); nodes.dot[j].setAttribute("aria-valuetext", `score ${fmt(z[j], 3)}, probability ${fmt(g.p[j], 3)}`);
      nodes.text[j].setAttribute("x", x); nodes.text[j].setAttribute("y", H - M.b + 15); nodes.text[j].textContent = slot > 34 ? fmt(g.p[j], 2) : slot > 16 || j % 8 === 0 ? j : "";
    }
    bars.table = () => [["key", "score", "probability"], ...z.map((v, j) => [j, v, g.p[j]])];
  }
  function drawCurve() {
    const T = Array.from({ length: 90 }, (_, i) => 0.05 * (400 ** (i / 89))), H = T.map((t) => gibbs(LAB.z, t).H), g = gibbs(LAB.z, LAB.T), slope = (g.variance * LAB.T ** 2) / LAB.T ** 3;
    const reach = [LAB.T / 1.9, LAB.T * 1.9], tangent = Array.from({ length: 12 }, (_, i) => reach[0] + (i / 11) * (reach[1] - reach[0]));
    xy(curve, { height: 230, x: { label: "temperature", log: true, domain: [0.05, 20] }, y: { label: "H, nats", domain: [0, Math.log(LAB.z.length) * 1.08] }, series: [
      { name: "H(T)", kind: "line", colour: lineColour(0), label: "H", x: T, y: H }, { name: "tangent", kind: "line", aside: true, dash: true, colour: lineColour(1), label: "", x: tangent, y: tangent.map((t) => g.H + slope * (t - LAB.T)), mute: true },
      { name: "log n", kind: "rule", at: { y: Math.log(LAB.z.length) }, label: "log n: every key alike", colour: "var(--soft)" }, { name: "here", kind: "dots", r: 6, colour: lineColour(1), x: [LAB.T], y: [g.H] }] });
  }
  LAB.watchers.push((source) => {
    const g = gibbs(LAB.z, LAB.T);
    if (source !== "T") heat_.set(LAB.T);
    if (source !== "n") count.set(LAB.z.length);
    drawBars(); drawCurve();
    out.show({ "k-H": fmt(g.H), "k-width": fmt(g.width), "k-logZ": fmt(g.logZ), "k-top": fmt(g.top), "k-var": fmt(g.variance), "k-slope": fmt(g.variance / LAB.T) });
    say.replaceChildren("H = log Z - E[z]/T = ", el("b", {}, fmt(g.logZ)), " - ", el("b", {}, fmt(g.mean)), " = ", el("b", {}, fmt(g.H)), " nats;  width = exp(H) = ", el("b", {}, fmt(g.width)), ` of ${LAB.z.length} keys`);
  });
  redraws.push(() => { drawBars(); drawCurve(); });
  return lab("knobs", "Scores", "Scores and temperature", "One row of any softmax: attention weights, class probabilities, or candidates of a contrastive loss.", say, el("div", { class: "bench" }, el("div", {}, bars.node, curve.node), el("div", { class: "controls" }, heat_, count, el("div", {}, "try"), presets, out)));
}
