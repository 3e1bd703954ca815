"""The environment: noted, hashed, compared."""

import json
import os

import numpy as np
import pytest
import torch
from tests.ranks import ranks
from tests.train.runs import rows, tensors, train_here

from drumline.checkpoint import open_commit
from drumline.comm import World, read_place
from drumline.comm.environment import read_variables
from drumline.numerics.determinism import deterministic
from drumline.train import manifest

KEYS = ("run.steps=2", "run.validation_batches=0", "checkpoint.every=1")


def here() -> dict:
    return manifest.describe(World(read_place({}), torch.device("cpu")))


def test_the_manifest_names_versions_processor_threads_variables_and_code(monkeypatch):
    monkeypatch.setenv("OMP_PLACES", "cores")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = here()
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["numpy"] == np.__version__
    assert found["num_threads"] == torch.get_num_threads()
    assert found["variables"]["OMP_PLACES"] == "cores"
    assert "secret" not in json.dumps(found)
    assert found["source"] == manifest.source_digest()
    assert found["torch"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


def test_the_digest_changes_with_what_may_decide_bits_and_with_nothing_else():
    found = here()
    assert manifest.digest(found) == found["digest"]
    for key, value in (("host", "other"), ("command", []), ("world_size", 64), ("revision", "0" * 40)):
        assert manifest.digest(found | {key: value}) == found["digest"], key
    for key, value in (
        ("num_threads", 64),
        ("processor", "other"),
        ("source", "0" * 16),
        ("packages", {"torch": "2.0"}),
        ("variables", {"OMP_NUM_THREADS": "64"}),
        ("torch", found["torch"] | {"cpu_capability": "NO AVX"}),
    ):
        assert manifest.digest(found | {key: value}) != found["digest"], key


def test_what_differs_is_named_by_key_and_what_was_not_noted_is_not_held_against_a_run():
    found = here()
    other = found | {"host": "x", "packages": found["packages"] | {"torch": "2.0"}, "variables": {}}
    other["variables"] = {**found["variables"], "MKL_CBWR": "AVX2"}
    assert manifest.differences(found, other) == [
        ("packages.torch", torch.__version__, "2.0"),
        ("variables.MKL_CBWR", found["variables"].get("MKL_CBWR"), "AVX2"),
    ]
    assert manifest.differences({"drumline": "0.0", "imported_from": "x"}, found) == []


def test_only_variables_of_known_prefixes_are_read():
    environ = {"OMP_A": "1", "OMPX": "2", "TORCH_B": "3", "TORCHELASTIC_RUN_ID": "4", "TOKEN": "5"}
    assert read_variables(("OMP_", "TORCH"), ("TORCHELASTIC_",), environ) == {"OMP_A": "1", "TORCH_B": "3"}


def test_the_digest_is_in_the_folder_in_every_commit_and_in_the_metrics(tmp_path):
    train_here(tmp_path, *KEYS)
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["digest"] == manifest.digest(written)
    assert written["torch"]["deterministic"] is True
    for step in (1, 2):
        assert open_commit(tmp_path / f"checkpoints/step-{step:08d}").environment["digest"] == written["digest"]
    assert [row["environment"] for row in rows(tmp_path, "start")] == [written["digest"]]


@ranks(2)
def test_a_rank_in_another_environment_is_named():
    if read_place().rank == 1:
        os.environ["MKL_CBWR"] = "COMPATIBLE"
    world = World(read_place(), torch.device("cpu"))
    found = manifest.describe_all(world)
    assert found["ranks"]["1"]["variables.MKL_CBWR"] == "COMPATIBLE"
    assert "0" not in found["ranks"]


def test_a_run_that_goes_on_elsewhere_says_what_is_different(tmp_path, capfd):
    train_here(tmp_path, *KEYS)

    def elsewhere():
        os.environ["MKL_CBWR"] = "COMPATIBLE"

    train_here(tmp_path, *KEYS, "run.steps=3", before=elsewhere)
    text = " ".join(capfd.readouterr().out.split())
    assert "another environment" in text
    assert "variables.MKL_CBWR: None there, COMPATIBLE here" in text


def test_determinism_is_asked_of_torch_while_it_lasts_and_no_longer():
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.empty(4).put_(torch.tensor([0]), torch.ones(1))
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_determinism_changes_no_bits_on_a_processor(tmp_path):
    train_here(tmp_path / "on", *KEYS)
    train_here(tmp_path / "off", *KEYS, "numerics.deterministic=false")
    on, off = (tensors(tmp_path / run / "checkpoints/step-00000002") for run in ("on", "off"))
    assert all(torch.equal(on[name], off[name]) for name in on)
