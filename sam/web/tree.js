// All sessions as a lineage tree: a grid of which only the rows in sight are drawn.

import { Component, h } from "./vendor/preact.mjs";
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { keyOf } from "./feed.js";
import { ago, count, short, stateOf, STATES, TIERS } from "./format.js";

const html = htm.bind(h);
const SPARE_ROWS = 8;
const STEP_ROWS = 4; // scrolling draws anew every so many rows
const sum = ([own, shared]) => own + shared;

const ORDERS = {
  name: { name: "by name", of: null },
  device: { name: "most on device", of: (record) => sum(record.tokens.device) },
  latest: { name: "last active", of: (record) => record.since_s },
};

// Children of each session, roots under "", placeholders for parents that are not known.
function lineage(rows) {
  const children = new Map([["", []]]);
  for (const [key, record] of rows) {
    const parent = record.parent == null ? "" : keyOf(record.tenant, record.parent);
    const above = parent && rows.has(parent) ? parent : "";
    if (!children.has(above)) children.set(above, []);
    children.get(above).push(key);
  }
  return children;
}

const collator = new Intl.Collator("en", { numeric: true });

function ranks(rows, children, order) {
  const { of } = ORDERS[order];
  if (!of) return null;
  const best = new Map();
  const visit = (key, seen) => {
    if (seen.has(key)) return 0;
    seen.add(key);
    let value = of(rows.get(key));
    for (const child of children.get(key) || []) value = Math.max(value, visit(child, seen));
    best.set(key, value);
    return value;
  };
  const seen = new Set();
  for (const key of children.get("")) visit(key, seen);
  return best;
}

// The rows to show, in order, with their place in the tree.
export function flatten(rows, { states, text, order, folded }) {
  const children = lineage(rows);
  const best = ranks(rows, children, order);
  const compare = (a, b) => (best ? best.get(b) - best.get(a) : 0)
    || collator.compare(rows.get(a).id, rows.get(b).id);
  const needle = text.trim().toLowerCase();
  const matches = (record) => states.has(stateOf(record))
    && (!needle || record.id.toLowerCase().includes(needle)
      || (record.tool || "").toLowerCase().includes(needle));
  const kept = new Map();
  const keep = (key) => {
    if (kept.has(key)) return kept.get(key) !== "no";
    kept.set(key, "no");
    const self = matches(rows.get(key));
    let below = false;
    for (const child of children.get(key) || []) below = keep(child) || below;
    kept.set(key, self ? "yes" : below ? "above" : "no");
    return self || below;
  };
  const shown = [];
  const add = (keys, depth) => {
    const here = keys.filter(keep).sort(compare);
    here.forEach((key, i) => {
      const below = (children.get(key) || []).filter(keep);
      const open = below.length > 0 && (!folded.has(key) || Boolean(needle));
      shown.push({ key, record: rows.get(key), depth, open, nBelow: below.length,
        place: i + 1, nBeside: here.length, dim: kept.get(key) === "above" });
      if (open) add(below, depth + 1);
    });
  };
  add(children.get(""), 0);
  return shown;
}

function Bar({ tier, tokens, largest }) {
  const [own, shared] = tokens || [0, 0];
  const all = own + shared;
  const width = (n) => `${(100 * n) / largest}%`;
  return html`<span role="gridcell" class="tier ${tier}" title="${tier}: ${count(own)} of its own, ${
    count(shared)} shared">
    <span class="number">${all ? short(all) : "·"}</span>
    <span class="bar" aria-hidden="true"><i class="own" style=${{ width: width(own) }}></i><i
      class="shared" style=${{ width: width(shared) }}></i></span>
    <span class="sr">${tier} tokens</span></span>`;
}

export function State({ record }) {
  const state = stateOf(record);
  const text = state === "tool" && record.tool ? record.tool : STATES[state] || state;
  return html`<span class="state ${state}" title=${STATES[state]}>
    ${state === "tool" && record.tool && html`<span class="sr">waits for</span>`}${text}</span>`;
}

const SAME = ["index", "top", "largest", "current", "selected", "since", "owners"];

class Row extends Component {
  // Handlers are new each time and do the same; of a row counts what it shows.
  shouldComponentUpdate(next) {
    const [row, was] = [next.row, this.props.row];
    return SAME.some((name) => next[name] !== this.props[name]) || row.record !== was.record
      || row.open !== was.open || row.nBelow !== was.nBelow || row.dim !== was.dim
      || row.depth !== was.depth || row.place !== was.place || row.nBeside !== was.nBeside
      || next.tiers.length !== this.props.tiers.length;
  }

