"""What the sessions must look like after each event: a naive mirror over ReferenceTable.

Owns: the rules of `HintManager` about *sessions* (who is bound, ended, offloaded, resumed,
what waits for a running session), stated again without tiers or tasks. Must never look at
the code under test.
"""

from sam.core.reference import ReferenceTable
from sam.core.sessions import SessionRef

EXPIRE_PER_MESSAGE = 8


class SessionModel:
    def __init__(self, config, key_of):
        self.config = config
        self.key_of = key_of
        self.table = ReferenceTable(config.session_limits())
        self.requests = {}
        self.waiting = {}
        self.seen = set()
        self.bound_at = {}

    # -- requests ------------------------------------------------------------------

    def queued(self, rid, envelope):
        """A request entered the queue with an envelope, or None."""
        if rid in self.requests or envelope is None:
            return
        actions = envelope["actions"]
        bind = next((a for a in actions if a["action_type"] == "session.bind"), None)
        edits = [a for a in actions if a is not bind]
        key, generation = None, 0
        if bind is not None:
            payload = bind["payload"]
            key, now_s = self.key_of(payload["session_id"]), payload["time_s"]
            self.waiting.pop(key, None)
            self.table.bind(key, payload.get("parent_session_id"), now_s)
            generation = self.table.request_queued(key, rid, now_s)
            self.bound_at[key] = max(self.bound_at.get(key, 0.0), now_s)
            self.age(now_s)
        self.requests[rid] = (key, generation, envelope["message_id"], edits)

    def over(self, rid, reason, aborted):
        if rid not in self.requests:
            return
        key, generation, message_id, edits = self.requests.pop(rid)
        if key is not None:
            now_s = self.table.now_s
            if aborted:
                self.table.request_aborted(key, rid, generation, now_s)
            else:
                self.table.request_finished(key, rid, generation, now_s, reason)
        if all(other[2] != message_id for other in self.requests.values()):
            for action in edits:
                self.action(action, message_id)
        record = self.table.find(key) if key is not None else None
        if record is None or not record.current():
            for action, of_message in self.waiting.pop(key, []):
                self.action(action, of_message, again=True)

    # -- actions -------------------------------------------------------------------

    def action(self, action, message_id, *, again=False):
        payload = action["payload"]
        key, now_s = self.key_of(payload["session_id"]), payload["time_s"]
        self.table.now_s = max(self.table.now_s, now_s)
        if (message_id, action["action_id"]) in self.seen and not again:
            return
        self.seen.add((message_id, action["action_id"]))
        kind = action["action_type"].removeprefix("session.")
        if kind == "bind":
            self.table.bind(key, payload.get("parent_session_id"), now_s)
        elif payload.get("target") == "tokens":
            pass  # no session changes its state by a range
        elif kind in ("evict", "demote", "prefetch") and self.bound_at.get(key, 0.0) > now_s:
            pass  # a newer request of the session came first
        elif kind == "evict":
            for ref in self.table.end(key, now_s):
                self.waiting.pop(ref.key, None)
                self.bound_at.pop(ref.key, None)
        elif kind in ("demote", "prefetch"):
            self.move(kind, key, payload, action, message_id)
        self.age(now_s)

    def move(self, kind, key, payload, action, message_id):
        keys = [key]
        if payload.get("scope") == "subtree":
            keys = self.table.subtree(key)
        for target in keys:
            record = self.table.find(target)
            if record is None or record.state in ("named", "ended"):
                continue
            if target.session_id == "default_session":
                continue
            if kind == "prefetch":
                self.table.mark_resuming(
                    target, payload["time_s"], self.config.prefetch_lease_s
                )
            elif not self.table.mark_offloaded(target, payload["time_s"]) and target == key:
                self.waiting.setdefault(target, []).append((action, message_id))

    def age(self, now_s):
        gone = self.table.expire(now_s, EXPIRE_PER_MESSAGE) or []
        for ref in [*gone, *(self.table.take_dropped() or [])]:
            self.bound_at.pop(ref.key, None)

    # -- views ---------------------------------------------------------------------

    def states(self):
        found = {}
        for r in self.table.records:
            parent = r.parent.session_id if r.parent else None
            found[r.key] = (r.state, r.generation, parent, len(r.current()), r.waiting_tool)
        return found

    def live_refs(self):
        """Generations that may own nodes: live ones, and ended ones that still run."""
        live = {
            SessionRef(r.key, r.generation)
            for r in self.table.records
            if r.state not in ("named", "ended")
        }
        running = {SessionRef(k, g) for k, g, _, _ in self.requests.values() if k is not None}
        return live | running
