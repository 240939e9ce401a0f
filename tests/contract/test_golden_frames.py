"""The bytes of every message, as another release of the grid would send or expect them.

`golden_frames.txt` is the contract and changes only when a message gains a field, by

    python tests/contract/test_golden_frames.py

run by hand, and only with lines that grow at their end.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from grid.wire.codec import Decoder, encode
from grid.wire.messages import (
    KINDS,
    Accepted,
    Announce,
    AnnounceNode,
    Bye,
    Cancel,
    Count,
    Counted,
    Decided,
    Done,
    DrainUnit,
    Embed,
    Failed,
    Fleet,
    HeldReservations,
    Hello,
    Ping,
    Place,
    Pong,
    Progress,
    Prove,
    Refused,
    Report,
    ReportNode,
    ReportUnits,
    Settle,
    StoreCall,
    StoreReply,
    Submit,
    TakeIn,
    Tokens,
    Vectors,
    Watch,
    Welcome,
    WireMessage,
)
from grid.words import (
    Candidate,
    Decision,
    FleetGpu,
    FleetQueue,
    FleetUnit,
    GpuCard,
    GpuSample,
    Message,
    NodeCard,
    PlacementRequest,
    Precision,
    Rejection,
    Sampling,
    Task,
    UnitCard,
    UnitLoad,
    UnitState,
)

GOLDEN = Path(__file__).with_name("golden_frames.txt")
HEADER_BYTES = 5

CARD = UnitCard(
    unit_id="unit-smollm2-0",
    incarnation="inc-1",
    host="10.0.0.7",
    port=41000,
    node_id="node-a",
    region="eu-central",
    task=Task.GENERATE,
    model="smollm2",
    precision=Precision.BF16,
    fingerprint="fp-1",
    context_tokens=8192,
    gpu_type="H100",
    gpus=0.5,
    memory_grant_mb=40_960,
    max_running=64,
    max_waiting=128,
    cu_factor=3.2,
    simulated=True,
    dimension=0,
    prefill_tokens_per_s=25_000.0,
    decode_ms_per_token=6.5,
    gpu_uuids=("GPU-1",),
)
LOAD = UnitLoad(
    unit_id="unit-smollm2-0",
    incarnation="inc-1",
    state=UnitState.READY,
    running=3,
    waiting=1,
    kv_tokens_free=100_000,
    kv_tokens_total=131_072,
    prefill_tokens_queued=512,
    steps=70_000,
    reservations=("req_1/answer/1",),
    prefill_tokens_per_s=24_000.5,
    decode_ms_per_token=7.25,
    memory_used_mb=38_000.0,
    compute_utilisation=0.75,
    prompt_tokens=9_000,
    cached_tokens=4_096,
    sequence=77,
    held_since=70,
    admits=3,
    chunk_tokens=192,
    preemptions=1,
)
GPU = GpuCard(
    uuid="GPU-1",
    number=0,
    product="NVIDIA H100 80GB HBM3",
    memory_mb=81_559.0,
    nvlinks=(0, 18),
    ancestors=(0, 10),
    compute_capability=(9, 0),
)
NODE = NodeCard(node_id="node-a", incarnation="inc-1", driver="575.57", gpus=(GPU,), flaw="GPU 1 is lost")
GPU_SAMPLE = GpuSample(
    uuid="GPU-1",
    memory_used_mb=38_000.0,
    memory_free_mb=43_559.0,
    memory_foreign_mb=0.0,
    compute_utilisation=0.75,
    sm_utilisation=0.5,
    bandwidth_utilisation=0.625,
    memory_busy=0.25,
    pcie_sent_mb_per_s=12.0,
    pcie_received_mb_per_s=24.0,
    nvlink_sent_mb_per_s=1000.0,
    nvlink_received_mb_per_s=1001.0,
    sm_clock_mhz=1980.0,
    memory_clock_mhz=2619.0,
    throttle=4,
    temperature_c=61.0,
    power_w=512.5,
    ecc_corrected=3,
    ecc_uncorrected=1,
    xid=79,
    fault="Xid 79: it fell off the bus",
)
CANDIDATE = Candidate(
    unit_id="unit-smollm2-0",
    incarnation="inc-1",
    host="10.0.0.7",
    port=41000,
    region="eu-central",
    model="smollm2",
    precision=Precision.BF16,
    gpu_type="H100",
    simulated=True,
    network_ms=0.5,
    queue_ms=0.0,
    prefill_ms=12.5,
    decode_ms=640.0,
    pressure_ms=3.0,
    cu_factor=3.2,
    cu_seconds=0.75,
    cached_tokens=512,
    others_ms=8.25,
)
REQUEST = PlacementRequest(
    request_id="req_1",
    step_id="answer",
    attempt=1,
    tenant_id="acme",
    task=Task.GENERATE,
    model="fast",
    prompt_tokens=900,
    max_output_tokens=100,
    allowed_regions=("eu-central", "eu-west"),
    prefer_regions=("eu-central",),
    avoid_models=("old",),
    min_memory_mb=1000,
    lowest_precision=Precision.FP8,
    exclude_units=("unit-9",),
    deadline_ms=30_000.0,
    dry_run=True,
    explain=True,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    pipeline_id="pl-1",
    prefix=(1 << 63, 7),
    priority=-1,
    prefer_fingerprint="vllm-0.32.0/cpu/fp32/0a1b",
    origin_region="eu-central-1",
)
DECISION = Decision(
    reservation_id="req_1/answer/1",
    chosen=CANDIDATE,
    next_best=(CANDIDATE._replace(unit_id="unit-smollm2-1"),),
    rejected_by_code=(("region", 2), ("saturated", 1)),
    rejections=(Rejection("unit-9", "region", "us-east is not allowed"),),
    model="smollm2",
    lease_ms=30_000.0,
    fleet_version=12,
    decide_us=85.0,
    candidates=2,
    expected_output_tokens=64,
    output_tokens_p90=100,
    queued_ms=12.5,
)

EXAMPLES: tuple[WireMessage, ...] = (
    Hello(stream=0, version=1, role="gateway", peer_id="gateway-1", nonce=bytes(range(32))),
    Welcome(
        stream=0,
        version=1,
        role="unit",
        peer_id="unit-smollm2-0",
        nonce=bytes(range(32, 64)),
        proof=bytes(range(64, 96)),
    ),
    Prove(stream=0, proof=bytes(range(96, 128))),
    Ping(stream=0, tick=300),
    Pong(stream=0, tick=300),
    Bye(stream=0, code="draining", message="the unit stops"),
    Place(stream=5, request=REQUEST),
    Decided(stream=5, decision=DECISION),
    Settle(
        stream=0,
        reservation_id="req_1/answer/1",
        outcome="done",
        input_tokens=900,
        output_tokens=42,
        ttft_ms=31.5,
        total_ms=310.25,
        cached_tokens=512,
        prefix=(9, 1 << 62),
    ),
    Announce(stream=0, card=CARD),
    Report(stream=0, node_id="node-a", loads=(LOAD,)),
    Watch(stream=6),
    Fleet(
        stream=6,
        version=12,
        units=(FleetUnit(card=CARD, load=LOAD, reserved=4, sample_age_ms=55.5, isolated="failed 2 of 20"),),
        gpus=(FleetGpu("node-a", GPU, GPU_SAMPLE, 20.5, ("unit-smollm2-0",)),),
        queues=(FleetQueue("smollm2", waiting=3, tenants=2, oldest_ms=250.0, wait_ms=1500.5),),
    ),
    TakeIn(stream=0, unit_id="unit-smollm2-0"),
    DrainUnit(stream=7, unit_id="unit-smollm2-0", draining=False, restart=True),
    AnnounceNode(stream=0, card=NODE),
    ReportNode(stream=0, node_id="node-a", incarnation="inc-1", samples=(GPU_SAMPLE,)),
    ReportUnits(
        stream=0,
        node_id="node-a",
        units=("unit-smollm2-0", "unit-smollm2-1"),
        incarnations=("inc-1", "inc-4"),
        counts=bytes(range(16)),
        readings=bytes(range(16, 32)),
        held=(HeldReservations(1, ("req_1/answer/1",), ("req_2/answer/1",), 70),),
    ),
    Submit(
        stream=8,
        request_id="req_1",
        attempt=2,
        reservation_id="req_1/answer/2",
        model="smollm2",
        messages=(Message("system", "Be brief."), Message("user", "Grüß dich, où est-ce?")),
        documents=("Returns are free for 30 days.",),
        sampling=Sampling(
            max_output_tokens=100,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            seed=7,
            frequency_penalty=0.1,
            presence_penalty=0.2,
        ),
        tenant_salt="salt-acme",
        deadline_ms=30_000.0,
        priority=1,
        emitted_ids=(40_000, 17, 128_255),
        emitted_code_points=11,
        prompt_hash=bytes(16),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    Accepted(
        stream=8,
        attempt=2,
        prompt_tokens=900,
        cached_tokens=512,
        prompt_hash=bytes(16),
        fingerprint="fp-1",
        documents_used=1,
    ),
    Refused(
        stream=8,
        code="context_overflow",
        message="the prompt does not fit",
        param="messages",
        retry_after_s=1.5,
        details={"prompt_tokens": 9000, "reasons": ["too long", None, True, 0.5]},
    ),
    Tokens(stream=8, attempt=2, first_index=3, ids=(50_123, 9), text=" été"),
    Progress(stream=8, attempt=2, state="prefill", prefill_tokens_done=512),
    Done(
        stream=8,
        attempt=2,
        finish_reason="stop",
        input_tokens=900,
        cached_tokens=512,
        output_tokens=42,
        cu_seconds=0.125,
        queue_ms=1.5,
        prefill_ms=20.0,
        decode_ms=280.0,
    ),
    Failed(
        stream=8,
        attempt=2,
        code="cancelled",
        message="the client left",
        input_tokens=900,
        cached_tokens=512,
        output_tokens=10,
        cu_seconds=0.03125,
    ),
    Cancel(stream=8, attempt=2),
    Count(
        stream=8,
        request_id="req_3",
        model="smollm2",
        messages=(Message("system", "Be brief."), Message("user", "How?")),
        documents=("Acme ships in 3 days.",),
        max_output_tokens=64,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    Counted(stream=8, prompt_tokens=17, documents_used=1),
    Embed(
        stream=9,
        request_id="req_2",
        reservation_id="req_2/retrieve/1",
        model="minilm",
        texts=("how do I return it?", ""),
        deadline_ms=5000.0,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    Vectors(stream=9, dimension=2, data=bytes(16), input_tokens=8, cu_seconds=0.5),
    StoreCall(
        stream=10,
        op="search",
        collection="kb",
        args={"top_k": 5, "filter": {"status": "published"}},
        data=bytes(8),
    ),
    StoreReply(stream=10, result={"points": [{"id": "a", "score": 0.5}]}),
)


def golden_text() -> str:
    lines = [f"{type(message).__name__} {encode(message).hex()}" for message in EXAMPLES]
    lines.append(f"Tokens*2 {encode(*TWO_TOKENS).hex()}")
    return "\n".join(lines) + "\n"


TWO_TOKENS = (Tokens(1, 1, 0, (1,), "a"), Tokens(2, 1, 0, (2,), "b"))


def golden() -> dict[str, bytes]:
    pairs = (line.split() for line in GOLDEN.read_text().splitlines())
    return {name: bytes.fromhex(frame) for name, frame in pairs}


def reframed(frame: bytes, fields: list[object]) -> bytes:
    """Return a frame of the same kind with other fields, as a peer of another release makes it."""
    run = msgspec.msgpack.encode([fields])
    return len(run).to_bytes(4, "big") + frame[4:5] + run


def named(message: WireMessage) -> str:
    return type(message).__name__


def test_every_kind_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(KINDS.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=named)
def test_a_message_has_its_golden_bytes(message: WireMessage) -> None:
    assert encode(message) == golden()[named(message)]


@pytest.mark.parametrize("message", EXAMPLES, ids=named)
def test_golden_bytes_are_the_message(message: WireMessage) -> None:
    [decoded] = Decoder().feed(golden()[named(message)])
    assert decoded == message
    assert type(decoded) is type(message)


def test_messages_of_one_kind_share_a_frame() -> None:
    frame = golden()["Tokens*2"]
    assert encode(*TWO_TOKENS) == frame
    assert tuple(Decoder().feed(frame)) == TWO_TOKENS


@pytest.mark.parametrize("message", EXAMPLES, ids=named)
def test_fields_that_a_newer_peer_appended_are_ignored(message: WireMessage) -> None:
    frame = golden()[named(message)]
    [fields] = msgspec.msgpack.decode(frame[HEADER_BYTES:])
    assert Decoder().feed(reframed(frame, [*fields, "new", {"and": ["more"]}])) == [message]


@pytest.mark.parametrize("message", EXAMPLES, ids=named)
def test_trailing_fields_that_an_older_peer_lacks_take_their_defaults(message: WireMessage) -> None:
    frame = golden()[named(message)]
    [fields] = msgspec.msgpack.decode(frame[HEADER_BYTES:])
    defaults = getattr(type(message), "_field_defaults", {})
    known = len(fields) - len(defaults)
    expected = message._replace(**defaults) if defaults else message
    assert Decoder().feed(reframed(frame, fields[:known])) == [expected]


def test_records_inside_a_message_grow_and_lack_fields_alike() -> None:
    frame = golden()["Fleet"]
    [[stream, version, [[card, load, reserved, age_ms, isolated]], *_]] = msgspec.msgpack.decode(
        frame[HEADER_BYTES:]
    )
    newer_card, older_load = [*card, "zone-b", 7], load[:9]
    fields = [stream, version, [[newer_card, older_load, reserved, age_ms, isolated, "new"]]]
    defaults = UnitLoad._field_defaults
    unit = FleetUnit(CARD, LOAD._replace(**defaults), 4, 55.5, isolated)
    assert Decoder().feed(reframed(frame, fields)) == [Fleet(6, 12, (unit,))]


if __name__ == "__main__":
    GOLDEN.write_text(golden_text())
