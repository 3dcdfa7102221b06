// Small charts over the last minutes: how full the pools are, where prompts were found, what
// had to go. Drawn as SVG; numbers follow the pointer, or the arrow keys.

import { h } from "./vendor/preact.mjs";
import { useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { clock, percent, RANKS, short } from "./format.js";

const html = htm.bind(h);
const BUCKET_S = 5;
export const N_BUCKETS = 180;
const HEIGHT = 100;
const WIDTH = N_BUCKETS * 4;

// One entry for each bucket up to now, undefined where nothing was told.
export function aligned(series, now) {
  const end = Math.floor(now / BUCKET_S) * BUCKET_S;
  const found = new Map(series.map((bucket) => [bucket.t, bucket]));
  return Array.from({ length: N_BUCKETS }, (_, i) => {
    const t = end - (N_BUCKETS - 1 - i) * BUCKET_S;
    return found.get(t) || { t };
  });
}

function bars(heights, floors) {
  let path = "";
  heights.forEach((height, i) => {
    if (height > 0) {
      const top = HEIGHT - floors[i] - height;
      path += `M${i * 4} ${top.toFixed(2)}h3.4v${height.toFixed(2)}h-3.4z`;
    }
  });
  return path;
}

function stacked(layers, buckets, scaleOf) {
  const floors = buckets.map(() => 0);
  return layers.map(({ name, tone, of }) => {
    const heights = buckets.map((bucket) => HEIGHT * of(bucket) * scaleOf(bucket));
    const path = bars(heights, floors);
    heights.forEach((height, i) => { floors[i] += height; });
    return html`<path key=${name} class="fill ${tone}" d=${path} />`;
  });
}

// Levels stay until the next bucket that tells one.
function held(buckets, of) {
  let last = null;
  return buckets.map((bucket) => {
    const value = of(bucket);
    if (value != null) last = value;
    return last;
  });
}

function line(values, tone) {
  let path = "";
  values.forEach((value, i) => {
    if (value == null) return;
    const y = (HEIGHT - HEIGHT * value).toFixed(2);
    path += `${path ? "L" : "M"}${i * 4} ${y}L${i * 4 + 4} ${y}`;
  });
  return html`<path key=${`line ${tone}`} class="line ${tone}" d=${path} />`;
}

function Chart({ title, buckets, legend, top, children, note, extra }) {
  const [at, setAt] = useState(null);
  const shown = at == null ? null : buckets[at];
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const i = Math.floor(((event.clientX - box.left) / box.width) * N_BUCKETS);
    setAt(Math.max(0, Math.min(N_BUCKETS - 1, i)));
  };
  const step = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      event.preventDefault();
      setAt(Math.max(0, Math.min(N_BUCKETS - 1, (at == null ? N_BUCKETS : at) + by)));
    } else if (event.key === "Escape") setAt(null);
  };
  const items = legend(at);
  const spoken = items.map(({ name, value }) => `${name} ${value}`).join(", ");
  return html`<section class="card chart">
    <header><h2>${title}</h2>${extra}
      <span class="when">${shown ? clock(shown.t) : note}</span></header>
    <div class="plot" tabindex="0" role="img" aria-label="${title}, last 15 minutes. ${spoken}"
      onPointerMove=${move} onPointerDown=${move} onPointerLeave=${() => setAt(null)}
      onKeyDown=${step} onBlur=${() => setAt(null)}>
      <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true">
        <path class="grid" d="M0 .5H${WIDTH}M0 50H${WIDTH}M0 99.5H${WIDTH}" />
        ${children}
        ${at != null && html`<path class="cursor" d="M${at * 4 + 1.7} 0V${HEIGHT}" />`}
      </svg>
      <span class="top" aria-hidden="true">${top}</span>
    </div>
    <div class="axis" aria-hidden="true"><span>15 min</span><span>10</span><span>5</span>
      <span>now</span></div>
    <ul class="legend">${items.map(({ name, tone, value }) => html`<li key=${name}>
      <i class="dot ${tone}"></i>${name} <b>${value}</b></li>`)}</ul>
  </section>`;
}

