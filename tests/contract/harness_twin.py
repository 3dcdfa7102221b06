"""Two rigs that get the same calls: sam's cache and the stock one.

Owns what twins of either tree core share. Must never let the arms differ in a call.
"""


class Twin:
    """The same calls on both; every answer must agree."""

    def __init__(self, make_rig, **settings):
        self.rigs = [make_rig(**settings), make_rig(stock=True, **settings)]
        self.sam, self.stock = self.rigs
        self.queued, self.running, self.texts = [], [], [[]]

    def same(self, ours, theirs):
        return ours == theirs

    def admitted(self, req):
        """What admission shows of a request."""
        return req.prefix_len, req.extend_end, req.host_loaded_length

    def both(self, call):
        ours, theirs = [call(rig, i) for i, rig in enumerate(self.rigs)]
        assert self.same(ours, theirs), (ours, theirs)
        return ours

    def queue(self, ids):
        self.queued.append([rig.queue(ids, rid=f"q{len(self.texts)}") for rig in self.rigs])
        self.texts.append(ids)

    def admit(self, pair, chunk):
        def call(rig, i):
            return rig.admit(pair[i], chunk=chunk), *self.admitted(pair[i])

        if self.both(call)[0] and pair in self.queued:
            self.queued.remove(pair)
            self.running.append(pair)

    def finish(self, pair, how):
        self.texts.append(self.sam.full_ids(pair[0]))
        for rig, req in zip(self.rigs, pair, strict=True):
            rig.finish(req, how) if rig.prefilled(req) else rig.abort_chunked(req)
        self.running.remove(pair)

    def retract(self, pair):
        for rig, req in zip(self.rigs, pair, strict=True):
            rig.retract(req)
        self.running.remove(pair)
        self.queued.append(pair)


def random_text(twin, rng):
    head = rng.choice(twin.texts[-30:])
    cut = rng.choice([0, 5, 16, 40, 90])
    return head[:cut] + [rng.randrange(3) * 50 + i for i in range(rng.randrange(1, 30))]
