"""`drumline train` on a recipe that cannot run: what it offers works here, with the options that were given."""

import pytest
import torch

from drumline.cli.app import main


@pytest.fixture
def refused(capsys, monkeypatch):
    """What a wrong request prints."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refused(*words):
        code = main(["train", "llama3-debug", *words])
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, "")
        return captured.err

    return refused


def test_a_degree_is_offered_though_it_takes_another_number_of_ranks(refused):
    err = refused("layout=cp3")
    assert "nearest that work: 2, 4" in err
    assert err.endswith("this would work: drumline train llama3-debug layout=cp3 layout.cp=2\n")


def test_the_number_of_ranks_that_was_asked_for_stays(refused):
    err = refused("layout=dp3", "--nproc", "2")
    assert err.endswith("this would work: drumline train llama3-debug layout=dp2 --nproc 2\n")


def test_a_fault_of_form_offers_what_this_machine_has(refused):
    err = refused("layout=dp0", "run.device=cuda", "metrics.peak=h2000", "--nproc", "2")
    assert err.endswith(
        "this would work: drumline train llama3-debug layout=dp2 run.device=auto metrics.peak=h200 --nproc 2\n"
    )
