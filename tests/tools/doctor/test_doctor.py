"""The doctor passes what is right, and names what is wrong."""

import collections
import contextlib
import copy
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.doctor import examine, main
from jaxrl.rollout.native.page_pool import PagePool
from jaxrl.rollout.native.slots import SlotTable
from jaxrl.rollout.weights.folder import WeightFolder
from jaxrl.tools.doctor.examination import CHECKS, SUPERVISED, chosen, run_check
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.gradients import Differentiated
from jaxrl.tools.doctor.quiet import ended_by_sigterm
from jaxrl.tools.doctor.recompilation import compiled_programs
from jaxrl.tools.doctor.rewards import rethreaded
from jaxrl.tools.doctor.smaller_config import choose
from jaxrl.train import BasePPOExp
from jaxrl.training.build import assemble_update
from jaxrl.training.rewards import make_estimate
from jaxrl.types import Prompt
from tests.test_train import QUICKSTART, ROOT, small
from tests.tools.doctor import planted

MODEL = ROOT / "configs" / "tiny_char_model"
PLANTED = "tests.tools.doctor.planted"
# sixteen rows of a minibatch, two on each of the eight devices
SIZES = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 4}
LOSS, ESTIMATOR = "trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"
REWARDS = "environment.reward_functions"
SUPERVISED_RECIPE = f"--config={ROOT / 'configs' / 'sft_addition.py'}"


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """A run, what all checks found of it, and the folder that its config writes to."""
    own, folder = (tmp_path_factory.mktemp(name) for name in ("own", "examination"))
    for name in ("quickstart/run.db", "checkpoints/global_step_7/meta", "exports/model"):
        (own / name).parent.mkdir(parents=True)
        (own / name).write_text(name)
    with compiled_programs() as programs:
        run = ExaminedRun(small(own, **SIZES), folder, programs=programs)
        with contextlib.closing(run):
            elsewhere = "gradients.mesh", "exact"  # checks that have tests of their own
            checks = {name: check for name, check in CHECKS.items() if name not in elsewhere}
            found = {name: run_check(name, check, run) for name, check in checks.items()}
            yield run, found, own


def changed(run, **overrides):
    """The run with another config; what is compiled for the model is shared."""
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    other, experiment, trainer = (copy.copy(x) for x in (run, run.experiment, run.trainer))
    experiment.config = trainer.config = config = cfg.apply_overrides(run.config, names)
    if names:
        trainer.updater = assemble_update(
            config,
            trainer.forward_pass,
            trainer.policy.placement,
            trainer.total_steps,
            trainer.policy.trained,
        )[2]
    trainer.state = jax.tree.map(jnp.copy, trainer.state)  # updates donate it
    made = run.made | {"trainer": trainer}
    vars(other).update(experiment=experiment, known={}, made=made)
    return other


def failures(run, *names):
    """Name -> finding, of the checks that failed."""
    found = {name: run_check(name, CHECKS[name], run) for name in names}
    return {name: finding for name, finding in found.items() if not finding.passed}


# ---------------------------------------------------------------- what is right


def test_a_right_run_passes(examined):
    _, found, _ = examined
    assert not {name: f for name, f in found.items() if f.passed is False}
    assert [name for name, f in found.items() if f.passed is None] == ["gradients.critic"]
    assert found["gradients.microbatches"].about == "one microbatch against 2 of 8 rows"
    exact = [f for name, f in found.items() if name.startswith("gradients") and f.passed]
    assert all(f.figure <= f.bound == 2e-5 for f in exact)  # float32
    # the same sums in another order: some compilers add a few of them in the same one
    assert any(f.figure > 0 for f in exact)
    padding = found["mask.padding"]  # the same rows in the same order: it may be 0
    assert 0 <= padding.figure <= padding.bound == 2e-5


def test_nothing_is_left_where_the_run_writes(examined):
    _, _, own = examined
    found = {str(p.relative_to(own)): p.read_text() for p in own.rglob("*") if p.is_file()}
    names = ("quickstart/run.db", "checkpoints/global_step_7/meta", "exports/model")
    assert found == {name: name for name in names}


def test_what_was_cut_is_said(examined):
    run, _, _ = examined
    assert run.changes["trainer.max_prompt_length"] == (16, 5)  # "1234>"
    assert run.changes["prompts"] == (64, 32)  # 4 batches of two minibatches of 4
    assert run.full_config.trainer.epochs == 10
    assert "trainer.epochs" not in run.changes  # not a matter of size


# ---------------------------------------------------------------- what is wrong


