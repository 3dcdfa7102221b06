// The story of one session: turns, waits and moves between tiers over time, and what may be done.

import { h } from "./vendor/preact.mjs";
import { useEffect, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { ago, clock, count, duration, percent, TIERS, told } from "./format.js";
import { State } from "./tree.js";

const html = htm.bind(h);

// Turns, what lay between them, and moves, from the session's events (oldest first).
export function chapters(events, now) {
  const turns = [];
  const waits = [];
  const moves = [];
  let turn = null;
  let wait = null;
  const rest = (t, tone, name) => {
    if (wait) wait.end = t;
    wait = tone ? { start: t, end: null, tone, name } : null;
    if (wait) waits.push(wait);
  };
  for (const event of events) {
    if (event.kind === "queued") {
      rest(event.t, null);
      turn = { start: event.t, end: null, event: null };
      turns.push(turn);
    } else if (event.kind === "finished" || event.kind === "aborted") {
      if (!turn) turns.push(turn = { start: event.t, end: null, event: null });
      turn.end = event.t;
      turn.event = event;
      turn = null;
      rest(event.t, "idle", "idle");
    } else if (event.kind === "waiting_tool") {
      if (wait && event.t - wait.start < 1) Object.assign(wait, { tone: "tool" });
      else rest(event.t, "tool");
      wait.name = event.reason || "a tool";
    } else if (["offloaded", "resuming", "ended", "idle", "opened"].includes(event.kind)) {
      if (!turn) rest(event.t, event.kind === "opened" ? "idle" : event.kind, event.kind);
    }
    if (["hint", "demoted_tokens", "evicted_tokens"].includes(event.kind)) moves.push(event);
  }
  if (turn) turn.end = now;
  if (wait) wait.end = now;
  return { turns, waits, moves };
}

function Turn({ turn, place }) {
  const event = turn.event;
  const read = event ? event.input_tokens || 0 : 0;
  const parts = TIERS.map((tier) => [tier, event ? event[`${tier}_tokens`] || 0 : 0]);
  const cached = parts.reduce((n, [, tokens]) => n + tokens, 0);
  parts.push(["none", Math.max(0, read - cached)]);
  const text = event ? `${told(event)[1]} in ${duration(turn.end - turn.start)}: ${told(event)[2]}`
    : "running";
  return html`<span class="spell ${event ? event.kind : "running"}" style=${place} title=${text}>
    ${read > 0 && parts.map(([tier, tokens]) => tokens > 0 && html`<i key=${tier} class=${tier}
      style=${{ height: `${(100 * tokens) / read}%` }}></i>`)}</span>`;
}

const MARKS = { hint: "◆", demoted_tokens: "▼", evicted_tokens: "✕" };

function Lanes({ events, now }) {
  const { turns, waits, moves } = chapters(events, now);
  const start = events[0].t;
  const length = Math.max(1, now - start);
  const left = (t) => `${(100 * Math.max(0, t - start)) / length}%`;
  const place = ({ start: from, end }) => ({ left: left(from),
    width: `${(100 * Math.max(0, end - from)) / length}%` });
  return html`<div class="lanes" role="img" aria-label=${`${turns.length} turns, ${
    waits.filter(({ tone }) => tone === "tool").length} tool waits and ${moves.length
    } moves in the last ${duration(length)}`}>
    <b>turns</b><div class="lane tall">${turns.map((turn) => html`<${Turn} key=${turn.start}
      turn=${turn} place=${place(turn)} />`)}</div>
    <b>between</b><div class="lane">${waits.map((wait) => html`<span key=${wait.start}
      class="wait ${wait.tone}" style=${place(wait)}
      title="${wait.name}, ${duration(wait.end - wait.start)}">${
        wait.end - wait.start > length / 9 && html`<em>${wait.name}</em>`}</span>`)}</div>
    <b>moves</b><div class="lane">${moves.map((event) => html`<span key=${event.t + event.kind}
      class="mark ${told(event)[0]}" style=${{ left: left(event.t) }}
      title="${told(event)[1]} ${told(event)[2]}">${MARKS[event.kind]}</span>`)}</div>
    <b></b><div class="ends"><span>${clock(start)}</span><span>${clock(now)}</span></div>
  </div>`;
}

const ACTIONS = {
  prefetch: "Bring it back before it is needed",
  offload: "Let its device memory go first; it stays on host",
  evict: "End it and those below it, and free what only they use",
};

function really(nBelow) {
  return nBelow ? `Really evict, with ${count(nBelow)} below it?` : "Really evict?";
}

function Controls({ feed, record, say }) {
  const [sure, setSure] = useState(false);
  const [busy, setBusy] = useState("");
  useEffect(() => setSure(false), [record.id, record.tenant]);
  if (!feed.control) {
    return html`<p class="quiet small">Read-only. To offload, prefetch or evict from here, start the
      server with <code>--sam-allow-control</code>.</p>`;
  }
  const act = async (action) => {
    if (action === "evict" && !sure) {
      setSure(true);
      return;
    }
    setSure(false);
    setBusy(action);
    try {
      const { status, reason } = await feed.act(record.tenant, record.id, action);
      const why = reason ? ` (${reason.replaceAll("_", " ")})` : "";
      say(`${action} of ${record.id}: ${status}${why}`);
    } catch (error) {
      say(`${action} of ${record.id}: ${error.message}`);
    }
    setBusy("");
  };
  return html`<div class="controls" role="group" aria-label="Act on this session">
    ${Object.entries(ACTIONS).map(([action, title]) => html`<button key=${action} type="button"
      class=${action === "evict" ? "danger" : ""} title=${title} disabled=${Boolean(busy)}
      onClick=${() => act(action)}>${busy === action ? "…"
        : action === "evict" && sure ? really(feed.countBelow(record)) : action}</button>`)}</div>`;
}

export function Story({ feed, record, tiers, onClose, say }) {
  const heading = useRef(null);
  useEffect(() => heading.current?.focus({ preventScroll: true }), [record.id, record.tenant]);
  const now = feed.now();
  const events = feed.story;
  return html`<aside class="card story" aria-label="Story of one session"
    onKeyDown=${(event) => event.key === "Escape" && onClose()}>
    <header><h2 tabindex="-1" ref=${heading} title=${record.id} dir="auto">${record.id}</h2>
      <button type="button" class="close" aria-label="Close the story" onClick=${onClose}>✕</button>
    </header>
    <dl class="facts">
      <div><dt>state</dt><dd><${State} record=${record} /></dd></div>
      <div><dt>active</dt><dd>${record.since_s ? `${ago(now - record.since_s)}` : "–"}</dd></div>
      <div><dt>life</dt><dd title="how often the id was opened">${record.life}</dd></div>
      <div class="wide"><dt>parent</dt><dd dir="auto" title=${record.parent}>${
        record.parent || "none, it is a root"}</dd></div>
      <div class="wide"><dt>owner</dt><dd title=${record.tenant}>${record.tenant}</dd></div>
    </dl>
    <table class="tokens"><thead><tr><th scope="col">tokens</th><th scope="col">its own</th>
      <th scope="col">shared</th></tr></thead><tbody>
      ${tiers.map((tier) => html`<tr key=${tier}><th scope="row"><i class="dot ${tier}"></i>${tier}
        </th><td>${count((record.tokens[tier] || [0])[0])}</td><td>${
        count((record.tokens[tier] || [0, 0])[1])}</td></tr>`)}</tbody></table>
    <${Controls} feed=${feed} record=${record} say=${say} />
    ${events == null ? html`<p class="quiet small">Reading its story…</p>`
      : !events.length ? html`<p class="quiet small">Nothing happened to it lately.</p>`
      : html`<${Lanes} events=${events} now=${Math.max(now, events[events.length - 1].t)} />
        <ol class="events">${[...events].reverse().map((event, i) => html`<${Event}
          key=${events.length - i} event=${event} />`)}</ol>`}
  </aside>`;
}

export function Event({ event, withName, onPick }) {
  const [tone, what, detail] = told(event);
  return html`<li class="event"><time>${clock(event.t)}</time><i class="dot ${tone}"></i>
    <span>${withName && html`<button type="button" class="link" dir="auto" title=${event.session_id}
      onClick=${onPick}>${event.session_id}</button> `}${what}${detail && html` <small>${detail}</small>`}
    </span></li>`;
}

export function cachedShare(totals) {
  const found = TIERS.reduce((n, tier) => n + (totals[tier] || 0), 0);
  return percent(found, totals.prompt);
}
