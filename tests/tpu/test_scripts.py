"""The scripts of tpu/: what they print, refuse and do. No cloud is asked; the chips are nowhere."""

import json
import math
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TPU = ROOT / "tpu"
SLICE = ["--project=my-project", "--zone=us-east5-b", "--name=first"]
GCLOUD = "gcloud compute tpus {} --project=my-project --zone=us-east5-b {}".format
UNPACK = (
    "mkdir -p jaxrl/models && cd jaxrl && if [ -f tpu/host/train.sh ]; then "
    "bash tpu/host/train.sh idle; fi && find . -mindepth 1 -maxdepth 1 ! -name .venv "
    "! -name models ! -name runs -exec rm -rf {} + && tar -xzf ../jaxrl.tar.gz "
    "&& echo COMMIT > COMMIT && bash tpu/host/install.sh --chips=8"
)
TRAIN = "cd jaxrl && bash tpu/host/train.sh"
DRY_RUNS = {  # command -> what it prints: the commands, word for word
    "create.sh --type=v6e-8": [
        GCLOUD("tpu-vm create", "first --version=v2-alpha-tpuv6e --accelerator-type=v6e-8")
    ],
    "create.sh --type=v5e-8 --spot --queued --queued-for=6h --service-account=a@b.c": [
        GCLOUD(
            "queued-resources create",
            "first --node-id=first --runtime-version=v2-alpha-tpuv5-lite "
            "--accelerator-type=v5litepod-8 --spot --service-account=a@b.c "
            "--valid-until-duration=6h",
        ),
        GCLOUD("queued-resources describe", "first '--format=value(state)'"),
    ],
    "create.sh --type=v5p-8 --internal-ip --network=n --subnetwork=s --runtime-version=v2": [
        GCLOUD(
            "tpu-vm create",
            "first --version=v2 --accelerator-type=v5p-8 --internal-ips --network=n --subnetwork=s",
        )
    ],
    "setup.sh --type=v6e-8 --models=gs://bucket/qwen --internal-ip": [
        "git archive --format=tar.gz --output=ARCHIVE COMMIT",
        GCLOUD("tpu-vm scp", "ARCHIVE first:jaxrl.tar.gz --internal-ip --worker=all"),
        GCLOUD("tpu-vm ssh", f"first --internal-ip --worker=all '--command={UNPACK}'"),
        GCLOUD(
            "tpu-vm ssh",
            "first --internal-ip --worker=all '--command=mkdir -p jaxrl/models/qwen && "
            "gcloud storage rsync gs://bucket/qwen jaxrl/models/qwen --recursive'",
        ),
    ],
    "run.sh --type=v5e-8 -- --config=configs/quickstart.py --config.trainer.seed=1": [
        GCLOUD(
            "tpu-vm ssh",
            f"first --worker=all '--command={TRAIN} start -- --config=configs/quickstart.py "
            "--config.trainer.seed=1'",
        )
    ],
    "run.sh --type=v6e-8 --module=jaxrl.sft --watch=60 -- --config=a.py": [
        GCLOUD(
            "tpu-vm ssh",
            f"first --worker=all '--command={TRAIN} start --module=jaxrl.sft --watch=60 -- "
            "--config=a.py'",
        )
    ],
    "run.sh --type=v6e-16 -- --config=a.py --config.trainer.ckpt_path=gs://b/c": [
        GCLOUD(
            "tpu-vm ssh",
            f"first --worker=all '--command={TRAIN} start --many -- --config=a.py "
            "--config.trainer.ckpt_path=gs://b/c'",
        )
    ],
    "run.sh --type=v6e-16 --module=jaxrl.evaluate -- --config=a.py": [
        GCLOUD(
            "tpu-vm ssh",
            f"first --worker=all '--command={TRAIN} start --many --module=jaxrl.evaluate -- "
            "--config=a.py'",
        )
    ],
    "run.sh --type=v6e-16 --stop": [
        GCLOUD("tpu-vm ssh", f"first --worker=all '--command={TRAIN} stop'")
    ],
    "logs.sh --follow --lines=9": [
        GCLOUD("tpu-vm ssh", "first --worker=0 '--command=tail -n 9 -F jaxrl/runs/logs/latest.log'")
    ],
    "logs.sh --fetch=here --worker=1": [
        GCLOUD(
            "tpu-vm ssh",
            "first --worker=1 '--command=tar -C jaxrl -czf jaxrl_runs.tar.gz "
            "--exclude=checkpoints --exclude=exports runs'",
        ),
        "mkdir -p here",
        GCLOUD("tpu-vm scp", "first:jaxrl_runs.tar.gz here/jaxrl_runs.tar.gz --worker=1"),
        "tar -C here -xzf here/jaxrl_runs.tar.gz",
        "rm here/jaxrl_runs.tar.gz",
    ],
    "notebook.sh --port=9999": [
        GCLOUD(
            "tpu-vm ssh",
            "first --worker=0 '--command=cd jaxrl && bash tpu/host/notebook.sh --port=9999' "
            "--ssh-flag=-t '--ssh-flag=-L 9999:127.0.0.1:9999'",
        )
    ],
    "delete.sh": [
        GCLOUD("tpu-vm delete", "first --quiet"),
        GCLOUD("tpu-vm list", "").rstrip(),
        GCLOUD("queued-resources list", "").rstrip(),
    ],
    "delete.sh --queued": [
        GCLOUD("queued-resources delete", "first --force --quiet"),
        GCLOUD("tpu-vm list", "").rstrip(),
        GCLOUD("queued-resources list", "").rstrip(),
    ],
    "host/install.sh --chips=8 --python=3.13": [
        "python3 -m pip install --quiet uv",
        "python3 -m uv venv --quiet --allow-existing --python=3.13 .venv",
        "python3 -m uv pip install --quiet --python=.venv/bin/python --editable '.[tpu,gcs]'",
        ".venv/bin/python tpu/host/check_chips.py 8",
    ],
    "host/train.sh start -- --config=a.py": [
        "mkdir -p runs/logs",
        "JAX_PLATFORMS=tpu,cpu PYTHONUNBUFFERED=1 setsid .venv/bin/python -m jaxrl.train "
        "--config=a.py > LOG 2>&1 &",
    ],
    "host/train.sh idle": [],
    "host/notebook.sh --port=8888": [
        "python3 -m uv pip install --quiet --python=.venv/bin/python jupyterlab",
        ".venv/bin/jupyter lab --no-browser --ip=127.0.0.1 --port=8888 --ServerApp.port_retries=0",
    ],
}
SCRIPTS = sorted(str(p.relative_to(TPU)) for p in TPU.rglob("*.sh") if p.name != "arguments.sh")


