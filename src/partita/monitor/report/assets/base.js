// DOM, numbers and colours. Text reaches the page only through textContent and setAttribute: no name can become markup.
const SVG = "http://www.w3.org/2000/svg";
function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}
function sv(tag, attrs, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attrs || {})) if (value !== undefined && value !== null) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const ok = (x) => typeof x === "number" && Number.isFinite(x);
function fmt(x, digits = 4) {
  if (!ok(x)) return "no value";
  if (x === 0) return "0";
  const a = Math.abs(x);
  if (a >= 1e5 || a < 1e-3) return x.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (Number.isInteger(x)) return String(x);
  return String(Number(x.toPrecision(digits)));
}
const tickText = (x) => {
  const a = Math.abs(x);
  if (a >= 1e6 || (a > 0 && a < 1e-3)) return x.toExponential(0).replace("e+", "e");
  if (a >= 1e4) return fmt(x / 1e3, 3) + "k";
  return fmt(x, 3);
};
const clip = (text, n) => { const all = Array.from(String(text)); return all.length > n ? all.slice(0, n - 1).join("") + "…" : all.join(""); };
const tail = (text, n) => { const all = Array.from(String(text)); return all.length > n ? "…" + all.slice(-n + 1).join("") : all.join(""); };
function extent(values) {
  let lo = Infinity, hi = -Infinity;
  for (const v of values) if (ok(v)) { if (v < lo) lo = v; if (v > hi) hi = v; }
  return lo <= hi ? [lo, hi] : null;
}
function quantile(values, q) {
  const s = values.filter(ok).sort((a, b) => a - b);
  if (!s.length) return NaN;
  const i = (s.length - 1) * q, k = Math.floor(i);
  return s[k] + (s[Math.min(k + 1, s.length - 1)] - s[k]) * (i - k);
}
const meanOf = (values) => { let t = 0, n = 0; for (const v of values) if (ok(v)) { t += v; n++; } return n ? t / n : NaN; };
// cividis at 17 stops (dark is low), and a diverging map from blue to brown through the paper
const CIVIDIS = ["#00224e", "#002d64", "#123570", "#2a3f6d", "#3b496c", "#48526b", "#575d6d", "#646770", "#707173", "#7d7c78", "#8c8778", "#9b9275", "#aa9e71", "#bcab69", "#cdb85f", "#e1c84f", "#fee838"];
const BLUES = ["#1f4e8c", "#5b8bc4", "#b5cde6"], BROWNS = ["#e6cfae", "#b98540", "#7a4a12"];
const hex = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
function blend(stops, t) {
  const x = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(x), stops.length - 2), f = x - i;
  const a = hex(stops[i]), b = hex(stops[i + 1]);
  return "#" + a.map((v, k) => Math.round(v + (b[k] - v) * f).toString(16).padStart(2, "0")).join("");
}
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const cividis = (t) => blend(CIVIDIS, t);
const diverging = (t) => blend([...BLUES, token("--paper") || "#ffffff", ...BROWNS], (t + 1) / 2);
const LINES = ["#3b6fb6", "#b26a00", "#2e7d4f", "#8a4fa0", "#5f6670"];
const dark = () => document.documentElement.dataset.theme === "dark";
const LINES_DARK = ["#7aa7e6", "#e0a040", "#63b98a", "#c08fd6", "#a9b0ba"];
const lineColour = (i) => (dark() ? LINES_DARK : LINES)[i % 5];
function mark(severity) {
  const s = sv("svg", { class: "mark", viewBox: "0 0 14 14", role: "img", "aria-label": severity });
  const colour = { error: "var(--error)", warning: "var(--warning)" }[severity] || "var(--fine)";
  if (severity === "error") s.append(sv("circle", { cx: 7, cy: 7, r: 6, fill: colour }));
  else s.append(sv("circle", { cx: 7, cy: 7, r: 5.2, fill: "none", stroke: colour, "stroke-width": 1.6 }));
  if (severity === "warning") s.append(sv("path", { d: "M7 1.8 A5.2 5.2 0 0 1 7 12.2 Z", fill: colour }));
  return s;
}
function sparkline(values, width = 96, height = 26) {
  const s = sv("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: "spark" });
  const range = extent(values);
  if (!range || values.length < 2) return s;
  const span = range[1] - range[0] || 1;
  const at = (v, i) => [2 + (i / (values.length - 1)) * (width - 8), height - 4 - ((v - range[0]) / span) * (height - 8)];
  let path = "", pen = "M", last = null;
  values.forEach((v, i) => { if (!ok(v)) { pen = "M"; return; } const [x, y] = at(v, i); path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`; pen = "L"; last = [x, y]; });
  s.append(sv("path", { d: path, fill: "none", stroke: "var(--ink)", "stroke-width": 1.3, "stroke-opacity": 0.75 }));
  if (last) s.append(sv("circle", { cx: last[0], cy: last[1], r: 2.4, fill: "var(--accent)" }));
  return s;
}
// state lives in the address, so that a link reopens what was seen
const state = {};
function readHash() {
  for (const part of location.hash.slice(1).split("&")) {
    const i = part.indexOf("=");
    if (i > 0) { try { state[part.slice(0, i)] = decodeURIComponent(part.slice(i + 1)); } catch { /* a broken link keeps the defaults */ } }
  }
}
let hashTimer = 0;
function writeHash() {
  clearTimeout(hashTimer);
  hashTimer = setTimeout(() => {
    const text = Object.entries(state).filter(([, v]) => v !== "" && v !== undefined && v !== null).map(([k, v]) => `${k}=${encodeURIComponent(v)}`).join("&");
    try { history.replaceState(null, "", "#" + text); } catch { /* sandboxed frames may not */ }
  }, 120);
}
const redraws = [];
function theme(name) {
  document.documentElement.dataset.theme = name;
  state.theme = name;
  for (const draw of redraws) draw();
}
function themeButton() {
  const prefers = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = state.theme === "dark" || state.theme === "light" ? state.theme : prefers;
  const button = el("button", { class: "bare", id: "theme", type: "button", onclick: () => { theme(dark() ? "light" : "dark"); button.textContent = dark() ? "light" : "dark"; writeHash(); } }, dark() ? "light" : "dark");
  return button;
}
function buildIndex(sections) {
  const nav = el("nav", { class: "index", "aria-label": "sections" });
  const links = new Map();
  for (const s of sections) { const a = el("a", { href: "#" + s.id, onclick: (e) => { e.preventDefault(); s.node.scrollIntoView(); } }, s.short); links.set(s.node, a); nav.append(a); }
  // where the first screen has room for an answer and not for a strip of links, the strip comes with the first scroll
  const late = () => nav.classList.toggle("late", scrollY < 80);
  addEventListener("scroll", late, { passive: true });
  late();
  if (window.IntersectionObserver) {
    const watcher = new IntersectionObserver((entries) => { for (const e of entries) if (e.isIntersecting) { for (const a of links.values()) a.classList.remove("here"); const a = links.get(e.target); a.classList.add("here"); if (nav.scrollWidth > nav.clientWidth) nav.scrollTo({ left: a.offsetLeft - 24 }); } }, { rootMargin: "-10% 0px -70% 0px" });
    for (const s of sections) watcher.observe(s.node);
  }
  return nav;
}
function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const a = el("a", { href: url, download: name });
  document.body.append(a); a.click(); a.remove();
  setTimeout(() => URL.revokeObjectURL(url), 2000);
}
const csvCell = (v) => { const t = v === null || v === undefined || (typeof v === "number" && !ok(v)) ? "" : String(v); return /[",\n\r]/.test(t) ? '"' + t.replaceAll('"', '""') + '"' : /^[=+@-]/.test(t) && !ok(Number(t)) ? "'" + t : t; };
