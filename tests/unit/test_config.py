import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grid.config import Config, Model, Section, load, parse
from grid.errors import InvalidRequest
from grid.model import Pool
from grid.words import Precision

ROOT = Path(__file__).parents[2]


def refused(text: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(text, "grid.yaml")
    return caught.value


def test_the_documented_file_is_the_defaults() -> None:
    assert load(ROOT / "grid.yaml") == Config()


def test_the_documented_file_names_every_key() -> None:
    data = yaml.safe_load((ROOT / "grid.yaml").read_text(encoding="utf-8"))

    def missing(section: type[Section], given: dict[str, Any]) -> list[str]:
        lacking = [name for name in section.model_fields if name not in given]
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section) and name in given:
                lacking += [f"{name}.{inner}" for inner in missing(kind, given[name])]
        return lacking

    assert missing(Config, data) == []
    assert missing(Model, data["models"][0]) == []


def test_the_documented_file_names_every_key_of_a_pool() -> None:
    text = (ROOT / "grid.yaml").read_text(encoding="utf-8")
    [about] = re.findall(r"^# A pool is .*?:$", text, re.MULTILINE | re.DOTALL)
    assert [name for name in Pool.model_fields if not re.search(rf"\b{name}\b", about)] == []


def test_the_simulated_cell_runs_the_demo_contract_on_four_simulated_units() -> None:
    config = load(ROOT / "examples/cells/simulated.yaml")
    generation, embedding = config.models
    assert (generation.engine, generation.min_units) == ("simulated", 4)
    assert embedding.engine == "embedding"
    assert config.aliases["smollm2-135m-instruct"].model == generation.name


def test_no_file_and_an_empty_file_and_an_empty_section_give_the_defaults() -> None:
    assert load(None) == parse("", "f") == parse("gateway:\n", "f") == Config()


def test_state_dir_is_absolute_with_the_home_folder_filled_in() -> None:
    assert Config().cell.state_dir == Path.home() / ".zerogrid"
    assert parse("cell: {state_dir: state}", "f").cell.state_dir == Path.cwd() / "state"


def test_an_alias_has_a_short_and_a_long_form() -> None:
    aliases = parse("aliases: {a: x, b: {model: x, ignore_dimension: true}}", "f").aliases
    assert (aliases["a"].model, aliases["a"].ignore_dimension) == ("x", False)
    assert (aliases["b"].model, aliases["b"].ignore_dimension) == ("x", True)


