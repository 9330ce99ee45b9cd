"""Which kernels the programs of a run have, what its card says of them, and what is refused."""

import dataclasses
from types import SimpleNamespace

import flax.linen as nn
import pytest

from jaxrl import config as cfg, train
from jaxrl.config.backend import MixedPrecisionConfig
from jaxrl.config.placement import check_mesh, device_ranges
from jaxrl.models import adapt_linen
from jaxrl.models.architecture import DeltaNet, Experts
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import Placement, ShardingRules, make_mesh
from jaxrl.rollout.build_jetstream import jetstream_engine
from jaxrl.training.build import expert_exchange, role_kernels

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
ENGINE = "generator.inference_engine"


def config_of(**values):
    given = {name.replace("__", "."): value for name, value in values.items()}
    return cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), given))


def on_gpu(**more):
    return config_of(
        trainer__bf16=True, trainer__flash_attn=True, trainer__use_sample_packing=False, **more
    )


def said(choices):
    return [str(choice) for choice in choices]


def test_the_head_of_a_critic_is_not_scored():
    critic = dataclasses.replace(MODEL, value_head="value_head")
    choices = role_kernels(on_gpu(), critic, HOPPER, "critic")
    assert said(choices) == ["packed_attention cudnn"]


def test_tokens_of_a_known_set_are_scored_by_columns():
    """As `score` does where a batch has the sets: the card, the plan and the run agree."""
    sampling = {"generator__sampling_params__top_k": 8}
    config = on_gpu(**sampling, generator__sampling_params__keep_sampling_mask=True)
    assert said(role_kernels(config, MODEL, HOPPER, "policy"))[1] == (
        "head_log_probs xla (tiles needs generator.sampling_params.keep_sampling_mask=False, and "
        "no distillation)"
    )
    assert said(role_kernels(on_gpu(**sampling), MODEL, HOPPER, "policy"))[1] == (
        "head_log_probs tiles"
    )
    config.trainer.kernels = {"head_log_probs": "tiles"}
    with pytest.raises(ValueError, match="'tiles' needs .*keep_sampling_mask=False"):
        role_kernels(config, MODEL, HOPPER, "policy")


def test_the_card_names_what_reference_and_critic_have_of_their_own():
    config = on_gpu(trainer__algorithm__use_kl_loss=True)
    config.trainer.ref.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32")
    critic = dataclasses.replace(MODEL, value_head="value_head")
    passes = {
        role: SimpleNamespace(kernels=role_kernels(config, model, HOPPER, role))
        for role, model in (("policy", MODEL), ("ref", MODEL), ("critic", critic))
    }
    trainer = SimpleNamespace(
        config=config,
        model=MODEL,
        forward_pass=passes["policy"],
        ref_forward_pass=passes["ref"],
        critic=SimpleNamespace(forward_pass=passes["critic"]),
    )
    lines = train._kernels(trainer, make_mesh())
    assert lines[:3] == [
        "kernel: packed_attention cudnn",
        "kernel: head_log_probs tiles",
        "kernel: paged_attention xla",
    ]
    (other,) = lines[3:]
    assert other.startswith("kernel of the reference: packed_attention chunked (cudnn needs")
    config.trainer.algorithm.use_kl_loss = False
    assert train._kernels(trainer, make_mesh()) == lines[:3]


def test_linear_attention_has_a_kernel_where_a_model_has_some():
    net = DeltaNet(key_heads=2, value_heads=4, key_dim=128, value_dim=128, window=4)
    model = dataclasses.replace(MODEL, num_layers=2, mixers=("delta", "attention"), delta_net=net)
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    config = config_of(trainer__bf16=True)
    assert said(role_kernels(config, model, tpu, "policy"))[1:] == [
        "delta_rule pallas",
        "head_log_probs tiles (pallas needs a hidden_size that 128 divides, not 64)",
    ]
    assert said(role_kernels(config, model, HOPPER, "policy"))[1] == "delta_rule xla"
    config.trainer.kernels = {"delta_rule": "xla"}
    assert said(role_kernels(config, model, tpu, "policy"))[1] == "delta_rule xla (trainer.kernels)"
    with pytest.raises(ValueError, match="has no effect: the model has no gated DeltaNet layers"):
        role_kernels(config, MODEL, tpu, "policy")


def test_a_flax_module_takes_no_kernel():
    config = config_of(trainer__kernels={"packed_attention": "chunked"})
    with pytest.raises(ValueError, match="brings its own attention and head; leave it empty"):
        role_kernels(config, adapt_linen(nn.Dense(1)), HOPPER, "policy")


