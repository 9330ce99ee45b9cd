"""The benchmarks run on a tiny shape and write what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import (
    agreement,
    baselines,
    capacity,
    chaos,
    collectives,
    compiled,
    decode,
    delta_rule,
    drafts,
    eight_bits,
    engine_host,
    environment_workers,
    exact,
    experts,
    gradients,
    grammars,
    grpo_step,
    long_context,
    losses,
    memory,
    mismatch,
    overhead,
    overlap,
    paged_attention,
    plan_memory,
    prefix_sharing,
    rollout,
    rollout_file,
    rollout_table,
    roofline,
    sandbox,
    serve,
    staleness,
    steady_memory,
    tail,
    tinker,
    tinker_cookbook,
    tool_use,
    train_step,
    weight_delta,
    weight_sync,
)
from benchmarks.grpo_step import make_workload, skewed_lengths
from benchmarks.shapes import SHAPES
from benchmarks.systems import torch_losses
from jaxrl import config as cfg
from jaxrl.losses import LOSSES
from jaxrl.models.exact import choose_tiles
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.tools.compare.variants import parse_variants
from tests.envs.test_sandbox import needs_sandbox

ROOT = Path(__file__).parents[2]
TOY = TransformerConfig(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
)


def run(benchmark, tmp_path, capsys, *flags):
    output = tmp_path / "result.json"
    assert benchmark.main(["--smoke", f"--json={output}", *flags]) == 0
    return capsys.readouterr().out, json.loads(output.read_text())


@pytest.mark.parametrize(
    "benchmark_module",
    [
        agreement,
        capacity,
        chaos,
        collectives,
        compiled,
        decode,
        engine_host,
        environment_workers,
        experts,
        gradients,
        grpo_step,
        losses,
        memory,
        overhead,
        overlap,
        paged_attention,
        plan_memory,
        rollout,
        rollout_file,
        rollout_table,
        sandbox,
        serve,
        staleness,
        steady_memory,
        tinker,
        tinker_cookbook,
        tool_use,
        train_step,
        weight_delta,
        weight_sync,
    ],
)
def test_help(benchmark_module, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        benchmark_module.main(["--help"])
    assert "Claim: " in capsys.readouterr().out


def test_rollout_file(tmp_path, capsys):
    _, report = run(rollout_file, tmp_path, capsys)
    assert report["savez_compressed"]["bytes"] < report["savez"]["bytes"]


def test_steady_memory(tmp_path, capsys):
    printed, report = run(steady_memory, tmp_path, capsys)
    assert [row["step"] for row in report["rows"]] == [2, 4, 6, 8]
    assert report["rows"][-1]["metrics.jsonl"] > 0 and "a step: rss " in printed


@pytest.mark.slow  # what it times: tests/tools/tinker
def test_tinker(tmp_path, capsys):
    output = tmp_path / "result.json"
    flags = ["--shape=smoke", "--rounds=1", "--tokens=2", "--tenants", "1", "2"]
    assert tinker.main([*flags, f"--json={output}"]) == 0
    report = json.loads(output.read_text())
    assert [(row["tenants"], row["same bits"]) for row in report["training"]] == [
        (1, True),
        (2, True),
    ]
    assert [row["adapters"] for row in report["decoding"]] == [0, 1, 2]


def test_the_cookbooks_problems_and_rewards():
    (row, other) = list(tinker_cookbook.cookbook_problems(steps=2))[:: tinker_cookbook.GROUPS]
    # np.random.RandomState(0): 44, 47; the second step begins with its own
    assert row["prompt"].endswith("User: What is 44 + 47?\n\nAssistant:")
    assert other["prompt"] != row["prompt"]
    end = tinker_cookbook.END
    answers = [f" 91{end}", f" 44 and 91{end}", " 91", f" 9 1{end}", f" none{end}"]
    assert [tinker_cookbook.right(text, row) for text in answers] == [1, 1, 1, 0, 0]
    assert [tinker_cookbook.unended(text) for text in answers] == [0, 0, 1, 0, 0]


def test_engine_host(tmp_path, capsys):
    _, report = run(engine_host, tmp_path, capsys)
    (row,) = report["rows"]
    assert row.keys() == {"slots", "admit_ms", "turn_ms", "end_ms"}
    assert row["slots"] == 16 and min(row.values()) > 0


def test_capacity(tmp_path, capsys):
    _, report = run(capacity, tmp_path, capsys)
    assert report["pages_at_once"] > 3 * report["slots_at_once"] and report["suspended"] > 0
    assert report["pages_seconds"] < report["slots_seconds"]


def test_paged_attention(tmp_path, capsys):
    _, report = run(paged_attention, tmp_path, capsys)
    assert [row["rows_ms"] > 0 < row["pages_ms"] for row in report["rows"]] == [True, True]


@needs_sandbox
def test_sandbox(tmp_path, capsys):
    printed, report = run(sandbox, tmp_path, capsys)
    assert "more than outside" in printed
    assert set(report["costs"]) == {"outside", "sandbox", "input"}
    assert all(costs["cpu_seconds"] > 0 for costs in report["costs"].values())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_grpo_step(tmp_path, capsys, device):
    printed, report = run(grpo_step, tmp_path, capsys, f"--device={device}")
    assert "x ours" in printed
    (result,) = report["results"]
    assert set(result["rates"]) == {"matmul_flops", "bandwidth"}
    assert [(row["workload"], row["system"]) for row in result["rows"]] == [
        ("full", "jaxrl"),
        ("skewed", "jaxrl"),
    ]
    phases = {"generation", "reference", "update", "total"}  # one update: no old log-probs
    for row in result["rows"]:
        assert set(row["seconds"]) == phases | {"cpu"}
        assert set(row["fraction_of_matmul_rate"]) == phases
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert row["times_ours"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_decode(tmp_path, capsys, device):
    printed, report = run(decode, tmp_path, capsys, f"--device={device}")
    assert "% of bound" in printed
    (result,) = report["results"]
    assert [(r["batch"], r["sampling"]) for r in result["rows"]] == [
        (batch, mode) for batch in (1, 2) for mode in ("greedy", "sampled")
    ]
    assert {"tokens_per_second", "decode_step_ms", "bound_step_ms"} <= set(result["rows"][0])
    split = result["split_ms"]
    parts = [split[name] for name in ("attention", "mlp", "head", "sampling")]
    assert sum(parts) == pytest.approx(split["whole"])


def test_rollout(tmp_path, capsys):
    printed, report = run(rollout, tmp_path, capsys, "--repeats=1")
    assert "% of the bound" in printed
    assert [(row["system"], row["sampling"]) for row in report["rows"]] == [
        ("jaxrl", "greedy"),
        ("jaxrl", "sampled"),
    ]
    assert report["bound"] > 0


def test_a_vllm_that_does_not_answer_is_refused():
    with pytest.raises(SystemExit, match="--vllm-url=http://127.0.0.1:9 does not answer: .*start"):
        rollout_table.main(["--smoke", "--vllm-url=http://127.0.0.1:9"])


@pytest.mark.slow  # what it times: tests/rollout/test_engine.py
def test_rollout_table(tmp_path, capsys):
    ways = "plain", "two engines", "two engines, no lending"
    printed, report = run(rollout_table, tmp_path, capsys, "--no-peer", "--ways", *ways)
    assert "| | seconds | tokens/s | times plain | steps | tokens of a step |" in printed
    assert [row["way"] for row in report["rows"]] == list(ways)
    assert all(row["seconds"] > 0 for row in report["rows"])
    # limits of 3, 2, 2 and 2 for groups of 2: 18 tokens, over 4 slots at least 5 steps
    assert report["tokens"] == 18
    assert all(row["steps"] >= 5 for row in report["rows"])


@pytest.mark.slow  # it compiles all of them
def test_rollout_table_of_everything(tmp_path, capsys):
    _, report = run(rollout_table, tmp_path, capsys)
    ways = [row["way"] for row in report["rows"]]
    assert ways[-len(rollout_table.WAYS) :] == list(rollout_table.WAYS)
    steps = {row["way"]: row["steps"] for row in report["rows"]}
    assert steps.get("transformers", 3) == 3  # one batch, to its longest


@pytest.mark.slow
def test_environment_workers(tmp_path):
    """In a process of its own, which starts Ray."""
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.environment_workers", "--smoke"]
    subprocess.run([*command, f"--json={output}"], check=True, cwd=ROOT)
    rows = json.loads(output.read_text())["rows"]
    assert list(rows) == ["threads", "1 workers"]
    assert all(x > 0 for row in rows.values() for x in row.values())


def test_experts(tmp_path, capsys):
    _, report = run(experts, tmp_path, capsys)
    (row,) = report["rows"]
    assert (row["experts"], row["of a token"], row["tokens"]) == (8, 2, 32)
    ratio = row["grouped gradient ms"] / row["loop gradient ms"]
    assert row["gradient grouped / loop"] == pytest.approx(ratio)


def test_losses(tmp_path, capsys):
    printed, report = run(losses, tmp_path, capsys, "--repeats=1")
    assert "torch/ours" in printed
    assert [row["loss"] for row in report["rows"]] == list(torch_losses.LOSSES)
    assert all(row["seconds"] > 0 and row["torch_seconds"] > 0 for row in report["rows"])


def test_staleness_tables():
    runs = [
        {
            **{"method": "ppo", "max_staleness_steps": 8, "seed": seed, "half_at": half_at},
            **dict.fromkeys(("reward", "greedy", "effective_sample_size"), reward),
        }
        for seed, reward, half_at in ((1, 0.5, 70), (2, 0.7, None))
    ]
    # mean 0.6, standard deviation sqrt(2 * 0.1^2 / 1) = 0.14
    printed = staleness.tables(runs)
    assert "| reward, last 20 steps | 8 |\n|---|---|\n| `ppo` | 0.60 +- 0.14 |" in printed
    assert "| `ppo` | 70 / - |" in printed


@pytest.mark.parametrize(
    "module, option, message",
    [
        (chaos, "--kinds=sync,asynchronous", "--kinds: there is no 'asynchronous'; take of sync,"),
        (chaos, "--folder={0}", "--folder={0} exists; name a new one"),
        (chaos, "--json={0}/missing/x", "--json={0}/missing/x: {0}/missing is not a folder"),
        (staleness, "--json={0}", "--json={0} is a folder; add the name of a file"),
        (staleness, "--plot={0}/missing/x.png", "{0}/missing is not a folder that can be written"),
    ],
)
def test_options_are_checked_before_the_runs(
    tmp_path, capsys, monkeypatch, module, option, message
):
    monkeypatch.setattr(module, {chaos: "torment", staleness: "learn"}[module], None)
    with pytest.raises(SystemExit, match="^2$"):
        module.main([option.format(tmp_path)])
    assert message.format(tmp_path) in capsys.readouterr().err


@pytest.mark.slow
def test_tool_use(tmp_path, capsys):
    printed, report = run(tool_use, tmp_path, capsys, f"--plot={tmp_path / 'plot.png'}")
    assert [row["arm"] for row in report["runs"]] == ["grpo", "no_tool", "no_demonstrations"]
    for row in report["runs"]:
        assert list(row["scores"]) == ["0", "1", "2"]
        assert len(row["reward"]) == len(row["calls"]) == len(row["malformed"]) == 2
        assert printed.count(f"| `{row['arm']}` | 1 |") == 1
    assert (tmp_path / "plot.png").stat().st_size > 0


@pytest.mark.slow
def test_staleness(tmp_path, capsys):
    printed, report = run(staleness, tmp_path, capsys, f"--plot={tmp_path / 'plot.png'}")
    assert "| `log_linear` |" in printed
    assert (tmp_path / "plot.png").stat().st_size > 0
    # lockstep: of four steps the first is on policy, the second one step old, then two
    assert [row["staleness"] for row in report["runs"]] == [1.25, 1.25]


@pytest.mark.slow
def test_train_step(tmp_path, capsys):
    printed, report = run(train_step, tmp_path, capsys)
    assert "packed/this" in printed
    packed, by_length, padded = report["results"][0]["rows"]
    assert [row["system"] for row in (packed, by_length, padded)] == ["packed", "sorted", "padded"]
    # 2 to 16 tokens, 53 in all: two packed microbatches of 2 x 16; four padded ones
    assert packed["efficiency"] == 53 / 64
    assert by_length["efficiency"] == 53 / 96
    assert padded["efficiency"] == 53 / 128
    assert all(row["peak_bytes"] > 0 and row["mfu"] > 0 for row in report["results"][0]["rows"])


def test_flops_of_an_update():
    # a layer: 16 x 8 x (2 x 2 + 2 x 1) + 3 x 16 x 32 = 2304; head 16 x 64; 2 tokens see 1 + 2
    forward = 2 * 2304 * 2 + 4 * 2 * 8 * 3 + 2 * 1024 * 2
    assert train_step.update_flops("smoke", [2]) == 3 * forward


def test_memory(tmp_path, capsys):
    printed, report = run(memory, tmp_path, capsys)
    assert "64 tokens   naive" in printed
    (row,) = report["rows"]
    assert row["naive"] > 64 * 512 * 4  # the logits, float32
    assert row["xla"] > 0  # our head, by the kernel of a CPU


@pytest.mark.slow  # what it times: tests/parallel/test_meshes.py
def test_collectives_of_host_devices(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collectives, "HOST_DEVICES", (1, 2))
    printed, report = run(collectives, tmp_path, capsys, "--repeats=1")
    assert "times one" in printed
    assert [row["devices"] for row in report["host"]] == [1, 2]


@pytest.mark.parametrize("benchmark_module", [collectives, memory])
def test_a_topology_without_its_compiler_is_refused(benchmark_module, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--topology=v5e:2x4 needs the TPU compiler: pip install"):
        benchmark_module.main(["--topology=v5e:2x4"])


def test_mesh_axes_of_a_group():
    mesh = {"data": 1, "fsdp": 4, "tensor": 2}  # device = 2 fsdp + tensor
    assert collectives.mesh_axes((0, 2, 4, 6), mesh) == "fsdp"
    assert collectives.mesh_axes((4, 5), mesh) == "tensor"
    assert collectives.mesh_axes(range(8), mesh) == "fsdp+tensor"


def test_flops_of_a_step():
    # a layer: q and o 4 x 4 each, k and v 4 x 2 each, MLP 3 x 4 x 6
    assert roofline.layer_params(TOY) == 2 * (16 + 16 + 8 + 8 + 72) == 240
    # positions 0, 1, 2 see 1 + 2 + 3 = 6 positions: 2 x 240 x 3 + 4 x 2 layers x 4 x 6
    assert roofline.layers_flops(TOY, 0, 3) == 1440 + 192
    assert roofline.head_flops(TOY, 5) == 2 * 4 * 10 * 5
    flops = roofline.step_flops(TOY, prompts=1, prompt_length=2, lengths=[1, 2])
    # forward: 3 + 4 positions seeing 6 and 10, 3 logits of 80 FLOPs
    assert flops["reference"] == 480 * 7 + 32 * 16 + 240 == 4112
    assert flops["update"] == 3 * 4112
    # prefill 2 positions seeing 3; then 1 and 2 positions seeing 3 and 3 + 4
    assert flops["generation"] == 480 * 5 + 32 * 13 + 240
    assert flops["total"] == 5 * 4112 + flops["generation"]


def test_bytes_of_a_decode_step():
    # weights 240 + head 40; cache 2 x 2 layers x 1 head x 2 wide x 5 positions x 3 rows
    assert roofline.decode_step_bytes(TOY, batch=3, context=5, bytes_per_element=4) == 4 * 400


def test_lengths_and_prompts(tmp_path):
    lengths = skewed_lengths(32, 128)
    assert (sum(lengths), max(lengths), min(lengths)) == (1252, 128, 1)  # mean 39.1
    work = make_workload(tmp_path, "smoke")
    assert {len(text) for text in work.read_prompts()} == {8}
    assert work.lengths["full"] == [8] * 8


@pytest.mark.slow
def test_agreement(tmp_path, capsys):
    variants = "shared prompt", "one stale matrix"
    printed, rows = run(agreement, tmp_path, capsys, "--variants", *variants)
    assert [row["variant"] for row in rows] == list(variants)
    assert all(name in printed for name in variants)
    for row in rows:
        assert 240 <= row["tokens"] < 248
        assert 0 < row["of_new_version"] < 240
    # pages were found; the other variant computes again what is in flight, by the clock
    assert rows[0]["prefilled"] < rows[0]["prompt_tokens"] - 10 * 64
    assert rows[0]["older_context"] > rows[1]["older_context"] == 0  # of those in flight


@pytest.mark.slow  # a server in a process of its own
def test_serve(tmp_path, capsys):
    printed, report = run(serve, tmp_path, capsys)
    assert "first token" in printed
    assert [(row["system"], row["streams"]) for row in report["rows"]] == [
        ("jaxrl", 1),
        ("jaxrl", 2),
    ]
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])


@pytest.mark.slow  # a process of its own: its memory is measured
def test_the_plan_of_an_update_is_the_memory_that_it_takes(tmp_path):
    file = tmp_path / "memory.json"
    command = [sys.executable, "-m", "benchmarks.plan_memory", f"--json={file}"]
    own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    subprocess.run(command, check=True, env=own | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT)
    report = json.loads(file.read_text())
    assert report["measured"] >= 2e9
    assert max(report["planned"].values()) == pytest.approx(report["measured"], rel=0.2)


@pytest.mark.slow
def test_overhead(tmp_path, capsys):
    printed, report = run(overhead, tmp_path, capsys)
    assert "3 pairs" in printed
    assert len(report["rows"]) == 3
    assert all(min(row.values()) > 0 for row in report["rows"])


@pytest.mark.slow  # another process
@pytest.mark.slow
def test_weight_delta(tmp_path, capsys):
    printed, report = run(weight_delta, tmp_path, capsys)
    assert "2 receivers, 2% changed" in printed
    (trained,) = report["runs"]
    assert len(trained["shares"]) == 2 and 0 < max(trained["shares"]) < 0.5
    whole, delta = report["pause"]
    sent = whole["whole_mib"] / 2  # to the first, which the second pulls from
    assert whole["sent_mib"] == pytest.approx(sent)
    assert delta["sent_mib"] == pytest.approx(0.02 * 2 * sent, rel=0.2)  # 8 bytes of 4
    assert "folder, changes: " in printed
    written = {row["way"]: row["mib"] for row in report["folder"]}
    assert written["changes"] < written["whole"] < written["Hugging Face folder"]


@pytest.mark.slow
def test_weight_sync(tmp_path, capsys):
    printed, report = run(weight_sync, tmp_path, capsys)
    names = [row["transport"] for row in report["rows"]]
    assert names[0] == "transfer, groups of 0.02 MiB" and names[-1] == "bound: memory"
    assert all(name in printed for name in names)
    assert all(row["seconds"] > 0 for row in report["rows"])


def test_attention_of_long_rows_has_no_square():
    assert long_context.one_core(1024, timed=False)["square"] == 0
    # [1, 2, 64, 64] of plain scores has the row's length twice
    scores = "f32[1,2,64,64]{3,2,1,0} dot(f32[1,2,64,8]{3,2,1,0} q, f32[1,2,8,64]{3,2,1,0} k)"
    assert long_context.squares(scores, 64, 1) == 2 * 64 * 64


def test_decays_of_all_chunks_are_found():
    assert delta_rule.squares("f32[8,128,128] a, f32[64,64] b, f32[128,16,64,64] c") == 128 * 2**18
    assert delta_rule.squares("f32[8,128,128] a, f32[64,128] b") == 0


@pytest.mark.slow
def test_guesses_that_are_right_take_fewer_steps():
    model = config_from_hf(SHAPES["smoke"])
    engines = {n: drafts.engine_of(model, init_params(model, 0), 2, n) for n in (0, 3)}
    _, share, same = drafts.measure(engines, 2, 0.0, model.vocab_size)
    assert same == 4
    assert share[0] == 1
    assert share[3] > 1.5


@pytest.mark.slow
def test_the_longest_first_takes_fewer_blocks():
    found = tail.order(4, 0, config_from_hf(SHAPES["smoke"]))
    assert found["longest first"][1] < found["order of the data"][1]


@pytest.mark.slow
def test_trees_of_groups_have_fewer_tokens(capsys):
    given = ["--shapes=smoke", "--prompts=96", "--samples=4", "--answer=16", "--repeats=1"]
    assert prefix_sharing.main(given) == 0
    flat, tree = capsys.readouterr().out.splitlines()[-2:]
    # 4 rows of 128 (the bucket of 112) against 96 + 4 x 16 = 160 tokens in two of them
    assert [line.split("|")[3:5] for line in (flat, tree)] == [
        [" flat ", " 512 "],
        [" tree ", " 256 "],
    ]


@pytest.mark.slow
def test_answers_with_a_grammar_are_as_long_as_free_ones():
    model = config_from_hf(SHAPES["smoke"] | {"vocab_size": 300})
    constrain = grammars.constrain_of(model, files=3)
    engine = drafts.engine_of(model, init_params(model, 0), 2, 0)
    found = grammars.measure(engine, 2, constrain)
    assert found.keys() == {"free", "one of a schema", "all of a schema"}
    assert grammars.mask_seconds(constrain, 5) > 0


@pytest.mark.slow  # it compiles five engines
def test_a_sampler_in_8_bits_is_apart_from_the_trainer():
    apart = eight_bits.differences(2, rows=2, drawn=8)
    assert {way: x.shape for way, x in apart.items()} == dict.fromkeys(eight_bits.WAYS, (2, 8))
    assert apart.pop("none").max() < 1e-4
    assert all(x.mean() > 1e-3 for x in apart.values())


@pytest.mark.parametrize("way", mismatch.WAYS)
def test_a_run_without_the_correction_is_for_the_benchmark_alone(way, tmp_path):
    config = cfg.resolve(mismatch.config_of(way, 1, 40, tmp_path))
    if not way.endswith(mismatch.ALONE):
        cfg.validate(config)
        return
    with pytest.raises(ValueError, match="nothing in the objective corrects for it"):
        cfg.validate(config)
    with mismatch.unchecked():
        cfg.validate(config)


@pytest.mark.slow  # it compiles every program twice
def test_the_exact_mode_has_no_difference():
    model = config_from_hf(SHAPES["smoke"])
    tiles = choose_tiles("log_probs", "cpu", tokens=16, parts=1)
    params = init_params(model, 0)
    drawn, largest, apart = exact.difference(model, params, jnp.bfloat16, tiles, tokens=500)
    assert drawn >= 500
    assert largest == apart == 0


@pytest.mark.parametrize("task", baselines.TASKS)
def test_baselines_are_valid_and_each_is_another_config(task):
    found = baselines.methods(baselines.TASKS[task], 100, [])
    names = [x.name for x in found]
    assert names == list(baselines.TASKS[task].pairs)
    for variant in found:
        cfg.validate(variant.config, num_devices=1)
    settings = [json.dumps(cfg.get_config_as_dict(x.config), sort_keys=True) for x in found]
    assert len(set(settings)) == len(settings)


def test_baselines_are_chosen_by_name():
    task = baselines.TASKS["sort_digits"]
    (nsr,) = baselines.methods(task, 100, ["nsr"])
    assert nsr.config.trainer.algorithm.advantage_kwargs == {
        "threshold": 0.99,
        "positive_weight": 0.0,
    }
    with pytest.raises(ValueError, match="'grop' is none of regular"):
        baselines.methods(task, 100, ["grop"])


def test_the_two_rewards_of_baselines():
    extras = {"reward_spec": {"ground_truth": "25"}}
    said = {"25": (1, 1), "52": (1, 0), "2": (0, 0.5), "251": (0, 1)}
    for action, (short, placed) in said.items():
        assert baselines.short(action, stopped=True) == short
        assert baselines.placed(action, extras) == placed
    assert baselines.short("25", stopped=False) == 0


def test_the_gradients_that_are_compared_are_those_of_other_objectives():
    config = cfg.resolve(baselines.sort_digits(100))
    found = parse_variants(config, gradients.choices(), None)
    assert set(LOSSES) - {"luffy", "chord"} < {x.name for x in found}
    settings = [json.dumps(cfg.get_config_as_dict(x.config), sort_keys=True) for x in found]
    assert len(set(settings)) == len(settings)
    with_bonus = [x.name for x in found if x.config.trainer.algorithm.use_entropy_loss]
    assert with_bonus == ["entropy alone"]
