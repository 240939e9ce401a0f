"""What does a reader see when a unit dies under its answer?

    python benchmarks/chaos.py [--json OUT] [--injections N] [--only KIND,…] [--plot PNG] [--vllm]

A cell of real processes (four simulated units at 20 ms a token, placement, one gateway replica) serves 16
streams at a time, each a greedy answer that is known from an undisturbed run. Meanwhile, N times each:

  kill       SIGKILL of a unit's process, which is then started again
  freeze     SIGSTOP of a unit's process for a second and a half
  cut        the sockets between gateway and unit are reset
  hole       nothing passes between gateway and unit for as long, and nothing is refused
  drain      the unit is drained, as by `grid drain`, and taken back
  placement  SIGKILL of the placement actor
  calm       nothing: the baseline, in the same minutes

For each: do all answers complete, is every text that of the undisturbed run, and by how much did the longest
gap of each moved answer pass the pace of that answer; with the prefill of the continuation, and without it.

`--vllm` measures two real units of the tiny random model instead: SIGKILL and SIGSTOP of the engine's process
under a unit that is well (`engine-kill`, `engine-stop`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import psutil

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

import importlib.util  # noqa: E402

from gateway.redis_server import EmbeddedRedis  # noqa: E402
from gateway.trust.keyfiles import LINK_KEY_FILE, read_or_make_secret, secret_path  # noqa: E402
from grid.config import Config  # noqa: E402
from grid.engines.models import TINY_RANDOM  # noqa: E402
from grid.hardware import catalogue  # noqa: E402
from grid.words import Precision  # noqa: E402

_spec = importlib.util.spec_from_file_location("chaos_cell", HERE / "chaos_cell.py")
assert _spec is not None
assert _spec.loader is not None
chaos_cell = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chaos_cell)

STREAMS = 16
UNITS = 4
PACE_MS = 20.0
TOKENS = 150
VLLM_STREAMS = 4
VLLM_TOKENS = 120
FAULT_S = 1.5
"""How long a unit stays frozen or behind a black hole: long past the second after which its link is cut."""
SETTLE_S = 0.5
WARM_S = 4.0
MODEL = "sim-8b"
GPU, PARAMETERS_B = "H100", 8.0
TARGETS_MS = {"kill": 200.0, "cut": 200.0, "freeze": 350.0, "hole": 350.0}


@dataclass
class Answer:
    prompt: int
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    done: dict[str, Any] | None = None
    error: str = ""

    @property
    def moves(self) -> int:
        return self.done["moves"] if self.done else 0

    @property
    def prefill_ms(self) -> float:
        """Of the last unit that the answer came from."""
        assert self.done is not None
        return self.done["timing"][-1]["prefill_ms"]

    def gaps_ms(self) -> list[float]:
        """Return the gaps between tokens beyond the answer's own pace, the longest first."""
        gaps = [1e3 * (b - a) for a, b in zip(self.times_s, self.times_s[1:], strict=False)]
        return sorted((gap - statistics.median(gaps) for gap in gaps), reverse=True) if gaps else [0.0]


