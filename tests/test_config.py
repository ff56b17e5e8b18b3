"""config.json: every quirk normalised, everything unknown refused by name."""

import pytest
import torch
from conftest import TINY

from river.config import load_config, parse_config
from river.errors import RiverError
from river.rope import Rope

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(**changes):
    values = {**TINY, **changes}
    return parse_config({key: value for key, value in values.items() if value is not ...})


def test_facts_of_a_config():
    c = config()
    assert (c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.kv_size) == (4, 4, 2, 16, 32)
    assert (c.rope.rope_type, c.rope.theta, c.rope.dim) == ("default", 10000.0, 16)


def test_defaults_of_absent_and_null_keys():
    for absent in (..., None):
        c = config(num_key_value_heads=absent, rms_norm_eps=absent, rope_theta=absent, head_dim=absent)
        assert (c.n_kv_heads, c.rms_norm_eps, c.rope.theta, c.head_dim) == (4, 1e-6, 10000.0, 16)


def test_an_explicit_head_dim_wins():
    c = config(head_dim=32)
    assert (c.head_dim, c.q_size, c.kv_size) == (32, 128, 64)


def test_rope_under_the_old_key_and_the_newer_one():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = config(rope_scaling=scaling, rope_theta=5e5)
    new = config(rope_scaling=..., rope_theta=..., rope_parameters={**scaling, "rope_theta": 5e5})
    assert old.rope.theta == new.rope.theta == 5e5
    assert old.rope.rope_type == new.rope.rope_type == "llama3"
    both = config(rope_scaling=scaling, rope_parameters={"rope_type": "default", "rope_theta": 3.0})
    assert both.rope.rope_type == "llama3", "the old key wins where both are set"


@pytest.mark.parametrize(
    "scaling, number, slower",
    (
        ({"rope_type": "linear", "factor": 4.0}, "factor", True),
        ({**LLAMA3, "original_max_position_embeddings": 64}, "factor", True),
        ({**LLAMA3, "original_max_position_embeddings": 64}, "low_freq_factor", None),
        ({**LLAMA3, "original_max_position_embeddings": 64}, "high_freq_factor", None),
        ({**LLAMA3, "original_max_position_embeddings": 64}, "original_max_position_embeddings", None),
        ({**YARN, "original_max_position_embeddings": 64}, "factor", True),
        ({**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings", None),
        ({**YARN, "beta_fast": 32, "beta_slow": 2}, "beta_fast", None),
        ({**YARN, "beta_fast": 32, "beta_slow": 2}, "beta_slow", None),
        ({"rope_type": "dynamic", "factor": 2.0}, "factor", True),
    ),
)
def test_every_number_of_a_rope_scaling_is_used(scaling, number, slower):
    """Scalings have been parsed and then ignored, or their factor been 8 whatever the file said."""

    def frequencies(scaling):
        rope = Rope(config(rope_scaling=scaling, head_dim=64).rope)
        rope.tables(torch.tensor([0]), 1024, torch.float32)
        return rope.inv_freq

    plain, one = frequencies(None), frequencies(scaling)
    other = frequencies({**scaling, number: scaling[number] * 2})
    assert not torch.equal(one, plain) and not torch.equal(one, other)
    if slower:
        assert (one <= plain).all() and (other <= one).all()


@pytest.mark.parametrize(
    "changes, named",
    (
        ({"model_type": "mamba"}, ("mamba", "llama")),
        ({"model_type": ...}, ("model_type", "llama")),
        ({"model_type": ["llama"]}, ("model_type",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"rope_scaling": {"rope_type": "spiral"}}, ("rope_type", "spiral", "llama3")),
        ({"rope_scaling": {"type": "spiral"}}, ("rope_type", "spiral")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, ("llama3", "factor", "'8'")),
        ({"rope_scaling": "llama3"}, ("rope_scaling",)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ("linear", "factor", "0")),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, ("linear", "factor", "-2.0")),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, ("linear", "factor", "inf")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": True}}, ("dynamic", "factor", "True")),
        ({"rope_scaling": {**LLAMA3, "factor": 0.0}}, ("llama3", "factor", "0.0")),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, ("low_freq_factor", "4.0", "high_freq_factor")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4}}, ("yarn", "factor", "-4")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 0}}, ("yarn", "beta_fast", "0")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": "x"}}, ("attention_factor", "'x'")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": "x", "mscale_all_dim": 1}}, ("mscale", "'x'")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1}, ("yarn", "rope_theta", "1.0")),
        ({"model_type": "ministral3", "rope_scaling": {**YARN, "llama_4_scaling_beta": "x"}}, ("scaling_beta", "'x'")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("rope_parameters", "each kind of layer")),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("quantised", "gptq")),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 8}}, ("longrope", "short_factor", "8")),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0]}}, ("longrope", "short_factor")),
        ({"rope_theta": 0}, ("rope_theta", "0")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers",)),
        ({"hidden_size": ...}, ("hidden_size", "missing")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"hidden_size": 66}, ("hidden_size", "66")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers",)),
        ({"num_hidden_layers": True}, ("num_hidden_layers",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps",)),
        ({"head_dim": 15}, ("head_dim", "15")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "yes")),
    ),
)
def test_what_is_unknown_or_malformed_is_named(changes, named):
    with pytest.raises(RiverError) as error:
        c = config(**changes)
        Rope(c.rope)
    for word in named:
        assert word in str(error.value)