@pytest.mark.slow
def test_a_mean_per_microbatch_is_told_from_a_wrong_mask(examined):
    names = ("gradients.microbatches", "gradients.order", "mask.padding")
    run = changed(examined[0], **{LOSS: f"{PLANTED}:microbatch_mean"})
    found = failures(run, *names)
    assert list(found) == ["gradients.microbatches"]
    finding = found["gradients.microbatches"]
    assert finding.figure > 0.1
    assert finding.cause.startswith("on the same log-probs the policy loss of a token depends on")
    assert "as a rule a mean per microbatch" in finding.cause
    assert "batch_statistics=True" in finding.fix
    run = changed(examined[0], **{LOSS: f"{PLANTED}:unmasked_mean"})
    found = failures(run, *names)
    assert list(found) == ["mask.padding"]
    cause = found["mask.padding"].cause
    assert cause.startswith(f"a wrong mask: policy loss '{PLANTED}:unmasked_mean' counts padding")


def test_a_loss_that_a_run_refuses_is_examined(examined, monkeypatch):
    run = changed(examined[0], **{LOSS: f"{PLANTED}:microbatch_mean"})
    experiment = examined[0].experiment
    monkeypatch.setattr(experiment, "config", run.config)
    with pytest.raises(ValueError, match="loss of a token depends on the other rows"):
        BasePPOExp.check_functions(experiment)
    experiment.check_functions()  # as the doctor builds it


def test_a_loss_that_reads_its_neighbours_depends_on_the_order(examined):
    names = ("gradients.microbatches", "gradients.order")
    run = changed(examined[0], **{LOSS: f"{PLANTED}:neighbours"})
    rows = run.minibatch
    start = int(np.asarray(rows.response_mask).argmax(1).max())
    lengths = np.minimum(rows.lengths, start + 1 + np.arange(len(rows.lengths)) % 8)
    assert len({*lengths.tolist()}) > 4  # a sort by length would undo most of a shuffle
    real = np.arange(rows.tokens.shape[1]) < lengths[:, None]
    masks = {name: getattr(rows, name) * real for name in ("response_mask", "loss_mask")}
    run.made["minibatch"] = rows.replace(lengths=lengths.astype(np.int32), **masks)
    found = failures(run, *names)
    assert list(found) == ["gradients.microbatches", "gradients.order"]
    assert found["gradients.order"].figure > 0.01
    assert "depends on the place of a row" in found["gradients.order"].cause


def test_a_loss_that_reads_beyond_the_mask(examined):
    run = changed(examined[0], **{LOSS: f"{PLANTED}:unmasked_baseline"})
    finding = failures(run, "mask.outside")["mask.outside"]
    assert "reads numbers of tokens outside loss_mask" in finding.cause


def test_a_model_that_sees_padding(examined, monkeypatch):
    def of_all_tokens(self):
        return {"embed": np.asarray(self.minibatch.tokens)}

    monkeypatch.setattr(Differentiated, "gradient", of_all_tokens)
    finding = failures(examined[0], "mask.outside")["mask.outside"]
    assert finding.cause == "the model sees padding tokens; most of the difference is in ['embed']"


@pytest.mark.parametrize(
    ("estimator", "cause"),
    [
        ("padded_estimator", "counts padding"),
        ("rolled_estimator", "depends on the place of a row in its batch"),
    ],
)
def test_a_wrong_estimator(examined, estimator, cause):
    run = changed(examined[0])
    algorithm = cfg.apply_overrides(
        run.config, {ESTIMATOR: f"{PLANTED}:{estimator}"}
    ).trainer.algorithm
    run.trainer.estimate = jax.jit(make_estimate(algorithm))
    finding = failures(run, "mask.advantages")["mask.advantages"]
    assert cause in finding.cause


def test_a_reference_that_moves(examined):
    run = changed(examined[0])
    trainer = run.trainer
    assert not failures(run, "reference")
    score = type(trainer).add_log_probs

    def add_log_probs(batch):
        trainer.ref_params = trainer.params
        return score(trainer, batch)

    run = changed(run)
    trainer = run.trainer
    vars(trainer)["add_log_probs"] = add_log_probs
    del run.made["batch"]
    finding = failures(run, "reference")["reference"]
    assert "the reference moves with the policy" in finding.cause


def test_stale_weights(examined):
    run = changed(examined[0])
    engine = run.trainer.engine
    planted.stale(engine)
    try:
        # not sampler.in_flight, which has an engine of its own
        names = ("sampler.first", "weights.first", "sampler.update", "weights.update")
        found = failures(run, *names)
    finally:
        del engine.update_weights
    assert list(found) == ["sampler.update", "weights.update"]
    assert found["sampler.update"].cause.startswith("stale weights: after the update the engine")
    assert "engine holds other weights" in found["weights.update"].cause