class Readers:
    """Clients that ask one answer after the other, and what they read."""

    def __init__(self, cell: Any, key: str, model: str, streams: int, tokens: int) -> None:
        self._cell = cell
        self._key = key
        self._model = model
        self._tokens = tokens
        self._streams = streams
        self.answers: list[Answer] = []
        self.wholes: dict[int, str] = {}
        self.open = 0

    async def learn(self) -> None:
        """Read every answer once, undisturbed."""
        for answer in await asyncio.gather(*(self._ask(prompt) for prompt in range(self._streams))):
            assert answer.done is not None, answer.error
            self.wholes[answer.prompt] = answer.text

    @contextlib.asynccontextmanager
    async def reading(self):  # type: ignore[no-untyped-def]
        ended = asyncio.Event()
        clients = [asyncio.create_task(self._go_on(prompt, ended)) for prompt in range(self._streams)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*clients)

    async def _go_on(self, prompt: int, ended: asyncio.Event) -> None:
        # They begin spread over the time of an answer, so that a fault meets answers at every point.
        await asyncio.sleep(prompt * PACE_MS / 1e3 * self._tokens / self._streams)
        while not ended.is_set():
            self.answers.append(await self._ask(prompt))

    async def _ask(self, prompt: int) -> Answer:
        answer = Answer(prompt)
        step = {
            "type": "generation",
            "model": self._model,
            "max_output_tokens": self._tokens,
            "temperature": 0.0,
        }
        body = orjson.dumps({"pipeline": {"steps": [step]}, "input": f"Question {prompt}.", "stream": True})
        address = urlsplit(self._cell.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = (
            f"POST /v1/pipeline HTTP/1.1\r\nhost: cell\r\nx-api-key: {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        self.open += 1
        try:
            await self._read(reader, answer)
        finally:
            self.open -= 1
            writer.close()
        return answer

    async def _read(self, reader: asyncio.StreamReader, answer: Answer) -> None:
        """Events are written whole, so that a line is never cut by a chunk of HTTP."""
        event = b""
        while line := (await reader.readline()).rstrip():
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                answer.error = line.decode()
            if line.lower().startswith(b"transfer-encoding"):
                continue
        while raw := await reader.readline():
            line = raw.rstrip()
            if line.startswith(b"event: "):
                event = line.removeprefix(b"event: ")
            elif line.startswith(b"data: "):
                data = orjson.loads(line.removeprefix(b"data: "))
                if event == b"token":
                    if data["index"] != answer.tokens:
                        answer.error = f"token {data['index']} came where {answer.tokens} was next"
                    answer.times_s.append(time.monotonic())
                    answer.text += data["text"]
                    answer.tokens += data["tokens"]
                elif event == b"done":
                    answer.done = data
                elif event == b"error":
                    answer.error = data["error"]["message"]
            elif answer.error and line.startswith(b"{"):
                answer.error += f" {line.decode()[:300]}"


class Chaos:
    def __init__(self, cell: Any, operator: httpx.AsyncClient, rng: random.Random) -> None:
        self._cell = cell
        self._operator = operator
        self._rng = rng

    async def ready(self) -> None:
        """Wait until all units are there and take work."""
        async with asyncio.timeout(chaos_cell.READY_S):
            while True:
                self._cell.revive()
                units = (await self._operator.get("/v1/units")).json()["units"]
                if [unit["state"] for unit in units] == ["ready"] * len(self._cell.units):
                    return
                await asyncio.sleep(0.1)

    async def busy_unit(self) -> str:
        units = (await self._operator.get("/v1/units")).json()["units"]
        running = [unit["unit_id"] for unit in units if unit["running"]]
        return self._rng.choice(running or list(self._cell.units))

    async def kill(self, unit_id: str) -> None:
        self._cell.signal(unit_id, SIGKILL)
        self._cell.processes[unit_id].wait()
        await asyncio.sleep(SETTLE_S)

    async def freeze(self, unit_id: str) -> None:
        self._cell.signal(unit_id, SIGSTOP)
        await asyncio.sleep(FAULT_S)
        self._cell.signal(unit_id, SIGCONT)

    async def cut(self, unit_id: str) -> None:
        self._cell.order("cut", unit_id)
        await asyncio.sleep(SETTLE_S)

    async def hole(self, unit_id: str) -> None:
        self._cell.order("hole", unit_id)
        await asyncio.sleep(FAULT_S)
        self._cell.order("heal", unit_id)

    async def drain(self, unit_id: str) -> None:
        path = f"/v1/units/{unit_id}/drain"
        (await self._operator.post(path, json={})).raise_for_status()
        async with asyncio.timeout(30):
            while True:
                units = (await self._operator.get("/v1/units")).json()["units"]
                if [unit["state"] for unit in units if unit["unit_id"] == unit_id] == ["drained"]:
                    break
                await asyncio.sleep(0.05)
        (await self._operator.post(path, json={"draining": False})).raise_for_status()

    async def placement(self, unit_id: str) -> None:
        self._cell.signal("placement", SIGKILL)
        self._cell.processes["placement"].wait()
        await asyncio.sleep(SETTLE_S)

    async def calm(self, unit_id: str) -> None:
        await asyncio.sleep(SETTLE_S)

    async def engine_kill(self, unit_id: str) -> None:
        for child in self._engines(unit_id):
            child.send_signal(SIGKILL)
        await asyncio.sleep(FAULT_S)

    async def engine_stop(self, unit_id: str) -> None:
        engines = self._engines(unit_id)
        for child in engines:
            child.send_signal(SIGSTOP)
        await asyncio.sleep(3 * FAULT_S)
        for child in engines:
            child.send_signal(SIGCONT)

    def _engines(self, unit_id: str) -> list[psutil.Process]:
        children = psutil.Process(self._cell.processes[unit_id].pid).children()
        return [each for each in children if "resource_tracker" not in " ".join(each.cmdline())]


SIMULATED = ("calm", "kill", "freeze", "cut", "hole", "drain", "placement")
VLLM = ("engine-kill", "engine-stop")


def simulated_cell(folder: Path) -> Config:
    decode_ms = catalogue.decode_ms_per_token(GPU, PARAMETERS_B, Precision.BF16, 0.0)
    model = {
        "name": MODEL,
        "engine": "simulated",
        "precision": "bf16",
        "gpu": GPU,
        "parameters_b": PARAMETERS_B,
        "max_running": 16,
        "min_units": UNITS,
        "max_units": UNITS,
        "simulated": {"speed": decode_ms / PACE_MS},
    }
    return chaos_config(folder, model)


def chaos_config(folder: Path, model: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "cell": {"name": "chaos", "state_dir": str(folder)},
            # Units that are hurt again and again would be isolated, and no supervisor replaces them here.
            "placement": {"isolated_share_max": 0.0},
            "models": [model],
        }
    )


def vllm_cell(folder: Path) -> Config:
    model = {
        "name": "tiny",
        "engine": "vllm",
        "source": TINY_RANDOM,
        "precision": "fp32",
        "context_tokens": 1024,
        "kv_cache_mb": 64,
        "max_running": 8,
        "min_units": 2,
        "max_units": 2,
    }
    return chaos_config(folder, model)


async def measure(folder: Path, arguments: argparse.Namespace, kinds: list[str]) -> dict[str, Any]:
    vllm, injections = arguments.vllm, arguments.injections
    config = vllm_cell(folder) if vllm else simulated_cell(folder)
    model = config.models[0].name
    read_or_make_secret(secret_path(folder, LINK_KEY_FILE))
    count, streams, tokens = (2, VLLM_STREAMS, VLLM_TOKENS) if vllm else (UNITS, STREAMS, TOKENS)
    cell = chaos_cell.ChaosCell(folder, config, {f"{model}-{n}": model for n in range(count)})
    redis = EmbeddedRedis(folder)
    redis.start()
    try:
        cell.start()
        keys = json.loads((folder / "keys.json").read_text())
        headers = {"x-api-key": keys["operator_key"]}
        async with httpx.AsyncClient(base_url=cell.url, headers=headers, timeout=20.0) as operator:
            chaos = Chaos(cell, operator, random.Random(1))
            await chaos.ready()
            readers = Readers(cell, keys["tenant_key"], model, streams, tokens)
            await readers.learn()
            rows: dict[str, Any] = {}
            for kind in kinds:
                readers.answers.clear()
                hurt = getattr(chaos, kind.replace("-", "_"))
                async with readers.reading():
                    await asyncio.sleep(WARM_S)
                    await inject(chaos, hurt, injections)
                rows[kind] = row(readers, injections)
                print(line(kind, rows[kind]), flush=True)
                if arguments.json:
                    keep(rows, arguments.json)
                await chaos.ready()
            return rows
    finally:
        cell.stop()
        redis.stop()


async def inject(chaos: Chaos, hurt: Callable[[str], Awaitable[None]], injections: int) -> None:
    for _ in range(injections):
        await chaos.ready()
        await asyncio.sleep(SETTLE_S + 0.6 * chaos._rng.random())
        await hurt(await chaos.busy_unit())
    await chaos.ready()


def row(readers: Readers, injections: int) -> dict[str, Any]:
    answers = readers.answers
    whole = [each for each in answers if each.done is not None and not each.error]
    moved = [each for each in whole if each.moves]
    gaps = [(gap, each.prefill_ms) for each in moved for gap in each.gaps_ms()[: each.moves]]
    others = [each.gaps_ms()[0] for each in whole if not each.moves]
    return {
        "injections": injections,
        "answers": len(answers),
        "completed": len(whole),
        "equal": sum(each.text == readers.wholes[each.prompt] for each in whole),
        "exact": sum(bool(each.done and each.done["exact"]) for each in whole),
        "errors": sorted({each.error for each in answers if each.error})[:5],
        "moves": sum(each.moves for each in whole),
        "gap_ms": spread([gap for gap, _ in gaps]),
        "gap_without_prefill_ms": spread([max(gap - prefill, 0.0) for gap, prefill in gaps]),
        "longest_gap_of_others_ms": spread(others),
        "gaps_ms": [round(gap, 1) for gap, _ in gaps],
    }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(int(len(ordered) * q), len(ordered) - 1)], 1) for name, q in at.items()}


