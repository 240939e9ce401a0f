"""At once or later, and which waiting request a freed slot serves."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from support.fleet import make_card, make_load, make_request, make_view

from grid.errors import Cancelled, GridError, InternalError, NoEligibleUnit, Overloaded, Saturated
from grid.words import Decision, PlacementRequest, Task, UnitCard, UnitState
from placement.decide import Among, decide
from placement.dispatch import MAX_PASSES, Answer, Dispatch
from placement.fleet import View
from placement.queue import Limits

ROOMY = Limits(most=10_000, most_per_tenant=10_000, wait_ms=1e6)
GATEWAY = 7


class Desk:
    """A dispatch over idle units of one slot each, with a clock that is told."""

    def __init__(self, *cards: UnitCard, limits: Limits = ROOMY, **rules: Any) -> None:
        self.view: View = make_view(*cards, stale_after_s=1e9, **rules)
        rng = random.Random(0)
        self.dispatch = Dispatch(
            self.view, limits, lambda request, now_s, among: decide(request, self.view, now_s, rng, among)
        )
        self.now_s = 0.0
        self.asked = 0
        self.told: list[Answer] = []

    def ask(self, **changes: Any) -> list[Answer]:
        self.asked += 1
        return self.place(make_request(f"req_{self.asked}", **changes))

    def place(self, request: PlacementRequest, holder: int = GATEWAY) -> list[Answer]:
        return self.hear(self.dispatch.place(request, holder, self.asked, self.now_s))

    def settle(self, number: int, outcome: str = "done") -> list[Answer]:
        held, answers = self.dispatch.settle(f"req_{number}/s/0", outcome, self.now_s)
        assert held
        return self.hear(answers)

    def serve(self, now_s: float) -> list[Answer]:
        self.now_s = now_s
        self.view.tick(now_s)
        return self.hear(self.dispatch.serve(now_s))

    def hear(self, answers: list[Answer]) -> list[Answer]:
        self.told += answers
        return answers

    @property
    def waiting(self) -> int:
        return len(self.dispatch.queue)


def slot(unit_id: str = "u0", **changes: Any) -> UnitCard:
    return make_card(unit_id, **{"max_running": 1, **changes})


def unit_of(answers: list[Answer]) -> str:
    [answer] = answers
    assert isinstance(answer.outcome, Decision), answer.outcome
    return answer.outcome.chosen.unit_id


def error_of(answers: list[Answer]) -> GridError:
    [answer] = answers
    assert isinstance(answer.outcome, GridError)
    return answer.outcome


# --- at once or later -----------------------------------------------------------------------


def test_a_freed_slot_goes_to_the_one_who_waits() -> None:
    desk = Desk(slot())
    assert unit_of(desk.ask()) == "u0"
    assert desk.ask() == []
    assert desk.waiting == 1
    desk.now_s = 2.5
    [answer] = desk.settle(1)
    assert (answer.holder, answer.stream) == (GATEWAY, 2)
    assert isinstance(answer.outcome, Decision)
    assert answer.outcome.queued_ms == pytest.approx(2500)
    assert (desk.waiting, desk.view.loads()) == (0, {"u0": 1})


def test_what_can_never_run_or_makes_no_sense_is_refused_at_once() -> None:
    desk = Desk(slot())
    desk.ask()
    assert isinstance(error_of(desk.ask(model="none")), NoEligibleUnit)
    assert error_of(desk.ask(prompt_tokens=-1)).code == "invalid_request"
    assert desk.waiting == 0


def test_a_dry_run_never_waits() -> None:
    desk = Desk(slot())
    desk.ask()
    full = error_of(desk.ask(dry_run=True))
    assert isinstance(full, Overloaded)
    assert full.retry_after_s > 0
    assert desk.waiting == 0


def test_without_a_queue_a_full_fleet_refuses() -> None:
    desk = Desk(slot(), limits=ROOMY._replace(wait_ms=0))
    desk.ask()
    refusal = error_of(desk.ask())
    assert isinstance(refusal, Overloaded)
    assert refusal.details["rejected_by_code"] == {"saturated": 1}


def test_a_refusal_of_the_queue_carries_the_reasons_of_the_units() -> None:
    desk = Desk(slot(), limits=Limits(most=10, most_per_tenant=1, wait_ms=1e6))
    desk.ask()
    desk.ask()
    refusal = error_of(desk.ask())
    assert type(refusal) is Saturated
    assert refusal.details["rejected_by_code"] == {"saturated": 1}


@pytest.mark.parametrize("how", ["joins", "reports", "resumes", "recovers"])
def test_room_that_comes_by_itself_is_given_out(how: str) -> None:
    desk = Desk(slot())
    if how == "resumes":
        desk.view.join(slot("u1"), 2)
        desk.view.report([make_load(slot("u1"))], 2, 0.0)
        desk.view.drain("u1", True)
    if how == "recovers":
        desk.view.join(slot("u1"), 2)
        desk.view.report([make_load(slot("u1"))], 2, 0.0)
        for number in range(2):
            desk.view.reserve(make_request(f"bad_{number}"), "u1", 1, number / 100)
            desk.view.settle(f"bad_{number}/s/0", "failed", number / 100)
    desk.ask()
    assert desk.ask() == []
    assert desk.serve(0.1) == []
    if how == "joins":
        desk.view.join(slot("u1"), 2)
        assert desk.serve(0.2) == [], "it has not reported yet"
        desk.view.report([make_load(slot("u1"))], 2, 0.2)
    elif how == "reports":
        desk.view.report([make_load(slot(), running=1, reservations=("req_1/s/0",))], 1, 0.2)
        desk.view.report([make_load(slot())], 1, 0.2)
    elif how == "resumes":
        desk.view.drain("u1", False)
    else:
        for tick in range(4, 100):
            desk.view.tick(tick / 10)
            for card in desk.view.canaries_due(tick / 10):
                desk.view.canary_ended(card, "", tick / 10)
        desk.now_s = 10.0
    assert unit_of(desk.serve(max(desk.now_s, 0.2))) in ("u0", "u1")
    assert desk.waiting == 0


def test_nobody_overtakes_who_waits_for_the_same() -> None:
    desk = Desk(slot())
    desk.ask()
    desk.ask(tenant_id="b")
    desk.view.withdraw("req_1/s/0")
    answers = desk.ask(tenant_id="c")
    assert [answer.request.tenant_id for answer in answers] == ["b"]
    assert desk.waiting == 1


def test_who_waits_for_what_is_not_there_holds_nobody_up() -> None:
    desk = Desk(slot(), slot("u1", region="us-east-1"))
    desk.ask(allowed_regions=("us-east-1",))
    desk.ask(allowed_regions=("us-east-1",))
    assert desk.waiting == 1
    assert unit_of(desk.ask()) == "u0"
    desk.ask(model="model-x")
    assert [answer.request.request_id for answer in desk.settle(3)] == ["req_4"]
    assert [answer.request.request_id for answer in desk.settle(1)] == ["req_2"]


# --- leaving --------------------------------------------------------------------------------


def test_whoever_cancels_leaves_the_queue() -> None:
    desk = Desk(slot())
    desk.ask()
    desk.ask()
    assert isinstance(error_of(desk.settle(2, "cancelled")), Cancelled)
    assert desk.waiting == 0
    assert desk.settle(1) == []


def test_a_lost_gateway_waits_for_nothing() -> None:
    desk = Desk(slot())
    desk.ask()
    desk.place(make_request("mine"), holder=8)
    desk.ask()
    assert desk.dispatch.leave(8) == 1
    assert desk.dispatch.leave(8) == 0
    assert [answer.request.request_id for answer in desk.settle(1)] == ["req_2"]


def test_asking_again_voids_what_waited() -> None:
    desk = Desk(slot())
    desk.ask()
    request = make_request("again")
    assert desk.place(request) == []
    assert isinstance(error_of(desk.place(request, holder=8)), Cancelled)
    assert desk.waiting == 1
    assert [answer.holder for answer in desk.settle(1)] == [8]


def test_time_runs_out_with_a_reason_and_a_time_to_come_back() -> None:
    desk = Desk(slot(), limits=ROOMY._replace(wait_ms=60_000.0))
    desk.ask()
    desk.ask(tenant_id="b", deadline_ms=9_000.0)
    desk.ask(tenant_id="c")
    assert desk.serve(8.9) == []
    late = error_of(desk.serve(9.0))
    assert isinstance(late, Overloaded)
    assert "within 9.0 s" in late.message
    assert late.retry_after_s > 0
    assert late.details["rejected_by_code"] == {"saturated": 1}
    assert error_of(desk.serve(60.0)).code == "overloaded"
    assert desk.waiting == 0


def test_the_last_look_before_time_runs_out_can_still_find_a_unit() -> None:
    desk = Desk(slot())
    desk.ask()
    desk.ask(deadline_ms=9_000.0)
    desk.view.withdraw("req_1/s/0")
    assert unit_of(desk.serve(9.5)) == "u0"


def test_a_unit_that_goes_leaves_those_who_wait_waiting() -> None:
    desk = Desk(slot())
    desk.ask()
    desk.ask()
    desk.view.leave(1)
    assert desk.serve(0.1) == []
    desk.view.join(slot(incarnation="second"), 5)
    desk.view.report([make_load(slot(incarnation="second"))], 5, 0.2)
    assert unit_of(desk.serve(0.2)) == "u0"


def test_a_bug_in_deciding_costs_one_who_waits() -> None:
    desk = Desk(slot())
    desk.ask()
    desk.ask()
    desk.ask()
    sound = desk.dispatch._decide
    broken = iter([InternalError("a bug")])

    def once(request: PlacementRequest, now_s: float, among: Among) -> Decision:
        for error in broken:
            raise error
        return sound(request, now_s, among)

    desk.dispatch._decide = once
    first, second = desk.settle(1)
    assert isinstance(first.outcome, InternalError)
    assert isinstance(second.outcome, Decision)


# --- who gains most -------------------------------------------------------------------------


def test_a_slot_goes_to_whom_it_helps_most_but_nobody_is_passed_over_for_ever() -> None:
    fast = slot("fast", decode_ms_per_token=5.0, prefill_tokens_per_s=10_000.0)
    desk = Desk(fast, slot("slow", decode_ms_per_token=50.0))
    desk.ask()
    desk.ask()
    desk.ask(tenant_id="short", max_output_tokens=2, prompt_tokens=10)
    for _ in range(MAX_PASSES + 4):
        desk.ask(tenant_id="long", max_output_tokens=500, prompt_tokens=1000)
    served = []
    holder = next(a.request.request_id for a in desk.told if unit_of([a]) == "fast")
    while "short" not in served:
        [answer] = desk.settle(int(holder.removeprefix("req_")))
        assert unit_of([answer]) == "fast"
        served.append(answer.request.tenant_id)
        holder = answer.request.request_id
    assert served == ["long"] * MAX_PASSES + ["short"]


# --- preferred regions ----------------------------------------------------------------------


def two_regions(**rules: Any) -> Desk:
    desk = Desk(slot("here", region="a"), slot("there", region="b"), **rules)
    desk.ask(allowed_regions=("a",))
    return desk


@pytest.mark.parametrize("flaw", [{"prompt_tokens": -1}, {"max_output_tokens": -1}, {"prefix": (-1,)}])
def test_what_makes_no_sense_waits_for_no_region(flaw: dict[str, Any]) -> None:
    desk = two_regions()
    assert error_of(desk.ask(prefer_regions=("a",), **flaw)).code == "invalid_request"
    assert desk.waiting == 0


def test_a_full_region_that_is_preferred_is_waited_for() -> None:
    desk = two_regions()
    assert desk.ask(prefer_regions=("a",)) == []
    assert unit_of(desk.ask()) == "there", "who doesn't prefer it isn't held up"
    assert unit_of(desk.settle(1)) == "here"


def test_after_the_bound_it_goes_elsewhere() -> None:
    desk = two_regions()
    assert desk.ask(prefer_regions=("a", "b")) == []
    assert desk.serve(1.9) == []
    answers = desk.serve(2.0)
    assert unit_of(answers) == "there"
    assert isinstance(answers[0].outcome, Decision)
    assert answers[0].outcome.queued_ms == pytest.approx(2000)


def test_a_wait_that_is_known_to_be_longer_is_not_begun() -> None:
    desk = two_regions(prefer_region_wait_ms=100.0)
    assert unit_of(desk.ask(prefer_regions=("a",))) == "there"


def test_a_queue_that_is_full_sends_them_elsewhere_at_once() -> None:
    desk = two_regions(limits=Limits(most=1, most_per_tenant=1, wait_ms=1e6))
    assert desk.ask(prefer_regions=("a",)) == []
    assert unit_of(desk.ask(prefer_regions=("a",))) == "there"


def test_when_every_region_is_full_the_first_to_free_within_the_bound_is_the_preferred_one() -> None:
    desk = two_regions()
    desk.ask(allowed_regions=("b",))
    assert desk.ask(prefer_regions=("a",)) == []
    assert desk.settle(2) == [], "it is held for the region that it prefers"
    assert unit_of(desk.settle(1)) == "here"


def test_a_dry_run_names_the_full_unit_that_a_call_would_wait_for() -> None:
    desk = two_regions()
    [answer] = desk.ask(prefer_regions=("a",), dry_run=True)
    decision = answer.outcome
    assert isinstance(decision, Decision)
    assert [each.unit_id for each in (decision.chosen, *decision.next_best)] == ["here", "there"]
    assert decision.chosen.queue_ms > 0 == decision.next_best[0].queue_ms
    assert decision.candidates == 2
    assert desk.waiting == 0
    desk.ask(allowed_regions=("b",))
    assert isinstance(error_of(desk.ask(prefer_regions=("a",), dry_run=True)), Overloaded)


def test_a_dry_run_goes_elsewhere_where_a_call_would() -> None:
    for desk in two_regions(prefer_region_wait_ms=100.0), two_regions(limits=ROOMY._replace(wait_ms=0)):
        assert unit_of(desk.ask(prefer_regions=("a",), dry_run=True)) == "there"
    full = two_regions(limits=Limits(most=1, most_per_tenant=1, wait_ms=1e6))
    assert full.ask(prefer_regions=("a",)) == []
    assert unit_of(full.ask(prefer_regions=("a",), dry_run=True)) == "there"


# --- many at once ---------------------------------------------------------------------------


def test_embedding_units_get_as_many_again_on_the_way() -> None:
    desk = Desk(make_card(task=int(Task.EMBED), max_running=4, max_waiting=64))
    for _ in range(9):
        desk.ask(task=int(Task.EMBED))
    assert desk.view.loads() == {"u0": 8}
    assert desk.waiting == 1


def test_three_times_the_capacity_is_shared_evenly_and_nothing_is_lost() -> None:
    desk = Desk(*(slot(f"u{number}") for number in range(10)), limits=ROOMY._replace(wait_ms=20_000.0))
    rng, ends, served = random.Random(1), dict[str, float](), Counter[str]()
    asked_s = 0.0
    while desk.now_s < 60.0:
        for request_id, end_s in list(ends.items()):
            if end_s <= desk.now_s:
                del ends[request_id]
                desk.settle(int(request_id.removeprefix("req_")))
        while asked_s <= desk.now_s:
            # An answer of 50 tokens takes about 0.6 s, so ten units give 16 a second.
            asked_s += 1 / 48
            desk.ask(tenant_id="many" if rng.random() < 0.9 else "few")
        desk.serve(desk.now_s)
        for answer in desk.told:
            if isinstance(answer.outcome, Decision):
                served[answer.request.tenant_id] += 1
                ends[answer.request.request_id] = desk.now_s + rng.uniform(0.5, 0.7)
            else:
                assert answer.request.tenant_id == "many", "whoever asks for less than its share gets it"
                assert type(answer.outcome) is Saturated
        desk.told.clear()
        desk.now_s += 0.05
    assert served["few"] > 250
    assert sum(served.values()) > 0.9 * 60 * 10 / 0.65


# --- standby --------------------------------------------------------------------------------


def on_standby(desk: Desk, name: str, link: int, state: UnitState = UnitState.STANDBY, **card: Any) -> None:
    made = slot(name, **card)
    desk.view.join(made, link)
    desk.view.report([make_load(made, state=int(state))], link, desk.now_s)


def test_the_first_request_takes_in_who_is_warm() -> None:
    desk = Desk()
    on_standby(desk, "u0", 1)
    before = desk.view.version
    assert unit_of(desk.ask()) == "u0"
    assert desk.dispatch.taken_in == ["u0"]
    assert desk.view.version > before, "gateways hear of it"
    [row] = desk.view.snapshot(0.0)
    assert (row.load.state, row.reserved) == (UnitState.READY, 1)


def test_who_serves_comes_before_who_is_on_standby() -> None:
    desk = Desk(slot())
    on_standby(desk, "u1", 2)
    assert unit_of(desk.ask()) == "u0"
    assert desk.dispatch.taken_in == []
    assert unit_of(desk.ask()) == "u1", "the other one is full"
    assert desk.dispatch.taken_in == ["u1"]
    assert desk.ask() == [], "now all are"


def test_warm_units_come_before_those_that_sleep() -> None:
    desk = Desk()
    on_standby(desk, "u0", 1, UnitState.ASLEEP)
    on_standby(desk, "u1", 2)
    assert [unit_of(desk.ask()) for _ in range(2)] == ["u1", "u0"]


def test_nobody_is_taken_in_who_could_not_run_it() -> None:
    desk = Desk()
    on_standby(desk, "u0", 1, region="us-east-1")
    on_standby(desk, "u1", 2, model="another")
    assert error_of(desk.ask(allowed_regions=("eu-central-1",))).code == "no_eligible_unit"
    assert desk.dispatch.taken_in == []


def test_a_dry_run_sees_who_would_be_taken_in_and_takes_nobody() -> None:
    desk = Desk()
    on_standby(desk, "u0", 1)
    assert unit_of(desk.ask(dry_run=True)) == "u0"
    assert desk.dispatch.taken_in == []
    assert desk.view.snapshot(0.0)[0].load.state == UnitState.STANDBY


def test_a_unit_serves_from_the_decision_until_it_says_that_it_is_on_standby_again() -> None:
    desk = Desk()
    on_standby(desk, "u0", 1)
    desk.ask()
    late, ready = (make_load(slot(), state=int(s)) for s in (UnitState.STANDBY, UnitState.READY))
    desk.view.report([late], 1, 0.1)
    desk.settle(1)
    assert unit_of(desk.ask()) == "u0"
    assert len(desk.dispatch.taken_in) == 1, "a sample from before changes nothing"
    desk.view.report([ready], 1, 0.2)
    desk.view.report([late], 1, 0.3)
    desk.settle(2)
    desk.ask()
    assert len(desk.dispatch.taken_in) == 2


def test_who_prefers_a_region_takes_in_who_is_on_standby_there() -> None:
    desk = Desk(slot(region="a"))
    on_standby(desk, "u1", 2, region="b")
    on_standby(desk, "u2", 3, region="a")
    desk.ask()
    assert unit_of(desk.ask(prefer_regions=("a",))) == "u2", "rather than to wait for the full one"


def test_a_hold_that_ends_takes_in_who_is_on_standby_elsewhere() -> None:
    desk = Desk(slot(region="a"))
    on_standby(desk, "u1", 2, region="b")
    desk.ask(allowed_regions=("a",))
    assert desk.ask(prefer_regions=("a",)) == []
    assert desk.serve(1.9) == []
    assert unit_of(desk.serve(2.0)) == "u1"


def test_who_waits_takes_in_who_comes_to_standby_before_anybody_later() -> None:
    desk = Desk(slot())
    desk.ask()
    assert desk.ask() == [] == desk.ask()
    on_standby(desk, "u1", 2)
    [answer] = desk.ask()
    assert (answer.request.request_id, unit_of([answer])) == ("req_2", "u1")
    on_standby(desk, "u2", 3)
    [answer] = desk.serve(0.1)
    assert (answer.request.request_id, unit_of([answer])) == ("req_3", "u2")
    assert desk.waiting == 1
