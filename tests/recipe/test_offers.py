"""What is offered in place of a problem works: every value, every line to try, and the command at the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cluster import accelerator_names
from drumline.recipe import RecipeError, builtin_names, check, load
from drumline.recipe.keys import keys
from drumline.recipe.problem import UNKNOWN_KEY, override
from drumline.recipe.rules import RULES, Machine

NAMES = builtin_names()
LEAVES = [key for key in keys() if "*" not in key and not hasattr(keys()[key].annotation, "model_fields")]
NUMBERS = [0, -1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 100, 129, 4096, 99999999999, 1.5, 0.0, 1.0, "nan", "5:3", "2:4"]
MODES = [
    "full",
    "selective",
    "every_n",
    "ring_ulysses",
    "ulysses",
    "zbv",
    "interleaved-1f1b",
    "flex",
    "kernel",
    "exact",
]
NAMED = [
    "llama3",
    "qwen3",
    "qwen4",
    "deepseek_v3",
    "bf16",
    "fp16",
    "sigmoid",
    "bytes",
    "bpe:100",
    "bpe:999999",
    "h2000",
]
WORDS = st.sampled_from([*map(str, NUMBERS), *MODES, *NAMED, "true", "false", "none", "cuda", "x", "a/b", "[]", ""])
LAYOUTS = st.lists(
    st.tuples(st.sampled_from(["pp", "dp", "fsdp", "cp", "tp", "ep"]), st.integers(0, 9)), min_size=1, max_size=3
).map(lambda parts: "layout=" + ".".join(f"{axis}{degree}" for axis, degree in parts))
OVERRIDES = st.lists(
    st.builds(lambda key, word: f"{key}={word}", st.sampled_from(LEAVES), WORDS)
    | st.builds(lambda axis, degree: f"layout.{axis}={degree}", st.sampled_from(["pp", "cp", "tp", "ep"]), WORDS)
    | LAYOUTS
    | st.sampled_from(["run.step=30", "lr=x", "run.compile=true", "model.moe.num_experts=6", "model.mla.v_head_dim=9"]),
    min_size=1,
    max_size=3,
)
MACHINES = st.builds(
    Machine,
    world_size=st.none() | st.integers(1, 17),
    device=st.sampled_from([None, "cpu", "cuda"]),
    has_bf16=st.booleans(),
    accelerators=st.none() | st.just(accelerator_names()),
)


def faults_of(name, overrides, machine):
    """What the commands would say of it: None where it runs."""
    try:
        recipe = load(name, overrides, machine=machine)
        check(recipe, **vars(machine), command=("drumline", "train", name, *overrides))
    except RecipeError as error:
        return error
    return None


def named(problems):
    return {(problem.code, problem.key) for problem in problems}


def hold_what_is_offered(name, overrides, machine):
    error = faults_of(name, overrides, machine)
    if error is None:
        return
    found = named(error.problems)
    for problem in error.problems:
        kept = [word for word in overrides if problem.code != UNKNOWN_KEY or word.split("=")[0] != problem.key]
        values = [] if problem.code == UNKNOWN_KEY else [override(problem.key, value) for value in problem.nearest]
        for offered in [*values, *([problem.remedy] if problem.remedy else [])]:
            after = faults_of(name, [*kept, offered], machine)
            left = named(after.problems) if after else set()
            assert left <= found - {(problem.code, problem.key)}, f"{offered} is offered, and refused: {after}"
    if error.mended:
        words = error.mended[error.mended.index(name) + 1 :]
        after = faults_of(name, words, machine)
        assert after is None, f"{words} would work, it was said, but: {after}"


@settings(max_examples=250, deadline=None)
@given(name=st.sampled_from(NAMES), overrides=OVERRIDES, machine=MACHINES)
def test_whatever_is_offered_works(name, overrides, machine):
    hold_what_is_offered(name, overrides, machine)


@pytest.mark.parametrize(
    ("overrides", "machine", "nearest", "mended"),
    [
        (["layout=dp0"], Machine(), ("dp1",), ["layout=dp1"]),
        (["layout=dp0"], Machine(world_size=4), ("dp4", "fsdp4", "dp2.fsdp2"), ["layout=dp4"]),
        (["data.validation_fraction=1.5"], Machine(), (0.01,), ["data.validation_fraction=0.01"]),
        (["layout=dp2xfsdp4"], Machine(), (), ["layout=dp2.fsdp4", "data.global_batch=16"]),
        (["model.family=qwen4"], Machine(), (), ["model.family=qwen3", "model.qk_norm=true"]),
        (["metrics.peak=h2000"], Machine(accelerators=("h200",)), ("h200",), ["metrics.peak=h200"]),
        (["run.steps=x", "layout=tp3"], Machine(world_size=2), (100,), ["layout=tp3", "run.steps=100", "layout.tp=2"]),
    ],
)
def test_the_first_fault_offers_what_all_rules_accept(overrides, machine, nearest, mended):
    error = faults_of("llama3-debug", overrides, machine)
    assert error is not None
    assert error.problems[0].nearest == nearest
    assert [*error.mended[error.mended.index("llama3-debug") + 1 :]] == mended


def test_a_remedy_that_a_later_one_made_needless_is_not_said():
    error = faults_of("llama3-debug", ["layout=dp3"], Machine(world_size=2))
    assert error is not None
    assert len(error.problems) == 2
    assert error.mended[3:] == ("layout=dp2",)


def test_what_is_offered_needs_no_more_than_a_moment():
    def num_rules_run(name, overrides):
        runs = 0

        def count(recipe, machine):
            nonlocal runs
            runs += 1
            yield from ()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("drumline.recipe.judging.RULES", (*RULES, count))
            assert faults_of(name, overrides, Machine(world_size=13)) is not None
        return runs

    assert num_rules_run("llama3-70b", ["layout=cp9.tp9.dp9", "model.num_heads=7", "data.seq_len=9999999"]) < 2000
