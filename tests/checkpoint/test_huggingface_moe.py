"""Qwen3-MoE folders: stacked experts here, one tensor an expert there, byte-equal both ways."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.checkpoint.test_huggingface import edit_config, edit_tensors, pieces_of, tensors_of
from tests.models.hf_reference import make, random_tokens
from tests.models.moe_reference import MOE, hf_config, with_moe

from drumline.checkpoint import huggingface, open_commit
from drumline.checkpoint.conversion import export_commit, import_huggingface
from drumline.checkpoint.huggingface import HuggingFaceFolder, export_huggingface, parameter_shapes
from drumline.checkpoint.huggingface_config import read_config, write_config
from drumline.checkpoint.huggingface_names import from_huggingface, stored_tensors
from drumline.checkpoint.piece import Piece
from drumline.models import build
from drumline.recipe import load
from drumline.recipe.errors import DrumlineError


def save_transformers(folder, dtype=torch.float32, model=MOE, **options):
    torch.manual_seed(0)
    saved = transformers.Qwen3MoeForCausalLM(hf_config(model)).to(dtype)
    saved.save_pretrained(folder, **options)
    return saved


def there_and_back(tmp_path, dtype, limit=5 * 10**9):
    decoder = build(MOE, device="cpu")
    HuggingFaceFolder(tmp_path / "theirs").fill(pieces_of(decoder))
    weights = dict(decoder.named_parameters())
    files = export_huggingface(tmp_path / "ours", MOE, weights.__getitem__, dtype=dtype, max_shard_bytes=limit)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    equal = [torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)) for name, tensor in theirs.items()]
    return files, all(equal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["50KB", "5GB"])
def test_a_folder_of_transformers_comes_back_byte_equal(dtype, shard, tmp_path):
    save_transformers(tmp_path / "theirs", dtype, max_shard_size=shard)
    files, is_equal = there_and_back(tmp_path, dtype, {"50KB": 50_000, "5GB": 5 * 10**9}[shard])
    assert is_equal
    assert (len(files) > 3) is (shard == "50KB")


def test_the_comparison_catches_experts_in_another_order(tmp_path, monkeypatch):
    save_transformers(tmp_path / "theirs")
    right = huggingface.to_huggingface
    swapped = {None: None, **{expert: expert ^ 1 for expert in range(8)}}
    monkeypatch.setattr(huggingface, "to_huggingface", lambda name, expert=None: right(name, swapped[expert]))
    assert not there_and_back(tmp_path, torch.float32)[1]


@pytest.mark.parametrize("limit", [40_000, 5 * 10**9])
def test_transformers_loads_an_export_and_gives_equal_logits(limit, tmp_path):
    decoder = make(MOE)
    export_huggingface(tmp_path / "out", MOE, dict(decoder.named_parameters()).__getitem__, max_shard_bytes=limit)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tokens_BT = random_tokens(2, 60, MOE.vocab_size)
    with torch.no_grad():
        expected = loaded(tokens_BT).logits
        assert ((decoder(tokens_BT) - expected).norm() / expected.norm()) < 5e-6


@pytest.mark.parametrize("model", [MOE, with_moe(num_dense_layers=0, normalize_weights=False)])
def test_config_of_transformers_is_read_as_the_shape(model, tmp_path):
    save_transformers(tmp_path, model=model)
    assert read_config(tmp_path) == model.model_copy(update={"max_seq_len": 512, "init_std": 0.02})
    (tmp_path / "config.json").write_text(write_config(model, "float32"))
    assert read_config(tmp_path) == model


def test_the_config_that_qwen_published_for_30b_a3b_is_the_built_in_recipe(tmp_path):
    published = {  # Qwen/Qwen3-30B-A3B, config.json: num_experts, as transformers 4 wrote it
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    ours = load("qwen3-30b-a3b", ["model.moe.balance=none"]).model
    assert read_config(tmp_path) == ours
    assert transformers.AutoConfig.from_pretrained(tmp_path).num_experts == 128
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(ours).values()) == 30_532_122_624


def test_names_go_to_transformers_and_back(tmp_path):
    save_transformers(tmp_path)
    stored = {}
    for name, shape in parameter_shapes(MOE).items():
        parts = stored_tensors(name, shape)
        assert {from_huggingface(theirs) for theirs in parts} == {name}
        stored |= parts
    assert stored == {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("offsets", "shape"), [((2, 5, 7), (3, 20, 30)), ((7, 0, 0), (1, 32, 64)), ((8, 0, 0), (0, 32, 64))]
)
def test_a_sharded_rank_reads_its_box_of_experts_only(offsets, shape, tmp_path):
    saved = save_transformers(tmp_path, max_shard_size="50KB")
    local = torch.empty(shape)
    HuggingFaceFolder(tmp_path).fill([Piece("model.layers.1.mlp.experts.up_proj.weight", (8, 32, 64), offsets, local)])
    whole = saved.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][:, 32:]
    box = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
    assert torch.equal(local, whole[box])


def test_a_folder_becomes_a_commit_and_the_commit_a_folder(tmp_path):
    save_transformers(tmp_path / "theirs")
    commit = open_commit(import_huggingface(tmp_path / "theirs", tmp_path / "run"))
    assert "balance" not in commit.recipe["model"]["moe"]
    export_commit(commit, tmp_path / "ours")
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit_tensors(lambda tensors: tensors.pop(EXPERT)), f"{EXPERT} is missing"),
        (
            edit_tensors(lambda tensors: tensors.update({EXPERT: torch.ones(3, 4)})),
            r"5.down_proj.weight has shape \[3, 4\]",
        ),
        (
            edit_tensors(lambda tensors: tensors.update({EXPERT.replace("5", "8"): torch.ones(64, 32)})),
            "experts.8.down_proj.weight has no place",
        ),
        (edit_config(num_local_experts=None), "num_experts is missing"),
        (edit_config(num_experts_per_tok=None), "num_experts_per_tok is missing"),
        (edit_config(num_hidden_layers=4, decoder_sparse_step=2), "only dense layers before all others"),
    ],
)
def test_a_bad_folder_gets_a_message_that_names_the_fault(spoil, message, tmp_path):
    save_transformers(tmp_path)
    HuggingFaceFolder(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DrumlineError, match=message) as caught:
        HuggingFaceFolder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "sigmoid", "num_shared_experts": 1}, "num_shared_experts = 1.*\n.*scoring = 'sigmoid'"),
        ({"balance": "bias"}, "moves the choice of experts"),
        ({"routed_scaling": 2.5}, "routed_scaling = 2.5"),
        ({"num_expert_groups": 4}, "num_expert_groups = 4"),
    ],
)
def test_an_export_that_transformers_would_compute_otherwise_is_refused(changes, message, tmp_path):
    model = with_moe(**changes)
    with pytest.raises(DrumlineError, match=message):
        export_huggingface(tmp_path / "out", model, dict(make(model).named_parameters()).__getitem__)
    assert not list(tmp_path.iterdir())
