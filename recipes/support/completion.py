"""Completion of `python -m recipes...` in bash: Hydra's own completes programs that are run by their path, not by -m."""

from __future__ import annotations

from pathlib import Path

from recipes.support.help import commands

_SCRIPT = """\
_complete_recipes() {
    local line=${COMP_LINE:0:COMP_POINT} words word
    read -ra words <<< "$line"
    if [[ $line == *[[:space:]] ]]; then words+=(""); fi
    word=${words[${#words[@]} - 1]}
    COMPREPLY=()
    if [[ ${words[1]} != -m || ${words[2]} != r* ]]; then return; fi
    if (( ${#words[@]} == 3 )); then
        COMPREPLY=($(compgen -W "MODULES" -- "$word"))
    else
        local query="python ${words[2]} ${words[*]:3}"
        COMPREPLY=($(COMP_LINE=$query COMP_POINT=${#query} "${words[0]}" -m "${words[2]}" -sc query=bash 2> /dev/null))
    fi
    if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}"); fi
}
complete -o nospace -o default -F _complete_recipes python python3"""


def script(conf: Path) -> str:
    """Return the bash code that `eval "$(python -m recipes.train -sc install=bash)"` runs: it completes every command.

    Hydra answers what may follow (`-sc query=bash`): groups and their choices, keys, values, files.
    """
    return _SCRIPT.replace("MODULES", " ".join(commands(conf)))
