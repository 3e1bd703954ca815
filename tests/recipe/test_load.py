"""Reading recipes: files, extends, overrides, and every fault of form as a problem."""

import json
from pathlib import Path

import pytest

from drumline.recipe import DrumlineError, Layout, Recipe, RecipeError, builtin_names, load


def faults(name="llama3-debug", *overrides):
    with pytest.raises(RecipeError) as raised:
        load(str(name), overrides)
    return {problem.key or problem.code: problem for problem in raised.value.problems}


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# built-in recipes and files


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_recipe_is_named_as_its_file(name):
    assert load(name).name == name


def test_a_file_is_named_by_its_stem_unless_it_says_otherwise(write):
    assert load(str(write("mine.toml", 'extends = "llama3-debug"'))).name == "mine"
    assert load(str(write("mine.toml", 'name = "other"'))).name == "other"


def test_the_recipe_of_a_run_reads_back_equal(write):
    recipe = load("llama3-8b", ["layout=dp2.fsdp4", "data.sources.0.weight=2"])
    assert load(str(write("recipe.json", recipe.model_dump_json()))) == recipe


def test_a_byte_order_mark_is_no_fault(write):
    assert load(str(write("bom.toml", b"\xef\xbb\xbf[run]\nsteps = 30"))).run.steps == 30


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b" \n\t\n", "the file is empty"),
        (b"[run\nsteps = 3", "no TOML"),
        (b"[run]\nsteps = 3\nsteps = 4", "no TOML"),
        (b"[run]\nname = '\xff'", "line 2 is no UTF-8 text (byte 0xff)"),
        (b"\x00\x01", "no TOML"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
        (b"[run]\nsteps = " + b"9" * 5000, "no TOML"),
    ],
)
def test_a_file_that_is_no_recipe_says_why(write, content, says):
    (problem,) = faults(write("bad.toml", content)).values()
    assert problem.code == "file-syntax"
    assert says in problem.rule


def test_a_large_file_is_not_read_whole(write):
    with pytest.raises(DrumlineError, match="larger than 1 MiB"):
        load(str(write("big.toml", b"#" * (1 << 21))))


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(DrumlineError, match=r"is a folder; a recipe is a TOML file$"):
        load(str(tmp_path))
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(DrumlineError, match=r"did you mean the run's recipe, .*/recipe\.json\?"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lama3-8b", "did you mean llama3-8b"),
        ("LLAMA3-8B", "did you mean llama3-8b"),
        ("gpt", "built in are deepseek-v3-debug, deepseek-v3, llama3-debug, llama3-125m"),
        ("", "give a built-in recipe's name or a file"),
        ("a\0b", "give a built-in recipe's name or a file"),
        ("no/such/recipe.toml", "there is no recipe file no/such/recipe.toml"),
        ("x" * 5000, "File name too long"),
        ("~nobody-here/x.toml", "there is no recipe file"),
    ],
)
def test_a_name_that_is_no_recipe_says_what_is_close(name, says):
    with pytest.raises(DrumlineError) as raised:
        load(name)
    assert says in str(raised.value)


def test_a_file_that_is_missing_names_the_one_beside_it(write):
    path = write("my-run.toml", "")
    with pytest.raises(DrumlineError, match=r"did you mean .*my-run\.toml"):
        load(str(path.with_name("my_run.toml")))


def test_a_file_without_permission_says_so(write, monkeypatch):
    import builtins

    path = write("secret.toml", "")
    opened = builtins.open

    def refuse(file, *args, **kwargs):
        if Path(file) == path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(DrumlineError, match=r"secret\.toml cannot be read: Permission denied"):
        load(str(path))


# extends


def test_extends_lays_one_file_over_the_next(write):
    write("base.toml", 'extends = "llama3-8b"\n[run]\nsteps = 7\nseed = 5')
    recipe = load(str(write("top.toml", 'extends = "base.toml"\n[run]\nsteps = 9\n[schedule]\nwarmup_steps = 1')))
    assert (recipe.run.steps, recipe.run.seed, recipe.model.dim) == (9, 5, 4096)


