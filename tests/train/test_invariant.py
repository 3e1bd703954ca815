"""Training on invariant operators, and what it refuses."""

import pytest
from tests.train.runs import recipe, rows, steps, train, train_here

from drumline.recipe import RecipeError


def losses(folder):
    return [(row["loss"], row["grad_norm"]) for row in rows(folder, "step")]


@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2"])
def test_a_run_on_invariant_operators_agrees_with_an_ordinary_one(tmp_path, layout):
    short = (
        f"layout={layout}",
        "run.steps=3",
        "memory.activation_checkpointing=full",
        "run.validation_batches=1",
        "data.validation_fraction=0.2",
    )
    train_here(tmp_path / "own", *short, "numerics.invariant=true")
    train_here(tmp_path / "ordinary", *short)
    pairs = zip(losses(tmp_path / "own"), losses(tmp_path / "ordinary"), strict=True)
    assert all(own == pytest.approx(ordinary, rel=1e-3) for own, ordinary in pairs)
    validated = [[row["loss"] for row in rows(tmp_path / name, "validation")] for name in ("own", "ordinary")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-3)
    assert len(validated[0]) == 2


def test_threads_do_not_move_a_runs_losses_and_norms(tmp_path):
    short = ("run.steps=3", "numerics.invariant=true")
    for threads in (1, 2):
        done = train(tmp_path / str(threads), *short, f"run.threads={threads}")
        assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "1") == steps(tmp_path / "2") != []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["layout=tp2"], "layout.tp = 2"),
        (["layout=pp2"], "layout.pp = 2"),
        (["run.compile=true"], "run.compile = true"),
        (["model.attention=sdpa"], "model.attention = 'sdpa'"),
        (["run.device=cuda"], "run.device = 'cuda'"),
    ],
)
def test_what_would_move_bits_is_refused(tmp_path, overrides, key):
    with pytest.raises(RecipeError) as error:
        recipe(tmp_path, "numerics.invariant=true", *overrides)
    assert any(p.code == "invariant" and p.key == key.split(" ")[0] for p in error.value.problems)
