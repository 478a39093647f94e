"""Launch scripts are read, never run."""

import contextlib
import random
import shlex
import string
import subprocess
from pathlib import Path

import pytest

from plaudit.convert.shell import NotAScript, read_script


def words(script: str) -> list[list[str]]:
    return [command.words for command in read_script(script).commands]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("train a=1 \\\n  b=2  # a comment\n", ["train", "a=1", "b=2"]),
        (
            "X=5\ntrain lr=$X other=${X}0 literal='$X' quoted=\"$X $Y\"",
            ["train", "lr=5", "other=50", "literal=$X", "quoted=5 ${Y}"],
        ),
        ("train ${1:-model} ${EPOCHS:-12} ${X:=3} $X", ["train", "model", "12", "3", "3"]),
        ('ARGS=(--lr 1e-5 "--name a b")\nARGS+=(--more)\ntrain "${ARGS[@]}"', ["train", "--lr", "1e-5", "--name a b", "--more"]),
        ("P=1024\nR=4096\ntrain tokens=$((3 * (P + R))) $(( 2 * $(( $P + 1 )) ))", ["train", "tokens=15360", "2050"]),
        ('M=org/Qwen-7B\ntrain name=$(basename "$M") ${M##*/} ${M%/*}', ["train", "name=Qwen-7B", "Qwen-7B", "org"]),
        ('OPTIONS="-a 1"\ntrain $OPTIONS "$OPTIONS"', ["train", "-a", "1", "-a 1"]),
        ("A=1 B=2 train x > log.txt 2>&1 &", ["train", "x"]),
        ("export N=8; train $N | tee log", ["train", "8"]),
        ("cat <<EOF > config\ntrain never\nEOF\ntrain now", ["train", "now"]),
    ],
)
def test_words_of_a_command(script, expected):
    assert next(command for command in words(script) if command[0] == "train") == expected


@pytest.mark.parametrize(("value", "kl"), [("True", "FALSE"), ("False", "0.001")])
def test_a_decided_branch_is_taken(value, kl):
    for test in ('[ "$OFF" == "True" ]', "[ $OFF = True ]", '[[ "$OFF" == T* ]]', '[ "$OFF" != False ]'):
        script = f"OFF={value}\nif {test}; then\n  KL=FALSE\nelse\n  KL=0.001\nfi\ntrain kl=$KL"
        assert words(script)[-1] == ["train", f"kl={kl}"]


def test_a_variable_set_in_an_undecided_branch_stays_open():
    script = "N=1\nif [ -f x ]; then N=2; else N=3; fi\ntrain $N\nfor i in 1 2; do M=$i; done\ntrain $M"
    assert words(script) == [["train", "${N}"], ["train", "${M}"]]


def test_substitutions_are_kept_and_never_run(tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    victim = tmp_path / "victim"
    victim.write_text("here")
    script = read_script(f"train a=$(rm -rf {victim}) b=`rm {victim}` c=${{X:-$(rm {victim})}} $(( __import__('os') ))")
    assert victim.exists()
    assert script.commands[0].words[1] == f"a=$(rm -rf {victim})"
    assert len(script.not_run) == 3


@pytest.mark.parametrize("script", ['train "open', "train 'open", "train $(open", "train ${open", "x=(a b"])
def test_what_is_never_closed_is_reported(script):
    with pytest.raises(NotAScript, match="never closed"):
        read_script(script)


@pytest.mark.parametrize(
    "script",
    [
        "X=0123456789\n" + "X=$X$X\n" * 100,
        "X=(a b)\n" + 'X=("${X[@]}" "${X[@]}")\n' * 100,
        f"X={'x' * 50_000}\ntrain {'$X' * 1000}",
    ],
    ids=["variable", "array", "word"],
)
def test_a_script_cannot_fill_the_memory(script):
    with pytest.raises(NotAScript, match="more than"):
        read_script(script)


@pytest.mark.parametrize("nested", ['"$(', "$((", "${X:-", '$("'])
def test_deep_nesting_is_read_or_refused_at_once(nested):
    with pytest.raises(NotAScript, match=r"never closed|nested too deeply"):
        read_script(f"train {nested * 5000}")


def test_quoted_words_are_read_as_the_shell_reads_them():
    """Any text that shlex quotes comes back, alone or as the value of a variable."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(string.printable, k=draw.randint(1, 12))).replace("\r", "")
        if text:
            assert words(f"train {shlex.quote(text)} end")[0] == ["train", text, "end"], text


def test_any_text_is_read_or_refused():
    draw = random.Random(1)
    pieces = [
        "$",
        "{",
        "}",
        "(",
        ")",
        "'",
        '"',
        "`",
        "\\",
        "\n",
        " ",
        "if",
        "fi",
        "then",
        "X=1",
        "$X",
        "<<E",
        "#",
        ";",
        "&&",
        "[",
        "]",
        "((",
        "a",
    ]
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 20)))
        with contextlib.suppress(NotAScript):
            read_script(text)


def test_expansions_agree_with_the_shell(tmp_path: Path):
    """A script without side effects: what is read is what bash prints."""
    script = "\n".join([
        "A=one", 'B="two words"', "C=(x 'y z')", "D=${A:-no}-${E:-default}-${F:+set}", "G=$((7 / 2 + 10 % 4))",
        'printf "%s\\n" "$A" "$B" $B "${C[@]}" "$D" "$G" "pre${A}post" \'$A\' "a\\"b" "${A#o}" "${A%e}"',
    ])  # fmt: skip
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()
    assert words(script)[-1][2:] == shell
