"""Hugging Face folders: byte-equal round trips, logits of transformers, a clear word about each kind of bad folder."""

import json
import resource

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.models.hf_reference import LLAMA, QWEN, hf_model, hf_name, make, random_tokens

from drumline.checkpoint.huggingface import (
    HuggingFaceFolder,
    export_huggingface,
    parameter_shapes,
)
from drumline.checkpoint.huggingface_config import read_config, write_config
from drumline.checkpoint.huggingface_names import from_huggingface, to_huggingface
from drumline.checkpoint.piece import Piece
from drumline.models import build
from drumline.recipe.errors import DrumlineError

BOTH = pytest.mark.parametrize("model", [LLAMA, QWEN], ids=["llama3", "qwen3"])


def tensors_of(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def save_transformers(model, folder, dtype=torch.float32, **options):
    torch.manual_seed(0)
    saved = hf_model(model).to(dtype)
    saved.save_pretrained(folder, **options)
    return saved


def pieces_of(decoder):
    return [Piece(f"model.{name}", tuple(x.shape), (0,) * x.ndim, x.data) for name, x in decoder.named_parameters()]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["50KB", "5GB"])
def test_a_folder_of_transformers_comes_back_byte_equal(model, dtype, shard, tmp_path):
    save_transformers(model, tmp_path / "theirs", dtype, max_shard_size=shard)
    decoder = build(model, device="cpu")
    HuggingFaceFolder(tmp_path / "theirs").fill(pieces_of(decoder))
    weights = dict(decoder.named_parameters())
    limit = {"50KB": 50_000, "5GB": 5 * 10**9}[shard]
    files = export_huggingface(tmp_path / "ours", model, weights.__getitem__, dtype=dtype, max_shard_bytes=limit)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name
    assert (len(files) > 3) is (shard == "50KB")


@BOTH
@pytest.mark.parametrize("limit", [40_000, 5 * 10**9])
def test_transformers_loads_an_export_and_gives_equal_logits(model, limit, tmp_path):
    decoder = make(model)
    export_huggingface(tmp_path / "out", model, dict(decoder.named_parameters()).__getitem__, max_shard_bytes=limit)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32
    tokens_BT = random_tokens(2, 60, model.vocab_size)
    with torch.no_grad():
        expected = loaded(tokens_BT).logits
        assert ((decoder(tokens_BT) - expected).norm() / expected.norm()) < 5e-6


@BOTH
def test_config_of_transformers_is_read_as_the_shape(model, tmp_path):
    save_transformers(model, tmp_path)
    assert read_config(tmp_path) == model.model_copy(update={"max_seq_len": 512, "init_std": 0.02})


@BOTH
def test_a_written_config_is_read_back_as_itself(model, tmp_path):
    (tmp_path / "config.json").write_text(write_config(model, "float32", {"eos_token_id": 7}))
    assert read_config(tmp_path) == model
    assert transformers.AutoConfig.from_pretrained(tmp_path).eos_token_id == 7


def test_the_config_that_meta_published_for_llama_3_1_8b_is_read(tmp_path):
    published = {  # meta-llama/Llama-3.1-8B, config.json: the form before rope_parameters
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = read_config(tmp_path)
    assert (model.head_dim, model.num_kv_heads, model.rope_theta) == (128, 8, 500000.0)
    assert model.rope_scaling is not None
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(model).values()) == 8_030_261_248


@BOTH
def test_names_go_to_transformers_and_back(model):
    names = list(parameter_shapes(model))
    assert [to_huggingface(name) for name in names] == [hf_name(name) for name in names]
    assert [from_huggingface(to_huggingface(name)) for name in names] == names
    theirs = set(hf_model(model).state_dict()) - ({"lm_head.weight"} if model.tie_embeddings else set())
    assert {to_huggingface(name) for name in names} == theirs


@pytest.mark.parametrize("name", ["layers.0.mlp.gates.weight", "layers.x.norm.weight", "head.weight"])
def test_an_unknown_name_is_refused_both_ways(name):
    with pytest.raises(DrumlineError, match="is no parameter"):
        to_huggingface(name)
    with pytest.raises(DrumlineError, match="is no parameter"):
        from_huggingface(f"model.{name}")


