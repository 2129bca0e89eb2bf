# What the acceptance scripts of this folder share; sourced from the repository's root.

bin=build/cpu/bin
work=out/acceptance
mkdir -p "$work"
failed=0

line() { # line NUMBER STATUS TEXT
  printf '%s %s %s\n' "$1" "$2" "$3"
  [ "$2" = FAIL ] && failed=1
  return 0
}
