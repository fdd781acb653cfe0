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
  local IFS=$'\n' word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
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