  render(props) {
    return drawn(props);
  }
}

function drawn({ row, index, tiers, largest, since, top, current, selected, owners, onPick,
  onFold }) {
  const { record, depth, open, nBelow, dim } = row;
  const owner = owners.size > 1 ? html`<span class="owner" title="owner ${record.tenant}">
    ${record.tenant.replace(/^key-(.{8}).*/, "$1").slice(0, 16)}</span>` : "";
  return html`<div role="row" id="row-${index}" class="row ${dim ? "dim" : ""} ${
    current ? "current" : ""}" style=${{ transform: `translateY(${top}px)` }}
    aria-rowindex=${index + 2} aria-level=${depth + 1} aria-posinset=${row.place}
    aria-setsize=${row.nBeside} aria-selected=${selected ? "true" : "false"}
    aria-expanded=${nBelow ? String(open) : null} onClick=${onPick}>
    <span role="gridcell" class="name" style=${{ paddingLeft: `${Math.min(depth, 12) * 18}px` }}>
      <button type="button" class="fold" tabindex="-1" aria-hidden="true" disabled=${!nBelow}
        onClick=${(event) => { event.stopPropagation(); onFold(); }}>${
          nBelow ? (open ? "▾" : "▸") : ""}</button>
      <span class="id" title=${record.id} dir="auto">${record.id}</span>
      ${!open && nBelow > 0 && html`<span class="below">+${nBelow}</span>`}${owner}</span>
    <span role="gridcell" class="cell"><${State} record=${record} /></span>
    ${tiers.map((tier) => html`<${Bar} key=${tier} tier=${tier} tokens=${record.tokens[tier]}
      largest=${largest} />`)}
    <span role="gridcell" class="since">${since}</span>
  </div>`;
}

function sinceOf(record, now) {
  if (record.state === "running") return "now";
  return record.since_s ? ago(now - record.since_s) : "";
}

