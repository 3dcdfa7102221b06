// Asks the server for news once a second while the page is in sight, and keeps what it said.

const KEY = "sam-key";
const EVERY_MS = 1000;
const LONGEST_MS = 15000;
const KEPT_EVENTS = 200;
const KEPT_BUCKETS = 180;

export const keyOf = (tenant, id) => `${tenant}\u0000${id}`;

export class Refused extends Error {}

export class Feed {
  constructor(changed) {
    this.changed = changed;
    this.watched = null; // [tenant, id]
    this.key = sessionStorage.getItem(KEY) || "";
    this.needsKey = false;
    this.wrongKey = false;
    this.problem = "connecting";
    this.control = false;
    this.failures = 0;
    this.timer = 0;
    this.startOver("");
    document.addEventListener("visibilitychange", () => this.wake());
    addEventListener("online", () => this.wake());
  }

  startOver(epoch) {
    this.epoch = epoch;
    this.version = 0;
    this.since = 0; // the version that was the newest when these rows began
    this.nextEvent = 0;
    this.rows = new Map();
    this.shape = 0; // counts changes of the rows
    this.events = [];
    this.series = [];
    this.story = null;
    this.summary = null;
    this.ingress = null;
    this.nSessions = 0;
    this.nowS = 0;
    this.receivedMs = 0;
    this.ageS = 0;
    this.nEvents = 0;
  }

  // The server's clock, as far as is known here.
  now() {
    return this.nowS + this.ageS + (performance.now() - this.receivedMs) / 1000;
  }

  useKey(key) {
    this.key = key;
    this.wrongKey = false;
    sessionStorage.setItem(KEY, key);
    this.needsKey = false;
    this.wake();
  }

  forgetKey() {
    this.key = "";
    sessionStorage.removeItem(KEY);
    this.startOver("");
    this.wake();
  }

  watch(key) {
    this.watched = key;
    this.story = null;
    this.wake();
  }

  wake() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.needsKey) this.poll();
  }

  async poll() {
    if (this.polling) {
      this.again = true;
      return;
    }
    this.polling = true;
    let waitMs = EVERY_MS;
    try {
      const more = await this.look();
      this.failures = 0;
      if (more || this.again) waitMs = 0;
    } catch (error) {
      if (error instanceof Refused) {
        this.needsKey = true;
        this.wrongKey = Boolean(this.key);
        sessionStorage.removeItem(KEY);
      }
      this.failures += 1;
      this.problem = error.message;
      waitMs = Math.min(LONGEST_MS, EVERY_MS * 2 ** Math.min(this.failures - 1, 4));
    }
    this.polling = this.again = false;
    this.changed();
    clearTimeout(this.timer);
    if (!document.hidden && !this.needsKey) this.timer = setTimeout(() => this.poll(), waitMs);
  }

  async look() {
    const last = this.series.length ? this.series[this.series.length - 1].t : 0;
    const ask = { epoch: this.epoch, version: this.version, since: this.since,
      event: this.nextEvent, bucket_s: last };
    const watched = this.watched;
    if (watched) [ask.tenant, ask.session_id] = watched;
    const news = await this.fetch(`api/live?${new URLSearchParams(ask)}`);
    if (news.epoch !== this.epoch) this.startOver(news.epoch);
    this.take(news, watched);
    return news.more;
  }

  take(news, watched) {
    if (news.afresh) this.rows.clear();
    for (const [tenant, id] of news.gone) this.rows.delete(keyOf(tenant, id));
    for (const record of news.sessions) this.rows.set(keyOf(record.tenant, record.id), record);
    if (news.afresh || news.sessions.length || news.gone.length) this.shape += 1;
    this.version = news.version;
    this.since = news.since;
    if (news.next_event > this.nextEvent) {
      for (const event of news.events) {
        event.n = this.nEvents;
        this.nEvents += 1;
        this.events.push(event);
      }
      this.nextEvent = news.next_event;
      this.events.splice(0, this.events.length - KEPT_EVENTS);
    }
    for (const bucket of news.series) {
      const last = this.series[this.series.length - 1];
      if (last && last.t === bucket.t) this.series.pop();
      this.series.push(bucket);
    }
    this.series.splice(0, this.series.length - KEPT_BUCKETS);
    if (watched && this.watched === watched && news.story) this.story = news.story;
    this.summary = news.summary;
    this.deviceTotal = news.device_total;
    this.ingress = news.ingress;
    this.control = news.control;
    this.nSessions = news.n_sessions;
    this.nowS = news.now_s;
    this.ageS = news.age_s;
    this.receivedMs = performance.now();
    this.problem = news.problem;
  }

  // How many live sessions are below this one.
  countBelow(record) {
    const children = new Map();
    for (const row of this.rows.values()) {
      const key = row.parent == null ? "" : keyOf(row.tenant, row.parent);
      if (!children.has(key)) children.set(key, []);
      children.get(key).push(row);
    }
    const seen = new Set();
    const visit = (row) => {
      const key = keyOf(row.tenant, row.id);
      if (seen.has(key)) return;
      seen.add(key);
      for (const child of children.get(key) || []) visit(child);
    };
    visit(record);
    seen.delete(keyOf(record.tenant, record.id));
    return [...seen].filter((key) => !["ended", "named"].includes(this.rows.get(key).state)).length;
  }

  // Ask for an action on a session; resolves with its outcome.
  async act(tenant, sessionId, action) {
    const body = JSON.stringify({ tenant, session_id: sessionId, action });
    const message = await this.fetch("api/hints", { method: "POST", body });
    const query = new URLSearchParams({ tenant });
    for (let tries = 0; tries < 40; tries += 1) {
      await new Promise((resume) => setTimeout(resume, 250));
      const known = await this.fetch(
        `api/hints/${encodeURIComponent(message.message_id)}?${query}`,
      );
      const outcome = known.actions[0];
      if (!["accepted", "deferred"].includes(outcome.status)) return outcome;
    }
    return { status: "deferred", reason: "still waiting" };
  }

  async fetch(address, options = {}) {
    const headers = { "content-type": "application/json" };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(address, { ...options, headers, cache: "no-store" });
    } catch {
      throw new Error("the server does not answer");
    }
    if (response.status === 401) throw new Refused("this server asks for a key");
    const said = await response.json().catch(() => ({}));
    if (!response.ok) {
      const reason = said.error && (said.error.message || said.error);
      throw new Error(reason || `the server answers ${response.status}`);
    }
    return said;
  }
}
