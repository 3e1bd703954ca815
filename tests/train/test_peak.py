"""The peak that MFU is measured against."""

import pytest
import torch
import torch.utils.benchmark

from drumline.comm import Place, join
from drumline.train.peak import find_peak, measure_matmul

ALONE = join(Place(), torch.device("cpu"), 1.0)


def test_a_number_is_teraflops_a_rank():
    assert find_peak("2.5", torch.float32, ALONE) == 2.5e12


def test_a_name_is_looked_up_by_dtype():
    # Data sheet of the H100 SXM: 989.4 TFLOP/s dense bf16, 66.9 fp32.
    assert find_peak("h100", torch.bfloat16, ALONE) == pytest.approx(989.4e12)
    assert find_peak("h100", torch.float32, ALONE) == pytest.approx(66.9e12)


def test_a_name_without_a_figure_for_the_dtype_gives_no_mfu():
    assert find_peak("tpu-v5p", torch.float32, ALONE) is None


def test_the_measured_peak_is_a_rate_that_a_matmul_of_another_size_does_not_pass_by_far():
    peak = measure_matmul(torch.float32, torch.device("cpu"), 0.1)
    a = torch.randn(512, 512)
    timer = torch.utils.benchmark.Timer("a @ a", globals={"a": a})
    assert 0.2 * 2 * 512**3 / timer.timeit(20).median < peak
