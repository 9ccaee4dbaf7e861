"""`turnwise completion SHELL`: a script that lets bash, zsh or fish complete verbs, options, keys and values."""

import argparse
import sys

HELP = "print a script that completes commands, options, config keys and values in bash, zsh or fish"
BASH = """\
_turnwise() {
    local line="${COMP_LINE:0:COMP_POINT}" current="" word prefix
    local -a words
    read -r -a words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    # bash itself splits words at the characters of COMP_WORDBREAKS; what stands before one must not be repeated
    prefix=""
    [[ "$COMP_WORDBREAKS" == *=* && "$current" == *=* ]] && prefix="${current%%=*}="
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("${word#"$prefix"}")
        [[ "$word" == *[=./] ]] && compopt -o nospace
    done < <("$1" __complete "${words[@]:1}" 2>/dev/null)
}
complete -o bashdefault -o default -F _turnwise turnwise
"""
ZSH = """\
#compdef turnwise
_turnwise() {
    local -a found
    found=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    (( ${#found} )) || { _files; return }
    local -a open=(${(M)found:#*[=./]}) whole=(${found:#*[=./]})
    (( ${#open} )) && compadd -S '' -- $open
    (( ${#whole} )) && compadd -- $whole
}
if [ "$funcstack[1]" = "_turnwise" ]; then _turnwise "$@"; else compdef _turnwise turnwise; fi
"""
FISH = """\
function __turnwise_words
    set -l words (commandline -opc) (commandline -ct)
    set -l found (turnwise __complete $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c turnwise --no-files -a '(__turnwise_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")
    parser.epilog = """\
switch it on:
  bash   echo 'eval "$(turnwise completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(turnwise completion zsh)"' >> ~/.zshrc      (after compinit)
  fish   turnwise completion fish > ~/.config/fish/completions/turnwise.fish
"""


def run(args: argparse.Namespace) -> int:
    """The script calls `turnwise __complete` with the words typed so far."""
    sys.stdout.write(SCRIPTS[args.shell])
    return 0
