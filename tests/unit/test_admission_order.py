"""The order of service: least to compute first, and nobody waits for ever."""

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


def test_least_to_compute_first_whatever_is_cached():
    queue = [
        waiting("a", 100),
        waiting("b", 5_000, matched=4_990),
        waiting("d", 30),
    ]
    assert order(queue) == "bda"


def test_what_was_retracted_goes_on_before_what_has_not_begun():
    queue = [waiting("a", 10), waiting("b", 5_000, output=50), waiting("c", 5_000, output=20)]
    assert order(queue, deferred="b") == "cba"


def test_equals_keep_their_order():
    assert order([waiting(rid, 100) for rid in "cabd"]) == "cabd"


def test_deferred_ones_come_last_in_the_same_order():
    queue = [waiting("a", 30), waiting("b", 20), waiting("c", 40)]
    assert order(queue, deferred="ab") == "cba"


def test_a_deferred_one_is_lifted_by_its_credit():
    """The one that computes its prefix is long and waits itself."""
    queue = [waiting("l", 50_000), waiting("s", 100), waiting("n", 2_000, arrived=4_000)]
    assert order(queue, deferred="s", processed=1_000) == "nls"
    assert order(queue, deferred="s", processed=4_000) == "snl"


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
    assert processed >= (long_tokens - step) / aging


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