export function Sessions({ feed, tiers, picked, onPick }) {
  const [states, setStates] = useState(() => new Set(
    Object.keys(STATES).filter((state) => state !== "ended")));
  const [text, setText] = useState("");
  const [order, setOrder] = useState("name");
  const [folded, setFolded] = useState(() => new Set());
  const [currentKey, setCurrentKey] = useState(null);
  const [scroll, setScroll] = useState({ top: 0, height: 600, row: 36 });
  const box = useRef(null);
  const shown = useMemo(() => flatten(feed.rows, { states, text, order, folded }),
    [feed.epoch, feed.shape, states, text, order, folded]);
  const facts = useMemo(() => {
    const numbers = Object.fromEntries(Object.keys(STATES).map((state) => [state, 0]));
    const owners = new Set();
    let largest = 1;
    for (const record of feed.rows.values()) {
      numbers[stateOf(record)] += 1;
      owners.add(record.tenant);
      if (record.state !== "ended") {
        for (const tier of TIERS) largest = Math.max(largest, sum(record.tokens[tier] || [0, 0]));
      }
    }
    return { numbers, owners, largest };
  }, [feed.epoch, feed.shape]);

  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const watcher = new ResizeObserver(() => {
      const row = parseFloat(getComputedStyle(element).getPropertyValue("--row")) || 36;
      setScroll((was) => ({ ...was, height: element.clientHeight, row }));
    });
    watcher.observe(element);
    return () => watcher.disconnect();
  }, []);

  const current = Math.max(0, shown.findIndex(({ key }) => key === currentKey));
  const toggle = (key) => setFolded((was) => {
    const now = new Set(was);
    if (!now.delete(key)) now.add(key);
    return now;
  });
  const go = (index) => {
    const i = Math.max(0, Math.min(shown.length - 1, index));
    if (!shown.length) return;
    setCurrentKey(shown[i].key);
    const { row } = scroll;
    const element = box.current;
    if (i * row < element.scrollTop) element.scrollTop = i * row;
    else if ((i + 1) * row > element.scrollTop + element.clientHeight) {
      element.scrollTop = (i + 1) * row - element.clientHeight;
    }
  };
  const onKey = (event) => {
    const row = shown[current];
    if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(scroll.height / scroll.row) - 1);
    const up = () => {
      let i = current - 1;
      while (i > 0 && shown[i].depth >= row.depth) i -= 1;
      return i;
    };
    const moves = { ArrowDown: () => go(current + 1), ArrowUp: () => go(current - 1),
      Home: () => go(0), End: () => go(shown.length - 1),
      PageDown: () => go(current + page), PageUp: () => go(current - page),
      ArrowRight: () => (row.nBelow && !row.open ? toggle(row.key) : row.nBelow && go(current + 1)),
      ArrowLeft: () => (row.open ? toggle(row.key) : row.depth && go(up())),
      Enter: () => onPick(row.record), " ": () => onPick(row.record) };
    const move = moves[event.key];
    if (move) {
      event.preventDefault();
      move();
    }
  };

  const first = Math.max(0, Math.floor(scroll.top / scroll.row) - SPARE_ROWS);
  const last = Math.min(shown.length,
    Math.ceil((scroll.top + scroll.height) / scroll.row) + STEP_ROWS + SPARE_ROWS);
  const now = feed.now();
  const left = feed.nSessions - feed.rows.size;
  return html`<section class="card sessions" aria-label="Sessions">
    <header>
      <h2>Sessions <span class="quiet">${count(feed.nSessions)}</span></h2>
      <input type="search" id="search" placeholder="Find…  /" aria-label="Find sessions"
        value=${text} onInput=${(event) => setText(event.target.value)} />
      <select aria-label="Order" value=${order} onChange=${(e) => setOrder(e.target.value)}>
        ${Object.entries(ORDERS).map(([key, { name }]) => html`<option key=${key} value=${key}>
          ${name}</option>`)}</select>
    </header>
    <div class="chips" role="group" aria-label="States shown">
      ${Object.entries(STATES).filter(([key]) => facts.numbers[key] || key !== "named")
        .map(([key, name]) => html`<button key=${key} type="button" class="chip ${key}"
          aria-pressed=${states.has(key)} onClick=${() => setStates((was) => {
            const next = new Set(was);
            if (!next.delete(key)) next.add(key);
            return next;
          })}><i class="dot ${key}"></i>${name} <b>${count(facts.numbers[key])}</b></button>`)}
    </div>
    <div class="grid tiers-${tiers.length}" role="treegrid" aria-label="Sessions by lineage"
      aria-rowcount=${shown.length + 1} aria-colcount=${tiers.length + 3} tabindex="0"
      aria-activedescendant=${shown.length ? `row-${current}` : null} onKeyDown=${onKey}>
      <div role="row" class="head" aria-rowindex="1">
        <span role="columnheader">session</span><span role="columnheader">state</span>
        ${tiers.map((tier) => html`<span key=${tier} role="columnheader" class="tier">
          <i class="dot ${tier}"></i>${tier}</span>`)}
        <span role="columnheader" class="since">active</span>
      </div>
      <div class="window" role="presentation" ref=${box}
        onScroll=${(event) => {
          const step = scroll.row * STEP_ROWS;
          const top = Math.floor(event.currentTarget.scrollTop / step) * step;
          if (top !== scroll.top) setScroll((was) => ({ ...was, top }));
        }}>
        <div role="presentation" class="all" style=${{ height: `${shown.length * scroll.row}px` }}>
          ${shown.slice(first, last).map((row, i) => html`<${Row} key=${row.key} row=${row}
            index=${first + i} top=${(first + i) * scroll.row} tiers=${tiers}
            since=${sinceOf(row.record, now)}
            largest=${facts.largest} owners=${facts.owners} current=${first + i === current}
            selected=${row.key === picked}
            onPick=${() => { setCurrentKey(row.key); onPick(row.record); }}
            onFold=${() => toggle(row.key)} />`)}
        </div>
        ${!shown.length && html`<p class="nothing">${feed.rows.size ? "None of these match."
          : "No sessions yet. They appear with the first request that carries an agent_hint."}</p>`}
      </div>
    </div>
    <footer class="quiet"><span class="keys"><kbd>↑</kbd><kbd>↓</kbd> move <kbd>←</kbd><kbd>→</kbd>
      fold <kbd>Enter</kbd> story <kbd>/</kbd> find</span>
      <span>${left > 0 && feed.rows.size ? `${count(left)} more are on their way`
        : "solid: its own tokens · pale: shared"}</span></footer>
  </section>`;
}
