"""Before anything is measured, a small copy of a model shows whether its stages compute what transformers computes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, InternVLConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from autotune import architecture
from autotune.architecture import model_code
from autotune.cli import main
from autotune.folders import architectures_folder
from autotune.job_file import load_job
from autotune.model_shape import model_shape
from tests.programs.users import JobFile, databases, refusal
from tests.tiny_models import text
from tests.values.parameters import parameters
from tests.values.training import variant_of
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model import decoder, skeleton
from trials.model.attention.samples import PackedSamples
from trials.model.plain import between
from trials.model.plain.parity import check_parity

SIZES = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [float(each) for each in range(1, 17)]}
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
}  # fmt: skip
"""Latent attention, and experts behind a dense layer"""
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
EQUAL: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tied": True},
    "qwen2, linear positions": {"model_type": "qwen2", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "positions by length": {"model_type": "qwen2", **DYNAMIC},
    "positions by context": {
        "model_type": "phi3", "rope_scaling": LONG,
        "original_max_position_embeddings": 4096, "max_position_embeddings": 131072,
    },
    "qwen2, yarn": {"model_type": "qwen2", "rope_scaling": YARN, "max_position_embeddings": 131072},
    "qwen2, a window in late layers": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "qwen2 with experts": {
        "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3 with experts": {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8},
    "qwen3, experts behind a dense layer": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8},
    "deepseek 2": {"model_type": "deepseek_v2", **LATENT},
    "deepseek 3": {"model_type": "deepseek_v3", **LATENT, "n_group": 2, "topk_group": 1},
    "granite with experts": {"model_type": "granitemoe", "num_local_experts": 8},
    "granite with shared experts": {
        "model_type": "granitemoeshared", "num_local_experts": 8, "shared_intermediate_size": 64,
    },
    "olmo with experts": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "flex olmo": {"model_type": "flex_olmo", "num_experts": 8, "num_experts_per_tok": 2},
    "ernie 4.5 with experts": {
        "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
    },
    "glm 4 with experts": {
        "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "phi 3.5 with experts": {"model_type": "phimoe", "num_local_experts": 8},
    "dots 1": {
        "model_type": "dots1", "head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    },
    "hunyuan with experts": {"model_type": "hunyuan_v1_moe", "head_dim": 32, "num_experts": 8, "moe_topk": 2},
    "minimax m2": {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 2},
    "llama": {"model_type": "llama"},
    "mistral, a window": {"model_type": "mistral", "sliding_window": 4096},
    "gemma 3, a window and positions of its own in some layers": {"model_type": "gemma3_text", "head_dim": 32},
    "exaone 4, a window in some layers": {"model_type": "exaone4", "sliding_window": 4096},
    "exaone with experts": {"model_type": "exaone_moe", "num_experts": 8, "sliding_window": 4096},
    "llama 3": {"model_type": "llama", "rope_scaling": LLAMA3, "max_position_embeddings": 131072},
    "granite, multipliers": {"model_type": "granite", **MULTIPLIERS},
    "granite with experts, multipliers": {"model_type": "granitemoe", "num_local_experts": 8, **MULTIPLIERS},
    "hyperclovax, multipliers": {"model_type": "hyperclovax", **MULTIPLIERS},
    "cohere": {"model_type": "cohere"},
    "gemma 2, caps": {"model_type": "gemma2", "head_dim": 32},
    "gpt-oss, sinks": {"model_type": "gpt_oss", "num_local_experts": 8, "head_dim": 32},
}  # fmt: skip
SHORT = (
    "qwen2, yarn", "deepseek 3", "granite with experts, multipliers",
    "gemma 3, a window and positions of its own in some layers",
)  # fmt: skip
"""What `test_text` does not show: that has caps, sinks, tied weights and positions by length."""
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "chunked attention": (
        {"model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 128},
        "layers of type 'chunked_attention' choose in a way of their own which tokens are seen; use a model whose",
    ),
    "linear attention": ({"model_type": "minimax"}, "layers of type 'linear_attention' carry a state over the tokens"),
    "chosen keys": ({"model_type": "deepseek_v32"}, "layers of type 'indexed_attention' choose in a way of their own"),
    "a constant that is lost": ({"model_type": "apertus"}, "act_fn.beta gets its value where its module is made"),
    "inputs of each layer": ({"model_type": "gemma3n_text"}, r"inputs of their own .*\(hidden_size_per_layer_input\)"),
    "masks of its own": (
        {"model_type": "doge"},
        "'doge' cannot be run in stages: its layers choose which tokens are s",
    ),
    "a state": ({"model_type": "jamba"}, "layers of type 'linear_attention' carry a state over the tokens"),
    "no rotary positions": ({"model_type": "gpt2"}, "it has no norm and no rotary_emb next to its word embedding; use"),
    "a loss of the router": (
        {"model_type": "mixtral", "num_local_experts": 8, "output_router_logits": True},
        "output_router_logits asks for an auxiliary loss of the experts' router .* set output_router_logits to false",
    ),
    "dropout before the layers": (
        {"model_type": "starcoder2", "embedding_dropout": 0.1},
        "embedding_dropout is 0.1, which stages do not apply; set it to 0 in config.json",
    ),
    "other attention": ({"model_type": "nemotron"}, "its NemotronAttention does not get the keywords of its model"),
    "other attention, of StableLM": ({"model_type": "stablelm"}, "its StableLmAttention does not get the keywords"),
}


FACTORS: dict[str, dict[str, Any]] = {
    "multipliers": {"kind": "granite"},
    "near 1": {"kind": "granite", "embedding_multiplier": 1.000001},
    "logits": {"kind": "cohere"},
    "a wide cap": {"kind": "gemma2", "final_logit_softcapping": 4e5},
    "states before the head": {
        "kind": "minicpm3", "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "scale_emb": 3, "dim_model_base": 8,
    },
}  # fmt: skip
REST = {
    "other attention, of StableLM", "a state", "chosen keys", "no rotary positions", "dropout before the layers",
    "other attention",
}  # fmt: skip
"""Refused in `test_text`, by the command below, or as others here are"""


def settings_of(folder: Path, language: dict[str, Any]) -> ModelSection:
    """A folder with the configuration of InternVL with this language model."""
    language = SIZES | language
    InternVLConfig(
        vision_config={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 3},
        image_token_id=990,
        tie_word_embeddings=language.pop("tied", False),
        text_config=language,
    ).save_pretrained(folder)
    return ModelSection(path=str(folder), weights="random")


@pytest.mark.parametrize("name", parameters({name: name for name in EQUAL}, short=SHORT))
def test_a_language_model_that_is_computed_alike_is_taken(name: str, tmp_path: Path) -> None:
    check_parity(settings_of(tmp_path, EQUAL[name]))


def test_a_language_model_that_is_computed_differently_is_refused_with_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedSamples, "masks", lambda self, _window, _device: [None] * len(self.lengths))
    with pytest.raises(ModelError, match=r"differently here than by transformers, logits by \S+ %, loss") as caught:
        check_parity(settings_of(tmp_path, EQUAL["mistral, a window"]))
    assert "\n" not in str(caught.value)
    found = re.search(r"logits by (\S+) %", str(caught.value))
    assert found is not None
    assert float(found[1]) > 0.1


LOST = {
    "multipliers": ("before_layers", "the word embedding and language layer 0 .*has embedding_multiplier 12.0, "),
    "near 1": ("before_layers", "the word embedding and language layer 0 .*has embedding_multiplier 1.000001, "),
    "logits": ("behind_head", r"the head and the loss .*has logit_scale 0.0625\)"),
    "a wide cap": ("behind_head", "the head and the loss .*final_logit_softcapping 400000.0"),
    "states before the head": ("before_head", "the final norm and the head .*dim_model_base"),
}


@pytest.mark.parametrize(
    "name",
    parameters({name: name for name in LOST}, short=("near 1", "a wide cap", "states before the head")),
)
def test_a_factor_that_stages_lose_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, message = LOST[name]
    text.make_kind(tmp_path, **FACTORS[name])
    settings = ModelSection(path=str(tmp_path), weights="random")
    check_parity(settings)
    monkeypatch.setattr(between, lost, lambda _, states: states)
    with pytest.raises(ModelError, match=f"transformers changes the states between {message}"):
        check_parity(settings)


@pytest.mark.parametrize("name", parameters({name: name for name in LIMITS}, short=set(LIMITS) - REST))
def test_a_language_model_that_stages_cannot_run_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    language, message = LIMITS[name]
    with pytest.raises(ModelError, match=message) as caught:
        check_parity(settings_of(tmp_path, language))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "command", parameters({each: each for each in ("tune", "profile", "run", "launch")}, short=("tune",))
)
def test_a_command_refuses_such_a_model_before_it_measures(
    command: str, job: JobFile, example: Path, home: Path, tmp_path: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"] |= {"model_type": "nemotron"}

    job.spoil(model__path=str(variant_of(example, tmp_path / "nemotron", change) / "model"))
    assert "'nemotron' cannot be run in stages: its NemotronAttention does not get" in refusal(command, job.path)[1]
    assert not databases(home)


def test_an_architecture_is_compared_once_for_each_version_of_the_code(
    job: JobFile, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_job(job.path).model
    digest = model_shape(settings).config_digest
    began: list[object] = []

    def compares() -> bool:
        began.clear()
        architecture.check_architecture(settings, digest, architectures_folder(), began.append)
        return bool(began)

    assert "Comparing a small copy" in CliRunner().invoke(main, ["launch", str(job.path), "--dry-run"]).stderr
    assert not compares()
    (passed,) = architectures_folder().iterdir()
    passed.write_bytes(b"\xff")
    assert compares()
    assert not compares()
    assert {"stage.py", "parity.py", "decoder.py", "internvl.py"} <= {file.name for file in model_code()}
    files = [*model_code(), tmp_path / "further.py"]
    files[-1].touch()
    monkeypatch.setattr(architecture, "model_code", lambda: files)
    files[-1].write_text("# changed\n")
    assert compares()
    assert not compares()


@pytest.mark.parametrize("kind", parameters({each: each for each in ("seed_oss", "phi3")}, short=["seed_oss"]))
def test_dropout_inside_of_layers_is_followed_also_where_they_are_recomputed(kind: str, tmp_path: Path) -> None:
    check_parity(settings_of(tmp_path, {"model_type": kind, "residual_dropout": 0.1, "resid_pdrop": 0.1}))


def test_dropout_that_stages_do_not_apply_is_found_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skeleton, "check_dropout", lambda _: None)
    with pytest.raises(ModelError, match=r"between the word embedding and language layer 0 .*embedding_dropout 0.1"):
        check_parity(settings_of(tmp_path, {"model_type": "starcoder2", "embedding_dropout": 0.1}))


@pytest.mark.parametrize(
    "original", [{}, {"original_max_position_embeddings": 30}], ids=["one context", "a longer one"]
)
def test_positions_of_a_long_sample_do_not_depend_on_those_before_it(original: dict[str, int]) -> None:
    """transformers keeps the frequencies of the longest sample so far."""
    rope = {"rope_scaling": DYNAMIC["rope_scaling"] | original}
    config = AutoConfig.for_model("qwen2", **SIZES | rope | {"max_position_embeddings": 8})
    lengths = (12, 9, 3, 20)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = PackTokens(input_ids=positions[0], positions=positions, lengths=lengths, grids=torch.zeros(0, 0))
    states = torch.zeros(1, sum(lengths), 1)
    found = decoder._embeddings(Qwen2RotaryEmbedding(config), states, positions, tokens)
    alone = [Qwen2RotaryEmbedding(config)(states, torch.arange(length)[None]) for length in lengths]
    for whole, parts in zip(found, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts, dim=-2))


def test_a_reference_can_forget_the_samples_before() -> None:
    rotary = Qwen2RotaryEmbedding(AutoConfig.for_model("qwen2", **SIZES | DYNAMIC | {"max_position_embeddings": 8}))
    states, long, shorter = torch.zeros(1, 1, 1), torch.arange(20)[None], torch.arange(9)[None]
    first, _ = rotary(states, shorter)
    rotary(states, long)
    assert not torch.equal(rotary(states, shorter)[0], first)
    decoder.forget_samples(rotary)
    assert torch.equal(rotary(states, shorter)[0], first)
