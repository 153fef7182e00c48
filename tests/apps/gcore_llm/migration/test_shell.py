"""Launch scripts are read as a shell would expand them, and nothing of them is run."""

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
        [bash, "-c", show + script], env={"LOG": str(log), "HOME": str(Path.home()), "PATH": "/bin"}, check=True
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
    script = ShellScript(f"x=$(touch {tmp_path / 'made'})\nif true; then y=1; fi\nshow $x $HOSTNAME ${{x/a/b}} $y")
    *_, words = script.commands()
    assert not (tmp_path / "made").exists()
    assert words == ["show", f"$(touch {tmp_path / 'made'})", "$HOSTNAME", "$x/a/b", "1"]
    assert script.has_conditions
    assert "$HOSTNAME" in script.unset
