"""Every rule: it is silent on a sound recipe, it finds what it is for, and the values it offers work."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cluster import accelerator_names
from drumline.recipe import Recipe, RecipeError, builtin_names, check, load, problems
from drumline.recipe.rules import RULES

SCALING = "{factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0}"
MOE = ("model.moe.num_experts=8",)
EXACT = ("numerics.mode=exact",)
PIECES = (*EXACT, "numerics.blocks=4")
MLA = ("model.family=deepseek_v3", "model.head_dim=48", "model.mla.kv_lora_rank=64")


def debug(*overrides):
    return load("llama3-debug", overrides)


def found_by(recipe, code, **machine):
    return [problem for problem in problems(recipe, **machine) if problem.code == code]


# (code, key, overrides, machine, the values that are offered)
CASES = [
    ("model-head-dim-even", "model.head_dim", ["model.head_dim=15"], {}, (14, 16)),
    ("model-kv-heads", "model.num_kv_heads", ["model.num_kv_heads=5"], {}, (4, 8)),
    ("model-kv-heads", "model.num_kv_heads", ["model.num_kv_heads=32"], {}, (16,)),
    ("model-qk-norm", "model.qk_norm", ["model.qk_norm=true"], {}, (False,)),
    ("model-qk-norm", "model.qk_norm", ["model.family=qwen3"], {}, (True,)),
    (
        "model-rope-scaling-family",
        "model.rope_scaling",
        ["model.family=qwen3", "model.rope_scaling.factor=8"],
        {},
        ("none",),
    ),
    (
        "model-rope-scaling-order",
        "model.rope_scaling.low_freq_factor",
        [f"model.rope_scaling={SCALING}"],
        {},
        (1.0,),
    ),
    ("model-mla-family", "model.family", ["model.mla.kv_lora_rank=64"], {}, ("deepseek_v3",)),
    ("model-mla-family", "model.family", ["model.family=deepseek_v3"], {}, ("llama3",)),
    ("model-mla-head-dim", "model.head_dim", [*MLA, "model.mla.qk_rope_head_dim=32"], {}, (64,)),
    ("model-mla-even", "model.mla.qk_rope_head_dim", [*MLA, "model.mla.qk_rope_head_dim=15"], {}, (14, 16)),
    ("model-mla-even", "model.mla.qk_nope_head_dim", [*MLA, "model.mla.qk_nope_head_dim=1"], {}, (2,)),
    ("model-mla-value-width", "model.mla.v_head_dim", [*MLA, "model.mla.v_head_dim=64"], {}, (48,)),
    ("model-mla-kv-heads", "model.num_kv_heads", [*MLA, "model.num_kv_heads=4"], {}, (16,)),
    ("model-yarn-mla", "model.yarn", ["model.yarn.factor=8"], {}, ("none",)),
    ("model-yarn-order", "model.yarn.beta_slow", [*MLA, "model.yarn.beta_slow=32"], {}, (1.0,)),
    ("sources-empty", "data.sources", ["data.sources=[]"], {}, ()),
    ("source-path", "data.sources.0.path", ["data.sources.0.path="], {}, ("stdlib",)),
    ("tokenizer-syntax", "data.tokenizer", ["data.tokenizer=gpt2"], {}, ("bpe:2048", "bytes")),
    ("tokenizer-syntax", "data.tokenizer", ["data.tokenizer=bpe:"], {}, ("bpe:2048", "bytes")),
    ("tokenizer-vocab", "data.tokenizer", ["data.tokenizer=bpe:4096"], {}, ("bpe:2048",)),
    ("tokenizer-vocab", "data.tokenizer", ["data.tokenizer=bytes", "model.vocab_size=128"], {}, ()),
    ("tokenizer-size", "data.tokenizer", ["data.tokenizer=bpe:100"], {}, ("bpe:257",)),
    ("seq-len-max", "data.seq_len", ["data.seq_len=4096"], {}, (2048,)),
    ("batch-divisible", "data.global_batch", ["layout=dp3"], {}, (6, 12)),
    ("batch-divisible", "data.global_batch", ["data.micro_batch=16"], {}, (16,)),
    ("batch-divisible", "data.global_batch", ["layout=dp2.fsdp2", "data.global_batch=10"], {}, (8, 16)),
    ("validation-all", "data.validation_fraction", ["data.validation_fraction=1"], {}, (0.01,)),
    ("validation-none", "data.validation_fraction", ["data.validation_fraction=0"], {}, (0.01,)),
    (
        "validation-batches",
        "run.validate_every",
        ["run.validate_every=10", "run.validation_batches=0"],
        {},
        (0,),
    ),
    (
        "every-n-layers",
        "memory.every_n",
        ["memory.activation_checkpointing=every_n", "memory.every_n=7"],
        {},
        (6,),
    ),
    ("profile-syntax", "run.profile", ["run.profile=3"], {}, ("3:5",)),
    ("profile-syntax", "run.profile", ["run.profile=3-5"], {}, ("3:5",)),
    ("profile-order", "run.profile", ["run.profile=5:3"], {}, ("3:5",)),
    ("profile-order", "run.profile", ["run.profile=5:5"], {}, ("3:5",)),
    ("profile-range", "run.profile", ["run.profile=900:905"], {}, ("3:5",)),
    ("name-folder", "run.name", ["run.name=a/b"], {}, ("a-b",)),
    ("name-folder", "name", ["name=.."], {}, ()),
    ("name-empty", "name", ["name="], {}, ("custom",)),
    ("path-nul", "run.dir", ['run.dir="a\\u0000b"'], {}, ()),
    ("layout-tp-heads", "layout.tp", ["layout.tp=3"], {}, (2, 4)),
    ("layout-tp-kv-heads", "layout.tp", ["layout.tp=8", "model.num_kv_heads=4"], {}, (4,)),
    ("layout-tp-hidden", "layout.tp", ["layout.tp=16", "model.hidden_dim=760"], {}, (8,)),
    ("layout-tp-seq", "layout.tp", ["layout.tp=4", "data.seq_len=510"], {}, (2,)),
    ("layout-tp-seq", "layout.tp", ["layout=cp2.tp4", "data.seq_len=516"], {}, (2,)),
    ("layout-tp-async", "layout.tp_async", ["layout.tp_async=true", "layout.sequence_parallel=false"], {}, (False,)),
    ("layout-tp-compile", "run.compile", ["layout.tp=2", "run.compile=true"], {}, (False,)),
    ("layout-cp-seq", "layout.cp", ["layout.cp=3"], {}, (2, 4)),
    ("layout-cp-seq", "layout.cp", ["layout.cp=512"], {}, (128,)),
    ("layout-pp-layers", "layout.pp", ["layout.pp=7"], {}, (6,)),
    ("layout-pp-layers", "layout.pp", ["layout.pp=4", "layout.pp_schedule=zbv"], {}, (3,)),
    (
        "layout-pp-layers",
        "layout.pp",
        ["layout.pp=2", "layout.pp_schedule=interleaved-1f1b", "layout.pp_virtual=4"],
        {},
        (),
    ),
    ("layout-pp-schedule", "layout.pp_schedule", ["layout.pp_schedule=1fb1"], {}, None),
    ("timeline-range", "run.timeline", ["run.steps=9", "run.timeline=10"], {}, (3,)),
    ("layout-pp-schedule", "layout.pp_schedule", ["layout.pp_schedule=xyz"], {}, ("1f1b",)),
    ("layout-pp-virtual", "layout.pp_virtual", ["layout.pp=2", "layout.pp_virtual=2"], {}, (0,)),
    (
        "layout-pp-virtual",
        "layout.pp_virtual",
        ["layout.pp=2", "layout.pp_schedule=interleaved-1f1b", "layout.pp_virtual=1"],
        {},
        (2,),
    ),
    ("layout-pp-compile", "run.compile", ["layout.pp=2", "layout.pp_schedule=zb-h1", "run.compile=true"], {}, (False,)),
    (
        "layout-pp-tied",
        "layout.pp_schedule",
        ["layout=pp2.fsdp2", "layout.pp_schedule=zbv", "model.tie_embeddings=true"],
        {},
        ("zb-h1", "1f1b"),
    ),
    ("layout-ep-dense", "layout.ep", ["layout.ep=2"], {}, (1,)),
    ("layout-tp-expert-hidden", "layout.tp", [*MOE, "layout.tp=16", "model.moe.expert_hidden_dim=40"], {}, (8,)),
    ("layout-ep-experts", "layout.ep", [*MOE, "layout=fsdp12.ep3"], {}, (2, 4)),
    ("layout-ep-ranks", "layout.ep", [*MOE, "layout=dp4.fsdp2.ep4"], {}, (2,)),
    ("moe-experts-per-token", "model.moe.experts_per_token", [*MOE, "model.moe.experts_per_token=9"], {}, (8,)),
    ("moe-groups", "model.moe.num_expert_groups", [*MOE, "model.moe.num_expert_groups=3"], {}, (2, 4)),
    (
        "moe-group-size",
        "model.moe.num_expert_groups",
        [*MOE, "model.moe.num_expert_groups=8", "model.moe.scoring=sigmoid", "model.moe.groups_per_token=2"],
        {},
        (4,),
    ),
    (
        "moe-groups-per-token",
        "model.moe.groups_per_token",
        [*MOE, "model.moe.num_expert_groups=2", "model.moe.groups_per_token=3"],
        {},
        (2,),
    ),
    (
        "moe-groups-too-few",
        "model.moe.groups_per_token",
        [*MOE, "model.moe.num_expert_groups=4", "model.moe.experts_per_token=5"],
        {},
        (3,),
    ),
    ("moe-dense-layers", "model.moe.num_dense_layers", [*MOE, "model.moe.num_dense_layers=6"], {}, (5,)),
    ("moe-shared-gate", "model.moe.shared_expert_gate", [*MOE, "model.moe.shared_expert_gate=true"], {}, (False,)),
    (
        "moe-capacity-cp",
        "model.moe.capacity_factor",
        [*MOE, "model.moe.capacity_factor=1.25", "layout.cp=2"],
        {},
        (0.0,),
    ),
    (
        "moe-capacity-tp",
        "model.moe.capacity_factor",
        [*MOE, "model.moe.capacity_factor=1.25", "layout.tp=2"],
        {},
        (0.0,),
    ),
    ("compile-experts", "run.compile", [*MOE, "run.compile=true"], {}, (False,)),
    (
        "compile-experts-width",
        "model.moe.expert_hidden_dim",
        [*MOE, "run.compile=true", "precision.compute=bf16", "model.moe.expert_hidden_dim=60"],
        {},
        (56, 64),
    ),
    ("layout-world", "layout", ["layout=dp2"], {"world_size": 4}, ("dp4", "dp2.fsdp2", "fsdp4")),
    ("layout-world", "layout", ["layout=fsdp4"], {"world_size": 2}, ("fsdp2", "dp2")),
    ("layout-world", "layout", ["layout=dp2.fsdp2"], {"world_size": 1}, ("dp1",)),
    ("layout-ulysses-groups", "layout.cp_ulysses", ["layout.cp=8", "layout.cp_method=ring_ulysses"], {}, (2, 4)),
    ("layout-ulysses-method", "layout.cp_ulysses", ["layout.cp=4", "layout.cp_ulysses=2"], {}, (1,)),
    (
        "layout-ulysses-heads",
        "layout.cp",
        ["layout.cp=32", "layout.cp_method=ulysses"],
        {},
        (2, 4, 8, 16),
    ),
    (
        "layout-ep-compile",
        "run.compile",
        [*MOE, "layout=fsdp2.ep2", "run.compile=true", "precision.compute=bf16"],
        {},
        (False,),
    ),
    ("layout-ep-ranks", "layout.ep", [*MOE, "layout=dp2.ep2"], {}, (1,)),
    (
        "layout-ep-selective",
        "memory.activation_checkpointing",
        [*MOE, "layout=fsdp2.ep2", "memory.activation_checkpointing=selective"],
        {},
        ("full", "every_n", "none"),
    ),
    (
        "layout-pp-selective",
        "memory.activation_checkpointing",
        ["layout=pp2", "layout.pp_schedule=zb-h1", "memory.activation_checkpointing=selective"],
        {},
        ("full", "every_n", "none"),
    ),
    ("layout-cp-compile", "run.compile", ["layout.cp=2", "run.compile=true"], {}, (False,)),
    ("exact-blocks-mode", "numerics.blocks", ["numerics.blocks=2"], {}, (1,)),
    ("exact-blocks-heads", "numerics.blocks", [*EXACT, "numerics.blocks=512"], {}, (256,)),
    ("exact-blocks-kv-heads", "numerics.blocks", [*EXACT, "numerics.blocks=512"], {}, (256,)),
    ("exact-blocks-hidden", "numerics.blocks", [*PIECES, "model.hidden_dim=770"], {}, (2,)),
    (
        "exact-blocks-expert-hidden",
        "numerics.blocks",
        [*PIECES, *MOE, "model.moe.expert_hidden_dim=130"],
        {},
        (2,),
    ),
    ("exact-blocks-vocabulary", "numerics.blocks", [*PIECES, "model.vocab_size=5"], {}, (2,)),
    ("exact-chunks-seq", "data.seq_len", [*PIECES, "data.seq_len=500"], {}, (496, 504)),
    ("exact-tp-blocks", "layout.tp", [*PIECES, "layout.tp=8"], {}, (4,)),
    ("exact-cp-blocks", "layout.cp", [*PIECES, "layout.cp=8"], {}, (4,)),
    ("exact-tp-chunks", "layout.tp", [*PIECES, "layout=cp4.tp4"], {}, (2,)),
    (
        "exact-ulysses-groups",
        "layout.cp_method",
        [*PIECES, "layout.cp=4", "layout.cp_method=ulysses", "model.num_kv_heads=2"],
        {},
        ("ring", "gather"),
    ),
    ("exact-ep-cp", "layout.ep", [*PIECES, *MOE, "layout=fsdp2.cp4.ep2"], {}, (4,)),
    (
        "exact-ep-schedule",
        "layout.pp_schedule",
        [*PIECES, *MOE, "layout=fsdp2.ep2.pp2", "layout.pp_schedule=zb-h1"],
        {},
        ("1f1b",),
    ),
    ("exact-mla", "model.mla", [*PIECES, *MLA], {}, ()),  # its family has latent attention
    ("exact-attention", "model.attention", [*PIECES, "model.attention=sdpa"], {}, ("auto",)),
    ("exact-capacity", "model.moe.capacity_factor", [*PIECES, *MOE, "model.moe.capacity_factor=1.5"], {}, (0.0,)),
    ("exact-tp-async", "layout.tp_async", [*PIECES, "layout.tp=2", "layout.tp_async=true"], {}, (False,)),
    (
        "exact-selective",
        "memory.activation_checkpointing",
        [*PIECES, "memory.activation_checkpointing=selective"],
        {},
        ("full", "every_n", "none"),
    ),
    ("exact-lanes", "numerics.lanes", [*EXACT, "numerics.lanes=3"], {}, (2, 4)),
    ("exact-micro-batch", "data.micro_batch", [*EXACT, "data.micro_batch=3"], {}, (2, 4)),
    ("exact-micro-batch", "data.micro_batch", [*EXACT, "numerics.lanes=8"], {}, (1,)),
    ("exact-lanes-batch", "numerics.lanes", [*EXACT, "numerics.lanes=16"], {}, (4,)),
    ("exact-lanes-ranks", "numerics.lanes", [*EXACT, "numerics.lanes=2", "layout=dp3"], {}, (4,)),
    ("exact-lanes-ranks", "numerics.lanes", [*EXACT, "data.global_batch=64", "layout=dp16"], {}, (16,)),
    ("exact-lanes-ranks", "data.global_batch", [*EXACT, "layout=dp8"], {}, (16,)),
    ("exact-lanes-even", "layout.fsdp", [*EXACT, "layout=fsdp3"], {}, (2, 4)),
    ("exact-lanes-even", "layout.dp", [*EXACT, "layout=dp3.pp2"], {}, (2, 4)),
    ("exact-products", "layout.tp", [*EXACT, "layout=tp2"], {}, (1,)),
    ("exact-products", "layout.cp", [*EXACT, "layout=cp2"], {}, (1,)),
    ("exact-products", "layout.ep", [*MOE, *EXACT, "layout=fsdp2.ep2"], {}, (1,)),
    ("exact-device", "run.device", EXACT, {"device": "cuda"}, ("cpu",)),
    ("exact-compile", "run.compile", [*EXACT, "run.compile=true"], {}, (False,)),
    (
        "exact-optimizer",
        "optimizer.implementation",
        [*EXACT, "optimizer.implementation=fused"],
        {},
        ("auto", "foreach"),
    ),
    ("exact-mtp", "model.num_mtp_layers", [*MLA, *EXACT, "model.num_mtp_layers=1"], {}, (0,)),
    (
        "replay-deterministic",
        "numerics.deterministic",
        ["resilience.replay_every=1", "numerics.deterministic=false"],
        {},
        (True,),
    ),
    ("replay-compile", "run.compile", ["resilience.replay_every=1", "run.compile=true"], {}, (False,)),
    ("replay-flex", "model.attention", ["resilience.replay_every=1", "model.attention=flex"], {}, ("sdpa",)),
    ("replay-flex", "model.attention", ["resilience.replay_every=1"], {"device": "cuda"}, ("sdpa",)),
    ("invariant", "numerics.invariant", [*MOE, "numerics.invariant=true"], {}, (False,)),
    ("invariant", "layout.tp", ["layout=tp2", "numerics.invariant=true"], {}, (1,)),
    ("invariant", "run.compile", ["run.compile=true", "numerics.invariant=true"], {}, (False,)),
    ("invariant", "model.attention", ["model.attention=sdpa", "numerics.invariant=true"], {}, ("auto",)),
    ("invariant", "numerics.mode", ["numerics.mode=exact", "numerics.invariant=true"], {}, ("default",)),
    ("invariant", "run.device", ["numerics.invariant=true"], {"device": "cuda"}, ("cpu",)),
    ("device-absent", "run.device", ["run.device=cuda"], {"device": "cpu"}, ("auto", "cpu")),
    (
        "precision-device",
        "precision.compute",
        ["precision.compute=bf16"],
        {"device": "cuda", "has_bf16": False},
        ("fp32",),
    ),
    ("attention-device", "model.attention", ["model.attention=flex"], {"device": "cpu"}, ("auto", "sdpa")),
    ("attention-device", "model.attention", ["model.attention=kernel", "run.device=cuda"], {}, ("auto", "sdpa")),
    ("peak-value", "metrics.peak", ["metrics.peak=0"], {}, ("measure",)),
    ("peak-value", "metrics.peak", ["metrics.peak=-3"], {}, ("measure",)),
    ("peak-value", "metrics.peak", ["metrics.peak=nan"], {}, ("measure",)),
    ("peak-name", "metrics.peak", ["metrics.peak=h300"], {"accelerators": ("h100", "h200", "a100")}, None),
]


def test_a_default_recipe_has_no_problem():
    assert problems(Recipe()) == []


@pytest.mark.parametrize(("code", "key", "overrides", "machine", "nearest"), CASES)
def test_a_rule_finds_its_problem_and_names_the_nearest_values(code, key, overrides, machine, nearest):
    found = [problem for problem in found_by(debug(*overrides), code, **machine) if problem.key == key]
    assert len(found) == 1
    assert nearest is None or found[0].nearest == nearest


@pytest.mark.parametrize(("code", "key", "overrides", "machine", "nearest"), CASES)
def test_every_value_that_is_offered_silences_the_rule(code, key, overrides, machine, nearest):
    (found,) = [problem for problem in found_by(debug(*overrides), code, **machine) if problem.key == key]
    for value in found.nearest:
        mended = debug(*overrides, f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        assert not [problem for problem in found_by(mended, code, **machine) if problem.key == key]


def test_every_rule_has_a_case():
    silent = set(RULES)
    for _, _, overrides, machine, _ in CASES:
        from drumline.recipe.rules import Machine

        silent -= {rule for rule in RULES if list(rule(debug(*overrides), Machine(**machine)))}
    assert not silent


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_recipe_runs_today_or_says_only_what_is_not_yet(name):
    assert {problem.code for problem in problems(load(name), accelerators=accelerator_names())} <= {"not-yet"}


def test_every_built_in_recipe_runs():
    assert [name for name in builtin_names() if problems(load(name))] == []


def test_a_sound_latent_attention_has_no_problem():
    assert problems(debug(*MLA, "model.yarn.factor=4", "model.num_mtp_layers=2")) == []


def test_all_problems_come_at_once():
    recipe = debug("layout=dp3.pp3", "model.num_kv_heads=5", "run.steps=3", "run.profile=x", "numerics.blocks=2")
    codes = {problem.code for problem in problems(recipe, world_size=8)}
    assert codes >= {"layout-world", "model-kv-heads", "batch-divisible", "profile-syntax", "exact-blocks-mode"}


def test_a_trial_shorter_than_the_warm_up_may_run():
    assert not problems(debug("run.steps=1", "schedule.warmup_steps=20"))


def test_check_ends_with_a_command_that_works():
    words = ("drumline", "train", "llama3-debug", "layout=dp3.tp6", "model.num_kv_heads=5", "run.steps=3")
    with pytest.raises(RecipeError) as raised:
        check(load("llama3-debug", words[3:]), world_size=4, command=words)
    mended = raised.value.mended
    assert mended[:3] == words[:3]
    assert problems(load("llama3-debug", mended[3:]), world_size=4) == []
    assert str(raised.value).endswith(" ".join(mended))


def test_a_message_has_the_key_the_value_the_rule_and_the_remedy():
    (problem,) = found_by(debug("layout.tp=6", "model.num_kv_heads=8", "model.num_heads=24"), "layout-tp-kv-heads")
    assert str(problem) == (
        "layout.tp = 6 does not divide model.num_kv_heads = 8   [layout-tp-kv-heads]\n"
        "  nearest that work: 4, 8      try: layout.tp=4"
    )


@settings(max_examples=60)
@given(
    dp=st.integers(1, 40),
    fsdp=st.integers(1, 40),
    micro=st.integers(1, 9),
    batch=st.integers(1, 5000),
    world=st.integers(1, 64),
)
def test_mending_any_batch_and_world_leaves_no_problem(dp, fsdp, micro, batch, world):
    words = [f"layout=dp{dp}.fsdp{fsdp}", f"data.micro_batch={micro}", f"data.global_batch={batch}"]
    recipe = debug(*words)
    if problems(recipe, world_size=world):
        with pytest.raises(RecipeError) as raised:
            check(recipe, world_size=world, command=("drumline", "train", "llama3-debug", *words))
        assert problems(debug(*raised.value.mended[3:]), world_size=world) == []


@settings(max_examples=60)
@given(
    layout=st.fixed_dictionaries({axis: st.integers(1, 70) for axis in ("pp", "dp", "fsdp", "cp", "tp", "ep")}),
    heads=st.integers(1, 130),
    kv_heads=st.integers(1, 130),
    seq_len=st.integers(1, 3000),
    moe=st.none()
    | st.fixed_dictionaries(
        {
            "num_experts": st.integers(1, 40),
            "experts_per_token": st.integers(1, 40),
            "num_dense_layers": st.integers(0, 9),
            "num_expert_groups": st.integers(1, 40),
            "groups_per_token": st.integers(1, 40),
            "scoring": st.sampled_from(["softmax", "sigmoid"]),
            "shared_expert_gate": st.booleans(),
        }
    ),
    mla=st.none()
    | st.fixed_dictionaries(
        {name: st.integers(1, 70) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    ),
    yarn=st.none() | st.fixed_dictionaries({"beta_fast": st.floats(0.1, 50), "beta_slow": st.floats(0.1, 50)}),
)
def test_no_rule_raises_and_no_value_is_offered_that_is_refused(layout, heads, kv_heads, seq_len, moe, mla, yarn):
    model = {"num_heads": heads, "num_kv_heads": kv_heads, "moe": moe, "mla": mla, "yarn": yarn}
    model |= {"family": "deepseek_v3" if mla else "llama3", "num_mtp_layers": heads % 3}
    recipe = Recipe.model_validate({"layout": layout, "model": model, "data": {"seq_len": seq_len}})
    for problem in itertools.islice(problems(recipe), 20):
        for value in problem.nearest:
            *sections, leaf = problem.key.split(".")
            tree = recipe.model_dump()
            functools.reduce(dict.__getitem__, sections, tree)[leaf] = value
            mended = Recipe.model_validate(tree)
            assert not [other for other in found_by(mended, problem.code) if other.key == problem.key]


def test_a_run_of_no_steps_is_judged_too():
    assert problems(debug("run.steps=0")) == []
    assert [p.code for p in problems(debug("run.steps=0", "schedule.warmup_steps=0", "run.profile=0:1"))] == [
        "profile-range"
    ]


def test_a_world_beyond_any_degree_offers_what_can_be_said():
    (problem,) = found_by(debug("layout=dp2147483647"), "layout-world", world_size=2**40)
    assert problem.nearest
    assert not found_by(debug(f"layout={problem.nearest[0]}"), "layout-world", world_size=2**40)
    assert found_by(debug("layout=dp2"), "layout-world", world_size=10**18 - 1)


def test_a_vocabulary_is_not_judged_when_sources_bring_their_own_tokenizer():
    assert not problems(debug("data.sources=prepared", "model.vocab_size=1024"))


def test_huge_numbers_are_judged_at_once():
    huge = 2**63 - 1
    recipe = debug(f"data.global_batch={huge}", f"data.micro_batch={huge - 24}", f"model.num_heads={huge}")
    assert {problem.code for problem in problems(recipe, world_size=2**31 - 1)} >= {"batch-divisible", "layout-world"}
