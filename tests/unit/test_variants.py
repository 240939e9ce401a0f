"""The precision table: for each GPU and each lowest precision that is accepted, the variant that runs, or why
none does."""

from __future__ import annotations

import pytest

from grid.config import Model
from grid.engines.variants import NoVariant, choose, fitted
from grid.hardware import catalogue
from grid.words import Precision

ASKED = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")
BEST = {
    "T4": ("int8", "int8", "fp8", "fp16", "fp32", "fp32"),
    "V100": ("int4", "int8", "fp16", "fp16", "fp32", "fp32"),
    "A10G": ("int8", "int8", "fp8", "bf16", "bf16", "fp32"),
    "A100-40": ("int8", "int8", "fp8", "bf16", "bf16", "fp32"),
    "A100-80": ("int8", "int8", "fp8", "bf16", "bf16", "fp32"),
    "L4": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "L40S": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "RTX 4090": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "H100": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "H100-PCIe": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "H200": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "B200": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "MI300X": ("fp8", "fp8", "fp8", "bf16", "bf16", "fp32"),
    "CPU": ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32"),
}
"""With every variant at hand; columns as ASKED."""

KERNELS = {
    "T4": ("Marlin", "W8A8", "Marlin, weights only", "native", "", "native"),
    "V100": ("GPTQ exllama", "GPTQ exllama", "", "native", "", "native"),
    "A10G": ("Marlin", "W8A8", "Marlin, weights only", "native", "native", "native"),
    "A100-40": ("Marlin", "W8A8", "Marlin, weights only", "native", "native", "native"),
    "A100-80": ("Marlin", "W8A8", "Marlin, weights only", "native", "native", "native"),
    "L4": ("Marlin", "W8A8", "W8A8", "native", "native", "native"),
    "L40S": ("Marlin", "W8A8", "W8A8", "native", "native", "native"),
    "RTX 4090": ("Marlin", "W8A8", "W8A8", "native", "native", "native"),
    "H100": ("Machete", "W8A8", "W8A8", "native", "native", "native"),
    "H100-PCIe": ("Machete", "W8A8", "W8A8", "native", "native", "native"),
    "H200": ("Machete", "W8A8", "W8A8", "native", "native", "native"),
    "B200": ("Marlin", "", "W8A8", "native", "native", "native"),
    "MI300X": ("", "", "W8A8", "native", "native", "native"),
    "CPU": ("", "W8A8", "", "", "native", "native"),
}
"""A model with this one variant: how it is computed, "" where it is refused."""

REASONS = {
    ("B200", "int8"): "no variant runs on B200: int8: W8A8 is broken on compute capability 10.0 in vLLM 0.32",
    ("V100", "fp8"): "no variant runs on V100: fp8: fp8 kernels need compute capability 7.5",
    ("T4", "bf16"): "no variant runs on T4: bf16: compute capability below 8.0 has no bf16 arithmetic",
    ("CPU", "int4"): "no variant runs on CPU: int4: vLLM's CPU engine dies at the first token",
    ("MI300X", "int8"): "no variant runs on MI300X: int8: not verified under ROCm",
}


def test_the_tables_hold_every_gpu() -> None:
    assert set(BEST) == set(KERNELS) == set(catalogue.GPUS)


@pytest.mark.parametrize("gpu", BEST)
def test_the_best_acceptable_variant(gpu: str) -> None:
    found = [choose(catalogue.GPUS[gpu], lowest=Precision.parse(asked)) for asked in ASKED]
    assert [each.label if isinstance(each, Precision) else each.reason for each in found] == list(BEST[gpu])
    assert choose(catalogue.GPUS[gpu]) is catalogue.GPUS[gpu].precisions[0]


@pytest.mark.parametrize("gpu", KERNELS)
def test_a_single_variant_runs_or_is_refused_with_a_reason(gpu: str) -> None:
    model = catalogue.GPUS[gpu]
    for asked, kernel in zip(ASKED, KERNELS[gpu], strict=True):
        precision = Precision.parse(asked)
        found = choose(model, [precision])
        if kernel:
            assert (found, model.kernels.serves[precision]) == (precision, kernel)
        else:
            assert isinstance(found, NoVariant)
            assert found.reason.startswith(f"no variant runs on {gpu}: {asked}: ")
            assert found.reason == REASONS.get((gpu, asked), found.reason)


def test_one_contract_gets_the_best_of_what_a_model_has_on_each_gpu() -> None:
    """`quantization: int4` for a model with an int4, an int8, an fp8 and a bf16 checkpoint."""
    offered = [Precision.INT4, Precision.INT8, Precision.FP8, Precision.BF16]
    found = {name: choose(gpu, offered, lowest=Precision.INT4) for name, gpu in catalogue.GPUS.items()}
    assert {name: found[name] for name in ("H100", "A100-80", "L40S", "T4", "B200", "CPU")} == {
        "H100": Precision.FP8,
        "A100-80": Precision.INT8,
        "L40S": Precision.FP8,
        "T4": Precision.INT8,
        "B200": Precision.FP8,
        "CPU": Precision.BF16,
    }


def test_every_problem_is_named() -> None:
    found = choose(catalogue.GPUS["B200"], [Precision.INT4, Precision.INT8], lowest=Precision.INT8)
    assert isinstance(found, NoVariant)
    assert found.reason == (
        "no variant runs on B200: int8: W8A8 is broken on compute capability 10.0 in vLLM 0.32; "
        "int4: below int8, the lowest accepted"
    )


@pytest.mark.parametrize(
    ("gpu", "gpus", "runs"),
    [
        ("H100", 1, "fp8"),  # 67 of 82 GB
        ("A100-40", 1, "int4"),  # 37 of 41 GB
        ("A100-40", 2, "int8"),
        ("L40S", 1, "int4"),
        ("L40S", 0.5, ""),
        ("L4", 1, ""),
        ("H200", 1, "fp8"),
    ],
)
def test_what_does_not_fit_is_passed_over(gpu: str, gpus: float, runs: str) -> None:
    variants = [{"precision": name, "source": f"/{name}"} for name in ("bf16", "fp8", "int8", "int4")]
    model = Model(name="m", engine="vllm", variants=variants, parameters_b=70, gpus=gpus)
    found = fitted(model, catalogue.GPUS[gpu])
    if runs:
        assert isinstance(found, Model)
        assert (found.precision, found.source, found.variants) == (runs, f"/{runs}", ())
    else:
        assert isinstance(found, NoVariant)
        assert "int4: 37384 MB of weights and 1536 MB to compute in are more than 23034 MB" in found.reason


def test_a_grant_counts_for_more_than_the_gpu() -> None:
    model = Model(name="m", engine="vllm", source="/m", precision="bf16", parameters_b=8, gpus=0.5)
    assert isinstance(fitted(model, catalogue.GPUS["H100"]), Model)
    small = model.model_copy(update={"memory_grant_mb": 16_000})
    assert isinstance(fitted(small, catalogue.GPUS["H100"]), NoVariant)
