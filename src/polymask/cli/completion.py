"""The verb that prints a shell's completion script: verbs, options, names in the library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.options import Option, options_of
from polymask.cli.verb import Verb

if TYPE_CHECKING:
    from rich.console import Console

Shell = Literal["bash", "zsh", "fish"]

_BASH = """\
# Completion of polymask, for ~/.bashrc:  source <(polymask completion bash)
# Where nothing of ours fits, the shell offers files.
_polymask_domains() {
  local folder=library place=1 file
  while [ "$place" -lt "$COMP_CWORD" ]; do
    if [ "${COMP_WORDS[place]}" = --library ]; then folder="${COMP_WORDS[place+1]}"; fi
    place=$((place + 1))
  done
  for file in "$folder"/*.safetensors; do
    if [ -e "$file" ]; then file="${file##*/}"; echo "${file%.safetensors}"; fi
  done
}
_polymask() {
  local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  local options= valued= places= values=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W $'VERBS' -- "$word"))
    return 0
  fi
  case "${COMP_WORDS[1]}" in
CASES
  esac
  case "${COMP_WORDS[1]} $before" in
VALUES
  esac
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
    return 0
  fi
  case " $valued " in *" $before "*) return 0 ;; esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) if [ "$places" = DOMAINS ]; then places="$(_polymask_domains)"; fi
       COMPREPLY=($(compgen -W "$places" -- "$word")) ;;
  esac
  return 0
}
complete -o default -F _polymask polymask
"""
_ZSH = """\
# Completion of polymask, for ~/.zshrc:  source <(polymask completion zsh)
whence compdef >/dev/null || { autoload -U compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
_FISH = """\
# Completion of polymask: polymask completion fish > ~/.config/fish/completions/polymask.fish
complete -c polymask -n __fish_use_subcommand -f -l version -d 'Say what is installed'
complete -c polymask -n __fish_use_subcommand -f -l help -d 'List the verbs'
"""
_FISH_DOMAINS = "(for file in library/*.safetensors; basename $file .safetensors; end)"


@dataclass(kw_only=True)
class Completion(Verb):
    """Print a completion script for a shell."""

    shell: tyro.conf.Positional[Shell]
    """bash, zsh or fish; the script's first line says where it goes."""

    def run(self) -> dict[str, Any]:
        from polymask.cli.parser import VERBS

        return {"shell": self.shell, "script": SCRIPTS[self.shell](VERBS)}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        print(result["script"], end="")  # rich would wrap it


def bash_script(verbs: Mapping[str, type[Verb]]) -> str:
    """Completion for bash."""
    cases, values = [], []
    for name, verb in verbs.items():
        found = options_of(verb)
        named = [option for option in found if not option.by_place]
        flags = _lines(f"--{option.name}" for option in named)
        valued = " ".join(f"--{option.name}" for option in named if not option.is_flag)
        places = "DOMAINS" if _takes_domain(found) else _lines(_words_by_place(found))
        cases.append(f"    {name}) options=$'{flags}' valued='{valued}' places=$'{places}' ;;")
        for option in named:
            if option.words:
                words = _lines(option.words)
                values.append(f"    '{name} --{option.name}') values=$'{words}' ;;")
    script = _BASH.replace("VERBS", _lines([*verbs, "--help", "--version"]))
    return script.replace("CASES", "\n".join(cases)).replace("VALUES", "\n".join(values))


def zsh_script(verbs: Mapping[str, type[Verb]]) -> str:
    """Completion for zsh, which runs bash's."""
    return _ZSH + bash_script(verbs).partition("\n")[2]


def fish_script(verbs: Mapping[str, type[Verb]]) -> str:
    """Completion for fish."""
    lines = []
    for name, verb in verbs.items():
        about = (verb.__doc__ or "").strip().splitlines()[0]
        lines.append(f"-n __fish_use_subcommand -f -a {name} -d {_quoted(about)}")
        found, seen = options_of(verb), f"-n '__fish_seen_subcommand_from {name}'"
        for option in (option for option in found if not option.by_place):
            takes = "-f" if option.is_flag else "-r"
            if option.words:
                takes = f"-x -a {_quoted(' '.join(option.words))}"
            meaning = f" -d {_quoted(option.meaning)}" if option.meaning else ""
            lines.append(f"{seen} {takes} -l {option.name}{meaning}")
        if _takes_domain(found):
            lines.append(f"{seen} -a {_quoted(_FISH_DOMAINS)}")
        if words := _words_by_place(found):
            lines.append(f"{seen} -f -a {_quoted(' '.join(words))}")
    return _FISH + "".join(f"complete -c polymask {line}\n" for line in lines)


SCRIPTS: dict[str, Callable[[Mapping[str, type[Verb]]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}


def _takes_domain(options: tuple[Option, ...]) -> bool:
    """Whether the verb takes the name of a domain in a library."""
    places = {option.name for option in options if option.by_place}
    return "pack" in places and any(option.name == "library" for option in options)


def _words_by_place(options: tuple[Option, ...]) -> list[str]:
    return [word for option in options if option.by_place for word in option.words]


def _lines(words: Any) -> str:
    return "\\n".join(words)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
