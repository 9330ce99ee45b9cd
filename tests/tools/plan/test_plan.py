"""Plans of the quickstart on eight host devices, and of machines that are not here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl import config as cfg, plan
from jaxrl.tools.plan import costs, phases, report, topology
from jaxrl.tools.plan.plan import _evaluated, host_residents, refused_host
from jaxrl.training.resident_memory import Resident

ROOT = Path(__file__).parents[3]
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"
MESH = "--config.trainer.policy.mesh.fsdp=4", "--config.trainer.policy.mesh.tensor=2"
WITH_REFERENCE = "--config.trainer.algorithm.use_kl_loss=True"
PARAMETERS = 126_336  # of configs/tiny_char_model: see test_parameters_of_the_quickstart
GIB = 2**30


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Of a machine that nobody measures."""
    monkeypatch.setattr(costs, "_measured", lambda: costs.Rates(matmul_flops=1e10, bandwidth=1e9))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Output and figures of a plan."""
    found = {}

    def run(capsys, *flags):
        if flags not in found:
            file = tmp_path_factory.mktemp("plan") / "plan.json"
            status = plan.main([QUICKSTART, f"--json={file}", *flags])
            report = json.loads(file.read_text())
            found[flags] = status, capsys.readouterr().out, report
        return found[flags]

    return run


def phases_of(report):
    return {phase["name"]: phase for phase in report["phases"]}


def test_parameters_of_the_quickstart():
    # embed 48 x 64; a layer: q 64 x 64, k and v 64 x 32 each, o 64 x 64, MLP 3 x 64 x 256, norms
    # 2 x 64 and 2 x 16; final norm 64
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256 + 2 * 64 + 2 * 16
    assert 48 * 64 + 2 * layer + 64 == PARAMETERS


def test_phases_and_what_stays(capsys, planned):
    status, printed, report = planned(capsys, *MESH, WITH_REFERENCE)
    assert status == 0
    assert printed.endswith("fits\n")
    # 32 prompts x 16 samples = 512 rows, in microbatches of 512 x 4 groups; minibatches of 16
    # prompts: two updates a step. A prompt is a tile, on each of eight devices; 64 are a chunk
    runs = {name: phase["runs"] for name, phase in phases_of(report).items()}
    assert runs == {
        "load weights": 1,
        "prefill": 4,
        "decode": 1,
        "log-probs": 1,
        "reference": 1,
        "gradient": 2,
        "apply": 2,
    }
    share = 4 * PARAMETERS / 8  # float32 on fsdp 4 x tensor 2
    assert report["residents"]["parameters"] == pytest.approx(share, rel=0.1)
    assert report["residents"]["optimizer"] == pytest.approx(2 * share, rel=0.1)
    assert report["residents"]["reference"] == report["residents"]["parameters"]
    assert report["residents"]["engine weights"] >= 4 * PARAMETERS
    # in each of 2 layers 2 heads x 16 wide, keys and values, of the 64 positions of a page for each
    # of 64 rows, an eighth of the 512
    assert report["residents"]["KV cache"] == 2 * 2 * 16 * 2 * 64 * 64 * 4


@pytest.mark.some(1)
@pytest.mark.parametrize("top_k", ["4", "None"])
def test_a_teacher_in_hindsight_is_planned_with_the_longest_hint(capsys, planned, top_k):
    """A row of 16 + 6 tokens has a hint of 40 more: rows of 64 where others have 24."""
    group = "--config.trainer.algorithm.distillation"
    teacher = f"{group}.coef=1", f"{group}.teacher=hindsight", f"{group}.max_hint_tokens=40"
    status, _, report = planned(capsys, *MESH, *teacher, f"{group}.top_k={top_k}")
    assert status == 0
    found = phases_of(report)
    assert "reference" not in found
    # of 512 rows on 4 groups tokens, positions, segments, targets (int32) and wanted: 17 bytes
    more = found["hindsight"]["arguments"] - found["log-probs"]["arguments"]
    assert more == pytest.approx(512 / 4 * (64 - 24) * 17, rel=0.05)


def test_argument_bytes_are_the_analytic_ones(capsys, planned):
    _, _, report = planned(capsys, *MESH, WITH_REFERENCE)
    phases, share = phases_of(report), 4 * PARAMETERS / 8
    # the state: parameters and two moments; and the gradient
    assert phases["apply"]["arguments"] == pytest.approx(4 * share, rel=0.1)
    # gradient and parameters; 256 rows of 24 tokens on 4 groups, of each token tokens, positions,
    # segments and 8 arrays of the loss and its weights with 4 bytes, wanted with 1
    rows = 256 // 4 * 24 * (4 * (3 + 8) + 1)
    assert phases["gradient"]["arguments"] == pytest.approx(2 * share + rows, rel=0.1)
    assert phases["gradient"]["beside"] == pytest.approx(3 * share, rel=0.1)  # moments, reference


def test_work_and_its_least_time(capsys, planned):
    _, _, report = planned(capsys, *MESH, WITH_REFERENCE)
    phases = phases_of(report)
    gradient, forward = phases["gradient"], phases["log-probs"]
    # two minibatches are the whole batch, and a gradient is three forward passes
    assert gradient["flops"] == pytest.approx(3 * forward["flops"])
    assert gradient["seconds"]["compute"] == pytest.approx(
        (gradient["flops"] + gradient["recomputed_flops"]) / (1e10 / 8)
    )
    assert gradient["bound"] in gradient["seconds"]
    assert {"all-reduce", "all-gather"} <= set(gradient["collectives"])


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_with_a_change_that_makes_it_fit(capsys, planned):
    _, _, report = planned(capsys, *MESH)
    needed = report["peak"]
    assert report["peak_phase"] == "gradient"
    small = f"--hbm-gib={0.6 * needed / GIB}"
    status, printed, report = planned(capsys, *MESH, small)
    assert status == 1
    assert "does not fit: gradient needs" in printed
    assert "micro_train_batch_size_per_gpu=" in printed
    assert "applied, fits" in printed
    flags = [f"--config.{n}={x}" for n, x in report["remedies"][0]["changes"].items()]
    status, printed, _ = planned(capsys, *MESH, small, *flags)
    assert status == 0
    assert printed.endswith("fits\n")


@pytest.mark.slow
def test_an_engine_without_room_for_one_row_is_refused(capsys, planned):
    status, printed, report = planned(capsys, "--topology=l4:2", "--hbm-gib=0.0005")
    assert status == 1
    assert "does not fit: generator.inference_engine.gpu_memory_utilization=0.8" in printed
    assert report["refusal"]


def test_gpus_that_are_not_here_are_estimated(capsys, planned, monkeypatch):
    monkeypatch.setattr(costs.Compiler, "__call__", None)  # nothing is compiled
    status, printed, report = planned(capsys, "--topology=h100:4")
    assert status == 0
    assert "ESTIMATE: nothing was compiled" in printed
    assert report["memory"] == 80e9
    assert all(phase["estimated"] for phase in report["phases"])
    assert all(phase["temporaries"] > 0 for phase in report["phases"])


def test_blocks_have_the_steps_of_the_machine(capsys, planned):
    """Of 100 tokens: a CPU's blocks have 32 steps, a GPU's 16."""
    flags = "--estimate", "--config.generator.sampling_params.max_generate_length=100"
    here, there = (planned(capsys, *flags, x)[2] for x in ("--hbm-gib=16", "--topology=h100:4"))
    assert phases_of(here)["decode"]["runs"] == 4
    assert phases_of(there)["decode"]["runs"] == 7


def test_shorter_responses_leave_dead_rows(capsys, planned):
    flags = "--estimate", "--config.generator.sampling_params.max_generate_length=100"
    longest = phases_of(planned(capsys, *flags, "--hbm-gib=16")[2])["decode"]
    _, printed, report = planned(capsys, *flags, "--hbm-gib=16", "--mean-response=40")
    mean = phases_of(report)["decode"]
    # one wave, for as long as its longest row: four blocks of 32; a row lives for 40 of 128 steps
    assert (longest["runs"], longest["live"]) == (4, 1)
    assert (mean["runs"], mean["live"]) == (4, 40 / 128)
    assert "have 40 tokens on average, the longest 100: 69% of the decoded rows are dead" in printed
    assert mean["seconds"]["memory"] < longest["seconds"]["memory"]


@pytest.mark.parametrize(
    ("rows", "mean", "late", "blocks"),
    [
        (1, 64, 16, 2),  # of 32 steps
        (2.5, 64, 16, 6),  # three waves of two blocks
        (4, 64, 16, 8),
        # a slot is free 16 steps after the end of its row: 3 rows of 24 + 16 steps, then one of 64
        # that begins last: 184 steps
        (4, 24, 16, 6),
        (4, 24, 6, 5),  # 3 x 30 + 64 = 154
        (1, 24, 16, 2),
    ],
)
def test_blocks_until_all_rows_have_ended(rows, mean, late, blocks):
    assert phases._blocks(rows, longest=64, mean=mean, steps=32, late=late) == blocks


def test_packed_rows_hold_more_of_shorter_trajectories(capsys, planned):
    flags = "--estimate", "--hbm-gib=16", "--config.trainer.use_sample_packing=True"
    flags += ("--config.generator.sampling_params.max_generate_length=100",)
    flags += ("--config.trainer.micro_train_batch_size_per_gpu=2",)
    longest = phases_of(planned(capsys, *flags)[2])["gradient"]["runs"]
    mean = phases_of(planned(capsys, *flags, "--mean-response=10")[2])["gradient"]["runs"]
    assert mean < longest / 2


@pytest.mark.slow
def test_a_plan_makes_as_many_stand_ins_as_gpus_are_asked_for():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "jaxrl.plan", "--estimate", "--topology=h100:3", QUICKSTART]
    done = subprocess.run(
        [*command, "--config.generator.n_samples_per_prompt=15"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "h100:3, which need not be here" in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v9:2x4"], "--topology=v9:2x4 is not known; write KIND:SIZE"),
        (["--topology=v5p-63"], "v5e:2x4 or h100:8, with one of"),
        (["--topology=h100:64"], "XLA_FLAGS=--xla_force_host_platform_device_count=64"),
        (["--topology=h100:2x4"], "the size of GPUs is their number, as in h100:8"),
        (
            ["--topology=h100:8", "--chips-per-host=4"],
            "--chips-per-host=4 needs a --topology of v5e",
        ),
        (["--mean-response=0"], "--mean-response=0 must be more than 0 and at most"),
        (["--mean-response=1e6"], "--mean-response=1e+06 must be more than 0 and at most"),
        (["--hbm-gib=-1"], "--hbm-gib=-1 must be positive"),
        (["--config.trainer.policy.model.path=nowhere/else/none"], "nowhere/else/none"),
        (["--config.trainer.policy.mesh.tensor=3"], "trainer.policy.mesh"),
        (["--topologie=v5e:2x4"], "unknown argument '--topologie=v5e:2x4'"),
    ],
)
def test_bad_input_is_named(capsys, flags, message):
    assert plan.main([QUICKSTART, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_topology_without_its_compiler_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert plan.main([QUICKSTART, "--topology=v5e:2x4"]) == 2
    message = "--topology=v5e:2x4 needs the TPU compiler: pip install 'jaxrl[tpu]'"
    assert message in capsys.readouterr().err


def test_types_of_the_cloud_are_topologies():
    """Every row of the table of slices; v5e-8 is v5litepod-8, and of v5p the number is cores."""
    lines = [x.split("\t") for x in (ROOT / "tpu" / "accelerators.tsv").read_text().splitlines()]
    rows = {line[0]: line[1] for line in lines if line[0][0] in "v"}
    assert len(rows) > 20
    for name, size in rows.items():
        kind = name.partition("-")[0].replace("v5litepod", "v5e")
        assert topology.of_accelerator_type(name) == f"{kind}:{size}"
    assert topology.of_accelerator_type("v5e-8") == "v5e:2x4"
    for name in ("v5e:2x4", "v5p-63", "v5p-9", "v5e-2", "v5e-0", "v6e-12", "h100-8", "v6e-"):
        assert topology.of_accelerator_type(name) is None


def test_a_checkpoint_of_this_machine_settles_nothing_for_another(capsys, monkeypatch, tmp_path):
    """A run of the quickstart on this CPU recorded bf16=False."""
    recorded = tmp_path / "global_step_1" / "meta"
    recorded.mkdir(parents=True)
    (recorded / "metadata").write_text('{"config": {"trainer": {"bf16": false}}}')
    words = QUICKSTART, "--estimate", f"--config.trainer.ckpt_path={tmp_path}"
    assert plan.main(list(words)) == 0
    assert f"note: bf16=False: as in {tmp_path}/global_step_1\n" in capsys.readouterr().out
    assert plan.main([*words, "--topology=h100:4"]) == 0
    printed = capsys.readouterr().out
    assert "as in" not in printed
    assert "bf16=True" in printed


def test_columns_never_touch_and_sizes_change_their_unit_at_a_thousand(capsys, planned):
    assert report.size(999 * 2**10) == "999.00 KiB"
    assert report.size(1018.53 * 2**10) == "0.99 MiB"
    assert report.size(1007.33 * 2**20) == "0.98 GiB"
    _, printed, figures = planned(capsys, "--estimate")
    for phase in figures["phases"]:
        (row,) = (x for x in printed.splitlines() if re.match(f"{phase['name']} +\\d+ ", x))
        assert len(row[19:].split()) == 1 + 5 * 2 + 4 + 1  # sizes are a number and its unit


def test_help(capsys):
    assert plan.main(["--help"]) == 0
    assert "--topology=v5e:2x4" in capsys.readouterr().out


@pytest.mark.slow  # the TPU compiler
def test_a_slice_that_is_not_here(capsys, planned):
    pytest.importorskip("libtpu")
    status, printed, report = planned(capsys, "--topology=v5e:2x4", *MESH)
    assert status == 0, printed
    assert (report["devices"], report["memory"]) == (8, 15.75 * GIB)
    # TPUs keep arrays in tiles of 8 x 128: shards as narrow as 32 take up to four times their
    # bytes. docs/plan.md has models whose shards fill their tiles, within 1 % of the sum
    share = 4 * PARAMETERS / 8
    assert 4 * share < phases_of(report)["apply"]["arguments"] < 4 * 4 * share
    assert not any(phase["estimated"] for phase in report["phases"])


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v5e:3x5"], "--topology=v5e:3x5 is not one that libtpu knows"),
        (["--topology=v5e:8"], "write the chips along each side, for example v5e:2x4"),
        (
            ["--topology=v5e:2x4", "--chips-per-host=3"],
            "--chips-per-host=3 of v5e must be 1, 4 or 8",
        ),
        (
            ["--topology=v5e:2x4", "--config.trainer.policy.mesh.fsdp=16"],
            "trainer.policy.mesh={'fsdp': 16}: the sizes must multiply to 8",
        ),
        (
            [
                "--topology=v5e:4x4",
                "--config.generator.inference_engine.hosts_per_engine=1",
                "--config.generator.inference_engine.tensor_parallel_size=8",
            ],
            "tensor_parallel_size=8 is 8, which does not divide 4 devices",  # those of a host
        ),
    ],
)
def test_slices_that_do_not_exist_or_do_not_suit_the_mesh(capsys, flags, message):
    pytest.importorskip("libtpu")
    assert plan.main([QUICKSTART, "--estimate", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow  # the TPU compiler
def test_each_host_samples_with_weights_of_its_own(capsys, planned):
    pytest.importorskip("libtpu")
    status, printed, report = planned(capsys, "--estimate", "--topology=v5e:4x4")
    assert status == 0
    assert "note: 4 processes of 4 devices: each samples 1/4 of the prompts" in printed
    _, _, alone = planned(capsys, "--estimate", "--topology=v5e:2x2")
    # a quarter of the rows on as many devices: a quarter of the cache; the same whole weights
    assert report["residents"]["KV cache"] == alone["residents"]["KV cache"] / 4
    assert report["residents"]["engine weights"] == alone["residents"]["engine weights"]
    # 4 devices hold the copy, a fourth each, in bfloat16, which "auto" means on a TPU; the final
    # norm of 64 in float32
    load, copy = phases_of(report)["load weights"], 2 * PARAMETERS + 2 * 64
    assert load["arguments"] == copy / 4
    assert load["sent"] == pytest.approx(copy * 15 / 16)
    status, printed, report = planned(
        capsys, "--estimate", "--topology=v5e:2x4", "--chips-per-host=4"
    )
    assert report["hosts"] == 2


@pytest.mark.slow  # the TPU compiler
def test_engines_of_two_hosts_hold_half_and_compile(capsys, planned):
    """On v5e:4x4 two engines of 2 x 4 chips: a weight of 64 is over 8 of them, not over 4."""
    pytest.importorskip("libtpu")
    spanning = [
        "--config.generator.inference_engine.tensor_parallel_size=8",
        "--config.generator.inference_engine.hosts_per_engine=2",
    ]
    status, printed, report = planned(capsys, "--topology=v5e:4x4", *MESH[1:], *spanning)
    assert status == 0, printed
    assert "note: 4 processes of 4 devices: 2 together sample 1/2 of the prompts" in printed
    load = phases_of(report)["load weights"]
    assert not load["estimated"]
    # weights come beside the decode weights and what the trainer keeps
    stay = report["residents"]
    assert load["beside"] == stay["engine weights"] + stay["parameters"] + stay["optimizer"]
    # each engine has all weights, in bfloat16 but for the final norm of 64: a sixteenth goes to
    # each device, then the half that the other engine has of the eighth that is its own
    # left out, as many hosts as the eight chips need are taken
    flags = "--estimate", "--topology=v5e:4x4", *MESH[1:], spanning[0]
    _, printed, report = planned(capsys, *flags)
    assert "note: hosts_per_engine=2: by memory, beside" in printed
    copy = 2 * PARAMETERS + 2 * 64
    assert phases_of(report)["load weights"]["sent"] == pytest.approx(copy / 16 + copy / 8 / 2)


@pytest.mark.slow  # the TPU compiler
def test_programs_of_one_host_of_many_compile(capsys, planned):
    pytest.importorskip("libtpu")
    status, printed, report = planned(capsys, "--topology=v5e:4x4", *MESH[1:])
    assert status == 0, printed
    assert not any(phase["estimated"] for phase in report["phases"])
    # what the trainer keeps is there while the engine samples
    assert phases_of(report)["decode"]["beside"] >= 3 * 4 * PARAMETERS / 16


def test_adapters_rest_on_a_base_that_the_reference_shares(capsys, planned):
    rank = "--config.trainer.policy.model.lora.rank=4"
    _, _, report = planned(capsys, "--estimate", WITH_REFERENCE, rank)
    stay = report["residents"]
    assert stay["base"] == pytest.approx(4 * PARAMETERS / 8, rel=0.1)
    assert "reference" not in stay
    # of 2 layers: A 64 x 4 and B 4 x 64 of q and o, 4 x 32 for k and v, 4 x 256 for gate and up,
    # A 256 x 4 and B 4 x 64 of down
    pairs = 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 256)) * 4
    assert 4 * pairs / 8 <= stay["parameters"] <= 4 * pairs
    phases = phases_of(report)
    # frozen weights: their own gradients are not computed
    assert phases["gradient"]["flops"] == pytest.approx(2 * phases["reference"]["flops"])
    assert phases["apply"]["arguments"] == pytest.approx(4 * stay["parameters"], rel=0.1)


def test_a_critic_is_a_second_model(capsys, planned):
    path = ROOT / "configs" / "guess_number_ppo.py"
    _, _, report = planned(capsys, "--estimate", f"--config={path}")
    names = list(phases_of(report))
    assert names.index("values") < names.index("critic gradient") < names.index("gradient")
    assert report["residents"]["critic optimizer"] >= 2 * report["residents"]["critic"]


def test_weights_and_moments_in_host_memory_leave_the_device(capsys, planned):
    flag = "--config.trainer.policy.optimizer_config.offload_after_step=True"
    _, printed, report = planned(capsys, "--estimate", flag)
    assert report["residents"]["optimizer"] == 0
    assert "in host memory" in printed
    assert phases_of(report)["apply"]["beside"] == 0
    # the one host has the two moments of all its eight devices, whose data axis repeats nothing
    assert report["host"] == {"optimizer": pytest.approx(2 * 4 * PARAMETERS, rel=0.1)}
    assert "stays in a host's memory\n  optimizer " in printed  # which a CPU shares


def test_a_copy_of_the_weights_stays_on_the_host_that_sends_what_changes_in_them(capsys, planned):
    engine = "--config.generator.inference_engine"
    servers = f"{engine}.run_engines_locally=False", f"{engine}.remote_urls=['http://a:1']"
    transfer = *servers, f"{engine}.weight_transport=transfer"
    _, _, report = planned(capsys, "--estimate", *transfer)
    assert report["host"] == {}
    delta = f"{engine}.weight_delta=True", f"{engine}.model_dtype=bfloat16"
    _, printed, report = planned(capsys, "--estimate", *transfer, *delta)
    # two bytes each; the final norm of 64 travels in float32
    assert report["host"] == {"weights as sent": 2 * PARAMETERS + 2 * 64}
    assert "not counted, nor are the weights as sent that its hosts keep too" in printed


def test_what_does_not_fit_into_a_host_is_refused():
    """24 GiB of two kinds on each of 2 x 4 devices of two hosts: 192 GiB a host."""
    stay = [
        Resident(name, 0, frozenset(range(8)), waits=24 * GIB)
        for name in ("parameters", "optimizer")
    ]
    run = SimpleNamespace(machine=SimpleNamespace(hosts=2, host_memory=192e9), held_bytes=lambda: 0)
    of_host = host_residents(run, stay)
    assert of_host == {"parameters": 96 * GIB, "optimizer": 96 * GIB}
    refusal = refused_host(run.machine, of_host)  # 192e9 bytes are 178.8 GiB
    assert refusal.startswith("a host has 178.81 GiB of memory, and parameters 96.00, optimizer 96")
    run.machine.host_memory = 192 * GIB
    assert refused_host(run.machine, of_host) is None


@pytest.mark.parametrize(("state_dtype", "of_float32"), [("bfloat16", 1 / 2), ("int8", 1 / 4)])
def test_moments_in_fewer_bits_are_counted(capsys, planned, state_dtype, of_float32):
    """Of rows of 16 to 256 numbers, each with a scale of 4 bytes, scales are a tenth."""
    flag = f"--config.trainer.policy.optimizer_config.state_dtype={state_dtype}"
    _, _, report = planned(capsys, "--estimate", *MESH, flag)
    exact = 2 * 4 * PARAMETERS / 8
    held = report["residents"]["optimizer"] / exact
    assert of_float32 <= held < of_float32 * (1.1 if state_dtype == "bfloat16" else 1.35)


def test_from_the_second_turn_on_every_sample_prefills_for_itself(capsys, planned):
    """A prompt of 16 tokens is one tile of 16, and less than a page: each of the eight devices
    prefills it, 32 x 8 tiles. Then two turns of 32 x 16 samples: of 40 tokens 40 - 16 - 2 x 6 = 12
    were told, six before each, one tile. 256 + 2 x 512 = 1280 tiles, 64 in a chunk.
    """
    turns = "--config.generator.max_turns=3", "--config.generator.max_input_length=40"
    _, _, report = planned(capsys, "--estimate", *MESH, *turns)
    assert phases_of(report)["prefill"]["runs"] == 1280 / 64


def test_a_turn_prefills_what_its_conversation_was_told(capsys, planned):
    """Of inputs of 840 tokens 840 - 16 - 4 x 6 = 800 were told, 200 before each of four turns: 13
    tiles of 16.
    """
    flags = "--config.generator.max_turns=5", "--config.generator.max_input_length=840"
    _, _, report = planned(capsys, "--estimate", *MESH, *flags)
    assert phases_of(report)["prefill"]["runs"] == (32 * 8 + 4 * 512 * 13) / 64


def test_the_samples_of_a_prompt_that_fills_a_page_share_it(capsys, planned):
    """32 prompts of 65 tokens: 64 to prefill, four tiles of 16; 64 tiles in a chunk."""
    length = "--config.trainer.max_prompt_length=65"
    _, _, report = planned(capsys, "--estimate", *MESH, length)
    assert phases_of(report)["prefill"]["runs"] == 32 * 4 / 64


@pytest.mark.slow
def test_prefill_and_decode_are_one_program_and_cost_what_is_theirs(capsys, planned):
    """With heads split over two devices a chunk sums the activations of its 128 tokens, 64 wide:
    embeddings, attention and MLP of the first layer; of the second only keys and values are wanted.
    A ring of two sends each sum once. A block decodes six tokens.
    """
    tensor = "--config.generator.inference_engine.tensor_parallel_size=2"
    _, _, report = planned(capsys, tensor)
    prefill, decode = (phases_of(report)[name] for name in ("prefill", "decode"))
    for name in ("arguments", "results", "aliased", "temporaries", "peak"):
        assert prefill[name] == decode[name]
    assert prefill["collectives"] == {"all-reduce": prefill["runs"] * 3 * 128 * 64 * 4}
    # 2 FLOPs for each weight of the layers, but for norms, and for the head of each token drawn
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256)
    products = 2 * layers * 128 * prefill["runs"] / 2  # on each of the two
    assert products < prefill["flops"] < 1.1 * products
    products = 2 * (layers + 64 * 48) * 128 * 6 / 2
    assert products < decode["flops"] < 1.1 * products


@pytest.mark.slow
def test_rows_that_the_pages_hold(capsys, planned):
    """Rows of a prompt of 129 tokens and 200 drawn: 328 positions are kept, six pages of 64. The 16
    samples of a prompt share two of them, so a group has 2 + 16 x 4 = 66 pages. Those of 100 tokens
    have 228 positions: four pages, 2 + 16 x 2 = 34 a group.
    """
    # the budget of a page: 64 positions x 2 layers x 2 x 2 heads x 16 x 4 bytes
    page, weights = 64 * 2 * 2 * 2 * 16 * 4, 4 * PARAMETERS
    memory = (100.5 * page + weights) / 0.5
    stay = 3 * 4 * PARAMETERS / 8  # parameters and moments
    flags = (
        f"--hbm-gib={(memory + stay) / GIB}",
        "--config.trainer.max_prompt_length=129",
        "--config.generator.sampling_params.max_generate_length=200",
        "--config.generator.inference_engine.gpu_memory_utilization=0.5",
    )
    _, printed, report = planned(capsys, "--estimate", *flags)
    cache = report["cache"]
    assert (cache["pages"], cache["page"], cache["slots"]) == (100, 64, 64)
    # a group, and of the 34 pages that are left 32 for eight rows of another
    assert cache["longest"] == 16 + 8
    assert "100 pages of 64 positions on a device; of its 64 rows these hold 24 of the" in printed
    # so 512 rows need 512 / (8 x 24): three waves of seven blocks of 32 tokens
    decode = phases_of(report)["decode"]
    assert (decode["runs"], decode["live"]) == (3 * 7, 24 / 64)
    assert "62% of the decoded rows are dead" in printed
    _, printed, report = planned(capsys, "--estimate", *flags, "--mean-response=100")
    # two groups, and of the 32 that are left 30 for 15 rows
    assert report["cache"]["mean"] == 2 * 16 + 15
    assert "24 of the longest, 47 of the mean response" in printed


MIXTURE = (
    f"--config.trainer.policy.model.path={ROOT / 'configs' / 'tiny_mixture_model'}",
    "--config.trainer.policy.mesh.expert=8",
    "--config.trainer.policy.mesh.fsdp=1",
    "--config.trainer.expert_exchange=all_to_all",
)


@pytest.mark.slow
def test_the_compiler_sends_to_experts_what_the_estimate_says(capsys, planned):
    """Two layers of 8 experts, of which a token has two, 64 numbers wide, in float32.

    One of two is a device's own with a probability of 1/4: of 768 tokens of a gradient 1.25 x 192
    = 240 find a place for each device, of 1,536 of a forward pass 480. A place sends 64 x 4 bytes
    and 2 x 8 of routes there and 64 x 4 back; of gradients 64 x 4 twice and 2 x 4.
    """
    sent = {"log-probs": 2 * 7 * 480 * (272 + 256)}
    sent["gradient"] = 2 * 2 * 7 * 240 * (272 + 256 + 520)  # in two updates
    _, printed, report = planned(capsys, "--estimate", *MIXTURE)
    found = phases_of(report)
    assert {name: found[name]["collectives"]["experts"] for name in sent} == sent
    assert "note: expert_exchange all_to_all (trainer.expert_exchange; of 768 tokens a" in printed
    # beside it, embeddings: each device has an eighth of their width and looks up all tokens; the
    # gradient goes the same way back
    embedded = {"log-probs": 1536 * 64 * 4 * 7 / 8, "gradient": 2 * 2 * 768 * 64 * 4 * 7 / 8}
    _, _, report = planned(capsys, *MIXTURE)
    found = phases_of(report)
    for name, to_experts in sent.items():
        assert found[name]["collectives"]["all-to-all"] == to_experts + embedded[name]


@pytest.mark.parametrize(
    ("changes", "prompts"),
    [
        ({"data.val_data": []}, 0),
        ({"trainer.eval_interval": -1}, 0),
        ({}, 8),
        ({"data.val_data": ["not/here.parquet"]}, 1024),  # a plan needs no data
    ],
)
def test_prompts_that_an_evaluation_has(changes, prompts):
    data = {"data.val_data": ["jaxrl.envs.toys.sort_digits:prompts(size=8, seed=1)"]}
    assert _evaluated(cfg.apply_overrides(cfg.TrainConfig(), data | changes)) == prompts
