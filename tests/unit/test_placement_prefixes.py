"""Requests go where their prompt begins in a cache, as far as that saves time; what is found is believed."""

from __future__ import annotations

import random

import pytest
from support.fleet import make_card, make_load, make_request, make_view

from gateway.pipeline.prefix import prompt_prefix, system_prefix, turn
from grid.engines.packing import CONTEXT_HEADING
from grid.errors import InvalidRequest
from grid.words import Candidate, Decision, Message, PlacementRequest
from placement.decide import decide
from placement.fleet import View
from placement.prefixes import END_TOKENS, MAX_BLOCKS
from placement.reports import Spent

GATEWAY = 9
LONG = tuple(range(1_000, 1_008))
"""Hashes of 512 tokens."""
LONG_TOKENS = END_TOKENS[len(LONG) - 1]


def choose(view: View, request: PlacementRequest) -> Decision:
    return decide(request, view, 0.0, random.Random(0))


def asking(number: int, prefix: tuple[int, ...] = LONG, tokens: int = 600) -> PlacementRequest:
    return make_request(f"req_{number}", prompt_tokens=tokens, prefix=prefix)


def run(
    view: View,
    request: PlacementRequest,
    unit_id: str,
    cached: int = 0,
    outcome: str = "done",
    answer: tuple[int, ...] = (),
) -> None:
    view.reserve(request, unit_id, GATEWAY, 0.0)
    spent = Spent(request.prompt_tokens, 20, 600.0, 800.0, cached)
    view.settle(request.reservation_id, outcome, 0.0, spent, answer)


def by_unit(decision: Decision) -> dict[str, Candidate]:
    return {each.unit_id: each for each in (decision.chosen, *decision.next_best)}


def test_a_prompt_goes_where_its_beginning_is_and_costs_what_is_left() -> None:
    view = make_view(*(make_card(f"u{i}") for i in range(4)))
    run(view, asking(0), "u2")
    decision = choose(view, asking(1))
    assert decision.chosen.unit_id == "u2"
    assert {unit: each.cached_tokens for unit, each in by_unit(decision).items()} == {
        **dict.fromkeys(("u0", "u1", "u3"), 0),
        "u2": LONG_TOKENS,
    }
    per_token_ms = view.units[2].speeds.prefill_ms_per_token
    saved_ms = decision.next_best[0].prefill_ms - decision.chosen.prefill_ms
    assert saved_ms == pytest.approx(LONG_TOKENS * per_token_ms, rel=0.01)
    assert choose(view, asking(2, prefix=LONG[:3])).chosen.cached_tokens == END_TOKENS[2]
    assert choose(view, asking(3, prefix=(1, 2, 3))).chosen.cached_tokens == 0


def test_only_units_that_may_run_it_count() -> None:
    view = make_view(make_card("u0", model="other"), *(make_card(f"u{i}") for i in range(1, 4)))
    run(view, asking(0), "u0")
    run(view, asking(1), "u3")
    chosen = choose(view, asking(2)).chosen
    assert (chosen.unit_id, chosen.cached_tokens) == ("u3", LONG_TOKENS)
    nowhere = choose(view, asking(3)._replace(exclude_units=("u3",)))
    assert [each.cached_tokens for each in (nowhere.chosen, *nowhere.next_best)] == [0, 0]


def test_a_cached_prompt_is_no_prompt_ahead_of_others() -> None:
    view = make_view(make_card("u0", max_running=64))
    run(view, asking(0), "u0")
    view.reserve(asking(1), "u0", GATEWAY, 0.0)
    assert view.columns.tokens_ahead[0] == pytest.approx(600 - LONG_TOKENS, rel=0.02)
    view.settle(asking(1).reservation_id, "cancelled", 0.0)
    assert view.columns.tokens_ahead[0] == 0


