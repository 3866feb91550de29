// Three classes: the point, its trail as T sweeps, and the two losses as contours.
function simplexView() {
  const f = figure({ id: "simplex-figure", title: "Where does the loss push?", subtitle: "the triangle of three probabilities; drag the point", help: ["p = softmax(z / T) for three scores. Grey trail: T from 0.05 to 20.", "Contours: cross entropy -log p_c, or squared error |p - y|^2. Arrow: the step -dL/dz turned into a change of p.", "Squared error is flat in the far corner (a confident mistake gives no gradient); cross entropy is not."] });
  let z = [1.4, 0.2, -0.8], T = 1, kind = "cross", target = 0, held = false;
  const out = numbers([["s-p", "p"], ["s-loss", "loss"], ["s-grad", "|dL/dz|"], ["s-H", "H, nats"]]);
  const loss = (p) => (kind === "cross" ? -Math.log(Math.max(p[target], 1e-9)) : p.reduce((a, v, i) => a + (v - (i === target ? 1 : 0)) ** 2, 0));
  const gradient = (p) => { const y = [0, 1, 2].map((i) => (i === target ? 1 : 0)); if (kind === "cross") return p.map((v, i) => v - y[i]); const r = p.map((v, i) => v - y[i]), m = p.reduce((a, v, i) => a + v * r[i], 0); return p.map((v, i) => 2 * v * (r[i] - m)); };
  const temperature = slider({ id: "s-T", label: "temperature T", min: 0.05, max: 20, value: 1, log: true, on: (v) => { T = v; draw(); } });
  const which = choice({ id: "s-kind", label: "loss", options: [["cross", "cross entropy"], ["square", "squared error"]], value: kind, on: (v) => { kind = v; draw(); } });
  const goal = choice({ id: "s-target", label: "true class", options: [["0", "A"], ["1", "B"], ["2", "C"]], value: "0", on: (v) => { target = Number(v); draw(); } });
  function draw() {
    const W = Math.max(260, Math.min(440, f.body.clientWidth || 420)), side = W - 60, height = side * 0.866, H = height + 50;
    const corner = [[W / 2, 22], [30, 22 + height], [30 + side, 22 + height]];
    const at = (p) => [0, 1].map((k) => p[0] * corner[0][k] + p[1] * corner[1][k] + p[2] * corner[2][k]);
    const back = (x, y) => { const a = Math.min(Math.max(1 - (y - 22) / height, 0.002), 0.996), c = Math.min(Math.max((x - 30) / side - a / 2, 0.002), 0.996), b = Math.max(1 - a - c, 0.002), t = a + b + c; return [a / t, b / t, c / t]; };
    const svg = sv("svg", { class: "drag", viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": "simplex" }), N = 64, peak = kind === "cross" ? 4 : 2;
    const canvas = document.createElement("canvas"); canvas.width = 160; canvas.height = 140;
    const g2 = canvas.getContext("2d"), image = g2.createImageData(160, 140);
    for (let y = 0; y < 140; y++) for (let x = 0; x < 160; x++) {
      const px = 30 + (x / 159) * side, py = 22 + (y / 139) * height, a = 1 - (py - 22) / height, c = (px - 30) / side - a / 2, b = 1 - a - c, k = 4 * (y * 160 + x);
      if (a < 0 || b < 0 || c < 0) continue;
      const v = Math.min(loss([a, b, c]) / peak, 1), [r, g, bl] = hex(cividis(Math.floor(v * 12) / 12)); image.data.set([r, g, bl, 150], k);
    }
    g2.putImageData(image, 0, 0);
    svg.append(sv("image", { href: canvas.toDataURL(), x: 30, y: 22, width: side, height, preserveAspectRatio: "none" }), sv("path", { d: `M${corner.map((c) => c.join(" ")).join("L")}Z`, fill: "none", stroke: "var(--ink)", "stroke-opacity": 0.6 }));
    ["A", "B", "C"].forEach((name, i) => svg.append(sv("text", { x: corner[i][0] + (i === 0 ? 0 : i === 1 ? -8 : 8), y: corner[i][1] + (i === 0 ? -8 : 20), "text-anchor": "middle" }, name + (i === target ? " (true)" : ""))));
    const trail = Array.from({ length: N }, (_, i) => at(gibbs(z, 0.05 * 400 ** (i / (N - 1))).p));
    svg.append(sv("path", { d: "M" + trail.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L"), fill: "none", stroke: "var(--paper)", "stroke-width": 4, "stroke-opacity": 0.7 }), sv("path", { id: "trail", d: "M" + trail.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L"), fill: "none", stroke: "var(--ink)", "stroke-width": 1.4, "stroke-dasharray": "3 3" }));
    const p = gibbs(z, T).p, d = gradient(p), moved = gibbs(z.map((v, i) => v - 1.2 * T * d[i]), T).p, [x, y] = at(p), [u, v] = at(moved);
    svg.append(sv("line", { x1: x, y1: y, x2: u, y2: v, stroke: "var(--error)", "stroke-width": 2.5 }), sv("circle", { cx: u, cy: v, r: 3, fill: "var(--error)" }));
    const dot = sv("circle", { class: "handle", id: "simplex-point", cx: x, cy: y, r: 9, fill: "var(--accent)", stroke: "var(--paper)", "stroke-width": 2, tabindex: 0, role: "slider", "aria-label": "point in the simplex", "aria-valuenow": fmt(p[0], 3), "aria-valuetext": p.map((v) => fmt(v, 3)).join(", ") });
    dot.addEventListener("pointerdown", (e) => { held = true; e.preventDefault(); });
    dot.addEventListener("keydown", (e) => { const k = { ArrowUp: 0, ArrowLeft: 1, ArrowRight: 2 }[e.key]; if (k !== undefined) { z[k] += 0.1 * T; e.preventDefault(); draw(); document.getElementById("simplex-point").focus(); } });
    const move = (e) => { if (!held) return; const box = svg.getBoundingClientRect(); z = back(((e.clientX - box.left) / box.width) * W, ((e.clientY - box.top) / box.height) * H).map((q) => T * Math.log(q)); draw(); };
    svg.append(dot); svg.addEventListener("pointerdown", (e) => { held = true; move(e); });
    svg.style.maxWidth = W + "px"; f.move = move; f.svg = svg; f.body.replaceChildren(svg);
    f.table = () => [["class", "score", "probability", "gradient"], ...p.map((q, i) => ["ABC"[i], z[i], q, d[i]])];
    out.show({ "s-p": p.map((q) => fmt(q, 2)).join(" "), "s-loss": fmt(loss(p)), "s-grad": fmt(Math.hypot(...d)), "s-H": fmt(gibbs(z, T).H) });
  }
  addEventListener("pointermove", (e) => f.move && f.move(e));
  addEventListener("pointerup", () => { held = false; });
  f.body.addEventListener("touchmove", (e) => { if (held) e.preventDefault(); }, { passive: false });
  redraws.push(draw);
  return { ...lab("simplex", "Simplex", "The simplex and two losses", "Cross entropy and squared error agree near the truth and part company where the model is confidently wrong.", el("div", { class: "bench" }, f.node, el("div", { class: "controls" }, temperature, which, goal, out))), draw };
}
