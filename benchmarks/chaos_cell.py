"""A cell of real processes without Ray, whose parts can be killed, frozen, cut off and silenced.

For `chaos.py`:

    python benchmarks/chaos_cell.py ROLE FOLDER [NAME]

Roles: `placement`, `gateway`, `unit` (NAME; it announces the port of its relay as its own) and
`relays`, which takes `cut NAME`, `hole NAME` and `heal NAME` as lines. What all of them have to know lies in
FOLDER as `cell.json`. A process ends with the one that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]
sys.path.append(str(HERE.parent / "tests"))

from support.relay import Relay  # noqa: E402

from grid.config import Config  # noqa: E402
from grid.units.actor import Site, UnitActor  # noqa: E402
from grid.wire.link import Link  # noqa: E402

HOST = "127.0.0.1"
READY_S = 120.0
"""vLLM needs most of it."""


class Described:
    """What the processes of a cell have to know of each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        told = json.loads((folder / "cell.json").read_text())
        self.config = Config.model_validate(told["config"])
        self.placement_port: int = told["placement_port"]
        self.gateway_port: int = told["gateway_port"]
        self.relay_ports: dict[str, int] = told["relay_ports"]
        self.models: dict[str, str] = told["models"]

    def port_file(self, unit_id: str) -> Path:
        return self.folder / f"{unit_id}.port"

    async def placement(self) -> tuple[str, int]:
        return HOST, self.placement_port


# --- roles ------------------------------------------------------------------------------------------


async def placement(cell: Described) -> None:
    from placement.actor import PlacementActor

    await PlacementActor(cell.config, port=cell.placement_port).start()
    await asyncio.Event().wait()


async def gateway(cell: Described) -> None:
    import uvicorn

    from gateway.http.app import GatewayApp
    from gateway.services import Services, build_services

    async def nowhere() -> tuple[str, int]:
        raise OSError("this cell has no vector store")

    async def build() -> Services:
        services = await build_services(
            cell.config, resolve_placement=cell.placement, resolve_vectors=nowhere
        )
        keys = await services.tenants.bootstrap()
        (cell.folder / "keys.json").write_text(json.dumps(keys))
        return services

    app = GatewayApp(cell.config, build)
    await uvicorn.Server(
        uvicorn.Config(app, host=HOST, port=cell.gateway_port, log_level="warning", access_log=False)
    ).serve()


class Behind(UnitActor):
    """A unit that announces its relay's address as its own."""

    def behind(self, cell: Described, relay_port: int) -> None:
        self._cell, self._relay_port = cell, relay_port

    def _announce(self, link: Link) -> None:
        unit = self._ready.unit
        if unit.card.port != self._relay_port:
            self._cell.port_file(unit.card.unit_id).write_text(str(unit.card.port))
            unit.card = unit.card._replace(port=self._relay_port)
        super()._announce(link)


async def unit(cell: Described, unit_id: str) -> None:
    (model,) = [each for each in cell.config.models if each.name == cell.models[unit_id]]
    actor = Behind(
        cell.config,
        model,
        unit_id,
        Site("node-1", HOST, cell.config.cell.region),
        resolve_placement=cell.placement,
        end_process=os._exit,
    )
    actor.behind(cell, cell.relay_ports[unit_id])
    await actor.start()
    await actor.ended()
    await asyncio.sleep(1.0)
    os._exit(0)


async def relays(cell: Described) -> None:
    class ToUnit(Relay):
        def __init__(self, unit_id: str) -> None:
            super().__init__(HOST, 0)
            self._unit_id = unit_id

        async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.target = (HOST, int(cell.port_file(self._unit_id).read_text()))
            await super()._joined(reader, writer)

    stand = {unit_id: ToUnit(unit_id) for unit_id in cell.relay_ports}
    for unit_id, relay in stand.items():
        await relay.start(cell.relay_ports[unit_id])
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    while line := (await orders.readline()).decode().split():
        order, unit_id = line
        {"cut": Relay.cut, "hole": Relay.black_hole, "heal": Relay.heal}[order](stand[unit_id])


# --- the cell as a whole ----------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


class ChaosCell:
    """Starts and ends the processes; restarts units that died. `models` says what each unit runs."""

    def __init__(self, folder: Path, config: Config, models: dict[str, str]) -> None:
        self.folder = folder
        placement_port, gateway_port, *relay_ports = free_ports(2 + len(models))
        self.url = f"http://{HOST}:{gateway_port}"
        self.units = tuple(models)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: dict[str, float] = {}
        told = {
            "config": config.model_dump(mode="json", exclude_unset=True),
            "placement_port": placement_port,
            "gateway_port": gateway_port,
            "relay_ports": dict(zip(models, relay_ports, strict=True)),
            "models": models,
        }
        (folder / "cell.json").write_text(json.dumps(told))

    def start(self) -> None:
        for name in ("relays", "placement", *self.units, "gateway"):
            self.begin(name)
        deadline_s = time.monotonic() + READY_S
        while not (self.folder / "keys.json").is_file():
            if time.monotonic() > deadline_s:
                raise SystemExit("the gateway did not start: see its output above")
            time.sleep(0.05)

    def begin(self, name: str) -> None:
        role = ["unit", str(self.folder), name] if name in self.units else [name, str(self.folder)]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        if name in self.units:
            environment |= self._engine_environment(name)
        self.processes[name] = subprocess.Popen(
            [sys.executable, __file__, *role],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def _engine_environment(self, unit_id: str) -> dict[str, str]:
        from grid.engines.environment import engine_environment

        cell = Described(self.folder)
        (model,) = [each for each in cell.config.models if each.name == cell.models[unit_id]]
        return engine_environment(model) if model.engine == "vllm" else {}

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def order(self, order: str, unit_id: str) -> None:
        relays = self.processes["relays"].stdin
        assert relays is not None
        relays.write(f"{order} {unit_id}\n".encode())
        relays.flush()

    def revive(self) -> None:
        """Start again what has ended."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                self.begin(name)

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    name, folder, *rest = sys.argv[1:]
    cell = Described(Path(folder))
    roles: dict[str, Any] = {"placement": placement, "gateway": gateway, "relays": relays}
    work: Awaitable[None] = unit(cell, rest[0]) if name == "unit" else roles[name](cell)
    parent = os.getppid()

    async def run() -> None:
        task = asyncio.ensure_future(work)
        while not task.done() and os.getppid() == parent:
            await asyncio.wait([task], timeout=1.0)
        if task.done():
            task.result()

    with contextlib.suppress(KeyboardInterrupt):
        if name == "gateway":
            import uvloop

            uvloop.run(run())
        else:
            asyncio.run(run())


if __name__ == "__main__":
    main()