def start(command, *, folder=TPU, environment=None, **options):
    words = command if isinstance(command, list) else shlex.split(command)
    given = {"PATH": os.environ["PATH"], **(environment or {})}
    ran = subprocess.run(
        [str(folder / words[0]), *words[1:]],
        env=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **{"stdin": subprocess.DEVNULL, **options},
    )
    return ran.returncode, ran.stdout, ran.stderr


def dry(command):
    """What the command prints with --dry-run, in the slice `first`."""
    script, *words = shlex.split(command)
    slice_options = [] if script.startswith("host/") else SLICE
    verb = [words.pop(0)] if script == "host/train.sh" else []
    code, out, err = start([script, *verb, "--dry-run", *slice_options, *words])
    assert code == 0, err
    out = re.sub(r"/[^\s=]+/jaxrl\.tar\.gz", "ARCHIVE", out)
    out = re.sub(r"runs/logs/\d{8}_\d{6}\.log", "LOG", out)
    return re.sub(r"(ARCHIVE|echo) [0-9a-f]{7,40}\b", r"\1 COMMIT", out).splitlines()


@pytest.fixture
def without_gcloud(tmp_path, monkeypatch):
    """A gcloud that leaves a trace: a dry run must not call it."""
    program = tmp_path / "gcloud"
    program.write_text(f"#!/bin/sh\necho called >> {tmp_path}/called\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "called"


@pytest.mark.parametrize("command", DRY_RUNS)
def test_dry_run_prints_the_commands_and_runs_none(command, without_gcloud):
    assert dry(command) == DRY_RUNS[command]
    assert not without_gcloud.exists()


def test_every_script_has_a_dry_run_here():
    assert {command.split()[0] for command in DRY_RUNS} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_option(script):
    code, out, _ = start([script, "--help"])
    assert code == 0
    text = (TPU / script).read_text()
    options = " ".join(re.findall(r"^(?:flags|values)='(.*)'$", text, re.M)).split()
    missing = [option for option in [*options, "dry-run"] if f"--{option}" not in out]
    assert not missing
    assert "set -euo pipefail" in text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("create.sh", "--project is missing: give --project=VALUE, or set JAXRL_TPU_PROJECT"),
        ("create.sh --project=p1 --zone=us-east5-b --name=n", "--type is missing"),
        ("delete.sh --project=p1 --zone=us-east5 --name=n", "--zone=us-east5: no zone"),
        ("delete.sh --project=P1 --zone=us-east5-b --name=n", "--project=P1: no id of a project"),
        ("delete.sh --project=p1 --zone=us-east5-b --name=my_tpu", "--name=my_tpu: give lower"),
        ("delete.sh --spot", "--spot: there is no such option; --help lists them"),
        ("delete.sh --type=v6e-8", "--type=v6e-8: there is no such option with a value"),
        ("delete.sh --name first", "--name needs a value: give --name=VALUE"),
        ("delete.sh first", "first: not an option"),
        ("create.sh SLICE --type=v6e-7", "--type=v6e-7: not a slice of tpu/accelerators.tsv"),
        ("create.sh SLICE --type=v6e-7", "choose one of v5litepod-1 v5litepod-4 v5litepod-8"),
        ("create.sh SLICE --type=v6e-8", "create it in my-project, us-east5-b?): give --yes"),
        ("create.sh SLICE --type=v6e-8 --queued-for=6h", "--queued-for=6h: it needs --queued"),
        ("create.sh SLICE --type=v6e-8 --queued --queued-for=six", "give 30m, 6h or 2d"),
        ("setup.sh SLICE --type=v6e-8 --models=gs://", "--models=gs://: no folder"),
        ("setup.sh SLICE --type=v6e-8 --models=/no/folder", "--models=/no/folder: no folder"),
        ("setup.sh SLICE --type=v6e-8 --env-file=/no/file", "there is no such file"),
        ("run.sh SLICE --type=v6e-8", "nothing to run: give the arguments of the module after --"),
        ("run.sh SLICE --type=v6e-8 quickstart", "put the run's arguments after --"),
        ("run.sh SLICE --type=v6e-8 --config=a.py", "put the run's arguments after --"),
        ("run.sh SLICE --type=v6e-8 --watch=0 -- x", "--watch=0: give a whole number above 0"),
        ("logs.sh SLICE --follow --fetch=a", "--follow and --fetch: give one of them"),
        ("logs.sh SLICE --fetch=a --worker=all", "--fetch copies from one host at a time"),
        ("logs.sh SLICE --worker=first", "--worker=first: give a number from 0, or all"),
        ("notebook.sh SLICE --port=web", "--port=web: give a whole number above 0"),
        ("host/install.sh", "--chips is missing"),
        ("host/train.sh begin", "begin: give start, stop or idle"),
        ("host/train.sh start", "nothing to run"),
        ("delete.sh SLICE", "delete first in my-project, us-east5-b, with what its disks hold?)"),
    ],
)
def test_wrong_arguments_are_named_with_the_fix(command, message, without_gcloud):
    code, _, err = start(command.replace("SLICE", " ".join(SLICE)))
    assert code == 2
    assert message in err
    assert not without_gcloud.exists()


