# Read by every bash that runs a script of verl's in the sandbox: launchers are noted instead of run, all else is harmless.
# TW_ROOT stands for / of the caller's machine, TW_NOTES is the folder of notes, TW_PYTHON the sandbox's own Python.
# Bodies hold one command where they can: the DEBUG trap runs for each.

exec {BASH_XTRACEFD}>/dev/null # set -x would hide what bash itself complains about
set -T # the trap below reaches into functions
TW_FILLED=() TW_COUNT=0

tw_note() { # one file a note, so that background jobs do not mix theirs
  local IFS=' '
  printf '%s\0' "$@" >"$TW_NOTES/$EPOCHREALTIME-$BASHPID-$((TW_COUNT++))" 2>/dev/null
}

tw_line() { # where the script called what is noted
  local depth
  for ((depth = 1; depth < ${#BASH_SOURCE[@]}; depth++)); do
    [[ ${BASH_SOURCE[depth]} == "$BASH_ENV" || ${BASH_SOURCE[depth]} == "$TW_SCRATCH"/bin/* ]] || { TW_LINE=${BASH_LINENO[depth - 1]}; return 0; }
  done
  TW_LINE=0
}

tw_launch() { # a program with its words: a shell among them is run, so is a command that is one word, all else is noted
  local - word at=1 inner=0
  set +eux
  tw_line
  for word in "${@:2}"; do
    ((++at))
    case $1:${word##*/} in
    python*) break ;;
    *:python*) # what uv or env start may be asked like Python itself
      [[ ${!at} == *=* || ! ${*:at+1:1} =~ ^-c?$ ]] || { tw_python "${@:at}"; return; } ;;
    *:bash | *:sh | *:zsh | *:dash) (($# > at)) && { bash "${@:at+1}"; return 0; } ;;
    sbatch:*.sh | sbatch:*.sbatch | sbatch:*.slurm) bash "${@:at}"; return 0 ;;
    esac
    case $1:$word in
    ssh:*' '* | pdsh:*' '* | tmux:*' '* | screen:*' '* | kubectl:*' '* | docker:*' '* | sbatch:--wrap=*)
      [[ $word =~ (python|torchrun|accelerate|deepspeed|uv) ]] && command bash -c "${word#--wrap=}" && inner=1 ;;
    esac
  done
  ((inner)) || tw_note run "$TW_LINE" "$BASH_SUBSHELL" "$@"
  return 0
}

tw_python() { # code on the command line or on standard input answers a question of the script: it is run
  local - word
  set +eux
  for word in "${@:2}"; do
    case $word in
    -c | - | -V | --version) break ;;
    -m | [!-]*) tw_launch "$@"; return 0 ;;
    esac
  done
  command timeout 10 "$TW_PYTHON" "${@:2}"
}

tw_place() { # a path of the caller's machine, inside
  case $1 in
  "$TW_ROOT" | "$TW_ROOT"/* | "$TW_SCRATCH"/*) REPLY=$1 ;;
  /*) REPLY=$TW_ROOT$1 ;;
  *) REPLY=$1 ;;
  esac
}

tw_ask() { # a file that the script reads: the host is asked for it
  tw_place "$1"
  [[ -e $REPLY ]] && return 0
  [[ $REPLY == /* ]] || REPLY=$PWD/$REPLY
  tw_line
  tw_note file "$TW_LINE" "$BASH_SUBSHELL" "$REPLY"
  return 1
}

tw_names() { # the variables that a command's text reads plainly, without a default; those with one
  local rest=$1 name after
  REPLY=() TW_DEFAULTED=' '
  while [[ $rest =~ \$(\{[#]?)?([A-Za-z_][A-Za-z0-9_]*)(.?.?) ]]; do
    name=${BASH_REMATCH[2]} after=${BASH_REMATCH[3]}
    rest=${rest#*"${BASH_REMATCH[0]%"$after"}"}
    if [[ -n ${BASH_REMATCH[1]} && $after =~ ^:?[-=+] ]]; then TW_DEFAULTED+="$name "; else REPLY+=("$name"); fi
  done
}

tw_fill() { # what is set nowhere keeps its name while this one command runs
  local name
  for name in "${TW_FILLED[@]}"; do
    [[ ${!name-} == "\${$name}" ]] && unset -v "$name"
  done
  TW_FILLED=()
  case $1 in
  '['* | 'test '* | '(('* | 'case '* | 'for '* | 'select '* | 'unset '*) return 0 ;;
  esac
  [[ $1 == *'$'* ]] || return 0
  tw_names "$1"
  for name in "${REPLY[@]}"; do
    declare -p "$name" &>/dev/null && continue
    if [[ $1 == *'(('* || $TW_DEFAULTED == *" $name "* ]]; then # its name would be counted with, or be no default
      tw_line
      tw_note unset "$TW_LINE" "$BASH_SUBSHELL" "$name"
    elif printf -v "$name" '${%s}' "$name" 2>/dev/null; then
      TW_FILLED+=("$name")
    fi
  done
}

tw_redirect() { # a log that cannot be opened here must not keep a launch from being seen; 0 if it ran without one
  local tw_target tw_text=$1
  shift # what is evaluated below reads the script's own arguments
  [[ $tw_text =~ \>\>?[[:space:]]*([^[:space:]\&\>\`\(\)]+) ]] || return 1
  eval "tw_target=${BASH_REMATCH[1]}" 2>/dev/null || return 1
  [[ $tw_target == /dev/* ]] && return 1
  [[ $tw_target == */* ]] && mkdir -p -- "${tw_target%/*}"
  { : >>"$tw_target"; } 2>/dev/null && return 1
  eval "$(sed -E 's/[0-9&]?>>?[[:space:]]*[^[:space:]&>]+//g; s/[0-9]?>&[0-9]//g' <<<"$tw_text")"
  return 0
}

