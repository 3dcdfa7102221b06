// The page: header, tiles, charts, sessions, and beside them what happens or one session's story.

import { h, render } from "./vendor/preact.mjs";
import { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { aligned, EvictionChart, HitChart, hitTotals, PoolChart } from "./charts.js";
import { Feed, keyOf } from "./feed.js";
import { bytes, count, percent, short } from "./format.js";
import { cachedShare, Event, Story } from "./story.js";
import { Sessions } from "./tree.js";

const html = htm.bind(h);
const THEMES = ["auto", "light", "dark"];
const root = document.documentElement;

function useTheme() {
  const [theme, setTheme] = useState(() => localStorage.getItem("sam-theme") || "auto");
  useEffect(() => {
    root.dataset.theme = theme;
    localStorage.setItem("sam-theme", theme);
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

function Connection({ feed }) {
  const isLive = !feed.problem;
  const text = isLive ? "live" : feed.problem;
  return html`<span class="pill ${isLive ? "good" : "bad"}" role="status">
    <i class="dot ${isLive ? "good" : "bad"}"></i>${text}</span>`;
}

function Order({ summary }) {
  const retention = (summary && summary.retention) || {};
  const notes = [];
  if (retention.lru_by_regret) notes.push("LRU for now: it misses less");
  if (retention.in_stock_order) notes.push("stock order");
  if (retention.ends_trusted === false) notes.push("ends not trusted: sessions come back");
  if (summary && summary.errors) notes.push(`${summary.errors} internal errors`);
  return html`<span class="pill" title="order in which KV goes">${retention.policy || "…"}</span>
    ${notes.map((note) => html`<span key=${note} class="pill warn">${note}</span>`)}`;
}

function Tile({ title, value, of, parts, note }) {
  return html`<div class="card tile"><h2>${title}</h2>
    <p class="big">${value} <small>${of}</small></p>
    <div class="meter" aria-hidden="true">${parts.map(({ tone, share }) => html`<i key=${tone}
      class=${tone} style=${{ width: `${100 * share}%` }}></i>`)}</div>
    <p class="quiet small">${note}</p></div>`;
}

function Tiles({ feed, totals, hasHost, hasPool }) {
  const { device, host, pool, pending_actions: pending } = feed.summary;
  const all = feed.deviceTotal;
  const locked = all - device.free - device.evictable;
  const share = (n, whole) => (whole ? n / whole : 0);
  const rejected = feed.ingress ? feed.ingress.rejected_hints : 0;
  const used = host ? host.total - host.free : 0;
  return html`<div class="tiles">
    <${Tile} title="Device" value=${percent(all - device.free, all)}
      of="of ${short(all)} tokens" parts=${[
        { tone: "locked", share: share(locked, all) },
        { tone: "device", share: share(device.evictable, all) }]}
      note="${short(locked)} in use now, ${short(device.evictable)} cached" />
    ${hasHost && html`<${Tile} title="Host" value=${percent(used, host.total)}
      of="of ${short(host.total)} tokens" parts=${[{ tone: "host", share: share(used, host.total) }]}
      note="${short(host.free)} free" />`}
    ${hasPool && html`<${Tile} title="Pool" value=${bytes(pool.bytes)}
      of="of ${count(pool.sessions_in_ledger)} sessions"
      parts=${[{ tone: "pool", share: share(pool.bytes, pool.bytes_peak) }]}
      note="${bytes(pool.bytes_peak)} at most, ${bytes(pool.bytes_removed)} given back" />`}
    <${Tile} title="Found in cache" value=${cachedShare(totals)} of="of ${short(totals.prompt)} tokens"
      parts=${["device", "host", "pool", "computed"].map((name) => ({
        tone: name === "computed" ? "none" : name, share: share(totals[name], totals.prompt) }))}
      note="prompts of the last 15 minutes" />
    <${Tile} title="Hints" value=${count(pending)} of="under way" parts=${[]}
      note=${rejected ? `${count(rejected)} malformed ones dropped` : "none malformed"} />
  </div>`;
}

function Activity({ feed, onPick }) {
  const events = feed.events.slice(-80).reverse();
  return html`<section class="card activity"><header><h2>As it happens</h2></header>
    ${events.length ? html`<ol class="events" role="log" aria-live="off" tabindex="0"
      aria-label="Newest first">${events.map((event) => html`<${Event} key=${event.n} event=${event}
        withName onPick=${() => onPick(event.tenant, event.session_id)} />`)}</ol>`
      : html`<p class="nothing">Nothing yet.</p>`}</section>`;
}

function AskKey({ feed }) {
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const send = (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (key) feed.useKey(key);
  };
  return html`<main class="ask"><form class="card" onSubmit=${send}>
    <h1>This server asks for a key</h1>
    <p>Its admin key, or its API key where it has no admin key. It stays in this tab and is
      forgotten when you close it.</p>
    <label for="key">Key</label>
    <input id="key" type="password" ref=${field} autocomplete="off" spellcheck="false"
      aria-invalid=${feed.wrongKey} aria-describedby="wrong" />
    <p id="wrong" role="alert">${feed.wrongKey ? "That is not the key." : ""}</p>
    <button type="submit">Show</button></form></main>`;
}

function Page({ feed }) {
  const [, redraw] = useState(0);
  const [theme, nextTheme] = useTheme();
  const [picked, setPicked] = useState(null);
  const [notice, say] = useState("");
  useEffect(() => {
    feed.changed = () => redraw((n) => n + 1);
    feed.wake();
    const onKey = (event) => {
      if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      const search = document.getElementById("search");
      if (search) {
        event.preventDefault();
        search.focus();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  useEffect(() => {
    const timer = notice && setTimeout(() => say(""), 8000);
    return () => clearTimeout(timer);
  }, [notice]);
  const pick = useCallback((tenant, id) => {
    setPicked(keyOf(tenant, id));
    feed.watch([tenant, id]);
  }, []);
  const close = useCallback(() => {
    setPicked(null);
    feed.watch(null);
    document.querySelector("[role=treegrid]")?.focus();
  }, []);
  const now = feed.now();
  const tick = Math.floor(now / 5);
  const last = feed.series[feed.series.length - 1];
  const buckets = useMemo(() => aligned(feed.series, now), [feed.epoch, tick, last]);
  if (feed.needsKey) return html`<${AskKey} feed=${feed} />`;
  const { summary } = feed;
  const hasHost = Boolean(summary && summary.host);
  const hasPool = Boolean(summary && summary.pool && summary.pool.attached);
  const tiers = ["device", ...(hasHost ? ["host"] : []), ...(hasPool ? ["pool"] : [])];
  const record = picked && feed.rows.get(picked);
  return html`<a class="skip" href="#sessions">To the sessions</a>
    <header class="bar-top"><h1><img src="icon.svg" alt="" width="22" height="22" />sam</h1>
      <${Connection} feed=${feed} /><${Order} summary=${summary} />
      <span class="pill ${feed.control ? "warn" : ""}">${feed.control ? "control on" : "read-only"}</span>
      <span class="space"></span>
      ${feed.key && html`<button type="button" class="plain" onClick=${() => feed.forgetKey()}>
        Forget key</button>`}
      <button type="button" class="plain" onClick=${nextTheme}
        aria-label="Colours: ${theme}; change">${{ auto: "◐", light: "☀", dark: "☾" }[theme]}<span class="theme-name"> ${theme}</span>
      </button></header>
    <main>
      ${summary ? html`<${Tiles} feed=${feed} totals=${hitTotals(buckets)} hasHost=${hasHost}
          hasPool=${hasPool} />
        <div class="charts"><${PoolChart} buckets=${buckets} />
          <${HitChart} buckets=${buckets} hasPool=${hasPool} />
          <${EvictionChart} buckets=${buckets} hasHost=${hasHost} /></div>
        <div class="split ${record ? "reading" : ""}" id="sessions" tabindex="-1">
          <${Sessions} feed=${feed} tiers=${tiers} picked=${picked}
            onPick=${(one) => pick(one.tenant, one.id)} />
          ${record ? html`<${Story} feed=${feed} record=${record} tiers=${tiers} onClose=${close}
            say=${say} />` : html`<${Activity} feed=${feed} onPick=${pick} />`}
        </div>` : html`<p class="nothing">${feed.problem === "connecting" ? "Asking the server…"
          : `No answer yet: ${feed.problem}.`}</p>`}
    </main>
    <p class="notice" role="status" aria-live="polite">${notice}</p>`;
}

render(html`<${Page} feed=${new Feed(() => {})} />`, document.getElementById("page"));
