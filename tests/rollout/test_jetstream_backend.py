"""Training runs whose rollouts come from JetStream engines, and what a config may ask of them."""

import pytest

from jaxrl import config as cfg
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models import hf
from jaxrl.parallel import make_mesh
from jaxrl.rollout.jetstream.wire.server import serve_grpc
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Sampling
from jaxrl.train import train
from tests.test_train import metric_lines, small

ENGINE = "generator.inference_engine"
IN_PROCESS = {f"{ENGINE}.backend": "jetstream"}
SERVERS = {
    f"{ENGINE}.backend": "jetstream",
    f"{ENGINE}.run_engines_locally": False,
    f"{ENGINE}.remote_urls": ["127.0.0.1:9000"],
    f"{ENGINE}.engine_init_kwargs": {"control": "tests.rollout.test_jetstream_backend:control"},
    "generator.sampling_params.logprobs": None,
    "trainer.eval_interval": -1,
}
SHORT = {
    "trainer.max_training_steps": 2,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.algorithm.use_kl_loss": False,
}


def check(tmp_path, overrides):
    config = cfg.resolve(cfg.to_train_config(small(tmp_path, **overrides)))
    cfg.validate(config, num_devices=8)
    return config


@pytest.mark.slow
def test_a_run_in_process_takes_the_steps_of_the_native_engine(tmp_path):
    lines = []
    for backend in ("native", "jetstream"):
        trainer = train(small(tmp_path / backend, **SHORT, **{f"{ENGINE}.backend": backend}))
        assert trainer.watch.recompiles == 0
        lines.append(metric_lines(tmp_path / backend))
    for ours, native in zip(*lines, strict=True):
        assert ours == pytest.approx(native, rel=1e-3, abs=1e-4)
        assert ours["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4


# ------------------------------------------------------------------ over gRPC

told = []  # engine and model of the server that `control` tells


def control(folder, version):
    """As a server's own: read the weights from the folder."""
    engine, model = told[-1]
    engine.update_weights(hf.load_params(folder, model), version)


@pytest.fixture
def serving(tmp_path):
    """A gRPC server whose engine `control` tells, and the config of a run that asks it."""
    overrides = SERVERS | SHORT
    config = check(tmp_path, overrides)
    path = config.trainer.policy.model.path
    model = hf.load_config(path, cfg.model_overrides(config.trainer, config.trainer.policy))
    engine = NativeEngine(model, make_mesh(), max_num_seqs=16)
    told.append((engine, model))
    sampling = Sampling(max_tokens=64, stop_token_ids=tuple(hf.eos_token_ids(path)))
    server = serve_grpc(engine, load_tokenizer(path, None), 0, sampling)
    overrides[f"{ENGINE}.remote_urls"] = [f"127.0.0.1:{server.bound_port}"]
    overrides[f"{ENGINE}.weights_folder"] = str(tmp_path / "w")
    yield engine, overrides
    server.stop(None)


@pytest.mark.slow
def test_a_run_over_grpc_uses_the_trainers_log_probs(tmp_path, capsys, serving):
    engine, overrides = serving
    trainer = train(small(tmp_path, **overrides))
    assert int(trainer.state.step) == 2
    assert engine.version == 2 and [p.name for p in (tmp_path / "w").iterdir()] == ["version-2"]
    for line in metric_lines(tmp_path)[1:]:
        assert not any("rollout_train_logprobs" in name for name in line)
    printed = capsys.readouterr().out
    assert "gives no log-probs: all log-probs are of the trainer's own forward" in printed
    assert "which are said to sample with temperature 1, top_k -1, top_p 1" in printed


def only_first(folder, version):
    """A server that takes no weights but the first."""
    if version == 0:
        control(folder, version)


@pytest.mark.slow
def test_a_server_that_keeps_its_first_weights_ends_the_run(tmp_path, serving):
    _, overrides = serving
    overrides[f"{ENGINE}.engine_init_kwargs"] = {
        "control": "tests.rollout.test_jetstream_backend:only_first"
    }
    overrides |= {"trainer.max_training_steps": 20, "trainer.policy.optimizer_config.lr": 0.02}
    with pytest.raises(RuntimeError, match=r"rollout_surprise_z=\d.*stale or wrong weights"):
        train(small(tmp_path, **overrides))


# ------------------------------------------------------------------ the config


@pytest.mark.parametrize("overrides", [IN_PROCESS, SERVERS])
def test_accepted(tmp_path, overrides):
    check(tmp_path, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            IN_PROCESS | {f"{ENGINE}.remote_urls": ["a:1"]},
            r"remote_urls=\['a:1'\]: has no effect with run_engines_locally=True",
        ),
        (
            IN_PROCESS
            | {f"{ENGINE}.engine_init_kwargs": {"engine": "a:b"}, f"{ENGINE}.num_engines": 2},
            "num_engines=2: engine_init_kwargs\\['engine'\\] makes one engine",
        ),
        (SERVERS | {f"{ENGINE}.remote_urls": []}, r"remote_urls=\[\]: set the addresses"),
        (SERVERS | {f"{ENGINE}.remote_urls": ["http://a:1"]}, "set the addresses"),
        (
            SERVERS | {f"{ENGINE}.engine_init_kwargs": {}},
            "JetStream's wire has no weight update, .* set 'control'",
        ),
        (
            SERVERS | {"generator.sampling_params.logprobs": 1},
            "sampling_params.logprobs=1: JetStream's wire carries no log-probs; set it to None",
        ),
        (
            SERVERS | {"generator.sampling_params.temperature": 0.7},
            "sampling_params.temperature=0.7: JetStream servers cannot be told how to sample",
        ),
        (
            SERVERS | {"trainer.eval_interval": 2},
            r"eval_sampling_params.temperature=0.0: .*trainer.eval_interval=-1 turns it off",
        ),
        (
            SERVERS | {"generator.sampling_params.additional_kwargs": {"min_tokens": 2}},
            "JetStream's wire has no such option",
        ),
        (
            SERVERS | {"trainer.algorithm.policy_loss_type": "rollout_is"},
            "policy_loss_type='rollout_is': needs the sampler's log-probs",
        ),
        (
            SERVERS | {"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"},
            "off_policy_correction='on': needs the sampler's log-probs.*turn it off",
        ),
    ],
)
def test_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        check(tmp_path, overrides)