def test_extends_is_relative_to_the_file_that_says_it(write, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write("base.toml", "[run]\nseed = 5")
    path = write("sub/top.toml", 'extends = "../base.toml"')
    monkeypatch.chdir("/")
    assert load(str(path)).run.seed == 5


def test_a_layout_string_in_a_file_replaces_what_is_extended_and_a_table_edits_it(write):
    write("base.toml", 'layout = "dp2.fsdp4"')
    assert load(str(write("a.toml", 'extends = "base.toml"\nlayout = "tp2"'))).layout == Layout(tp=2)
    edited = load(str(write("b.toml", 'extends = "base.toml"\n[layout]\ndp = 4'))).layout
    assert edited == Layout(dp=4, fsdp=4)


def test_what_is_inherited_can_be_taken_away(write):
    path = write("a.toml", 'extends = "llama3-8b"\n[model]\nrope_scaling = "none"')
    assert load(str(path)).model.rope_scaling is None
    assert load("llama3-8b", ["model.rope_scaling=none"]).model.rope_scaling is None


def test_a_circle_of_extends_is_shown(write):
    write("a.toml", 'extends = "b.toml"')
    write("b.toml", 'extends = "c.toml"')
    path = write("c.toml", 'extends = "a.toml"')
    problem = faults(path)["extends"]
    assert problem.code == "extends-cycle"
    circle = problem.rule.removeprefix("closes a circle: ").split(" -> ")
    assert [Path(file).name for file in circle] == ["c.toml", "a.toml", "b.toml", "c.toml"]


def test_extending_itself_is_a_circle(write):
    assert faults(write("a.toml", 'extends = "a.toml"'))["extends"].code == "extends-cycle"


def test_extending_what_does_not_exist_names_the_file_and_what_is_close(write):
    problem = faults(write("a.toml", 'extends = "llama3-8bb"'))["extends"]
    assert problem.code == "extends-missing"
    assert "did you mean llama3-8b" in problem.rule


@pytest.mark.parametrize("base", ["3", "[]", "true", '["llama3-8b"]'])
def test_extends_is_text(write, base):
    assert faults(write("a.toml", f"extends = {base}"))["extends"].code == "extends-type"


# overrides


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["run.steps=30"], "run.steps", 30),
        (["run.steps=1_000"], "run.steps", 1000),
        (["run.steps = 30"], "run.steps", 30),
        (["run.steps=30", "run.steps=40"], "run.steps", 40),
        (["optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["optimizer.lr=1"], "optimizer.lr", 1.0),
        (["data.shuffle=false"], "data.shuffle", False),
        (["run.name=abc"], "run.name", "abc"),
        (['run.name="abc"'], "run.name", "abc"),
        (["run.name="], "run.name", ""),
        (["run.name=123"], "run.name", "123"),
        (["run.name=true"], "run.name", "true"),
        (["run.name=a=b"], "run.name", "a=b"),
        (["run.name=2024-01-01"], "run.name", "2024-01-01"),
        (["run.name=1\nx = 2"], "run.name", "1\nx = 2"),
        (["metrics.peak=989.4"], "metrics.peak", "989.4"),
        (["metrics.peak=h100"], "metrics.peak", "h100"),
        (["run.dir=/tmp/a b"], "run.dir", "/tmp/a b"),
        (["precision.compute=bf16"], "precision.compute", "bf16"),
        (["layout=dp2.fsdp2"], "layout", Layout(dp=2, fsdp=2)),
        (['layout="dp2"'], "layout", Layout(dp=2)),
        (["layout.tp=4"], "layout.tp", 4),
        (["layout=dp2", "layout.tp=4"], "layout", Layout(dp=2, tp=4)),
        (["layout.tp=4", "layout=dp2"], "layout", Layout(dp=2)),
        (["layout.zero=1", "layout=fsdp2"], "layout", Layout(fsdp=2, zero=1)),
        (["layout={dp=2}", "layout={fsdp=2}"], "layout", Layout(dp=2, fsdp=2)),
        (["data.sources=wiki"], "data.sources.0.path", "wiki"),
        (['data.sources=["a", "b"]'], "data.sources.1.path", "b"),
        (["data.sources=[{path='a', weight=2}, 'b']"], "data.sources.0.weight", 2.0),
        (["data.sources.0.weight=3"], "data.sources.0.weight", 3.0),
        (["data.sources.1.path=b", "data.sources.1.weight=2"], "data.sources.1.weight", 2.0),
        (["data.sources.1=b"], "data.sources.1.path", "b"),
        (["model.rope_scaling.factor=4"], "model.rope_scaling.factor", 4.0),
    ],
)
def test_an_override_sets_its_key(overrides, key, value):
    found = load("llama3-debug", overrides)
    for part in key.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_an_element_of_the_default_mixture_can_be_edited(write):
    path = write("bare.toml", "[run]\nsteps = 200")
    sources = load(str(path), ["data.sources.0.weight=3", "data.sources.1=more"]).data.sources
    assert [(source.path, source.weight) for source in sources] == [("stdlib", 3.0), ("more", 1.0)]


