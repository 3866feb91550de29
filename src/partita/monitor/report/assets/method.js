// How the numbers were made, and all of them.
function methodView(run) {
  const pairs = (object) => el("table", {}, Object.entries(object || {}).map(([k, v]) => el("tr", {}, el("th", { scope: "row" }, k), el("td", { class: "mono" }, clip(typeof v === "object" && v !== null ? JSON.stringify(v) : String(v), 400)))));
  const formulas = ["score = softcap(scale <q, k>) + bias;  p = exp(score) / Z over the visible keys.", "H = log(mass) - first / mass with mass = sum e^(s - peak), first = sum (s - peak) e^(s - peak): no cancellation.", "Rows that see one key are left out of every mean, padded queries too.", "width = exp(H), averaged after the exponential. Largest score: the maximum. Everything else: means over rows.", "Entropy is not importance, and attention is not an explanation: a collapsed head can be a useful one."];
  return [el("ul", { class: "small" }, formulas.map((t) => el("li", {}, t))), el("div", { class: "grid2" }, el("div", {}, el("h3", {}, "Thresholds (heuristic, configurable)"), el("div", { class: "scroll" }, pairs(run.thresholds))), el("div", {}, el("h3", {}, "Provenance"), Object.keys(run.provenance || {}).length ? el("div", { class: "scroll" }, pairs(run.provenance)) : el("p", { class: "soft" }, "not recorded"), el("p", { class: "small soft" }, "The record is JSON lines (schema partita.record/1, written by w.save): `partita report RUN -o page.html` makes this page again, `partita.load_record` reads the numbers."))),
    el("h3", { class: "apart" }, "Coverage"), el("p", { id: "coverage" }, clip((run.coverage && run.coverage.text) || "not recorded", 2000)), (run.coverage && run.coverage.missed && run.coverage.missed.length) ? el("ul", { class: "small" }, run.coverage.missed.slice(0, 40).map((m) => el("li", {}, `${tail(m.name, 120)}: ${m.reason}`))) : null];
}
function tableView(run) {
  const columns = ["layer", "head", "name", ...Object.keys(run.values)], PAGE = 40;
  const filter = el("input", { type: "search", id: "filter", placeholder: "layer 5, or part of a name", "aria-label": "filter the table" }), body = el("tbody"), count = el("span", { class: "soft" });
  let sort = null, page = 0;
  const show = () => {
    const text = filter.value.trim().toLowerCase();
    let rows = run.index.map(([l, h]) => ({ layer: l, head: h, name: run.sites[l].name, ...Object.fromEntries(Object.keys(run.values).map((m) => [m, run.at(m, l, h, SEEN.step)])) }));
    if (text) rows = rows.filter((r) => `layer ${r.layer} head ${r.head} ${r.name}`.toLowerCase().includes(text));
    if (sort) rows.sort((a, b) => { const x = a[sort.key], y = b[sort.key]; const d = typeof x === "number" ? (ok(x) ? x : -Infinity) - (ok(y) ? y : -Infinity) : String(x).localeCompare(String(y)); return sort.up ? d : -d; });
    page = Math.min(page, Math.max(0, Math.ceil(rows.length / PAGE) - 1));
    body.replaceChildren(...rows.slice(page * PAGE, page * PAGE + PAGE).map((r) => el("tr", {}, columns.map((c) => el("td", { class: typeof r[c] === "number" ? "num" : "" }, typeof r[c] === "number" ? (ok(r[c]) ? fmt(r[c]) : "") : tail(r[c], 48))))));
    count.textContent = `${rows.length} rows at ${stepName(run, SEEN.step)}, page ${page + 1} of ${Math.max(1, Math.ceil(rows.length / PAGE))}`;
  };
  filter.addEventListener("input", () => { page = 0; show(); });
  stepFollowers.push(show);
  const head = el("tr", {}, columns.map((c) => el("th", { class: c === "name" ? "" : "num" }, el("button", { type: "button", onclick: () => { sort = { key: c, up: sort && sort.key === c ? !sort.up : true }; show(); } }, c))));
  const save = el("button", { class: "bare", type: "button", onclick: () => download("heads.csv", "text/csv", [["step", ...columns], ...run.steps.flatMap((s, t) => run.index.map(([l, h]) => [s, l, h, run.sites[l].name, ...Object.keys(run.values).map((m) => run.at(m, l, h, t))]))].map((r) => r.map(csvCell).join(",")).join("\n")) }, `CSV of all ${run.unit}s`);
  return { nodes: [el("div", { class: "row" }, el("h3", {}, "All heads"), filter, save), el("div", { class: "scroll" }, el("table", { id: "raw" }, el("thead", {}, head), body)), el("div", { class: "pager" }, el("button", { type: "button", onclick: () => { page = Math.max(0, page - 1); show(); } }, "previous"), el("button", { type: "button", onclick: () => { page++; show(); } }, "next"), count)], draw: show };
}
