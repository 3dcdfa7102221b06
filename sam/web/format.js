// Numbers, times and events as text. Knows nothing of the page.

export const STATES = {
  running: "running",
  tool: "waits for a tool",
  idle: "idle",
  resuming: "resuming",
  offloaded: "offloaded",
  ended: "ended",
  named: "only named",
};
export const TIERS = ["device", "host", "pool"];
export const RANKS = {
  plain: "no session",
  ended: "ended",
  superseded: "superseded",
  offloaded: "offloaded",
  idle: "idle",
  queued: "queued",
  running: "running",
  shared: "shared by many",
};

const whole = new Intl.NumberFormat("en");

export function count(n) {
  return n == null ? "" : whole.format(Math.round(n));
}

export function short(n) {
  if (n == null) return "";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (n >= 9.995 * size || (n >= size && size > 1e3)) {
      const shown = n / size;
      return shown.toFixed(shown < 100 ? 1 : 0).replace(/\.0$/, "") + unit;
    }
  }
  return count(n);
}

export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return (share > 0 && share < 1 ? "<1" : Math.round(share)) + " %";
}

export function ago(seconds) {
  const s = Math.max(0, seconds);
  if (s < 1) return "now";
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function clock(t) {
  return new Date(t * 1000).toLocaleTimeString("en-GB");
}

export function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  }
  return `${n} B`;
}

export function stateOf(record) {
  return record.tool != null && record.state !== "running" && record.state !== "ended"
    && record.state !== "offloaded" && record.state !== "resuming" ? "tool" : record.state;
}

function tiers(event) {
  const parts = TIERS.filter((tier) => event[`${tier}_tokens`])
    .map((tier) => `${count(event[`${tier}_tokens`])} ${tier}`);
  return parts.length ? `${parts.join(", ")} tokens` : "";
}

const VERBS = { demote: "offload" };
export const OPEN = ["accepted", "deferred"];

// The event as [kind for its colour, what happened, detail].
export function told(event) {
  switch (event.kind) {
    case "opened": return ["idle", event.generation > 1 ? "opened again" : "opened", ""];
    case "queued": return ["running", "turn started", ""];
    case "finished": {
      const read = event.input_tokens || 0;
      const cached = event.cached_tokens || 0;
      const from = tiers(event);
      return ["turn", "turn finished",
        `${count(read)} in, ${count(event.output_tokens || 0)} out; `
        + `${percent(cached, read)} cached${from ? ` (${from})` : ""}`];
    }
    case "waiting_tool": return ["tool", "waits for a tool", event.reason || ""];
    case "aborted": return ["bad", "turn aborted", event.reason || ""];
    case "idle": return ["idle", "idle again", "what was asked for was not used in time"];
    case "offloaded": return ["offloaded", "offloaded", ""];
    case "resuming": return ["resuming", "about to resume", ""];
    case "ended": return ["ended", "ended", ""];
    case "expired": return ["ended", "aged out", ""];
    case "dropped": return ["ended", "forgotten", "the table was full"];
    case "demoted_tokens": return ["evicted", "moved down under pressure", tiers(event)];
    case "evicted_tokens": return ["evicted", "evicted under pressure", tiers(event)];
    case "hint": {
      const tone = event.status === "done" ? "good"
        : OPEN.includes(event.status) || event.status === "clipped" ? "open" : "bad";
      const detail = [(event.reason || "").replaceAll("_", " "), tiers(event)];
      return [tone, `${VERBS[event.action] || event.action} ${event.status}`,
        detail.filter(Boolean).join("; ")];
    }
    default: return ["idle", String(event.kind).replaceAll("_", " "), ""];
  }
}