def test_the_cell_leaves_affinity_once_waiting_costs_more_than_computing() -> None:
    view = make_view(*(make_card(f"u{i}", max_running=8, max_waiting=64) for i in range(3)))
    run(view, asking(0), "u1")
    placed = []
    for number in range(1, 25):
        decision = choose(view, asking(number))
        placed.append(decision.chosen.unit_id)
        view.reserve(asking(number), decision.chosen.unit_id, GATEWAY, 0.0)
    assert placed[0] == "u1"
    assert {unit: placed.count(unit) for unit in set(placed)}.keys() == {"u0", "u1", "u2"}
    assert max(placed.count(f"u{i}") for i in range(3)) <= 12, "who has the prefix is not flooded"


def test_equal_prompts_at_the_same_instant_spread_over_idle_units() -> None:
    view = make_view(*(make_card(f"u{i}", max_running=64) for i in range(4)))
    for number in range(80):
        chosen = choose(view, asking(number)).chosen.unit_id
        view.reserve(asking(number), chosen, GATEWAY, 0.0)
    assert max(view.loads().values()) - min(view.loads().values()) <= 1


def test_a_new_process_holds_nothing_and_rows_may_move() -> None:
    cards = [make_card(f"u{i}") for i in range(3)]
    view = make_view(*cards)
    run(view, asking(0), "u0")
    run(view, asking(1), "u2")
    view.leave(1)
    assert {unit: each.cached_tokens for unit, each in by_unit(choose(view, asking(2))).items()} == {
        "u1": 0,
        "u2": LONG_TOKENS,
    }
    restarted = cards[2]._replace(incarnation="second")
    view.join(restarted, 3)
    view.report([make_load(restarted)], 3, 0.0)
    assert choose(view, asking(3)).chosen.cached_tokens == 0


def test_an_answer_lengthens_what_is_held() -> None:
    view = make_view(make_card("u0"), make_card("u1"))
    run(view, asking(0), "u1", answer=(7, 8))
    longer = asking(1, prefix=(*LONG, 7, 8, 9), tokens=900)
    assert choose(view, longer).chosen.cached_tokens == END_TOKENS[len(LONG) + 1]


@pytest.mark.parametrize("outcome", ["refused", "cancelled"])
def test_what_never_ran_is_not_held(outcome: str) -> None:
    view = make_view(make_card("u0"), make_card("u1"))
    run(view, asking(0, prefix=LONG[:2]), "u0")
    run(view, asking(1), "u0", outcome=outcome)
    assert choose(view, asking(2)).chosen.cached_tokens == END_TOKENS[1], "only the earlier request's"


def test_what_a_unit_reports_is_held_although_its_client_left() -> None:
    card = make_card("u0")
    view = make_view(card)
    view.reserve(asking(0), "u0", GATEWAY, 0.0)
    view.report([make_load(card, running=1, reservations=(asking(0).reservation_id,))], 1, 0.0)
    view.settle(asking(0).reservation_id, "cancelled", 0.0)
    assert choose(view, asking(1)).chosen.cached_tokens == LONG_TOKENS


def test_a_cache_that_proves_empty_is_believed_with_all_that_is_older() -> None:
    view = make_view(make_card("u0"))
    old, newer = (1, 2, 3, 4), (11, 12, 13, 14)
    run(view, asking(0, old), "u0")
    run(view, asking(1), "u0")
    run(view, asking(2, newer), "u0")
    run(view, asking(3), "u0", cached=0)
    assert choose(view, asking(4, old)).chosen.cached_tokens == 0
    assert choose(view, asking(5, newer)).chosen.cached_tokens > 0
    assert 0 < choose(view, asking(6)).chosen.cached_tokens < LONG_TOKENS, (
        "it has it now, and is trusted less"
    )


def test_a_unit_without_prefix_caching_is_soon_expected_to_have_none() -> None:
    view = make_view(make_card("u0"))
    for number in range(60):
        run(view, asking(number), "u0", cached=0)
    assert choose(view, asking(99)).chosen.cached_tokens < 0.02 * LONG_TOKENS
    for number in range(100, 160):
        run(view, asking(number), "u0", cached=LONG_TOKENS)
    assert choose(view, asking(199)).chosen.cached_tokens > 0.98 * LONG_TOKENS


