"""What does it cost a gateway replica to count and explain a call?

    python benchmarks/figures.py [--json OUT] [--calls N]

CPU microseconds a call, in one thread: writing the story down while the call runs and adding it to the sums,
which happen on the call's way, and what the flush does for it twice a second. The baseline is what every such
counter must do at least: make one object and add to six numbers of a dictionary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package `gateway`.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from gateway.observe.ledger import Ledger  # noqa: E402
from gateway.observe.recorder import encoded  # noqa: E402
from gateway.observe.story import Story  # noqa: E402
from gateway.pipeline.events import Finished, StepTiming  # noqa: E402
from grid.words import Candidate, Decision, Usage  # noqa: E402

CHOSEN = Candidate("unit-a", "i", "127.0.0.1", 1, "local", "m", 16, "H100", True, 0.3, 1, 2, 30, 0, 1.0, 0.04)
NEXT_BEST = tuple(CHOSEN._replace(unit_id=f"unit-{letter}") for letter in "bcd")
DECISION = Decision("req_1/s/1", CHOSEN, NEXT_BEST, (("region", 2), ("saturated", 1)), (), "m", 1.0, 7, 80.0)
USED = Usage(120, 40, 80, 0.04)
TIMING = StepTiming("generation-1", "generation", 40.0, 0.4, 0.0, 0.0, 0.2, 4.0, 35.0, USED)
FINISHED = Finished("length", USED, 5.0, 40.0, (), (), True)
ROUNDS = 7


def one_call(number: int) -> Story:
    story = Story("req_1", 0.0, 1e9 + number / 1000, "acme", "/v1/chat/completions")
    story.of("pl-1", 1)
    run = story.run("m")
    run.decided("generation-1", DECISION)
    run.settled("req_1/s/1", "done")
    run.step(TIMING)
    run.hear(FINISHED)
    story.end(200, None, 0.04 + number % 100 / 1000)
    return story


class Least:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def baseline(calls: int) -> None:
    sums: dict[str, int] = {}
    for number in range(calls):
        call = Least(number)
        for name in ("calls", "good", "input", "cached", "output", "cu"):
            sums[name] = sums.get(name, 0) + call.number


def us_a_call(work: Callable[[], object], calls: int) -> float:
    began_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began_ns) / 1e3 / calls


def one_round(calls: int) -> dict[str, float]:
    stories: list[Story] = []
    ledger = Ledger(86_400)
    return {
        "baseline": us_a_call(lambda: baseline(calls), calls),
        "story": us_a_call(lambda: stories.extend(map(one_call, range(calls))), calls),
        "count": us_a_call(lambda: [ledger.add(story) for story in stories], calls),
        "flush": us_a_call(lambda: encoded(1, ledger.take(calls), stories), calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--calls", type=int, default=5_000)
    options = parser.parse_args()
    rounds = [one_round(options.calls) for _ in range(ROUNDS)]
    best = {name: round(min(each[name] for each in rounds), 2) for name in rounds[0]}
    print("CPU microseconds a call, best of seven rounds")
    for name, spent_us in best.items():
        print(f"{name:>10} {spent_us:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(best, indent=2) + "\n")


if __name__ == "__main__":
    main()
