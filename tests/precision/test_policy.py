"""Dtype policies."""

import pytest
import torch

from drumline.precision import policy
from drumline.recipe.sections import Precision


@pytest.mark.parametrize(
    ("compute", "dtype", "is_mixed"), [("fp32", torch.float32, False), ("bf16", torch.bfloat16, True)]
)
def test_masters_and_reduction_are_fp32_whatever_the_compute_dtype(compute, dtype, is_mixed):
    chosen = policy(Precision(compute=compute))
    assert (chosen.parameter, chosen.compute, chosen.reduce) == (torch.float32, dtype, torch.float32)
    assert chosen.is_mixed is is_mixed