def test_no_more_is_held_than_the_cache_has_room_for() -> None:
    card = make_card("u0")
    view = make_view(card)
    view.report([make_load(card, kv_tokens_free=2_000, kv_tokens_total=2_000)], 1, 0.0)
    for number in range(4):
        run(view, asking(number, tuple(range(100 * number, 100 * number + 8))), "u0")
    held = [
        choose(view, asking(9, tuple(range(100 * number, 100 * number + 8)))).chosen.cached_tokens
        for number in range(4)
    ]
    each = 600 + 20
    assert held[3] == held[2] == held[1] == LONG_TOKENS
    assert held[0] == (2_000 - 3 * each) // END_TOKENS[0] * END_TOKENS[0], "of a prompt, its end leaves first"


def test_speeds_are_learned_from_what_was_computed() -> None:
    views = make_view(make_card("u0")), make_view(make_card("u0"))
    for number in range(50):
        run(views[0], asking(number), "u0", cached=LONG_TOKENS)
        short = make_request(f"req_{number}", prompt_tokens=600 - LONG_TOKENS)
        views[1].reserve(short, "u0", GATEWAY, 0.0)
        views[1].settle(short.reservation_id, "done", 0.0, Spent(600 - LONG_TOKENS, 20, 600.0, 800.0))
    one, other = (view.units[0].speed.kind for view in views)
    assert one.inputs == other.inputs
    assert one.speeds().prefill_ms_per_token == pytest.approx(other.speeds().prefill_ms_per_token, rel=0.01)


@pytest.mark.parametrize("prefix", [(-1,), tuple(range(MAX_BLOCKS + 1))])
def test_a_prefix_that_makes_no_sense_is_refused(prefix: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="prefix"):
        choose(make_view(make_card()), make_request(prefix=prefix))


# --- what the gateway hashes ----------------------------------------------------------------


def text_of(words: int, seed: int) -> str:
    return " ".join(f"word{random.Random(seed + i).randrange(10_000)}" for i in range(words))


SYSTEM, FIRST, ANSWER, SECOND = (
    Message(role, text_of(200, i)) for i, role in enumerate(["system", "user", "assistant", "user"])
)


def test_a_conversation_goes_on_from_its_earlier_prompt_and_answer() -> None:
    before = prompt_prefix("salt", (SYSTEM, FIRST), ())
    asked = before.hashes
    answered = before.extend(turn(ANSWER.role, ANSWER.text))
    after = prompt_prefix("salt", (SYSTEM, FIRST, ANSWER, SECOND), ()).hashes
    assert asked
    assert answered
    assert after[: len(asked) + len(answered)] == asked + answered
    assert len(after) > len(asked) + len(answered)
    assert not set(after) & set(prompt_prefix("pepper", (SYSTEM, FIRST, ANSWER, SECOND), ()).hashes)


def test_documents_stand_where_units_pack_them() -> None:
    documents = tuple(text_of(100, 50 + i) for i in range(3))
    packed = "\n\n".join((SYSTEM.text, CONTEXT_HEADING, *reversed(documents)))
    shown = prompt_prefix("salt", (Message("system", packed), FIRST), ()).hashes
    assert prompt_prefix("salt", (SYSTEM, FIRST), documents).hashes == shown
    alone = system_prefix("salt", (SYSTEM, FIRST)).hashes
    assert alone
    assert shown[: len(alone)] == alone
    packed = "\n\n".join((CONTEXT_HEADING, *reversed(documents)))
    without = prompt_prefix("salt", (Message("system", packed), FIRST), ()).hashes
    assert prompt_prefix("salt", (FIRST,), documents).hashes == without
    assert system_prefix("salt", (FIRST,)).hashes == ()


def test_who_speaks_matters() -> None:
    one, other = (prompt_prefix("salt", (Message(role, text_of(200, 0)),), ()) for role in ("user", "system"))
    assert not set(one.hashes) & set(other.hashes)


def test_an_answer_s_hashes_that_can_be_none_are_counted_and_never_held() -> None:
    view = make_view(make_card())
    # The first one's tokens without a hash are held as the unit's filler -1.
    run(view, asking(1), "u0")
    run(view, asking(2), "u0", answer=(-1,))
    assert view.dropped == {"bad_figures": 1}
    assert view.loads() == {"u0": 0}
