"""Scripts are read as text: what is understood, what is named, and that nothing of them runs."""

from datetime import datetime

import pytest

from jaxrl.config.skyrl.script import read_script

pytestmark = pytest.mark.check
SCRIPT = r"""
set -euo pipefail
set -x
: "${DATA_DIR:="$HOME/data/sums"}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}" # or wandb
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
LENGTH=$((1024 * 2))
YEAR=$(date +%Y)
LR=1e-6; STOP='["</a>", "</b>"]'
EXTRA_ARGS=(trainer.seed=7)
if [ "$NUM_GPUS" = "4" ]; then
  EXTRA_ARGS+=("generator.n_samples_per_prompt=$((NUM_GPUS * 2))")
fi
mkdir -p "$DATA_DIR" && rm -rf /nowhere > /dev/null 2>&1
echo "start" > started.txt
FLAG=x uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet', '$DATA_DIR/more.parquet']" \
  trainer.run_name="sums of ${LENGTH} in $YEAR" \
  trainer.policy.optimizer_config.lr=$LR \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  generator.sampling_params.stop="$STOP" \
  generator.sampling_params.max_generate_length=$LENGTH \
  trainer.logger="$LOGGER" \
  "${EXTRA_ARGS[@]}" \
  "$@" 2>&1 | tee "$SCRIPT_DIR/run.log"
"""


RUN = '\nuv run -m main trainer.a=$A "$@"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("A", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_run_of_a_script_is_read_and_nothing_in_it_runs(folder):
    run = read_script(SCRIPT, ["trainer.epochs=3"], "run_sums.sh")
    assert run.command[:6] == ["uv", "run", "--isolated", "--extra", "fsdp", "-m"]
    assert run.command[7:-1] == [
        "data.train_data=['/home/me/data/sums/train.parquet', '/home/me/data/sums/more.parquet']",
        f"trainer.run_name=sums of 2048 in {datetime.now():%Y}",  # 1024 * 2
        "trainer.policy.optimizer_config.lr=1e-6",
        "trainer.placement.policy_num_gpus_per_node=4",
        'generator.sampling_params.stop=["</a>", "</b>"]',
        "generator.sampling_params.max_generate_length=2048",
        "trainer.logger=console",
        "trainer.seed=7",
        "generator.n_samples_per_prompt=8",  # 4 * 2
        "trainer.epochs=3",
    ]
    assert (run.command[-1], run.unknown, run.notes) == ("trainer.epochs=3", [], [])
    assert list(folder.iterdir()) == []


