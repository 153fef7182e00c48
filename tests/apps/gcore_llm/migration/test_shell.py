"""Launch scripts are read as a shell would expand them, and nothing of them is run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gcore_llm.migration.shell import ShellScript

SCRIPTS = {
    "variables": 'a=1; B="$a two"\nexport C=$B-three\nshow $a "$B" ${C} \'$a\' "it\'s \\$a" x\\ y',
    "defaults": 'show ${unset_one:-four} "${unset_two:-"${HOME}/x"}" ${unset_one:-again}; E=; show "${E:-empty}" "$E"',
    "assigned defaults": "show ${F:=six} $F",
    "arithmetic": "n=8; show $((1024 * 2)) $(((n + 1) / 2)) $((n % 3 - 1)) $((${n} * $n))",
    "arrays": 'A=(a.b=1 "c=two words"  # a note\n  d=$((2 + 3))\n)\nA+=(e=4)\nshow "${A[@]}"',
    "empty arrays": 'EMPTY=()\nshow "${EMPTY[@]}" end',
    "continued lines": "show a=1 \\\n    b=2 \\\n    c=3 # the end\nshow d=4",
    "lists of Hydra": "show trainer.logger=['console','wandb'] t='[\"console\"]' \"u=['console']\"",
    "positional": 'show "$@" $1 ${2:-second} end',
    "a last line that is continued": "show a=1 \\\n",
    "a backslash in a comment": "show a=1 \\\n  b=2  # c=3 \\\nshow d=4",
    "if": 'DEVICE=${DEVICE:-gpu}\nif [ "$DEVICE" = gpu ]; then n=1024; else n=16; fi\nshow $n',
    "elif": 'A=2\nif [ $A -gt 2 ]; then show x\nelif [[ "$A" == 2 && -n $A ]]; then show y\nelse show z\nfi; show $A',
    "unset variables": 'if [ -n "$NO_SUCH" ]; then show x; fi; if [[ -z "${NO_SUCH:-}" ]]; then show y; fi',
    "case": 'D=gpu\ncase "${D}" in\n  gpu | npu) ;;\n  *) show x; exit 1 ;;\nesac\n'
    'case $D in npu) A+=(x) ;; g*) A+=(y z) ;; *) A+=(v) ;; esac\nshow "${A[@]}"',
    "nested": "D=npu; B=vllm\ncase $D in\n"
    'npu)\n  n=16\n  if [ "$B" = vllm ]; then n=17; A=(u); fi\n  ;;\ngpu) n=3 ;;\nesac\nshow $n $A',
    "and, or": 'p=1; [ "$p" -gt 1 ] && v=2 || v=null; [ $p = 1 ] && { w=3; }; show $v $w',
    "groups in conditions": 'A=vllm; if [ "${U:-1}" != 0 ] && { [ "$A" = x ] || [ "$A" = vllm ]; }; then show y; fi',
    "arithmetic conditions": "n=9; if (( n % 4 != 0 )); then show a; fi; (( n > 10 )) || show b; ((n == 9)) && show c",
    "loops": 'for x in a "b c"; do show "$x"; done; i=3; while [ $i -gt 1 ]; do show $i; i=$((i - 1)); done',
    "functions": 'start() { local n=$1; show "$n" "${2:-none}" $#; }\nunused() { show never; }\nstart 4; start 5 6',
    "added text": "N=run; N+=_1; show $N",
    "changed values": "P=/a/b-C.tar.gz; show ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P,,} ${P^^} ${P//a/x} ${P/a/y} ${#P}",
    "alternatives": 'X=1; show ${X:+is-set} ${Y:+no} "${Y:+no}" ${Z-unset} ${X+set}',
    "printed by commands": 'x=$(echo a b); y=`basename /c/d.sh .sh`; show "$x" $y $(dirname /e/f) $(cd / && pwd)',
    "status of an import": "D=$(python3 -c 'import no_such_module' 2>/dev/null && echo npu || echo gpu); show $D",
    "here-documents": "show a <<EOF\nshow b\nEOF\nshow c <<'X'\nx=$(\nX\nshow d",
    "declarations": 'declare -a L=(a b); export E=1 F=2; readonly R=3; show "${L[@]}" $E $F $R ${L[0]}',
    "negation": 'if ! [ a = b ]; then show y; fi; if [[ ! -n "" ]]; then show z; fi\n'
    "if [[ gpt-4 =~ ^gpt-[0-9]$ ]]; then show r; fi",
    "several commands": "x=1; show $x && show two | cat; show three > /dev/null 2>&1",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    bash = shutil.which("bash")
    assert bash is not None
    log = tmp_path / "log"
    show = 'show() { printf "%s\\0" "$#" "$@" >> "$LOG"; }\n'
    subprocess.run(
        [bash, "-c", show + script],
        env={"LOG": str(log), "HOME": str(Path.home()), "PATH": os.defpath},
        check=True,
    )
    fields = log.read_text().split("\0")[:-1]
    expected: list[list[str]] = []
    while fields:
        count = int(fields[0])
        expected.append(fields[1 : count + 1])
        fields = fields[count + 1 :]
    found = [words[1:] for words in ShellScript(script).commands() if words[0] == "show"]
    assert found == expected


def test_nothing_is_run_and_what_is_left_is_named(tmp_path: Path) -> None:
    script = ShellScript(
        f"x=$(touch {tmp_path / 'made'})\nif true; then y=1; fi\nshow $x $HOSTNAME ${{x/a/b}} $y"
    )
    *_, words = script.commands()
    assert not (tmp_path / "made").exists()
    assert words == ["show", f"$(touch {tmp_path / 'made'})", "$HOSTNAME", "${x/a/b}", "1"]
    assert "$HOSTNAME" in script.unset


def test_what_cannot_be_decided_is_named() -> None:
    """A program's status is not known; a condition without an effect is not worth a line."""
    script = ShellScript(
        'if nvidia-smi | grep -q H100; then\n  n=8\nfi\nif [ "$WANDB" = 1 ]; then echo on; fi\n'
        "mkdir -p runs && cd runs || exit 1\nif nvidia-smi; then show a; fi\ncase $(hostname) in gpu*) n=4 ;; esac\n"
        "if [ $# -lt 1 ]; then show usage; exit 1; fi\nshow $n"
    )
    assert [words for words in script.commands() if words[0] == "show"] == [
        ["show", "usage"],
        ["show", "$n"],
    ]
    assert script.undecided == [
        "line 1: nvidia-smi | grep -q H100",
        "line 6: nvidia-smi",
        "line 7: $(hostname)",
    ]
    assert script.taken_as_empty == ["$WANDB"]
    assert script.exits == [8]


@pytest.mark.parametrize(
    "script",
    [
        *(
            'x="a',
            "x='a",
            'show "a\\',
            "x=$(a",
            "x=${a",
            "x=$((1",
            "`a",
            "a=(b",
            "[[ a",
            "((a",
            "{ a",
            "(a",
        ),
        *(
            "if a",
            "if a; then b",
            "case a",
            "case a in b",
            "for",
            "for x in a; do b",
            "while a",
            "f() {",
        ),
    ],
)
def test_a_script_that_is_not_closed_is_refused(script: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        ShellScript(script).commands()
