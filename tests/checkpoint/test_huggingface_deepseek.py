"""DeepSeek-V3 folders: rotary pairs, router biases and modules of multi-token prediction, there and back."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.checkpoint.test_huggingface import edit_config, edit_tensors, tensors_of
from tests.models.deepseek_reference import DEEPSEEK, YARN, hf_config, with_mla
from tests.models.hf_reference import make, random_tokens
from tests.models.moe_reference import with_moe

from drumline.checkpoint import huggingface, open_commit
from drumline.checkpoint.conversion import export_commit, import_huggingface
from drumline.checkpoint.huggingface import HuggingFaceFolder, export_huggingface, parameter_shapes
from drumline.checkpoint.huggingface_config import read_config, write_config
from drumline.checkpoint.piece import Piece
from drumline.recipe import load
from drumline.recipe.errors import DrumlineError

AHEAD = DEEPSEEK.model_copy(update={"num_mtp_layers": 2})
SHAPES = {
    "with a latent of queries": DEEPSEEK,
    "without": with_mla(q_lora_rank=0),
    "yarn": DEEPSEEK.model_copy(update={"yarn": YARN, "max_seq_len": 128}),
    "no groups": with_moe(DEEPSEEK, num_expert_groups=1, groups_per_token=1, normalize_weights=False),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def save_transformers(folder, model=DEEPSEEK, dtype=torch.float32, **extra):
    torch.manual_seed(0)
    saved = transformers.DeepseekV3ForCausalLM(hf_config(model, **extra)).to(dtype)
    with torch.no_grad():
        for layer in saved.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    saved.save_pretrained(folder)
    return saved


def loaded_here(folder):
    source = HuggingFaceFolder(folder)
    decoder = make(source.model)
    decoder.load_state_dict({name: source.read(name).float() for name in source.names})
    return decoder


def logits_error(saved, decoder):
    tokens_BT = random_tokens(2, 60, decoder.shape.vocab_size)
    with torch.no_grad():
        expected = saved(tokens_BT).logits
        return ((decoder(tokens_BT) - expected).norm() / expected.norm()).item()


@EVERY_SHAPE
@pytest.mark.parametrize("rope_interleave", [True, False])
def test_a_folder_of_transformers_gives_its_logits(shape, rope_interleave, tmp_path):
    saved = save_transformers(tmp_path, SHAPES[shape], rope_interleave=rope_interleave)
    assert logits_error(saved, loaded_here(tmp_path)) < 5e-6


def test_the_comparison_catches_pairs_that_stay_neighbours(tmp_path, monkeypatch):
    saved = save_transformers(tmp_path, rope_interleave=True)
    monkeypatch.setattr(huggingface, "row_order", lambda name, model: None)
    assert logits_error(saved, loaded_here(tmp_path)) > 1e-3


def test_the_comparison_catches_a_bias_that_is_lost(tmp_path):
    saved = save_transformers(tmp_path)
    decoder = loaded_here(tmp_path)
    for name, buffer in decoder.named_buffers():
        assert name.endswith("router.bias")
        buffer.zero_()
    assert logits_error(saved, decoder) > 1e-3


@EVERY_SHAPE
def test_transformers_loads_an_export_and_gives_equal_logits(shape, tmp_path):
    decoder = make(SHAPES[shape])
    with torch.no_grad():
        for buffer in decoder.buffers():
            buffer.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    export_huggingface(tmp_path / "out", decoder.shape, decoder.state_dict().__getitem__)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.config.rope_interleave
    assert logits_error(loaded, decoder) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_transformers_becomes_a_commit_and_comes_back_byte_equal(dtype, tmp_path):
    save_transformers(tmp_path / "theirs", dtype=dtype, rope_interleave=True)
    commit = open_commit(import_huggingface(tmp_path / "theirs", tmp_path / "run"))
    export_commit(commit, tmp_path / "ours", dtype=dtype)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        kept = torch.float32 if "e_score_correction_bias" in name else dtype
        assert ours[name].dtype == kept
        assert torch.equal(tensor.to(kept), ours[name]), name


@EVERY_SHAPE
def test_a_config_is_read_as_the_shape_that_wrote_it(shape, tmp_path):
    model = SHAPES[shape]
    (tmp_path / "config.json").write_text(write_config(model, "float32"))
    assert read_config(tmp_path) == model
    save_transformers(tmp_path / "theirs", model)
    read = HuggingFaceFolder(tmp_path / "theirs").model
    assert read.model_copy(update={"max_seq_len": model.max_seq_len, "init_std": model.init_std}) == model


def test_the_config_that_deepseek_published_is_the_built_in_recipe(tmp_path):
    published = {  # deepseek-ai/DeepSeek-V3, config.json, without quantization_config
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    # The paper's section 4.2 initializes with 0.006, which the folder does not say.
    assert read_config(tmp_path) == load("deepseek-v3", ["model.init_std=0.02"]).model


def test_modules_of_multi_token_prediction_are_the_layers_behind_the_last(tmp_path):
    decoder = make(AHEAD)
    export_huggingface(tmp_path / "out", AHEAD, decoder.state_dict().__getitem__)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    module = decoder.mtp[1]
    assert torch.equal(stored["model.layers.4.eh_proj.weight"], module.merge_proj.weight)
    assert torch.equal(stored["model.layers.4.enorm.weight"], module.embedding_norm.weight)
    assert torch.equal(stored["model.layers.4.hnorm.weight"], module.hidden_norm.weight)
    assert torch.equal(stored["model.layers.4.shared_head.norm.weight"], module.norm.weight)
    expert = stored["model.layers.4.mlp.experts.5.up_proj.weight"]
    assert torch.equal(expert, module.block.mlp.experts.up_proj.weight[5])
    again = loaded_here(tmp_path / "out")
    assert again.shape == AHEAD
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in decoder.state_dict().items())


def test_the_copies_that_a_published_folder_keeps_with_its_modules_are_left_unread(tmp_path):
    decoder = make(AHEAD)
    export_huggingface(tmp_path / "out", AHEAD, decoder.state_dict().__getitem__)
    file = tmp_path / "out" / "model.safetensors"
    copies = {
        "model.layers.3.embed_tokens.weight": torch.ones(1),
        "model.layers.3.shared_head.head.weight": torch.ones(1),
    }
    save_file(load_file(file) | copies, file)
    assert loaded_here(tmp_path / "out").shape == AHEAD


def test_a_folder_that_has_lost_its_modules_is_a_model_without(tmp_path):
    save_transformers(tmp_path, AHEAD)
    assert read_config(tmp_path).num_mtp_layers == 2
    assert HuggingFaceFolder(tmp_path).model.num_mtp_layers == 0


def test_a_sharded_rank_reads_its_box_of_rows_that_change_places(tmp_path):
    save_transformers(tmp_path, rope_interleave=True)
    whole = HuggingFaceFolder(tmp_path).read("layers.1.attention.q_b_proj.weight")
    local = torch.empty(30, 11)
    HuggingFaceFolder(tmp_path).fill([Piece("model.layers.1.attention.q_b_proj.weight", (96, 40), (33, 7), local)])
    assert torch.equal(local, whole[33:63, 7:18])


def test_a_bias_that_was_not_trained_is_written_as_0(tmp_path):
    decoder = make(with_moe(DEEPSEEK, balance="aux_loss"))
    export_huggingface(tmp_path / "out", decoder.shape, decoder.state_dict().__getitem__)
    assert not load_file(tmp_path / "out" / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ].any()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert logits_error(loaded, decoder) < 5e-6


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit_tensors(lambda x: x.pop("model.layers.1.self_attn.kv_b_proj.weight")), "kv_b_proj.weight is missing"),
        (edit_tensors(lambda x: x.update({"model.layers.3.eh_proj.weight": torch.ones(2)})), "layers.3.eh_proj.weight"),
        (edit_config(topk_method="greedy"), "topk_method = 'greedy'"),
        (edit_config(rms_norm_eps=1e-5), "rms_norm_eps = 1e-05, only 1e-06"),
        (edit_config(kv_lora_rank=None), "kv_lora_rank is missing"),
        (edit_config(num_key_value_heads=2), "num_key_value_heads = 2"),
        (edit_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1.0}), "only 'default' and 'yarn'"),
        (edit_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "yarn rotary scaling lacks mscale"),
    ],
)
def test_a_bad_folder_gets_a_message_that_names_the_fault(spoil, message, tmp_path):
    save_transformers(tmp_path)
    HuggingFaceFolder(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DrumlineError, match=message):
        HuggingFaceFolder(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            with_moe(DEEPSEEK, scoring="softmax", num_shared_experts=0),
            "scoring = 'softmax'.*\n.*num_shared_experts = 0",
        ),
        (DEEPSEEK.model_copy(update={"norm_eps": 1e-5}), "norm_eps = 1e-05"),
        (DEEPSEEK.model_copy(update={"moe": None}), "model.moe is absent"),
        (load("llama3-debug", ["model.num_mtp_layers=1"]).model, "llama3 has no multi-token prediction"),
    ],
)
def test_an_export_that_transformers_would_compute_otherwise_is_refused(model, message, tmp_path):
    with pytest.raises(DrumlineError, match=message):
        export_huggingface(tmp_path / "out", model, lambda name: torch.zeros(parameter_shapes(model)[name]))
    assert not list(tmp_path.iterdir())
