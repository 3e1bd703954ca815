"""The table of accelerators."""

import itertools

import pytest

from drumline.cluster import ACCELERATORS, accelerator_names, find, recognize


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda entry: entry.name)
def test_rates_grow_as_dtypes_shrink_and_have_a_source(accelerator):
    order = [dtype for dtype in ("fp32", "tf32", "bf16", "fp8", "fp4") if dtype in accelerator.peak]
    rates = [accelerator.peak[dtype] for dtype in order]
    assert rates == sorted(rates)
    assert accelerator.source
    assert accelerator.peak.get("fp16", accelerator.peak["bf16"]) == accelerator.peak["bf16"]


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda entry: entry.name)
def test_each_halving_of_the_bits_doubles_the_dense_rate(accelerator):
    ladder = [accelerator.peak[dtype] for dtype in ("tf32", "bf16", "fp8", "fp4") if dtype in accelerator.peak]
    for slower, faster in itertools.pairwise(ladder):
        assert faster / slower == pytest.approx(2.0, rel=2e-3)


def test_names_and_aliases_are_unique_and_lower_case():
    names = accelerator_names()
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)
    assert all(find(name.upper()) is not None for name in names)


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_drivers_name_is_recognized(device_name, name):
    assert recognize(device_name) is find(name)


@pytest.mark.parametrize(
    "device_name",
    ["NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA RTX A1000", "Tesla V100", ""],
)
def test_a_variant_with_other_rates_is_not_taken_for_its_sibling(device_name):
    assert recognize(device_name) is None