def test_a_missing_window_is_the_familys_and_a_null_one_is_none():
    """Mistral 7B v0.1 has 4096 and v0.2 null; a config without the key means 4096."""
    assert config(model_type="mistral", sliding_window=64).windows == (64,) * 4
    assert config(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert config(model_type="mistral").windows == (4096,) * 4
    assert config(model_type="llama").windows == (None,) * 4
    assert config(model_type="llama", sliding_window=64).windows == (None,) * 4, "kept by a conversion, never used"


@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
def test_qwen_slides_only_where_it_is_told_to(family):
    assert config(model_type=family, sliding_window=64).windows == (None,) * 4
    sliding = {"model_type": family, "sliding_window": 64, "use_sliding_window": True}
    assert config(**sliding).windows == (None,) * 4, "28 full layers come first"
    assert config(**sliding, max_window_layers=0).windows == (64,) * 4
    assert config(**sliding, max_window_layers=1).windows == (None, 64, 64, 64)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert config(**sliding, layer_types=kinds).windows == (64, None, 64, None)
    for bad in (kinds[:3], ["chunked_attention"] * 4, "full_attention"):
        with pytest.raises(RiverError, match="layer_types"):
            config(**sliding, layer_types=bad)


def test_biases_and_norms_of_each_family():
    biased = {"attention_bias": True, "mlp_bias": True}
    flags = {
        family: (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm, c.fused_projections)
        for family in ("llama", "mistral", "ministral3", "phi3", "qwen2", "qwen3")
        for c in [config(model_type=family, **biased)]
    }
    assert flags == {
        "llama": (True, True, True, False, False),
        "mistral": (False, False, False, False, False),
        "ministral3": (False, False, False, False, False),
        "phi3": (False, False, False, False, True),
        "qwen2": (True, False, False, False, False),
        "qwen3": (True, True, False, True, False),
    }


def test_the_text_model_of_a_multimodal_checkpoint():
    text = {**TINY, "model_type": "ministral3", "eos_token_id": [2, 5]}
    c = parse_config({"model_type": "mistral3", "text_config": text, "tie_word_embeddings": False})
    assert c.model_type == "ministral3" and c.eos_token_ids == {2, 5}
    assert c.tie_word_embeddings is None, "the two configs contradict each other: the tensors decide"
    with pytest.raises(RiverError, match="text_config"):
        parse_config({"model_type": "mistral3"})


def test_ministral_has_a_rotary_default_and_a_query_scaling_of_its_own():
    bare = config(model_type="ministral3", rope_theta=...).rope
    assert (bare.rope_type, bare.theta, bare.number("factor")) == ("yarn", 1e6, 16.0)
    assert bare.number("llama_4_scaling_beta") == 0.1
    other = config(rope_scaling={**YARN, "llama_4_scaling_beta": 0.1}).rope
    assert "llama_4_scaling_beta" not in other.scaling, "other families' classes never look at it"


def test_the_context_counts_what_a_scaling_adds():
    """Qwen2.5 says how to turn yarn on: with the maximum left as it was."""
    assert config().context == 512
    assert config(rope_scaling=YARN).context == 2048
    assert config(rope_scaling={**YARN, "original_max_position_embeddings": 128}).context == 512
    assert config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).context == 1024
    assert config(rope_scaling={"rope_type": "linear", "factor": 2.0}).context == 512


def test_partial_rotary_counts_only_where_transformers_lets_it():
    partial = {"partial_rotary_factor": 0.5}
    assert config(**partial).rope.dim == 16, "llama's default type ignores it"
    assert config(**partial, model_type="phi3").rope.dim == 8
    assert config(**partial, rope_scaling={"rope_type": "linear", "factor": 2.0}).rope.dim == 8


def test_phi3_has_old_names_for_longrope():
    for name in ("su", "yarn", "longrope"):
        assert config(model_type="phi3", rope_scaling={"type": name}).rope.rope_type == "longrope"


def test_the_original_length_at_the_top_level_wins():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    def original(**changes):
        return config(**changes).rope.scaling["original_max_position_embeddings"]

    assert original(rope_scaling=scaling) == 64
    assert original(rope_scaling=scaling, original_max_position_embeddings=32) == 32
    assert original(rope_scaling={"rope_type": "yarn", "factor": 4.0}) == 512


def test_stop_tokens_are_those_of_both_files(tmp_path):
    """Llama 3 lists three in generation_config.json and one in config.json; SmolLM2 has one int."""
    for in_config, in_generation, want in (
        ("2", None, {2}),
        ("[2, 3]", None, {2, 3}),
        ("2", "[4, 5]", {2, 4, 5}),
        ("null", "7", {7}),
        ("[]", "null", set()),
    ):
        import json

        (tmp_path / "config.json").write_text(json.dumps({**TINY, "eos_token_id": json.loads(in_config)}))
        generation = tmp_path / "generation_config.json"
        generation.unlink(missing_ok=True)
        if in_generation:
            generation.write_text(f'{{"eos_token_id": {in_generation}}}')
        assert load_config(tmp_path).eos_token_ids == want


@pytest.mark.parametrize("content", ("", "{", "[]", "null", "\x00", '{"a": ' * 5000))
def test_a_malformed_file_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RiverError, match="config.json"):
        load_config(tmp_path)