def test_the_environment_names_the_slice_and_options_outrank_it():
    environment = {
        "JAXRL_TPU_PROJECT": "my-project",
        "JAXRL_TPU_ZONE": "us-east5-b",
        "JAXRL_TPU_NAME": "first",
        "JAXRL_TPU_TYPE": "v6e-8",
    }
    _, out, _ = start("create.sh --dry-run", environment=environment)
    assert out.splitlines() == DRY_RUNS["create.sh --type=v6e-8"]
    _, out, _ = start("create.sh --dry-run --type=v5p-8", environment=environment)
    assert "--accelerator-type=v5p-8" in out
    others = {"name": "Not A Name", "type": "v0", "internal_ip": "yes", "yes": "yes"}
    _, out, _ = start("logs.sh --dry-run", environment=environment | others)
    assert out.endswith("first --worker=0 '--command=tail -n 50 jaxrl/runs/logs/latest.log'\n")
    assert start(["delete.sh", *SLICE], environment=others)[0] == 2  # it still asks


@pytest.mark.parametrize(("answer", "created"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_create_asks_first(answer, created, without_gcloud):
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    code, _, err = start(["create.sh", *SLICE, "--type=v6e-8"], stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert "1 host(s) of 8 chips with 32 GB each, on demand" in err
    assert (code, without_gcloud.exists()) == ((0, True) if created else (2, False))


def test_a_slice_of_several_hosts_is_created_with_what_its_runs_will_need():
    code, _, err = start(["create.sh", *SLICE, "--type=v5p-64", "--dry-run"])
    assert code == 0
    assert err.endswith(
        "note: all 8 hosts must see the checkpoints: give run.sh "
        "--config.trainer.ckpt_path=gs://...\n"
    )
    assert "note" not in start(["create.sh", *SLICE, "--type=v6e-8", "--dry-run"])[2]


def test_a_run_on_several_hosts_is_told_of_its_checkpoints():
    words = ["run.sh", *SLICE, "--type=v5p-64", "--dry-run", "--", "--config=a.py"]
    code, _, err = start(words)
    assert code == 0
    assert "note: all 8 hosts must see the checkpoints: unless the recipe says so" in err
    assert "note" not in start([*words, "--config.trainer.ckpt_path=gs://b/c"])[2]


# ------------------------------------------------------------------------ the table and the files


def slices():
    lines = [x for x in (TPU / "accelerators.tsv").read_text().splitlines() if x[0] != "#"]
    names = lines[0].split("\t")
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]


@pytest.mark.parametrize("row", slices(), ids=lambda row: row["type"])
def test_chips_are_those_of_the_topology(row):
    chips = int(row["hosts"]) * int(row["chips_per_host"])
    assert math.prod(int(n) for n in row["topology"].split("x")) == chips
    family, number = row["type"].split("-")
    # v5litepod-8 and v6e-8 are 8 chips; v5p-8 is 8 cores, of which a v5p chip has two
    assert int(number) == (2 * chips if family == "v5p" else chips)
    assert row["gke_machine"].endswith(f"-{row['chips_per_host']}t")
    per_family = {
        "v5litepod": ("16", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", 2),
        "v5p": ("95", "v2-alpha-tpuv5", "tpu-v5p-slice", 3),
        "v6e": ("32", "v2-alpha-tpuv6e", "tpu-v6e-slice", 2),
    }
    dimensions = row["topology"].count("x") + 1
    assert per_family[family] == (
        row["hbm_gb"],
        row["runtime"],
        row["gke_accelerator"],
        dimensions,
    )


def test_the_jobset_asks_for_one_row_of_the_table():
    text = (TPU / "jobset.yaml").read_text()
    (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    work = job["template"]["spec"]
    pod = work["template"]["spec"]
    chosen = pod["nodeSelector"]
    (row,) = (
        row
        for row in slices()
        if row["gke_accelerator"] == chosen["cloud.google.com/gke-tpu-accelerator"]
        and row["topology"] == chosen["cloud.google.com/gke-tpu-topology"]
        and row["gke_machine"] == chosen["node.kubernetes.io/instance-type"]
    )
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == int(row["chips_per_host"])
    assert work["parallelism"] == work["completions"] == int(row["hosts"]) == 1
    (rule,) = work["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    script = container["command"][2]  # its $0 and $@ follow; bash must accept it
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert text.count("# type:") == 6  # what the header tells the reader to change


def test_the_skypilot_file_asks_for_one_row_of_the_table():
    task = yaml.safe_load((TPU / "skypilot.yaml").read_text())
    resources = task["resources"]
    (row,) = (row for row in slices() if f"tpu-{row['type']}" == resources["accelerators"])
    assert resources["accelerator_args"]["runtime_version"] == row["runtime"]
    assert task["setup"].split() == [
        "bash",
        "tpu/host/install.sh",
        f"--chips={row['chips_per_host']}",
    ]
    assert row["hosts"] == "1"
    assert resources["autostop"]["down"] is True  # an idle slice costs as much as a busy one
    used = set(re.findall(r"\$\{?([A-Z]+)", task["run"]))
    assert used == set(task["envs"])
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)


def test_the_files_name_recipes_and_folders_that_exist():
    named = [
        *re.findall(r"configs/\w+\.py", (TPU / "jobset.yaml").read_text()),
        *re.findall(r"configs/\w+\.py", (TPU / "skypilot.yaml").read_text()),
        *re.findall(r"configs/\w+\.py|examples/\w+\.py", (TPU / "README.md").read_text()),
    ]
    missing = [name for name in named if not (ROOT / name).exists()]
    assert len(named) > 3 and not missing


@pytest.mark.parametrize(("name", "extra"), [("Dockerfile", "tpu"), ("Dockerfile.gpu", "gpu")])
def test_an_image_has_what_runs_need_and_no_run_falls_back_to_the_cpu(name, extra):
    """Every line is of a known form; what is copied exists; the extra has the platform's JAX."""
    text = (TPU / name).read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    words = [word for word, _ in lines]
    assert words[0] == "FROM" and set(words) <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}
    assert ":" in lines[0][1] and not lines[0][1].endswith(":latest")
    copied = [name for word, rest in lines if word == "COPY" for name in rest.split()[:-1]]
    assert {"pyproject.toml", "jaxrl", "configs"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    (install,) = (rest for word, rest in lines if word == "RUN")
    assert "--no-cache-dir" in install
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = re.findall(r"\.\[([\w,]+)\]", install)[0].split(",")
    assert extra in asked and set(asked) <= set(extras)
    assert extras[extra][0].startswith({"tpu": "jax[tpu]", "gpu": "jax[cuda13]"}[extra])
    platform = {"tpu": "tpu", "gpu": "cuda"}[extra]
    settings = " ".join(rest for word, rest in lines if word == "ENV").split()
    assert f"JAX_PLATFORMS={platform},cpu" in settings
    for word, rest in lines:
        if word == "CMD":
            assert json.loads(rest)[:3] == ["python", "-m", "jaxrl.prove"]


def test_shellcheck():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    files = [*map(str, TPU.rglob("*.sh"))]
    ran = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_gcloud_knows_every_command_and_option(tmp_path):
    """By the static check of the cloud CLI itself, where it is installed; it asks no server."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    blocks = re.findall(r"```bash\n(.*?)```", (TPU / "README.md").read_text(), re.S)
    text = re.sub(r"\$JAXRL_TPU_\w+", "my-value", "\n".join(blocks).replace("\\\n", " "))
    commands = [line.split("#")[0].strip() for line in text.splitlines() if line[:6] == "gcloud"]
    for printed in DRY_RUNS.values():
        commands += [line.replace("ARCHIVE", "a") for line in printed if line[:6] == "gcloud"]
    planted = "gcloud compute tpus tpu-vm create n --sport"
    asked = [{"command_string": command} for command in [*dict.fromkeys(commands), planted]]
    (tmp_path / "commands.json").write_text(json.dumps(asked))
    environment = {
        **os.environ,
        "CLOUDSDK_CONFIG": str(tmp_path),
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    }
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={tmp_path}/commands.json"]
    ran = subprocess.run(lint, env=environment, capture_output=True, text=True, check=False)
    if "Invalid choice: 'lint-gcloud-commands'" in ran.stderr:
        pytest.skip("this gcloud has no such check")
    assert ran.returncode == 0, ran.stderr
    *answers, last = json.loads(ran.stdout)
    assert "--sport" in last["error_message"]
    assert len(answers) == len(asked) - 1 > 20
    wrong = {a["command_string"]: a["error_message"] for a in answers if not a["success"]}
    assert not wrong


# --------------------------------------------------------- a host, here: a folder in place of a VM

FAKE_GCLOUD = r"""#!/usr/bin/env bash
words=() recurse=''
for word in "${@:5}"; do
  case $word in
    --command=*) command=${word#--command=} ;;
    --recurse) recurse=-r ;;
    --*) ;;
    *) words+=("${word/#first:/$HOST/}") ;;
  esac
done
case $4 in
  ssh) cd "$HOST" && HOME=$HOST exec bash -c "$command" ;;
  scp) cp $recurse "${words[@]}" ;;