def test_the_environment_counts_as_it_does_for_the_script(monkeypatch):
    monkeypatch.setenv("NUM_GPUS", "2")
    words = read_script(SCRIPT, []).command
    assert "trainer.placement.policy_num_gpus_per_node=2" in words
    assert not any(word.startswith("generator.n_samples_per_prompt") for word in words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=1 # don't", "1"),
        ("A='it'\"s\"", "its"),
        ("A=x\\\ny", "xy"),
        ("export B=2 A=~/q", "/home/me/q"),
        ("A=1; B=2 A=3 program", "1"),
        ('A="${B:-$HOME/x}"', "/home/me/x"),
        (': "${A:="$HOME"}"', "/home/me"),
        ("B=; A=${B-3}${B:-4}", "4"),
        ("B=2; A=${B:+3}", "3"),
        ("A=1; A+=2", "12"),
        ("A=$(( 2 * (3 + 4) / 5 ))", "2"),  # 14 / 5
        ("B=7; A=$((B % 4))", "3"),
        ("A=(1 # don't\n 2); A=${A[1]}", "2"),
        ("B=x/y.z.w; A=${B##*/}-${B%.*}-${B%%.*}-${B#*/}", "y.z.w-x/y.z-x/y-y.z.w"),
        ('A=$(basename "$(dirname "$0")")', "d"),
        ("cat <<EOF\nit's $( ` \"\nA=2\nEOF\nA=1", "1"),
        ("python - <<-'E'\n\tA=2\n\tE\nA=1", "1"),
        ("mkdir d > >(tee log) 2>&1 < in && A=1", "1"),
        ("echo trainer.a=2; printf trainer.a=3; A=1", "1"),
        ('if [ -z "$B" ]; then A=1; else A=2; fi', "1"),
        ("if [ 3 -lt 2 ]; then A=1\nelif [[ a != b ]]; then A=2; else A=3; fi", "2"),
        ("A=1; if [ x = y ]; then if unknown; then A=2; fi; fi", "1"),
        ('[ -n "$B" ] && A=1 || A=2', "2"),
        ("A=1\nif unknown; then exit 1; fi", "1"),
        ("set -- trainer.b=1 x; shift; A=$1; shift", "x"),
    ],
)
def test_what_is_understood(text, value):
    run = read_script(text + RUN, [], "d/s.sh")
    assert (run.command, run.unknown) == (["uv", "run", "-m", "main", f"trainer.a={value}"], [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A=$(rm -rf out.txt /nowhere)", "$(rm -rf out.txt /nowhere)"),
        ("A=x-`touch out.txt`", "`touch out.txt`"),
        ("eval 'A=1; touch out.txt'", "A, which `eval 'A=1; touch out.txt'` may set"),
        ("source settings.sh", "A, which `source settings.sh` may set"),
        ("A=$(cat <<EOF\n1\nEOF\n)", "$(cat <<EOF 1 EOF )"),
        ("read -r A <<EOF\n1\nEOF", "A, set by `read -r A`"),
        ("for A in 1 2; do :; done", "A, set by `for A in 1 2`"),
        ("A=1; if [ -f x ]; then A=2; fi", "A, which `if [ -f x ]` decides"),
        ("case $1 in\n a) A=1;;\nesac", "A, which `case $1 in` decides"),
        ("f() { A=1; }", "A, which `{ A=1` decides"),
        ("program || A=1", "A, which `program` decides"),
        ("A=2; program && A=1", "A, which `program` decides"),
        ("if program && [ x = x ]; then A=1; fi", "A, which `if program` decides"),
        ("((A = 3))", "A, set by `((A = 3))`"),
        ("A=$((B++))", "$((B++))"),
        ("A=$((0 - 7))x$(( (0 - 7) / 2 ))", "$(( (0 - 7) / 2 ))"),
        ("B=abc; A=${B:0:2}", "${B:0:2}"),
        ("printf -v A x", "A, set by `printf -v A x`"),
        ("cd src; A=$(pwd)", "$(pwd)"),
        ("A=$?", "$?"),
    ],
)
def test_what_is_not_understood_is_named_and_not_run(folder, text, reason):
    run = read_script(text + RUN, [], "d/s.sh")
    assert run.command == ["uv", "run", "-m", "main"]
    (unknown,) = run.unknown
    assert unknown == (
        f"trainer.a: not known without running the script: {reason}; give key=value after the "
        "script"
    )
    given = read_script(text + RUN, ["trainer.a=1"], "d/s.sh")
    assert (given.command[-1], given.unknown) == ("trainer.a=1", [])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "bash"),  # what bash gives
    [
        # functions
        ("A=1; f() { A=2; }; A=3; f", 2),
        ("A=1; function f() {\nA=2\n}", 1),
        ("A=1; my-f() { A=2; }; A=1; my-f", 2),
        ("f() { source x; }; A=1; f", 2),
        # here-documents
        ("A=1\ncat <<EOF | tee f\nA=5\nEOF", 1),
        ("A=1\ncat <<EOF || exit 1\nA=5\nEOF", 1),
        ("A=1\ncat <<EOF >f; Y=2\nA=5\nEOF", 1),
        ("A=1\n(cat <<EOF)\nA=5\nEOF", 1),
        ("A=1\ncat <<EOF\n\tEOF\nA=2\nEOF", 1),
        ("X=$(cat <<EOF\nit's\nEOF\n)\nA=2\nZ=$(cat <<EOF\nit's\nEOF\n)", 2),
        # subshells, pipes, background
        ("A=1\n(A=2)", 1),
        ("A=1; f() ( A=2 )", 1),
        ("A=1\nA=2 &", 1),
        ("A=1\ntrue && A=2 &", 1),
        ("A=1\necho 5 | A=2", 1),
        ("A=1\n{ A=2; } | cat", 1),
        ("A=1\necho | { A=2; }", 1),
        ("A=1\nfalse && ( A=2 )", 1),
        ("A=1\n(exit 1)", 1),
        # the outcome of an assignment
        ("A=1; X=$(nvidia-smi) || A=2", 2),
        ("if X=$(false); then A=1; else A=2; fi", 2),
        # sums
        ("A=1; B=$((A++))", 2),
        ("A=1; B=$((A += 4))", 5),
        ("A=1; : $((++A))", 2),
        ("A=5; for ((A=0;A<3;A++)); do :; done", 3),
        ("A=$[1+2]", 3),
        ("B=010; A=$((B+1))", 9),
        # what may set anything
        ("A=1; eval 'A=2'", 2),
        ("A=1; source x", 2),
        ("A=1; . ./x", 2),
        ("A=1; export $(cat .env)", 2),
        # tests
        ("if [ -n $X ]; then A=1; else A=2; fi", 1),
        ("P='a*'; if [[ abc == $P ]]; then A=1; else A=2; fi", 1),
        ("if [[ a == @(a|b) ]]; then A=1; else A=2; fi", 1),
        ("if [[ 010 -eq 8 ]]; then A=1; else A=2; fi", 1),
        # bash's own variables
        ("cd /usr; A=$PWD", "/usr"),
        ("pushd /usr; A=$(pwd)", "/usr"),
        ("A=$RANDOM", 7),
        ("A=$UID", 0),
        # assignments
        ("B=0; export B=1 A=$B", 0),
        ("B=a; B+=(b); A=${B[1]}", "b"),
        ("B=(1 2); B+=x; A=${B[0]}", "1x"),
        ("B=(1 2); B=3; A=${B[1]}", 2),
        ("B=([2]=x [0]=y); A=${B[0]}", "y"),
        ("declare -i A=3+4", 7),
        ("declare -u A=abc", "ABC"),
        ("A=1; declare -n R=A; R=2", 2),
        ("B=(1 2); IFS=,; A=${B[*]}", "1,2"),
        ("B=({1,2}); A=${B[1]}", 2),
        ("B=(x{1..3}); A=${B[1]}", "x2"),
        ("E=' b'; B=(1$E); A=${B[1]}", "b"),
        ("set a b; A=$1", "a"),
        ('A=$"abc"', "abc"),
        ("time { A=1; }", 1),
        ("X='a*b*c'; A=${X%\"*\"*}", "a*b"),
        ("X=abc; A=${X#[^b]}", "bc"),
        ("A=a:~/b", "a:/home/me/b"),
    ],
)
def test_a_value_is_what_bash_gives_or_unknown(folder, text, bash):
    run = read_script(text + RUN, [], "d/s.sh")
    if run.command[-1].startswith("trainer.a="):
        assert (run.command[-1], run.unknown) == (f"trainer.a={bash}", [])
    else:
        assert run.unknown[0].startswith("trainer.a: not known without running the script: ")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "A=1; run() { uv run trainer.a=$A; }; A=2 run",
        "A=1; run() { uv run trainer.a=$A; }; A=2; run",
        "function run() {\nlocal A=$1\nuv run trainer.a=$A\n}\nrun 1",
        "A=1; for i in 1 2; do uv run trainer.a=$A; A=2; done",
        "uv run trainer.a={1,2}",
        "E=' trainer.b=2'; uv run trainer.a=1$E",
    ],
)
def test_what_another_line_may_set_is_not_known_in_the_run(text):
    run = read_script(text, [], "s.sh")
    assert run.command == ["uv", "run"]
    assert run.unknown[0].startswith("trainer.a: not known without running the script: ")