OURS = [
    {f"{ENGINE}.backend": "jetstream"},
    {"trainer.placement.rollout_num_nodes": 0},
]
OTHERS = [
    {f"{ENGINE}.backend": "jetstream", f"{ENGINE}.engine_init_kwargs": {"engine": "a:b"}},
    {f"{ENGINE}.backend": "vllm"},
    {f"{ENGINE}.run_engines_locally": False},
]


@pytest.mark.parametrize("changes", OURS, ids=str)
def test_an_engine_of_ours_takes_a_kernel(changes):
    cfg.validate(config_of(**changes, trainer__kernels={"paged_attention": "xla"}))


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_the_kernels_of_other_engines_are_theirs(changes):
    config = config_of(**changes, trainer__kernels={"paged_attention": "xla"})
    with pytest.raises(ValueError, match=r"'paged_attention'\]='xla': has no effect, no engine"):
        cfg.validate(config)


def test_the_kernel_of_the_cache_before_is_refused_by_the_name_of_todays():
    config = config_of(trainer__kernels={"decode_attention": "xla"})
    with pytest.raises(ValueError, match="'decode_attention': is gone; name 'paged_attention'"):
        cfg.validate(config)


def test_supervised_training_takes_kernels_but_of_decoding():
    config = cfg.TrainConfig()
    config.trainer.kernels = {"packed_attention": "chunked"}
    assert cfg.resolve_sft(config).trainer.kernels == {"packed_attention": "chunked"}
    config.trainer.kernels = {"paged_attention": "xla"}
    with pytest.raises(ValueError, match=r"'paged_attention'\]='xla': has no effect, no engine"):
        cfg.validate_sft(config)


def test_jetstream_decodes_by_the_kernel_of_the_run():
    """One that CPUs do not have is refused where the engine is built."""
    tokenizer = SimpleNamespace(decode=str)
    config = config_of(
        **{f"{ENGINE}.backend": "jetstream"}, trainer__kernels={"paged_attention": "ragged"}
    )
    with pytest.raises(ValueError, match="'ragged': on a cpu there is xla"):
        jetstream_engine(config, MODEL, make_mesh(), tokenizer)


MIXTURE = dataclasses.replace(MODEL, experts=Experts(count=64, per_token=2, width=16))
EXPERT, FIELD = "trainer.policy.mesh.expert", "trainer.expert_exchange"
MAX = "generator.sampling_params.max_generate_length"


def exchange_on(model, devices=8, **changes):
    given = {EXPERT: 8, "trainer.policy.mesh.fsdp": 1, "trainer.max_prompt_length": 1024}
    given |= {MAX: 1024, "trainer.bf16": True}
    given |= {"trainer.micro_train_batch_size_per_gpu": 2, "trainer.use_sample_packing": False}
    config = cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), given | changes))
    placement = Placement(make_mesh(expert=devices), ShardingRules())
    return said(expert_exchange(config, model, placement))


def test_the_card_says_how_tokens_come_to_experts():
    """Two rows of 2,048 tokens on a device, 64 numbers wide, 2 of 64 experts, 8 on each of 8.

    The gather sends 7 x 4096 x (64 x 2 + 2 x 8) bytes there, 7 x 4096 x 64 x 4 back. A device has
    one of two experts with 1 - C(56, 2) / C(64, 2) = 0.236: 1.25 x 0.236 x 4096 = 1208 places.
    """
    gather, places = "gather 3.9 MiB there and 7.0 back", "1.2 MiB there and 2.1 back"
    assert exchange_on(MIXTURE) == [
        f"expert_exchange all_to_all (of 4,096 tokens a device sends {places} in a layer, {gather})"
    ]
    (forced,) = exchange_on(MIXTURE, **{FIELD: "gather"})
    assert forced.startswith("expert_exchange gather (trainer.expert_exchange; of 4,096 tokens a ")
    (few,) = exchange_on(MIXTURE, **{"trainer.max_prompt_length": 64, MAX: 64})
    assert few.startswith("expert_exchange gather (of 256 tokens")
    assert exchange_on(MIXTURE, devices=1) == exchange_on(MODEL) == []


def test_an_exchange_that_nothing_takes_is_refused():
    whole = dataclasses.replace(MIXTURE, experts=Experts(count=12, per_token=2, width=16))
    forced = {FIELD: "all_to_all"}
    with pytest.raises(ValueError, match=f"{FIELD}='all_to_all' has no effect: the model has no"):
        exchange_on(MODEL, **forced)
    with pytest.raises(ValueError, match="mesh.expert=8 does not divide the 12 experts"):
        exchange_on(whole, **forced)
    config = cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), forced))
    with pytest.raises(ValueError, match=f"{FIELD}='all_to_all': has no effect with mesh.expert=1"):
        check_mesh(config, device_ranges(config, 8))