def keep(rows: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write the rows beside those of other kinds that the file holds, and return all."""
    held = json.loads(path.read_text()) if path.is_file() else {"kinds": {}}
    held["kinds"] |= rows
    held["machine"] = f"{os.cpu_count()} CPUs, {platform.machine()}"
    path.write_text(json.dumps(held, indent=1))
    kinds: dict[str, Any] = held["kinds"]
    return kinds


HEAD = (
    f"{'':12}{'answers':>9}{'complete':>10}{'equal':>8}{'moves':>7}"
    f"{'gap p50':>10}{'p99':>8}{'max':>8}{'no prefill p99':>16}{'others p99':>12}"
)


def line(kind: str, figures: dict[str, Any]) -> str:
    gap, bare, others = (
        figures[name] for name in ("gap_ms", "gap_without_prefill_ms", "longest_gap_of_others_ms")
    )
    return (
        f"{kind:12}{figures['answers']:>9}{figures['completed']:>10}{figures['equal']:>8}{figures['moves']:>7}"
        f"{gap.get('p50', '-'):>10}{gap.get('p99', '-'):>8}{gap.get('max', '-'):>8}"
        f"{bare.get('p99', '-'):>16}{others.get('p99', '-'):>12}"
        + "".join(f"\n            {error}" for error in figures["errors"])
    )


def plot(rows: dict[str, Any], path: Path) -> None:
    """Draw, for each kind of fault, the share of moved answers whose gap was no longer than that."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, figures in rows.items():
        gaps = sorted(figures["gaps_ms"])
        if gaps:
            shares = [(index + 1) / len(gaps) for index in range(len(gaps))]
            axes.step(gaps, shares, where="post", label=f"{kind} ({len(gaps)})")
    axes.set_xlabel("gap that a reader saw, beyond the pace of its answer (ms)")
    axes.set_ylabel("share of moved answers")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here; kinds that it holds already stay")
    parser.add_argument("--injections", type=int, default=50)
    parser.add_argument("--only", help="kinds, with commas between them")
    parser.add_argument("--plot", type=Path, help="draw the distributions of all kinds in --json here")
    parser.add_argument("--vllm", action="store_true")
    arguments = parser.parse_args()
    kinds = arguments.only.split(",") if arguments.only else list(VLLM if arguments.vllm else SIMULATED)
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="zgb-") as folder:
        rows = asyncio.run(measure(Path(folder), arguments, kinds))
    for kind, target_ms in TARGETS_MS.items():
        if kind in rows and rows[kind]["gap_ms"]:
            reached = rows[kind]["gap_without_prefill_ms"]["p99"] < target_ms
            print(f"{kind}: p99 below {target_ms:.0f} ms without prefill: {'yes' if reached else 'no'}")
    if arguments.plot:
        plot(keep(rows, arguments.json) if arguments.json else rows, arguments.plot)


if __name__ == "__main__":
    main()
