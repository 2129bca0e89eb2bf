#!/usr/bin/env bash
# The King James text of Debian's bible-kjv packages as plain files: one verse a line, without references, one file a
# book. Ruth, Isaiah, Mark and John are held out whole: 384,147 bytes, on which gzip -9 takes 2.52 and xz -9e 2.16 bits
# per byte.
#
#   bash runs/prepare_kjv.sh OUT_DIR      writes OUT_DIR/train/01-genesis.txt ... and OUT_DIR/heldout/08-ruth.txt ...
set -euo pipefail

if [ $# -ne 1 ]; then
  echo "usage: bash runs/prepare_kjv.sh OUT_DIR" >&2
  exit 2
fi
if ! command -v bible >/dev/null; then
  echo "prepare_kjv.sh: the program 'bible' is missing; install the packages bible-kjv and bible-kjv-text" >&2
  exit 1
fi

out=$1
mkdir -p "$out"
part=$(mktemp -d "$out/.kjv.XXXXXX")
trap 'rm -rf "$part"' EXIT
mkdir "$part/train" "$part/heldout"

# The whole Bible in one call, a verse never broken: heading lines "Ruth 1", verse lines "  1 Now it came to pass ...".
bible -l9999 gen1:1-rev99:99 | awk -v out="$part" '
  BEGIN { held["Ruth"] = held["Isaiah"] = held["Mark"] = held["John"] = 1 }
  /^  [0-9]+ / { sub(/^  [0-9]+ /, ""); print > file; next }
  / [0-9]+$/ {
    title = $0
    sub(/ [0-9]+$/, "", title)
    if (title == book) next
    if (file) close(file)
    book = title
    name = tolower(title)
    gsub(/ /, "_", name)
    file = sprintf("%s/%s/%02d-%s.txt", out, title in held ? "heldout" : "train", ++books, name)
  }
  END { if (books != 66) { print "prepare_kjv.sh: found " books + 0 " books, need 66" > "/dev/stderr"; exit 1 } }'

bytes=$(cat "$part"/heldout/*.txt | wc -c)
if [ "$bytes" -ne 384147 ]; then
  echo "prepare_kjv.sh: the held-out books have $bytes bytes, need 384147: another version of the text?" >&2
  exit 1
fi
rm -rf "$out/train" "$out/heldout"
mv "$part/train" "$part/heldout" "$out/"
echo "$out: 62 books to train on ($(cat "$out"/train/*.txt | wc -c) bytes), 4 held out ($bytes bytes)"