esac
"""
FAKE_PYTHON = """#!/usr/bin/env bash
# python3 of the host: pip and uv install nothing, the environment is that of the tests
[[ "$*" == "-m uv venv "* ]] || exit 0
mkdir -p .venv/bin
printf '#!/bin/sh\\n[ "$1" = tpu/host/check_chips.py ] && ' > .venv/bin/python
printf 'echo $2 chips && exit\\nexec %s "$@"\\n' {} >> .venv/bin/python
chmod +x .venv/bin/python
"""
PROGRAM = """
import os, sys, time
print(sys.argv[1:], os.environ["JAX_PLATFORMS"], os.environ["HF_TOKEN"])
if "stay" in sys.argv:
    time.sleep(120)
sys.exit("refused")
"""


@pytest.fixture
def host(tmp_path):
    """A checkout with the scripts, a folder as the host, and what runs a command there."""
    checkout, machine, programs = tmp_path / "checkout", tmp_path / "host", tmp_path / "bin"
    shutil.copytree(TPU, checkout / "tpu")
    (checkout / "program.py").write_text(PROGRAM)
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    machine.mkdir()
    programs.mkdir()
    for name, text in (("gcloud", FAKE_GCLOUD), ("python3", FAKE_PYTHON.format(sys.executable))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOST": str(machine)}

    def do(script, *words):
        return start([script, *SLICE, *words], folder=checkout / "tpu", environment=environment)

    yield checkout, machine, do
    do("run.sh", "--type=v6e-8", "--stop")


def test_a_run_on_a_host_from_setup_to_its_records(host, tmp_path):
    checkout, machine, do = host
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    (tmp_path / "secrets").write_text("export HF_TOKEN=hf_a\n")
    (checkout / "new.py").write_text("")
    given = f"--models={tmp_path}/qwen", f"--env-file={tmp_path}/secrets"
    code, out, err = do("setup.sh", "--type=v6e-8", *given)
    assert code == 0, err
    assert "8 chips" in out
    assert "not sent, because not committed:\n?? new.py" in err
    assert "hf_a" not in out + err
    there = machine / "jaxrl"
    assert (there / "models/qwen/config.json").exists() and not (there / "new.py").exists()

    arguments = ["stay", "it's", '["a b"]', "$HOME;x", "*"]
    one = "--type=v6e-8", "--module=program", "--watch=1"
    code, out, err = do("run.sh", *one, "--", *arguments)
    assert code == 0 and "running as process" in out, err
    _, out, _ = do("logs.sh")
    assert out == f"{arguments} tpu,cpu hf_a\n"  # not a word was changed on the way

    code, _, err = do("run.sh", *one, "--", "stay")
    assert code == 2 and "a TPU has one user at a time: tpu/run.sh --stop ends it" in err
    code, _, err = do("setup.sh", "--type=v6e-8")
    assert code == 2 and "a run is alive on this host" in err

    code, _, _ = do("run.sh", "--type=v6e-8", "--stop")
    assert code == 0
    _, out, _ = do("run.sh", "--type=v6e-8", "--stop")
    assert out == "no run is alive on this host\n"
    assert (there / "COMMIT").exists()

    (there / "runs/q/checkpoints").mkdir(parents=True)
    (there / "runs/q/checkpoints/big").write_text("")
    (there / "runs/q/metrics.jsonl").write_text("{}\n")
    code, _, err = do("logs.sh", f"--fetch={tmp_path}/here")
    assert code == 0, err
    here = tmp_path / "here/runs"
    assert (here / "q/metrics.jsonl").exists() and (here / "logs/latest.log").exists()
    assert not (here / "q/checkpoints").exists()


def test_many_hosts_are_left_to_the_launcher():
    code, out, _ = start("host/train.sh start --many --module=jaxrl.sft --dry-run -- --config=a.py")
    assert code == 0
    command = "-m jaxrl.cluster.launch --no-ray --module=jaxrl.sft --config=a.py >"
    assert command in out
    (file,) = yaml.safe_load_all((TPU / "jobset.yaml").read_text())
    assert "jaxrl.train --distributed" in str(file)  # JobSet itself starts all pods again
    task = yaml.safe_load((TPU / "skypilot.yaml").read_text())
    assert "-m jaxrl.cluster.launch --no-ray --config=" in task["run"]


def test_a_run_that_ends_at_once_shows_why(host):
    _, machine, do = host
    (machine / "jaxrl.env").write_text("HF_TOKEN=hf_a\n")
    assert do("setup.sh", "--type=v6e-8")[0] == 0
    code, out, err = do("run.sh", "--type=v6e-8", "--module=program", "--", "--config=a.py")
    assert code == 1
    assert out.endswith("refused\n")
    assert "the run ended within" in err and "with status 1" in err


def test_no_chips_is_an_error_and_not_a_run_on_the_cpu():
    check = [sys.executable, str(TPU / "host/check_chips.py"), "8"]
    ran = subprocess.run(check, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert re.search(r"^jax \d.*, libtpu ", ran.stdout)
    assert "error: JAX has no TPU" in ran.stderr