def test_a_sharded_rank_reads_its_box_only(tmp_path):
    saved = save_transformers(LLAMA, tmp_path, max_shard_size="50KB")
    local = torch.empty(17, 20)
    piece = Piece("model.layers.1.mlp.gate_proj.weight", (96, 64), (31, 40), local)
    state = Piece("optimizer.norm.weight.exp_avg", (1,), (0,), torch.zeros(1))
    HuggingFaceFolder(tmp_path).fill([piece, state])
    assert torch.equal(local, saved.state_dict()["model.layers.1.mlp.gate_proj.weight"][31:48, 40:60])


def edit_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def edit_tensors(edit):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def edit_index(edit):
    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        located = dict.fromkeys(
            load_file(folder / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors"
        )
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": edit(located)}))

    return change


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NORM = "model.layers.0.input_layernorm.weight"
BAD_FOLDERS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json in it"),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
    "other family": (
        edit_config(model_type="gpt2"),
        "'gpt2' is not supported\n  those that are: llama, qwen3",
    ),
    "biases": (edit_config(attention_bias=True, mlp_bias=True), "attention_bias = True.*\n.*mlp_bias = True"),
    "other scaling": (edit_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_type = 'yarn'"),
    "no width": (edit_config(hidden_size=None), "hidden_size is missing"),
    "bad width": (edit_config(hidden_size=-4), "dim: Input should be greater"),
    "half a scaling": (edit_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "lacks 'factor'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "pickle": (pickle_only, "only pickled weights \\(pytorch_model.bin\\)"),
    "cut off": (cut_off, "model.safetensors is no whole safetensors file"),
    "tensor missing": (edit_tensors(lambda tensors: tensors.pop(NORM)), f"{NORM} is missing"),
    "wrong shape": (
        edit_tensors(lambda tensors: tensors.update({NORM: torch.ones(3)})),
        f"{NORM} has shape \\[3\\], but config.json asks for \\[64\\]",
    ),
    "stranger": (edit_tensors(lambda tensors: tensors.update(adapter=torch.ones(3))), "adapter has no place"),
    "index no index": (edit_index(lambda located: [1]), "is no index of shards"),
    "shard missing": (edit_index(lambda located: located | {NORM: "b.safetensors"}), "b.safetensors is missing"),
    "shard lacks it": (edit_index(lambda located: located | {"x": "model-00001-of-00001.safetensors"}), "places x in"),
    "shard outside": (edit_index(lambda located: located | {NORM: "../b.safetensors"}), "lies outside of the folder"),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_bad_folder_gets_a_message_that_names_the_fault(kind, tmp_path):
    save_transformers(LLAMA, tmp_path)
    spoil, message = BAD_FOLDERS[kind]
    HuggingFaceFolder(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DrumlineError, match=message) as caught:
        HuggingFaceFolder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DrumlineError, match="nowhere is no Hugging Face model folder: no such folder"):
        HuggingFaceFolder(tmp_path / "nowhere")


def test_weights_of_another_size_are_refused(tmp_path):
    save_transformers(LLAMA, tmp_path)
    decoder = build(LLAMA.model_copy(update={"vocab_size": 202}), device="cpu")
    with pytest.raises(
        DrumlineError, match=r"model.embed_tokens.weight has shape \[101, 64\], but the run's embedding.weight"
    ):
        HuggingFaceFolder(tmp_path).fill(pieces_of(decoder))


def test_an_export_does_not_touch_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DrumlineError, match="is there already and is not an empty folder"):
        export_huggingface(tmp_path, LLAMA, dict(make(LLAMA).named_parameters()).__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_export_that_fails_leaves_nothing(tmp_path):
    weights = dict(make(LLAMA).named_parameters()) | {"norm.weight": torch.ones(3)}
    with pytest.raises(DrumlineError, match=r"norm.weight has shape \[3\]"):
        export_huggingface(tmp_path / "out", LLAMA, weights.__getitem__, max_shard_bytes=40_000)
    assert not list(tmp_path.iterdir())


def test_an_export_that_finds_no_room_says_so_and_leaves_nothing(tmp_path):
    weights = dict(make(LLAMA).named_parameters())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(DrumlineError, match=r"safetensors cannot be written: .*(large|space)"):
            export_huggingface(tmp_path / "out", LLAMA, weights.__getitem__)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