export function PoolChart({ buckets }) {
  const locked = held(buckets, (b) => (b.device_free == null ? null
    : 1 - (b.device_free + b.device_evictable) / b.device_total));
  const used = held(buckets, (b) => (b.device_free == null ? null
    : 1 - b.device_free / b.device_total));
  const host = held(buckets, (b) => (b.host_total ? 1 - b.host_free / b.host_total : null));
  const hasHost = host.some((value) => value != null);
  const legend = (at) => {
    const i = at == null ? N_BUCKETS - 1 : at;
    const of = (values) => (values[i] == null ? "–" : percent(values[i], 1));
    return [
      { name: "device", tone: "device", value: of(used) },
      { name: "in use now", tone: "locked", value: of(locked) },
      ...(hasHost ? [{ name: "host", tone: "host", value: of(host) }] : []),
    ];
  };
  const zero = buckets.map(() => 0);
  const heights = (values) => values.map((value) => HEIGHT * (value || 0));
  return html`<${Chart} title="Pool pressure" note="used" top="100 %" buckets=${buckets}
    legend=${legend}>
    <path class="fill device soft" d=${bars(heights(used), zero)} />
    <path class="fill locked" d=${bars(heights(locked), zero)} />
    ${hasHost && line(host, "host")}
  <//>`;
}

const found = (name) => (b) => b[`hit_${name}`] || 0;
const computed = (b) => Math.max(0, (b.prompt || 0) - found("device")(b) - found("host")(b)
  - found("pool")(b));
const WHERE = [
  { name: "device", tone: "device", of: found("device") },
  { name: "host", tone: "host", of: found("host") },
  { name: "pool", tone: "pool", of: found("pool") },
  { name: "computed", tone: "none", of: computed },
];

export function hitTotals(buckets) {
  const sum = (of) => buckets.reduce((n, bucket) => n + of(bucket), 0);
  return { prompt: sum((b) => b.prompt || 0), ...Object.fromEntries(
    WHERE.map(({ name, of }) => [name, sum(of)])) };
}

export function HitChart({ buckets, hasPool }) {
  const layers = WHERE.filter(({ name }) => hasPool || name !== "pool");
  const totals = hitTotals(buckets);
  const legend = (at) => layers.map(({ name, tone, of }) => ({
    name, tone, value: at == null ? percent(totals[name], totals.prompt)
      : percent(of(buckets[at]), buckets[at].prompt),
  }));
  return html`<${Chart} title="Prompt tokens found" note="of the last 15 min" top="100 %"
    buckets=${buckets} legend=${legend}>
    ${stacked(layers, buckets, (b) => (b.prompt ? 1 / b.prompt : 0))}
  <//>`;
}

export function EvictionChart({ buckets, hasHost }) {
  const [tier, setTier] = useState("device");
  const layers = Object.entries(RANKS).map(([rank, name]) => ({
    name, tone: `rank-${rank}`, of: (b) => b[`evicted_${tier}_${rank}`] || 0,
  }));
  const sums = buckets.map((b) => layers.reduce((n, { of }) => n + of(b), 0));
  const highest = Math.max(1, ...sums);
  const legend = (at) => {
    const items = layers.map(({ name, tone, of }) => {
      const n = at == null ? buckets.reduce((sum, b) => sum + of(b), 0) : of(buckets[at]);
      return { name, tone, n, value: short(n) };
    }).filter(({ n }) => n);
    return items.length ? items : [{ name: "nothing had to go", tone: "none", value: "" }];
  };
  const extra = hasHost && html`<span class="switch" role="group" aria-label="tier">
    ${["device", "host"].map((name) => html`<button key=${name} type="button"
      aria-pressed=${tier === name} onClick=${() => setTier(name)}>${name}</button>`)}</span>`;
  return html`<${Chart} title="Evicted, by state" note="tokens" buckets=${buckets}
    top=${sums.some(Boolean) ? short(highest) : ""} legend=${legend} extra=${extra}>
    ${stacked(layers, buckets, () => 1 / highest)}
  <//>`;
}
