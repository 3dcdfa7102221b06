"""The order of service: least to compute first, and nobody waits for ever."""

import random
from types import SimpleNamespace

import pytest

from sam.config import ConfigError, SamConfig
from sam.srt.managers.admission_order import AdmissionOrder, create_order, refusal


def waiting(rid, n_tokens, *, matched=0, arrived=0, output=0):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=range(n_tokens),
        output_ids=range(output),
        num_matched_prefix_tokens=matched,
        arrival_processed_tokens=arrived,
    )


def order(queue, *, aging=0.05, deferred=(), processed=0):
    AdmissionOrder(aging)(queue, set(deferred), processed)
    return "".join(req.rid for req in queue)


def test_least_to_compute_first_whatever_is_cached_or_was_generated():
    queue = [
        waiting("a", 100),
        waiting("b", 5_000, matched=4_990),
        waiting("c", 10, output=50),
        waiting("d", 30),
    ]
    assert order(queue) == "bdca"


def test_equals_keep_their_order():
    assert order([waiting(rid, 100) for rid in "cabd"]) == "cabd"


def test_deferred_ones_come_last_in_the_same_order():
    queue = [waiting("a", 30), waiting("b", 20), waiting("c", 40)]
    assert order(queue, deferred="ab") == "cba"


def test_what_waits_gains_on_what_comes_later():
    def queue():
        return [waiting("a", 100, arrived=1_990), waiting("b", 190, arrived=0)]

    assert order(queue(), processed=2_000, aging=0.05) == "ba"
    assert order(queue(), processed=2_000, aging=0.04) == "ab"
    assert order(queue(), processed=2_000, aging=0) == "ab"


def test_a_caller_without_a_count_gives_no_credit():
    queue = [waiting("a", 20, arrived=0), waiting("b", 10, arrived=900)]
    assert order(queue, processed=0) == "ba"


def test_a_long_prefill_is_overtaken_for_a_bounded_time():
    """Short requests come without end, and the long one still has its turn."""
    aging, long_tokens, step = 0.1, 1_000, 50
    queue, processed = [waiting("long", long_tokens)], 0
    while queue[0].rid != "long" or processed == 0:
        queue += [waiting("short", step, arrived=processed) for _ in range(2)]
        AdmissionOrder(aging)(queue, set(), processed)
        if queue[0].rid != "long":
            queue.pop(0)
            processed += step
        assert processed <= long_tokens / aging * 3
    overtaking = [req for req in queue[1:] if req.arrival_processed_tokens * aging > long_tokens]
    assert queue[0].rid == "long" and all(req.rid == "short" for req in overtaking)
    assert processed >= (long_tokens - step) / aging


def test_ranks_that_see_the_same_sort_alike():
    """The result depends on nothing but the queue and the count: two ranks, many rounds."""
    rng = random.Random(7)
    ranks = [AdmissionOrder(0.05), AdmissionOrder(0.05)]
    queues, processed = [[], []], 0
    for i in range(300):
        sizes = (rng.randrange(1, 4_000), rng.randrange(0, 500))
        deferred = {str(i)} if rng.random() < 0.2 else set()
        for rank, queue in zip(ranks, queues, strict=True):
            queue.append(waiting(str(i), sizes[0], matched=min(sizes), arrived=processed))
            rank(queue, deferred, processed)
        assert [req.rid for req in queues[0]] == [req.rid for req in queues[1]]
        if rng.random() < 0.9:
            processed += rng.randrange(2_000)
            for queue in queues:
                queue.pop(0)


def test_off_brings_no_order():
    assert create_order(SamConfig()) is None
    assert create_order(SamConfig(admission="shortest", admission_aging=0.2)).aging == 0.2
    with pytest.raises(ConfigError, match="SAM_ADMISSION_AGING"):
        create_order(SamConfig(admission="shortest", admission_aging=float("inf")))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, None),
        ({"enable_priority_scheduling": True}, "--enable-priority-scheduling"),
        ({"schedule_policy": "lpm"}, "--schedule-policy lpm"),
    ],
)
def test_what_leaves_no_room_for_an_order(settings, text):
    usual = {"schedule_policy": "fcfs", "enable_priority_scheduling": False}
    schedule = SimpleNamespace(**usual | settings)
    assert refusal(SamConfig(), schedule) is None
    found = refusal(SamConfig(admission="shortest"), schedule)
    assert found is None if text is None else text in found and "--sam-admission off" in found