tw_before() { # the DEBUG trap: before every simple command of the script; 0 if that is done with
  local - IFS=$' \t\n' REPLY program
  set +eux
  shopt -s extdebug # the trap may skip a command; set any earlier, bash looks for its debugger
  [[ $1 == tw_* || ${FUNCNAME[1]-} == tw_* ]] && return 1
  tw_fill "$1"
  program=${1%%[[:space:]]*}
  if [[ $program =~ ^[\"\']?[][A-Za-z0-9_.\$\{\}@~/-]*/[][A-Za-z0-9_.\$\{\}@-]+[\"\']?$ ]]; then
    eval "program=$program" 2>/dev/null && case $program in # a launcher by its path
    */python | */python[0-9]*) eval "function $program { tw_python python \"\$@\"; }" 2>/dev/null ;;
    */torchrun | */accelerate | */ray | */uv | */deepspeed | */pip | */pip3)
      eval "function $program { tw_launch ${program##*/} \"\$@\"; }" 2>/dev/null ;;
    esac
  fi
  [[ $1 == *'>'* ]] || return 1
  tw_redirect "$@"
}

for TW_NAME in torchrun accelerate deepspeed uv uvx ray srun sbatch mpirun horovodrun nohup nice setsid sudo timeout \
  numactl taskset stdbuf nsys ncu pdsh ssh docker podman singularity apptainer kubectl tmux screen watch unbuffer \
  pip pip3 conda mamba micromamba hf huggingface-cli modelscope wandb curl wget scp rsync aws gsutil hdfs apt apt-get yum \
  nvidia-smi nc ping pkill killall systemctl mount; do
  eval "function $TW_NAME { tw_launch $TW_NAME \"\$@\"; }"
done
for TW_NAME in python python3 python3.10 python3.11 python3.12 python3.13; do
  eval "function $TW_NAME { tw_python $TW_NAME \"\$@\"; }"
done
for TW_NAME in mkdir rm cp mv touch tee ln chown chmod; do # they may name places that are not here
  eval "function $TW_NAME { command $TW_NAME \"\$@\" 2>/dev/null || :; }"
done
unset -v TW_NAME

command_not_found_handle() { tw_launch "$@"; }
ulimit() { :; }
sleep() { :; }
env() { if (($#)); then tw_launch env "$@"; else command env; fi; }
tail() { if [[ " $*" == *' -'[fF]* || $* == *--follow* ]]; then :; else command tail "$@"; fi; }
git() { if [[ $* == 'rev-parse --show-toplevel' ]]; then echo "$TW_TOP"; else tw_launch git "$@"; fi; }
kill() { builtin kill "$@" 2>/dev/null || [[ ${1-} != -0 ]]; }
sh() { bash "$@"; }
source() { tw_ask "$1" && builtin source "$REPLY" "${@:2}" || :; }
.() { source "$@"; }

exec() { # a program instead of the shell; redirections alone are of no use here
  (($#)) || return 0
  "$@"
  exit
}

bash() { # the file that it runs, if it is here
  local - word
  set +eux
  for word in "$@"; do
    case $word in
    -*c*) break ;;
    -* | +*) ;;
    *) tw_ask "$word" || return 0; break ;;
    esac
  done
  command bash "$@"
}

cd() { # every folder of the caller's machine may be entered
  local - to=${HOME-}
  set +eux
  while [[ ${1-} == -[LPe@-]* ]]; do shift; done
  [[ -n ${1-} ]] && to=$1
  [[ $to == - ]] && to=${OLDPWD-.}
  tw_place "$to"
  mkdir -p -- "$REPLY"
  builtin cd -- "$REPLY" 2>/dev/null
  return 0
}
pushd() { cd "${1-.}"; }
popd() { cd -; }

trap '! tw_before "$BASH_COMMAND" "$@"' DEBUG # with `!`, since set -e would end the script at a command that is skipped