@pytest.mark.slow
def test_keys_and_values_that_outlive_an_update(examined, monkeypatch):
    finding = examined[1]["sampler.in_flight"]
    assert finding.passed
    # eight slots of the group and two turns that go on from it, each with two of three tokens left
    # (8 + 2) * 2 = 20; the 3 * 8 + 5 samples are drawn twice: 2 * 29 * 3 - 20 = 154
    assert finding.about == "154 tokens of one version over 3 updates in flight, 20 not"

    def said_to_be_new(self, waiting, *, live):
        forget(self, waiting, live=live)
        self.oldest_version[:] = self.version

    forget = SlotTable.forget
    for where, name, fault in (
        (SlotTable, "forget", said_to_be_new),
        (PagePool, "forget", lambda self: None),  # later samples find old pages
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fault)
            finding = failures(changed(examined[0]), "sampler.in_flight")["sampler.in_flight"]
        assert finding.cause == "tokens are not of the weights that they are said to be drawn from"
    monkeypatch.setattr(
        SlotTable, "forget", lambda self, waiting, *, live: forget(self, waiting, live=False)
    )
    finding = failures(changed(examined[0]), "sampler.in_flight")["sampler.in_flight"]
    assert finding.cause == (
        "0 tokens of samples that began after an update are of older keys and values; with "
        "recompute_kv_on_update 20 are"
    )


def test_a_reward_that_is_not_deterministic(examined):
    workers = "environment.skyrl_gym.max_env_workers"
    for function, threads in (
        ("moody", 0),
        ("counting", 0),
        ("alternating", 0),
        ("alternating", 4),
    ):
        changes = {REWARDS: [f"{PLANTED}:{function}"], workers: threads}
        run = changed(examined[0], **changes)
        finding = failures(run, "rewards")["rewards"]
        assert finding.cause.startswith(
            f"a reward that is not deterministic: reward term '{function}' of environment "
            "'sort_digits' gave "
        )
        assert "sample of prompt 0:" in finding.cause


def test_environments_in_ray_are_judged_again_in_threads(tmp_path):
    pytest.importorskip("ray")
    gym = "environment.skyrl_gym"
    changes = {f"{gym}.max_env_workers": 2, f"{gym}.ray_env_workers": 1}
    config = rethreaded(cfg.resolve(small(tmp_path, **changes)))
    cfg.validate(config, num_devices=8)
    found = config.environment.skyrl_gym
    assert (found.max_env_workers, found.ray_env_workers) == (4, 0)


def test_generators_share_the_pool_of_environments(examined):
    class Pools(BasePPOExp):
        made = 0

        def get_environment_pool(self):
            Pools.made += 1

    run = copy.copy(examined[0])
    run.experiment_class = Pools
    del run.experiment  # made anew, without its other parts
    run.experiment.tokenizer = examined[0].tokenizer
    for _ in range(3):
        run.generator(None)
    assert Pools.made == 1


@pytest.mark.parametrize(
    ("checkpointer", "arrays"),
    [(planted.LossyCheckpointer, ".opt_state[1][0].mu"), (planted.ForgetfulCheckpointer, ".batch")],
)
def test_a_lossy_checkpoint(examined, tmp_path, checkpointer, arrays):
    run = changed(examined[0])
    run.trainer.checkpointer = checkpointer(str(tmp_path))
    found = failures(run, "checkpoint.state", "checkpoint.step")
    run.trainer.checkpointer.close()
    assert list(found) == ["checkpoint.state", "checkpoint.step"]
    assert found["checkpoint.state"].cause.startswith(f"a lossy checkpoint: {arrays}")
    assert "were not restored, and the next step differs" in found["checkpoint.step"].cause


@pytest.mark.slow
def test_a_shape_that_recompiles(examined):
    run = changed(examined[0])
    trainer = run.trainer
    vars(trainer)["collate"] = lambda output: planted.exact(type(trainer).collate(trainer, output))
    finding = failures(run, "recompilation")["recompilation"]
    assert finding.cause.startswith("warm steps compile ")
    assert "int32[" in finding.cause
    assert ", was int32[" in finding.cause


def test_a_check_that_crashes_fails_and_the_next_ones_go_on(examined, capsys):
    run = changed(examined[0])

    def crash(run):
        raise RuntimeError("out of paper\nand ink")

    finding = run_check("mask.tokens", crash, run)
    assert (finding.passed, finding.cause) == (False, "RuntimeError: out of paper")
    assert "Traceback" in capsys.readouterr().err
    assert not failures(run, "mask.tokens", "mask.padding")


