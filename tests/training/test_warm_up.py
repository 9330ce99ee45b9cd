"""All shapes of a run are compiled before its steps."""

import jax
import pytest

from benchmarks.shapes import write_model_folder
from docs.generate.recipes import RECIPES
from jaxrl import config as cfg
from jaxrl.config.microbatching import longest_trajectory
from jaxrl.parallel.compilation import COMPILED
from jaxrl.rollout.native.decode import Features
from jaxrl.tools.plan.run import Run
from jaxrl.tools.plan.topology import machine
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from tests.config.test_platform_defaults import FAST
from tests.test_train import metric_lines, small


class WatchedTrainer(Trainer):
    """Notes the width of each batch."""

    def collate(self, output):
        batch = super().collate(output)
        self.widths = [*getattr(self, "widths", []), batch.tokens.shape[1]]
        return batch


class WatchedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return WatchedTrainer(*args, **kwargs)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_varied_lengths_compile_nothing_after_the_first_step(tmp_path, capsys, packed):
    # Prompts of 2 and 10 tokens in random order and responses of 1 to 4: prompts fill the buckets
    # 8 and 12, rows of 3 to 14 tokens the buckets 8, 12 and 16.
    lengths = {"short": 1, "long": 9}
    sources = {
        name: f"jaxrl.envs.toys.sort_digits:prompts(size=8, seed=0, length={length})"
        for name, length in lengths.items()
    }
    changes = {
        "data.train_data": list(sources.values()),
        "data.val_data": [sources["short"]],
        "generator.sampling_params.max_generate_length": 4,
        "trainer.max_training_steps": 6,
        "trainer.epochs": 12,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 1,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.use_sample_packing": packed,
    }
    trainer = WatchedExp(small(tmp_path, **changes)).run()
    printed = capsys.readouterr().out
    assert "prompts of [8, 12] tokens; rows of [8, 12, 16] tokens" in printed
    assert "microbatches of 8 x 8, 8 x 12, 8 x 16\n" in printed
    assert len(set(trainer.widths)) >= 2
    assert trainer.watch.recompiles == 0, capsys.readouterr().out
    assert len(metric_lines(tmp_path)) == 6


@pytest.mark.slow
def test_few_shapes_are_compiled_together_and_once(tmp_path, capsys):
    # As above, packed: prompts of 2 and 10 tokens and responses of up to 12 in rows of
    # 16 + 12 = 28 tokens at most, the bucket 32. Of 8 x 4 samples a full microbatch has 32 rows,
    # four on each of 8 devices, and a quarter 8.
    lengths = {"short": 1, "long": 9}
    changes = {
        "data.train_data": [
            f"jaxrl.envs.toys.sort_digits:prompts(size=8, seed=0, length={length})"
            for length in lengths.values()
        ],
        "generator.sampling_params.max_generate_length": 12,
        "trainer.max_training_steps": 3,
        "trainer.epochs": 12,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.use_sample_packing": True,
        "trainer.few_shapes": True,
    }
    compiled = []

    def listen(event, duration_secs, **details):
        if event == COMPILED:
            compiled.append(str(details.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        trainer = WatchedExp(small(tmp_path, **changes)).run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "rows of [32] tokens" in capsys.readouterr().out
    assert set(trainer.widths) == {32}
    assert trainer.watch.recompiles == 0
    assert trainer.updater.microbatching.row_counts(32) == [8, 32]
    assert sum("accumulate" in name for name in compiled) == 2
    for line in metric_lines(tmp_path):  # and they compute what they would have without
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert line["policy/policy_entropy"] > 1
        assert line["policy/grad_norm"] > 0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the policy, of a teacher that is another model, and of a mixture of experts."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-30b-a3b"):
        write_model_folder(folder / name, name)
    return folder


def recipe_on_an_accelerator(name, models):
    """A recipe as on a TPU, with models that are here."""
    config = cfg.load_config_file(str(RECIPES / f"{name}.py"))
    resolved = (cfg.resolve_sft if name.startswith("sft_") else cfg.resolve)(config)
    resolved, policy = cfg.with_settled(resolved, FAST), resolved.trainer.policy.model.path
    for role in ("policy", "ref", "critic"):
        model = getattr(resolved.trainer, role).model
        shape = "qwen2.5-0.5b" if model.path == policy else "qwen2.5-1.5b"
        shape = "qwen3-30b-a3b" if "A3B" in (model.path or "") else shape
        model.path = model.path and str(models / shape)
    return resolved


def shapes_of(cut, config):
    """(rows, tokens) of all microbatches, of trajectories of any length that the config allows."""
    widths = cut.batch_widths(2, longest_trajectory(config))
    return {(rows, cut.length(width)) for width in widths for rows in cut.row_counts(width)}


def programs(config, samples):
    """Distinct programs of a run on eight devices, by the function that is compiled.

    Args:
        samples: a supervised run has no engine.
    """
    run = Run(config, machine())
    passes = [("log-probs", run.forward_pass, run.forward_pass.microbatching)]
    if run.has_reference:
        # its parameters are another tree where the policy has adapters
        base = "of the base" if run.policy.lora else "log-probs"
        passes.append((base, run.ref_forward_pass, run.ref_forward_pass.microbatching))
    updates = [run.updater]
    if run.critic:
        passes.append(("values", run.critic.forward_pass, run.critic.forward_pass.microbatching))
        updates.append(run.critic.updater)
    for updater in updates:
        batch = run.batch(updater.microbatching, done=True)
        if updater is run.updater and updater.objective.sees_whole(batch):
            passes.append(("with entropy", run.forward_pass, updater.microbatching))
    found = {
        "gradient": {(u, shape) for u in updates for shape in shapes_of(u.microbatching, config)},
        "forward": {(n, s, shape) for n, s, cut in passes for shape in shapes_of(cut, config)},
    }
    engine = config.generator.inference_engine
    if engine.run_engines_locally and engine.backend == "native" and samples:
        needs = {Features().including(request.sampling) for request in run.requests()}
        found["block"] = needs | {one.union(other) for one in needs for other in needs}
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_an_accelerator_compiles_at_most_twelve_programs(name, models):
    config = recipe_on_an_accelerator(name, models)
    found = {kind: len(of) for kind, of in programs(config, name[:4] != "sft_").items()}
    assert sum(found.values()) <= 12, found