@pytest.mark.parametrize(
    "text", ["run.steps", "=3", ".steps=3", "run..steps=3", "run.steps.=3", "a b=3", "", "--nproc"]
)
def test_what_is_no_override_says_what_one_is(text):
    problem = faults("llama3-debug", text)["override-syntax"]
    assert repr(text) in problem.rule


@pytest.mark.parametrize("index", ["3", "99999999999999999999", "9" * 5000])
def test_a_gap_in_a_list_names_the_next_element(index):
    problem = faults("llama3-debug", f"data.sources.{index}.path=x")[f"data.sources.{index}.path"]
    assert problem.rule == "names no element: data.sources has 1, so the next is data.sources.1"


# faults of form


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("run.step", "run.steps"),
        ("model.num_layer", "model.num_layers"),
        ("model.n_layers", "model.num_layers"),
        ("lr", "optimizer.lr"),
        ("optimizer.learning_rate", None),
        ("training.steps", "run.steps"),
        ("optimiser.lr", "optimizer.lr"),
        ("model.seq_len", "data.seq_len"),
        ("zero", "layout.zero"),
        ("rope_scaling.factor", "model.rope_scaling.factor"),
    ],
)
def test_an_unknown_key_gets_did_you_mean(key, meant):
    problem = next(p for p in faults("llama3-debug", f"{key}=8").values() if p.code == "unknown-key")
    assert key.startswith(problem.key)
    if meant:
        assert meant in problem.nearest or meant.startswith(f"{problem.nearest[0]}.")


def test_an_unknown_key_of_a_source_means_one_of_a_source(write):
    assert faults(write("a.toml", "[[data.sources]]\npaht = 'x'"))["data.sources.0.paht"].nearest == (
        "data.sources.0.path",
    )


def test_keys_that_need_quotes_are_shown_in_quotes(write):
    found = faults(write("a.toml", '"" = 1\n"a.b" = 2\n[run]\n"steps " = 3'))
    assert set(found) == {'""', '"a.b"', 'run."steps "'}


def test_extends_is_no_override():
    assert faults("llama3-debug", "extends=llama3-8b")["extends"].code == "extends-override"


def test_every_key_of_an_unknown_table_is_named(write):
    found = faults(write("a.toml", "[training]\nsteps = 3\nlr = 1.0"))
    assert found["training.steps"].nearest == ("run.steps",)
    assert found["training.lr"].nearest == ("optimizer.lr",)


def test_an_unknown_key_in_a_file_offers_no_override_since_none_would_help(write):
    problem = faults(write("a.toml", "[run]\nstep = 3"))["run.step"]
    assert problem.nearest == ("run.steps",)
    assert not problem.remedy
    assert str(problem) == "run.step = 3 is no key of a recipe   [unknown-key]\n  did you mean: run.steps"