# ---------------------------------------------------------------- the command


def test_help_and_bad_input(capsys, tmp_path):
    assert main([]) == main(["--help"]) == 0
    assert "Exit status: 0 every check passed" in capsys.readouterr().out
    for arguments, message in (
        (["--config=nowhere.py"], "no such file"),
        ([f"--config={QUICKSTART}", "--only=gradient"], "--only=gradient: there is no such check"),
        ([f"--config={QUICKSTART}", "--experiment=json:loads"], "no subclass of"),
        ([f"--config={QUICKSTART}", "--json=/no/such/folder/x"], "--json="),
        ([f"--config={QUICKSTART}", "--config.trainer.train_batch_size=0"], "train_batch_size"),
        ([f"--config={QUICKSTART}", "--config.data.train_data=['x.jsonl']"], "does not exist"),
        (
            [f"--config={QUICKSTART}", "--config.trainer.policy.model.path=/no"],
            "trainer.policy.model.path='/no': /no is not a folder",
        ),
        ([f"--config={QUICKSTART}", "--only=versions", "--nonsense"], "unknown argument"),
        (["--env", f"--config={QUICKSTART}"], "--env takes no config"),
        ([SUPERVISED_RECIPE, "--sft", "--only=rewards"], "no such check of a supervised run"),
        (
            [SUPERVISED_RECIPE, "--config.sft.max_length=-1", "--config.trainer.epochs=0"],
            "hint: the config sets sft.*; one of jaxrl.sft needs --sft",
        ),
    ):
        assert main(arguments) == 2, arguments
        assert message in capsys.readouterr().err


def test_the_machine_is_described_without_secrets(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("RAY_ADDRESS", "http://me:pass@host:1")
    monkeypatch.setenv("UNRELATED", "hello")
    assert main(["--env", f"--json={tmp_path / 'env.json'}"]) == 0
    printed = capsys.readouterr().out
    assert f"  jax: {jax.__version__}" in printed
    assert "devices: 8\n  8 x cpu (cpu) of process 0" in printed
    assert "  HF_TOKEN: <set>" in printed
    assert "  RAY_ADDRESS: http://<hidden>@host:1" in printed
    assert "XLA_FLAGS: " in printed
    assert not [word for word in ("hf_abc", "me:pass", "UNRELATED") if word in printed]
    assert json.loads((tmp_path / "env.json").read_text())["environment"]["HF_TOKEN"] == "<set>"


def test_checks_are_chosen_by_name_and_family():
    assert list(chosen(["mask.padding", "weights"])) == [
        "mask.padding",
        "weights.first",
        "weights.update",
    ]
    assert chosen([]) == CHECKS


def test_sigterm_removes_what_was_written():
    before = signal.getsignal(signal.SIGTERM)  # Ray's, where a test has started it
    with pytest.raises(SystemExit) as ended, ended_by_sigterm(), tempfile.TemporaryDirectory() as a:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not os.path.exists(a)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_without_room_is_skipped(examined, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 2**20))
    run = changed(examined[0])
    finding = run_check("checkpoint.state", CHECKS["checkpoint.state"], run)
    assert finding.passed is None
    assert "free: set TMPDIR to a larger folder" in finding.about


def test_weights_of_servers_are_beside_those_of_the_run(tmp_path):
    weights, folder = tmp_path / "weights", tmp_path / "examination"
    (weights / "version-7").mkdir(parents=True)
    folder_field = "generator.inference_engine.weights_folder"
    run = ExaminedRun(small(tmp_path, **{folder_field: str(weights)}), folder)
    own = Path(run.config.generator.inference_engine.weights_folder)
    assert own == weights / "doctor-examination"
    written = WeightFolder(own, lambda params, path: path.mkdir(parents=True))
    written.publish({}, 0)
    written.keep_only(0)
    assert (own / "version-0").exists()
    run.close()
    assert os.listdir(weights) == ["version-7"]


def test_prompts_are_chosen_of_every_environment():
    def prompts(name, *sizes):
        return [Prompt(f"{name}{n}", [], (1,) * n, name) for n in sizes]

    both = prompts("short", 3, 300, 4, 5) + prompts("long", 500, 400)
    assert [p.uid for p in choose(both, 4)] == ["short3", "long400", "short4", "long500"]
    assert [p.uid for p in choose(both, 6)][4:] == ["short5", "short300"]


