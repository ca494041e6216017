# Source this file: `scale` runs one study of `paceline scale`, resumes an interrupted one, and keeps a finished one.
# $out is the output folder, $python the interpreter.

scale() { # NAME VERB ARGUMENTS...: one study in the folder NAME
  local name=$1 verb=$2
  shift 2
  if compgen -G "$out/$name/run.json*" >/dev/null; then
    echo "$out/$name exists already: skipped"
  elif [ -e "$out/$name" ]; then
    "$python" -m paceline scale "$verb" --resume "$out/$name"
  else
    status=0
    "$python" -m paceline scale "$verb" "$@" --out "$out/new" || status=$?
    mv "$out"/new/* "$out/$name"
    rmdir "$out/new"
    return "$status"
  fi
}