@pytest.mark.parametrize(
    ("override", "code", "rule", "nearest"),
    [
        ("data.seq_len=0", "out-of-range", "must be at least 1", (1,)),
        ("run.steps=-5", "out-of-range", "must be at least 0", (0,)),
        ("run.steps=3.0", "wrong-type", "must be an integer", (3,)),
        ("run.steps=1e3", "wrong-type", "must be an integer", (1000,)),
        ("run.steps=nan", "wrong-type", "must be an integer", (100,)),
        ("run.steps=true", "wrong-type", "must be an integer", (100,)),
        ("run.steps=many", "wrong-type", "must be an integer", (100,)),
        ('run.steps="30"', "wrong-type", "must be an integer", (30,)),
        ("run.steps=[3]", "wrong-type", "must be an integer", (100,)),
        ("run.steps=99999999999999999999", "out-of-range", "must be at most 9223372036854775807", (2**63 - 1,)),
        ("optimizer.lr=nan", "not-finite", "must be a finite number", (0.001,)),
        ("optimizer.lr=inf", "not-finite", "must be a finite number", (0.001,)),
        ("optimizer.lr=-1", "out-of-range", "must be at least 0.0", (0.0,)),
        ("optimizer.lr=fast", "wrong-type", "must be a number", (0.001,)),
        ("optimizer.eps=0", "out-of-range", "must be more than 0.0", (1e-8,)),
        ("optimizer.beta1=1", "out-of-range", "must be less than 1.0", (0.9,)),
        ("data.validation_fraction=2", "out-of-range", "must be at most 1.0", (0.01,)),
        ("data.shuffle=yes", "wrong-type", "must be true or false", (True,)),
        ("data.shuffle=0", "wrong-type", "must be true or false", (False,)),
        ("precision.compute=bf61", "not-a-choice", 'must be one of "fp32", "bf16"', ("bf16",)),
        ("precision.compute=fp16", "not-yet", 'cannot run yet; what runs today: "fp32", "bf16"', ("bf16",)),
        ("optimizer.name=muon", "not-yet", 'cannot run yet; what runs today: "adamw"', ("adamw",)),
        ("layout.zero=4", "not-a-choice", "must be one of 1, 2, 3", (3,)),
        ("model=3", "wrong-type", "must be a table", ()),
        ("data.sources=3", "wrong-type", "must be a list", ()),
        ("layout=3", "layout-syntax", "must be a layout string such as dp2.fsdp4, or a table of degrees", ()),
        ("layout.tp=0", "out-of-range", "must be at least 1", (1,)),
        ("layout.tp=4294967296", "out-of-range", "must be at most 2147483647", (16,)),
    ],
)
def test_a_value_of_the_wrong_form_names_the_right_one(override, code, rule, nearest):
    (problem,) = faults("llama3-debug", override).values()
    assert (problem.key, problem.code, problem.rule) == (override.split("=")[0], code, rule)
    assert problem.nearest == nearest


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("dp2xfsdp2", ("dp2.fsdp2",)),
        ("dp2xfsdp4", ()),  # which the batch of 8 does not go into
        ("dp99999999999", ("dp1",)),
        ("dp=2", ("dp2",)),
        ("DP2", ("dp2",)),
        ("dp0", ("dp1",)),
        ("fsdp2.tp0", ("fsdp2",)),
        ("", ("dp1",)),
        ("dp2..tp2", ("dp2.tp2",)),
    ],
)
def test_a_layout_that_cannot_be_read_offers_what_its_parts_make(text, nearest):
    (problem,) = faults("llama3-debug", f"layout={text}").values()
    assert problem.code == "layout-syntax"
    assert problem.nearest == nearest


def test_a_layout_that_names_an_axis_twice_says_so():
    (problem,) = faults("llama3-debug", "layout=dp2.dp4").values()
    assert "dp is named twice" in problem.rule


def test_a_layout_in_a_file_is_no_fault_once_an_override_replaces_it(write):
    path = write("a.toml", 'layout = "nonsense"')
    assert faults(path)["layout"].code == "layout-syntax"
    assert load(str(path), ["layout=dp2"]).layout == Layout(dp=2)


def test_a_layout_on_the_command_line_is_no_fault_once_a_later_word_replaces_it():
    assert load("llama3-debug", ["layout=nonsense", "layout=dp2"]).layout == Layout(dp=2)
    assert "layout" in faults("llama3-debug", "layout=nonsense", "layout.tp=2")


def test_faults_of_form_and_broken_rules_come_together():
    found = faults("llama3-debug", "run.step=3", "optimizer.lr=x", "layout=dp3", "model.num_kv_heads=5")
    assert {problem.code for problem in found.values()} == {
        "unknown-key",
        "wrong-type",
        "batch-divisible",
        "model-kv-heads",
    }


def test_a_rule_that_reads_a_broken_key_is_not_judged():
    assert set(faults("llama3-debug", "model.num_heads=x", "model.num_kv_heads=5")) == {"model.num_heads"}
    assert set(faults("llama3-debug", "layout.dp=x", "data.global_batch=7")) == {"layout.dp"}


def test_the_message_ends_with_a_command_that_works():
    with pytest.raises(RecipeError) as raised:
        load("llama3-debug", ["run.step=30", "optimizer.lr=x", "run.name=my run"], command="drumline train")
    *_, last = str(raised.value).split("\n")
    assert last == "this would work: drumline train llama3-debug 'run.name=my run' optimizer.lr=0.001 run.steps=30"


def test_text_that_is_no_unicode_is_a_fault_of_form():
    assert faults("llama3-debug", "run.name=a\udcff")["run.name"].code == "wrong-type"


def test_nothing_of_pydantic_reaches_the_user():
    with pytest.raises(RecipeError) as raised:
        load("llama3-debug", ["run.steps=x", "model.dim=-1", "layout=q", "data.sources=[3]", "zzz=1"])
    assert "pydantic" not in str(raised.value)
    assert "Input should" not in str(raised.value)
    assert "type=" not in str(raised.value)


def test_a_section_refuses_an_unknown_key_and_a_change():
    with pytest.raises(ValueError, match="frozen"):
        Recipe().run.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_recipe_survives_json():
    recipe = load("llama3-70b")
    assert Recipe.model_validate(json.loads(recipe.model_dump_json())) == recipe
