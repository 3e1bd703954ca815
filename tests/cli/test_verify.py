"""`drumline verify` as a user runs it: its table, its JSON, its exit codes."""

import json
import os
import subprocess
import sys

import pytest


def run(*args):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [sys.executable, "-m", "drumline", "verify", *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_layouts_of_a_recipe_make_a_table_that_says_what_was_kept():
    done = run("llama3-debug", "--layout", "dp2", "--layout", "tp2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("made small: num_layers 6 -> 2;")
    assert "2 of 2 layouts compute what one device computes" in done.stdout


def test_json_is_one_document_with_a_verdict_a_layout():
    done = run("--matrix", "--only", "moe/fsdp2.ep2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    first = document["layouts"][0]
    assert (first["layout"], first["model"], first["ok"], first["bitwise"], first["flips"]) == (
        "fsdp2.ep2",
        "moe",
        True,
        True,
        0,
    )
    assert 0 < first["worst_ratio"] < document["limits"]["fp32"]
    assert first["worst_key"].count("/") >= 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("llama3-debug", "--layout", "dpp2"), "is no axis with a degree"),
        (("llama3-debug", "--layout", "tp3"), "does not divide model.num_heads = 16"),
        (("llama3-debug", "--layout", "dp64"), "more than the 16 that verify starts here"),
        (("llama3-debug", "--only", "cp2"), "needs --matrix"),
        (("--matrix", "--only", "nonsense"), "matches no row"),
        (("llama3-debug", "--matrix"), "not both"),
        (("--matrix", "model.dim=64"), "would not change: leave overrides out"),
        (
            ("--matrix", "--only", "dp2", "model.dim=64", "run.seed=1"),
            "try: drumline verify llama3-debug model.dim=64 ",
        ),
        (("model.dim=64",), "is an override: give a recipe before it"),
        ((), "give a recipe, or --matrix"),
        (("--exact",), "give a recipe, or --matrix"),
        (("llama3-debug", "--exact", "--layout", "tp2"), "numerics.blocks = 1"),
        (("--exact", "--matrix", "--only", "latent"), "matches no row"),
    ],
)
def test_a_wrong_request_is_refused(args, said):
    done = run(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def run_with(fault, *args):
    """Runs the command with a fault: it comes with the interpreter, from which the ranks are forked."""
    call = f"sys.exit(main(['verify', 'llama3-debug', *{args!r}]))"
    script = f"import sys\n{fault}\nfrom drumline.cli.app import main\n{call}\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)


def test_a_mismatch_exits_with_1_and_names_the_tensor():
    # The reference has no ranks, so its gradients are not those that are left unsummed.
    done = run_with(
        "from drumline.parallel.replicate import Replicate\n"
        "Replicate.__init__.__kwdefaults__['all_reduce'] = lambda flat, group: None",
        "--layout",
        "dp2",
    )
    assert done.returncode == 1, done.stderr
    assert "1/gradient/output.weight" in done.stderr
    assert "0 of 1 layouts" in done.stdout


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was ended by SIGKILL"),
        ("raise ValueError('no more')", "ValueError: no more"),
    ],
)
def test_a_rank_that_dies_exits_with_3_and_one_line_and_is_no_mismatch(end, said):
    done = run_with(
        "import os, signal\n"
        "from drumline.verify import candidate\n"
        "record = candidate.record\n"
        "def die(recipe, world, *rest):\n"
        f"    if world.rank == 1: {end}\n"
        "    return record(recipe, world, *rest)\n"
        "candidate.record = die",
        "--layout",
        "dp2",
    )
    assert done.returncode == 3, done.stderr
    assert said in done.stderr
    assert "llama3-debug/dp2" in done.stderr
    assert "failed" in done.stdout
    assert "Traceback" not in done.stderr


def test_exact_compares_every_bit_of_ten_steps():
    done = run("llama3-debug", "--exact", "--layout", "dp2", "--json")
    assert done.returncode == 0, done.stderr
    (layout,) = json.loads(done.stdout)["layouts"]
    assert (layout["layout"], layout["ok"], layout["num_different"], layout["first_wrong"]) == ("dp2", True, 0, "")
    assert layout["num_compared"] > 10 * 2 * 20  # gradients and weights of every step