@pytest.mark.parametrize(
    "line",
    [
        "echo x > out.txt",
        "echo x >> out.txt",
        "echo x &> out.txt",
        'cat < /dev/null > "out.txt"',
        "printf x | tee out.txt",
        "/bin/touch out.txt",
        "eval 'echo x > out.txt'",
        "touch out.txt &",
        "exec touch out.txt",
        "PATH=/bin:/usr/bin touch out.txt",
        "bash -c 'touch out.txt'",
        "command -p touch out.txt",
        "python - <<EOF\nopen('out.txt', 'w')\nEOF",
        "while true; do sleep 1; break; done; kill -9 $PPID",
        "set +r; echo x > out.txt",
        "echo $(touch out.txt) `touch out.txt`",
        "coproc touch out.txt",
        "trap 'touch out.txt' EXIT",
    ],
)
def test_what_a_script_would_write_or_kill_it_does_not(folder, line):
    run = read_script(f"{line}\nA=1{RUN}", [])
    assert (run.command[-1], run.unknown) == ("trainer.a=1", [])
    assert list(folder.iterdir()) == []


def test_what_is_not_needed_is_noted():
    run = read_script(f"source x.sh\necho $(nproc)\ncat <<EOF\nEOF\nA=1{RUN}{RUN}", [], "s.sh")
    assert run.notes == [
        "s.sh: not run, in case it sets something: `source x.sh`, $(nproc), <<EOF",
        "s.sh: 1 further runs; the first is converted",
    ]
    run = read_script(f"A=1$B; if [ -f x ]; then {RUN} fi", [], "s.sh")
    assert run.notes == [
        "s.sh: not set, read as empty: B",
        "s.sh: starts its run where `if [ -f x ]` decides, which is not known",
    ]
    run = read_script("main() { uv run trainer.a=$A trainer.b=$1; }\nA=1\nmain 2", [], "s.sh")
    assert run.unknown[0].startswith("trainer.a: not known without running the script: A, which a")
    assert run.unknown[1].startswith("trainer.b: not known without running the script: $1 of a fun")
    run = read_script("uv run trainer.a=1 $(more)", [], "s.sh")
    assert run.command == ["uv", "run", "trainer.a=1"]
    assert run.unknown[0].startswith("$(more): not known without running the script: $(more)")


def test_a_script_that_starts_nothing_says_so():
    with pytest.raises(ValueError, match=r"s.sh: starts no command .* \(it calls wget\)"):
        read_script("wget http://x", [], "s.sh")
    with pytest.raises(ValueError, match=r"\(it calls nothing; it ends at `exit 1`\)"):
        read_script(f"exit 1{RUN}", [], "s.sh")
    with pytest.raises(ValueError, match="MODEL: set the model"):
        read_script(': "${MODEL:?set the model}"\nuv run trainer.seed=1', [], "s.sh")
    with pytest.raises(ValueError, match="s.sh: line 2: not closed: 'x"):
        read_script("A=1\nB='x\n", [], "s.sh")
    with pytest.raises(ValueError, match="s.sh: maximum recursion depth"):
        read_script(f"A={'$(' * 5000}", [], "s.sh")