@pytest.mark.parametrize(
    ("text", "param", "says"),
    [
        ("gatway: {}", "gatway", "unknown key; did you mean 'gateway'?"),
        ("gateway: {hots: x}", "gateway.hots", "unknown key; did you mean 'host'?"),
        ("redis: {zzz: 1}", "redis.zzz", "unknown key; known: url"),
        (
            "models: [{name: m, engine: simulated, simulated: {sped: 2}}]",
            "models[0].simulated.sped",
            "did you mean 'speed'?",
        ),
        ("aliases: {a: {modle: m, model: m}}", "aliases.a.modle", "did you mean 'model'?"),
        (
            "models: [{name: m, engine: simulated, max_units: 2, standby: {warm: 2}}]",
            "models[0]",
            "1 min_units and 2 on standby are above max_units (2); raise it",
        ),
        (
            "models: [{name: m, engine: vllm, source: x, max_units: 2, standby: {asleep: 1}}]",
            "models[0]",
            "standby.asleep needs vLLM on a GPU",
        ),
        (
            "models: [{name: m, engine: simulated, pools: [{name: a, max_units: 1, standby: {warm: 1}}]}]",
            "models[0]",
            "are above max_units (1)",
        ),
        (
            "gateway: {port: 99999}",
            "gateway.port",
            "99999 was given; it should be less than or equal to 65535",
        ),
        ("models: [{engine: simulated}]", "models[0].name", "is missing and has no default; add it"),
        (
            "models: [{name: m, engine: vlm}]",
            "models[0].engine",
            "'vlm' was given; it should be 'vllm', 'simulated' or 'embedding'",
        ),
        ("models: [{name: m, engine: vllm}]", "models[0]", "engine 'vllm' needs a source"),
        (
            "models: [{name: m, engine: simulated, precision: fp7}]",
            "models[0].precision",
            "unknown precision 'fp7'; one of int4",
        ),
        (
            "models: [{name: m, engine: simulated, gpu: H300}]",
            "models[0].gpu",
            "unknown GPU model 'H300'; did",
        ),
        (
            "models: [{name: m, engine: simulated}, {name: m, engine: simulated}]",
            "",
            "two models have the same name; give units of one model in its `pools`",
        ),
        (
            "models: [{name: m, engine: simulated, pools: [{gpu: H100, gpus: 1.5}]}]",
            "models[0].pools[0].gpus",
            "a share below 1 or a whole number, not 1.5",
        ),
        (
            "models: [{name: m, engine: simulated, pools: [{gpu: H100}, {gpu: h100}]}]",
            "models[0]",
            "needs a `name` that tells it from the others",
        ),
        (
            "models: [{name: m, engine: simulated, precision: fp8, pools: [{precision: int4}]}]",
            "models[0]",
            "pools[0].precision: there is no int4 variant; it has fp8",
        ),
        (
            "models: [{name: m, engine: simulated, precision: fp8, variants: [{precision: fp8}]}]",
            "models[0]",
            "precision is of a single checkpoint; give each of the variants its own",
        ),
        (
            "models: [{name: m, engine: vllm, source: /m, variants: [{precision: fp8}, {precision: fp8}]}]",
            "models[0]",
            "two variants have the same precision; keep one",
        ),
        ("models: 3", "models", "holds 3; it should be a list"),
        ("cell: 3", "cell", "holds 3; it should be a mapping of name, region, state_dir"),
        ("1: x", "[1]", "the key 1 is not text; put it in quotes"),
        ("aliases: {smollm2-135m-instruct: m}", "", "is also the name of a model; rename the alias"),
        ("aliases: {a: b, b: m}", "", "points at the alias 'b'; point it at a model"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_remedy(text: str, param: str, says: str) -> None:
    error = refused(text)
    assert error.param == param
    assert says in error.message
    assert error.message.startswith("grid.yaml: ")
    assert "\n" not in error.message


def test_every_mistake_has_a_line_of_its_own() -> None:
    lines = refused("gateway: {port: 0, replicas: 0}\nrdeis: {}").message.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["gateway.port", "gateway.replicas", "rdeis"]


def test_a_key_given_twice_is_refused_with_its_line() -> None:
    assert refused("cell:\n  name: a\n  name: b").message == (
        "grid.yaml:3:3: is not valid YAML: 'name' is given twice; keep one"
    )


def test_broken_yaml_says_where() -> None:
    assert refused("cell: [").message.startswith("grid.yaml:1:8: is not valid YAML")
    assert "should be a mapping of sections" in refused("- 3").message


def test_a_long_value_is_not_quoted_whole() -> None:
    assert len(refused(f"gateway: {{port: {'x' * 1000}}}").message) < 200


def test_an_unreadable_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read: No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"cell: {name: \xe9}")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


def test_pools_and_variants_narrow_a_model() -> None:
    text = """
models:
  - name: m
    engine: vllm
    source: /m
    kv_cache_mb: 700
    variants: [{precision: fp8}, {precision: int4, source: /m-awq}]
    pools:
      - {gpu: h100, region: us-east-1, min_units: 2}
      - {gpu: L4, gpus: 0.5, precision: INT4, max_units: 3}
"""
    [model] = parse(text, "f").models
    assert [(each.precision, each.source) for each in model.checkpoints] == [
        ("fp8", "/m"),
        ("int4", "/m-awq"),
    ]
    (first, large), (second, small) = model.split()
    assert (first, large.gpu, large.region, large.min_units, large.max_units) == (
        *("h100-us-east-1", "H100", "us-east-1", 2, 2),
    )
    assert len(large.checkpoints) == 2
    assert (second, small.gpus, small.precision, small.source) == ("l4-int4", 0.5, "int4", "/m-awq")
    assert (small.min_units, small.max_units) == (1, 3)
    for each in (large, small, large.at(Precision.FP8)):
        assert "kv_cache_mb" in each.model_fields_set, "what was set stays set"
        assert "max_running" not in each.model_fields_set
        assert each.split() == (("", each),)


def test_a_written_configuration_reads_back() -> None:
    config = load(ROOT / "examples/cells/simulated.yaml")
    assert Config.model_validate_json(config.model_dump_json(exclude_unset=True)) == config
