"""A node's probe and placement over real sockets: real pynvml, our own driver library, faults on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fake_nvml import H100, L4, UUIDS, FakeGpus
from support.fleet import make_card, make_load, make_request
from support.waiting import until

from gateway.http.operations import gpu_view
from gateway.http.shapes.operations import GpuView
from grid.config import Cell, Config, Model, Placement, Simulated
from grid.errors import Forbidden, NoEligibleUnit, UnitLost
from grid.hardware.nvml import Probe
from grid.units import node
from grid.units.actor import Site, UnitActor
from grid.units.node import NodeProbe
from grid.wire.link import Link, dial
from grid.wire.messages import Announce, AnnounceNode, Report, ReportNode
from grid.words import GpuSample
from placement.actor import PlacementActor
from placement.client import PlacementClient

pytestmark = pytest.mark.slow

SECRET = b"s" * 32
NODE = "node-1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "link.key").write_bytes(SECRET)
    return Config(cell=Cell(region="eu", state_dir=tmp_path), placement=Placement(stale_after_ms=60_000))


@pytest.fixture
async def placement(config: Config) -> AsyncIterator[PlacementActor]:
    actor = PlacementActor(config)
    await actor.start()
    yield actor
    await actor.close()


@asynccontextmanager
async def probing(config: Config, placement: PlacementActor) -> AsyncIterator[NodeProbe]:
    probe = NodeProbe(config, NODE, resolve_placement=placement.address, is_ours=lambda pid: pid < 100)
    await probe.start()
    try:
        yield probe
    finally:
        await probe.stop()


@asynccontextmanager
async def watching(placement: PlacementActor) -> AsyncIterator[PlacementClient]:
    client = PlacementClient(placement.address, peer_id="gateway-0", secret=SECRET)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def linked(placement: PlacementActor, role: str) -> Link:
    return await dial(*await placement.address(), role=role, peer_id=role, secret=SECRET)


def view_of(client: PlacementClient, uuid: str) -> GpuView:
    return GpuView.model_validate(next(gpu_view(gpu) for gpu in client.fleet.gpus if gpu.card.uuid == uuid))


async def test_gateways_see_the_gpus_of_a_node_as_they_change(
    config: Config, placement: PlacementActor, gpus: FakeGpus
) -> None:
    gpus.set(L4, power_mw=None, processes=f"500:{1 << 30}", throttle=4)
    async with watching(placement) as client, probing(config, placement) as probe:
        card, samples = await probe.hardware()
        assert [gpu.uuid for gpu in card.gpus] == [sample.uuid for sample in samples] == list(UUIDS)
        await until(lambda: any(gpu.sample_age_ms >= 0 for gpu in client.fleet.gpus))
        seen = view_of(client, UUIDS[L4])
        assert (seen.node_id, seen.product, seen.power_w, seen.units) == (NODE, "NVIDIA L4", None, [])
        assert (seen.memory_foreign_mb, seen.throttled_by, seen.fault) == (1024, ["power cap"], None)
        gpus.set(H100, utilisation=77)
        await until(lambda: view_of(client, UUIDS[H100]).compute_utilisation == 0.77)
    await until(lambda: not placement._view.gpu_snapshot(0.0))


async def test_a_fatal_error_takes_the_units_of_its_gpu_out(
    config: Config, placement: PlacementActor, gpus: FakeGpus
) -> None:
    card = make_card(node_id=NODE, gpu_uuids=(UUIDS[L4],))
    unit = await linked(placement, "unit")
    unit.send(Announce(0, card))
    unit.send(Report(0, NODE, (make_load(card),)))
    async with watching(placement) as client, probing(config, placement):
        await until(lambda: len(client.fleet.gpus) == 5 and len(client.fleet.units) == 1)
        assert view_of(client, UUIDS[L4]).units == ["u0"]
        assert (await client.place(make_request(), 5)).chosen.unit_id == "u0"
        gpus.set(L4, xids="79")
        await until(lambda: view_of(client, UUIDS[L4]).fault is not None)
        with pytest.raises(NoEligibleUnit, match=r"faulty GPU, GPU-fake-4: Xid 79"):
            await client.place(make_request("req_2"), 5)
    assert "Xid 79" in (await placement.stats())["gpu_faults"][f"{NODE}/{UUIDS[L4]}"]


async def test_a_driver_that_is_away_is_said_and_found_again(
    config: Config, placement: PlacementActor, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "REOPEN_PERIOD_S", 0.01)
    state = gpus.path.read_text()
    gpus.path.unlink()
    async with probing(config, placement) as probe:
        card, samples = await probe.hardware()
        assert (card.gpus, samples) == ((), ())
        assert "check the driver with nvidia-smi" in card.flaw
        gpus.path.write_text(state)
        await until(lambda: len(placement._view.gpu_snapshot(0.0)) == 5)
        assert (await probe.hardware())[0].flaw == ""


async def test_a_bug_in_reading_is_said_and_does_not_end_it(
    config: Config, placement: PlacementActor, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "REOPEN_PERIOD_S", 0.01)
    read = Probe.read

    def broken(probe: Probe, now_s: float) -> tuple[GpuSample, ...]:
        raise ValueError("a bug")

    monkeypatch.setattr(Probe, "read", broken)
    async with probing(config, placement) as probe:
        card, samples = await asyncio.wait_for(probe.hardware(), 10)
        assert (card.gpus, samples) == ((), ())
        assert "ValueError" in card.flaw
        monkeypatch.setattr(Probe, "read", read)
        await until(lambda: len(placement._view.gpu_snapshot(0.0)) == 5)


async def test_only_a_node_tells_of_gpus_and_only_of_its_own(
    placement: PlacementActor, config: Config, gpus: FakeGpus
) -> None:
    dropped = placement._view.gpus.dropped
    async with probing(config, placement) as probe:
        card, _ = await probe.hardware()
        await until(lambda: bool(placement._view.gpu_snapshot(0.0)))
        fault = ReportNode(0, NODE, card.incarnation, (GpuSample(UUIDS[L4], fault="broken"),))
        stranger = await linked(placement, "node")
        stranger.send(fault)
        await until(lambda: dropped["foreign_node"] == 1)
        unit = await linked(placement, "unit")
        unit.send(AnnounceNode(0, card))
        await until(lambda: placement._counts[f"refused_{Forbidden.code}"] == 1)
        assert placement._view.gpus.faults() == {}


async def test_units_tell_by_their_node_and_by_themselves_while_it_is_away(
    config: Config, placement: PlacementActor
) -> None:
    probes: list[NodeProbe] = []

    async def resolve_node() -> tuple[str, int]:
        if not probes:
            raise UnitLost("the probe is away")
        return await probes[0].address()

    unit = UnitActor(
        config,
        Model(name="m", engine="simulated", precision="bf16", simulated=Simulated(full_speed=True)),
        "unit-m-0",
        Site(NODE, "127.0.0.1", "eu"),
        resolve_placement=placement.address,
        resolve_node=resolve_node,
        end_process=lambda _status: None,
    )
    await unit.start()
    counts, columns = placement._counts, placement._view.columns
    await until(lambda: counts["reports_of_units"] >= 3)
    async with probing(config, placement) as probe:
        probes.append(probe)
        await until(lambda: counts["batches_of_nodes"] >= 3)
        by_unit, sequence = counts["reports_of_units"], columns.sequence.item(0)
        await until(lambda: columns.sequence.item(0) >= sequence + 3)
        assert counts["reports_of_units"] == by_unit
    probes.clear()
    by_node, sequence = counts["batches_of_nodes"], columns.sequence.item(0)
    await until(lambda: columns.sequence.item(0) >= sequence + 3)
    assert counts["batches_of_nodes"] <= by_node + 1
    assert not placement._view.dropped
    await unit.stop()
