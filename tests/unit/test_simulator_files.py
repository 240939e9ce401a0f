"""Fleet files and traces: a mistake is named with its line, its field and what it should be."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from support.simulation import FAST, SLOW, TRIPS, kernels

from grid.errors import InvalidRequest
from placement.simulator.fleets import plan_units, read_fleet
from placement.simulator.geography import Origins
from placement.simulator.servegen import Quantiles
from placement.simulator.traces import Row, offered, read_trace, replicate

HERE = Origins([("us-east-1", 1.0)])

FLEET = """\
name: pair
model: llama-3.1-8b
precision: bf16
units:
  - {gpu: H100-SXM, region: us-east-1, count: 1}
  - {gpu: L4, region: ap-northeast-1, count: 2}
"""


def test_a_fleet_file_becomes_units(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    gpus = {gpu.name: gpu for gpu in (FAST, SLOW)}
    units = plan_units(read_fleet(path), path, gpus, {"H100-SXM": kernels()}, TRIPS)
    assert [unit.gpu.name for unit in units] == ["H100-SXM", "L4", "L4"]
    # Without a table of its own: scaled from the nearest, by bandwidth where answers alone are computed.
    ratio = (units[1].times.decode_ms(1, 100) - 1.5) / (units[0].times.decode_ms(1, 100) - 1.5)
    assert ratio == pytest.approx(3350 / 300)


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("count: 2", "count: 0", "line 6: units.1.count"),
        ("count: 2", "number: 2", "line 6: units.1"),
        ("name: pair\n", "", "line 1: name"),
        ("bf16", "fp8", "line 3: precision: what can be simulated is llama-3.1-8b in bf16"),
        ("llama-3.1-8b", "llama-9", "line 2: model"),
        ("units:", "units: [", "line "),
        ("gpu: L4", "gpu: L5", "line 6: units.1.gpu: 'L5' is none of H100-SXM, L4"),
        ("ap-northeast-1", "mars-1", "line 6: units.1.region: region: region 'mars-1'"),
    ],
)
def test_a_mistake_in_a_fleet_file_is_named(tmp_path: Path, was: str, becomes: str, said: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace(was, becomes))
    gpus = {gpu.name: gpu for gpu in (FAST, SLOW)}
    with pytest.raises(InvalidRequest) as caught:
        plan_units(read_fleet(path), path, gpus, {"H100-SXM": kernels()}, TRIPS)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_the_formats_are_read(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,110,27\n"
    )
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 900, "output_length": 6, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]}\n'
        '{"timestamp": 4000, "input_length": 150000, "output_length": 4, "hash_ids": [3]}\n'
    )
    rows = read_trace(azure, HERE).rows(1, random.Random(1))
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(4808, 10), (110, 27)]
    assert rows[1].at_s == pytest.approx(2.0)
    trace = read_trace(mooncake, HERE)
    assert [row.blocks for row in trace.rows(1, random.Random(1))] == [(0, 1), (0, 2)]
    assert trace.note.startswith("1 requests beyond the model's context")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n", "line 1: GeneratedTokens: this column is missing"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,x,3\n",
            "line 2: ContextTokens: is 'x'",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,3,3\n", "line 2: TIMESTAMP: is 'noon'"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5}\n', "line 1: output_length: is missing"),
        ("m.jsonl", "{}\n[1]\n", "line 1: timestamp: is missing"),
        ("m.jsonl", "no\n", "line 1: is not JSON"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 3}\n', "input_length: is 0"),
        ("t.txt", "", "the format is unknown"),
        ("r.csv", "client,t_s,rate_rps,cv,dist\n1,0,2,1,Pareto\n", "line 2: dist: is 'Pareto'"),
    ],
)
def test_a_mistake_in_a_trace_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    (tmp_path / "r.csv_lengths.csv").write_text("client,t_s,field,p50,p90,p99\n1,0,input_tokens,5,6,7\n")
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path, HERE).rows(10, random.Random(1))
    assert said in caught.value.message


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_trace(tmp_path / "none.jsonl", HERE)


def test_a_trace_is_replicated_with_prefixes_of_its_own() -> None:
    rows = [Row(float(at), "", 1000, 10, (at, at + 1)) for at in range(10)]
    made = replicate(rows, 25, random.Random(3))
    assert len(made) == 30
    assert [row.at_s for row in made] == sorted(row.at_s for row in made)
    assert max(row.at_s for row in made) <= 9.0
    # 11 blocks a copy, and no two copies share one.
    assert len({block for row in made for block in row.blocks}) == 33


def test_time_is_scaled_to_the_offered_rate() -> None:
    rows = [Row(at * at * 1.0, "", 10, 10) for at in range(50)]
    made = offered(rows, 5.0, HERE, random.Random(1))
    assert made[-1].arrival_s == pytest.approx(10.0)
    gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(made)]
    # The shape is kept: gaps grow as the trace's do.
    assert gaps[30] / gaps[10] == pytest.approx(61 / 21)


def test_generated_lengths_have_their_quantiles() -> None:
    rng, quantiles = random.Random(5), Quantiles(200.0, 500.0, 2000.0)
    drawn = sorted(quantiles.draw(rng) for _ in range(4000))
    assert drawn[2000] == pytest.approx(200, rel=0.1)
    assert drawn[3600] == pytest.approx(500, rel=0.1)
    assert drawn[3960] == pytest.approx(2000, rel=0.25)