# ---------------------------------------------------------------- whole examinations


def failing(folder, experiment=BasePPOExp, **overrides):
    """What a whole examination finds wrong: name -> cause."""
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    found = examine(small(folder, **SIZES, **names), experiment)
    assert os.listdir(folder) == []
    return {f.name: f.cause for f in found.findings if f.passed is False}


FAULTS = {
    "stale weights": (
        (planted.StaleExp, {}),
        {
            "sampler.update": "stale weights",
            "weights.update": "the engine holds other weights",
            "sampler.in_flight": "tokens are not of the weights",
        },
    ),
    "per-microbatch mean": (
        (BasePPOExp, {LOSS: f"{PLANTED}:microbatch_mean"}),
        {"gradients.microbatches": "on the same log-probs the policy loss"},
    ),
    "wrong mask in a loss": (
        (BasePPOExp, {LOSS: f"{PLANTED}:unmasked_mean"}),
        {"mask.padding": "a wrong mask: policy loss"},
    ),
    "random reward": (
        (BasePPOExp, {REWARDS: [f"{PLANTED}:moody"]}),
        {"rewards": "a reward that is not deterministic"},
    ),
    "lossy checkpoint": (
        (planted.LossyExp, {}),
        {"checkpoint.state": "a lossy checkpoint", "checkpoint.step": "a lossy checkpoint"},
    ),
    "shape that recompiles": (
        (planted.ExactExp, {}),
        {"recompilation": "warm steps compile"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_check_and_no_other(tmp_path, name):
    (experiment, overrides), expected = FAULTS[name]
    found = failing(tmp_path, experiment, **overrides)
    assert found.keys() == expected.keys()
    for check, cause in expected.items():
        assert found[check].startswith(cause)


@pytest.mark.slow
def test_the_meshes(tmp_path):
    (found,) = examine(small(tmp_path, **SIZES), only=["gradients.mesh"]).findings
    assert found.passed
    assert found.about == "{'fsdp': 8} against data 1, data 8, fsdp 4xtensor 2"
    assert 0 < found.figure <= 2e-5


@pytest.mark.slow
def test_a_generator_that_trains_observations(tmp_path):
    config = tiny_recipe(str(ROOT / "configs" / "guess_number.py"), tmp_path)
    found = examine(config, planted.EverythingExp)
    assert [f.name for f in found.findings if f.passed is False] == ["mask.tokens"]
    cause = next(f.cause for f in found.findings if f.name == "mask.tokens")
    assert cause.startswith("a wrong mask: loss_mask is 1 on tokens that the policy did not sample")
    assert "(an observation)" in cause


@pytest.mark.slow
def test_a_trainer_that_raises(tmp_path):
    found = failing(tmp_path, planted.BrokenExp)
    assert found["batch"] == "RuntimeError: no advantages today"
    reason = "there is no batch (RuntimeError('no advantages today')); see 'batch'"
    assert found["gradients.order"] == found["checkpoint.state"] == reason
    assert not {"sampler.first", "weights.first", "rewards", "mask.tokens"} & found.keys()


def tiny_recipe(path, folder, teacher=None):
    """A recipe on the model of 126k parameters, with random weights."""
    config = cfg.load_config_file(path)
    settings = {
        "trainer.policy.model.path": str(MODEL),
        "trainer.policy.model.random_init": True,
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
    }
    if config.trainer.max_prompt_length == 64:
        settings["trainer.max_prompt_length"] = 160  # a token for every letter
    if config.trainer.ref.model.path:
        shutil.copytree(MODEL, teacher)
        settings["trainer.ref.model.path"] = str(teacher)
        settings["trainer.ref.model.random_init"] = True
    return cfg.apply_overrides(config, settings)


RECIPES = sorted(path.name for path in (ROOT / "configs").glob("*.py"))
RECIPES.remove("sft_addition.py")  # below


@pytest.mark.slow
def test_a_supervised_recipe_passes(tmp_path):
    config = tiny_recipe(str(ROOT / "configs" / "sft_addition.py"), tmp_path)
    found = examine(config, supervised=True)
    assert [f.cause for f in found.findings if f.passed is False] == []
    assert [f.name for f in found.findings] == list(SUPERVISED)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_pass(tmp_path, tmp_path_factory, recipe):
    teacher = tmp_path_factory.mktemp("models") / "teacher"
    found = examine(tiny_recipe(str(ROOT / "configs" / recipe), tmp_path, teacher))
    assert {f.name: f.cause for f in found.findings if f.passed is False} == {}
    assert os.listdir(tmp_path) == []
