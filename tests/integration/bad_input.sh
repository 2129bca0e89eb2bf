#!/usr/bin/env bash
# Bad input of every kind: each case must end with exit code 2 (1 where the machine said no) and one line on standard
# error that names the thing; never with a stack trace, and never with something lost.
#
#   bash tests/integration/bad_input.sh [DATA]     the shards of out/demo/data/train by default
#
# One line a case, `ok NAME: MESSAGE` or `FAILED NAME: WHY`, then a summary. Full disks and read-only folders need the
# right to mount a tmpfs; without it those cases are skipped with the reason.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

furlong=${FURLONG:-$PWD/build/cpu/bin/furlong}
data=$(realpath "${1:-out/demo/data/train}")
[ -x "$furlong" ] && [ -e "$data/meta.json" ] || { echo "need $furlong and $data/meta.json"; exit 2; }
tmp=$(mktemp -d)
disk=$tmp/disk
trap 'umount "$disk" 2>/dev/null; rm -rf "$tmp"' EXIT
cases=0
failed=0
skipped=0
prefix='^furlong: '

failure() { # failure NAME WHY
  failed=$((failed + 1))
  printf 'FAILED %s: %s\n' "$1" "$2"
  sed 's/^/       | /' "$tmp/stderr" | tail -n 6
}

digest() { (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum); }

# What must be there unchanged after every case.
kept() { digest "$tmp/run"; digest "$tmp/data"; }

# refused NAME CODE PATTERN COMMAND...: the last line must hold PATTERN, as must no other line begin like a failure.
refused() {
  local name=$1 code=$2 pattern=$3 got last
  shift 3
  cases=$((cases + 1))
  timeout 60 "$@" >"$tmp/stdout" 2>"$tmp/stderr" </dev/null
  got=$?
  last=$(tail -n 1 "$tmp/stderr")
  if [ $got -ne "$code" ]; then
    failure "$name" "exit code $got, need $code"
  elif ! grep -q "$prefix" <<<"$last" || [ "$(grep -c "$prefix" "$tmp/stderr")" -ne 1 ]; then
    failure "$name" "the last line, and no other, must begin with 'furlong: '"
  elif grep -Eiq 'terminate called|exception|frame #|std::|c10|what\(\)|filesystem error|assert' "$tmp/stderr"; then
    failure "$name" "speaks of the program's insides"
  elif ! grep -Eq -- "$pattern" <<<"$last"; then
    failure "$name" "the message lacks '$pattern'"
  elif [ -n "${before:-}" ] && [ "$before" != "$(kept)" ]; then
    failure "$name" "changed the run or the shards"
  else
    printf 'ok %s: %s\n' "$name" "${last#furlong: }"
  fi
}

# accepted NAME PATTERN COMMAND...: exit code 0 and PATTERN somewhere in the output.
accepted() {
  local name=$1 pattern=$2 got
  shift 2
  cases=$((cases + 1))
  timeout 60 "$@" >"$tmp/stdout" 2>"$tmp/stderr" </dev/null
  got=$?
  if [ $got -ne 0 ]; then
    failure "$name" "exit code $got, need 0"
  elif ! grep -Eq -- "$pattern" "$tmp/stdout" "$tmp/stderr"; then
    failure "$name" "the output lacks '$pattern'"
  else
    printf 'ok %s: %s\n' "$name" "$(grep -Eha -- "$pattern" "$tmp/stderr" "$tmp/stdout" | head -n 1 | cut -c -160)"
  fi
}

same() { # same NAME FILE FILE
  cases=$((cases + 1))
  if cmp -s "$2" "$3"; then printf 'ok %s\n' "$1"; else : >"$tmp/stderr"; failure "$1" "$2 and $3 differ"; fi
}

skip() { # skip NAME WHY
  skipped=$((skipped + 1))
  printf 'skipped %s: %s\n' "$1" "$2"
}

flip() { # flip FILE BYTE: changes one bit
  local byte
  byte=$(od -An -tu1 -j "$2" -N 1 "$1")
  printf "\\x$(printf %x $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

shorten() { truncate -s $(($(stat -c %s "$1") * ${2:-50} / 100)) "$1"; }

cat >"$tmp/tiny.toml" <<END
compute = "fp32"
[model]
vocab_size = 2048
hidden_size = 32
num_layers = 3
full_attention_layers = [2]
intermediate_size = 32
activation = "situ"
attnres_block_size = 2
[model.kda]
heads = 2
head_size = 16
gate_lower_bound = -5.0
[model.mla]
heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 16
v_head_dim = 16
[model.moe]
num_experts = 8
experts_per_token = 2
expert_size = 16
[[data.sources]]
path = "$tmp/data"
[[stages]]
name = "only"
context = 32
steps = 6
rows = 2
[schedule]
peak_lr = 1e-3
[checkpoint]
every_steps = 2
keep = 2
END

train=("$furlong" train "$tmp/tiny.toml" --out "$tmp/new")
with() { "${train[@]}" "${@/#/--set=}"; }
set_refused() { # set_refused NAME PATTERN ASSIGNMENT...
  local name=$1 pattern=$2
  shift 2
  refused "$name" 2 "$pattern" "${train[@]}" "${@/#/--set=}"
  if [ -e "$tmp/new" ]; then failure "$name" "left $tmp/new behind"; rm -rf "$tmp/new"; fi
}

cp -r "$data" "$tmp/data"
accepted "a run to damage" 'bits|training|step' "$furlong" train "$tmp/tiny.toml" --out "$tmp/run"
last=step-000006
before=$(kept)

# --- The command line.
refused "no command" 2 'command' "$furlong"
refused "unknown command" 2 "'tran'.*'train'" "$furlong" tran
refused "unknown command of a group" 2 "'prepair'.*'prepare'" "$furlong" data prepair
refused "unknown option" 2 '--chekpoint' "$furlong" inspect "$tmp/run" --chekpoint x
for command in train eval "eval loss" generate tokenizer "tokenizer train" "tokenizer encode" "tokenizer decode" \
  "tokenizer render" "tokenizer parse" data "data prepare" "data inspect" inspect plan report; do
  # shellcheck disable=SC2086
  refused "$command without arguments" 2 "$command: .*required" "$furlong" $command
done
generate=("$furlong" generate --checkpoint "$tmp/run" --prompt)
refused "max-tokens negative" 2 '--max-tokens.*-1' "${generate[@]}" In --max-tokens -1
refused "max-tokens not a number" 2 '--max-tokens.*many' "${generate[@]}" In --max-tokens many
refused "temperature negative" 2 'temperature.*-1' "${generate[@]}" In --temperature -1
refused "temperature NaN" 2 'temperature.*nan' "${generate[@]}" In --temperature nan
refused "top-p above 1" 2 'top.p.*2' "${generate[@]}" In --top-p 2
refused "top-p zero" 2 'top.p.*0' "${generate[@]}" In --top-p 0
refused "seed negative" 2 '--seed.*-3' "${generate[@]}" In --seed -3
refused "max-tokens beyond the context" 2 '^furlong: prompt and max-tokens.*context' "${generate[@]}" In --max-tokens 99999999
refused "empty prompt" 2 '--prompt' "${generate[@]}" ''
accepted "max-tokens zero" '^In$' "${generate[@]}" In --max-tokens 0
accepted "a prompt of invalid UTF-8" ' 4 tokens in| [0-9]+ prompt tokens' "${generate[@]}" $'In \xff\xfe\xc3' --max-tokens 4
"$furlong" train "$tmp/tiny.toml" --out "$tmp/wide" --set model.vocab_size=4096 >/dev/null 2>&1
accepted "a model of more entries than its tokenizer" '24 tokens in' "$furlong" generate --checkpoint "$tmp/wide" --prompt In \
  --max-tokens 24 --temperature 100 --top-p 1 --seed 1
rm -rf "$tmp/wide"
refused "unknown precision" 2 '--compute.*fp8' "${generate[@]}" In --compute fp8
refused "plan of a context of 0" 2 '--context.*0' "$furlong" plan configs/model/nano.toml --context 0 --batch 1
refused "eval chunk 0" 2 '--chunk' "$furlong" eval loss --checkpoint "$tmp/run" --data "$tmp/data" --chunk 0
refused "eval threads negative" 2 '--threads.*-1 not in range 0 to 4096' "$furlong" eval loss --checkpoint "$tmp/run" \
  --data "$tmp/data" --threads -1
refused "eval window negative" 2 '--context.*-1 not in range 0 to 1073741824' "$furlong" eval loss --checkpoint "$tmp/run" \
  --data "$tmp/data" --window -1
accepted "plan of a run" 'parameters' "$furlong" plan "$tmp/run" --context 64 --batch 1
accepted "plan of a training config" 'parameters' "$furlong" plan "$tmp/tiny.toml" --context 64 --batch 1
accepted "inspect of a training config" 'vocab_size = 2048' "$furlong" inspect "$tmp/tiny.toml"

# --- Config keys and sizes.
set_refused "misspelt key" "'stages.0.contxt'.*'context'" stages.0.contxt=3
set_refused "unknown key" "'colour'" colour=blue
set_refused "misspelt model key" "'kda.head'.*'heads'" model.kda.head=2
set_refused "KDA heads 0" "'kda.heads' is 0" model.kda.heads=0
set_refused "MLA heads 0" "'mla.heads' is 0" model.mla.heads=0
set_refused "more experts chosen than there are" "experts_per_token.* 9.* 8 " model.moe.experts_per_token=9
set_refused "negative width" "hidden_size' is -32" model.hidden_size=-32
set_refused "negative layers" "num_layers' is -1" model.num_layers=-1
set_refused "absurd width" "hidden_size' is 1000000000000" model.hidden_size=1000000000000
set_refused "a model larger than memory" 'memory' model.hidden_size=1048576 model.num_layers=4096
set_refused "experts larger than memory" 'memory' model.moe.num_experts=65536 model.moe.expert_size=1048576
set_refused "a step larger than memory" 'memory' stages.0.context=1048576 stages.0.rows=1000000
set_refused "number beyond 64 bits" "vocab_size" model.vocab_size=99999999999999999999999
set_refused "width is text" "hidden_size' must be an integer" model.hidden_size=wide
set_refused "layer beyond the last" 'full_attention_layers.* 9' 'model.full_attention_layers=[2, 9]'
set_refused "layer 0" 'full_attention_layers' 'model.full_attention_layers=[0]'
set_refused "layer twice" 'full_attention_layers.*twice' 'model.full_attention_layers=[2, 2]'
set_refused "attention-residual block too long" 'attnres_block_size' model.attnres_block_size=99
set_refused "context above the model's" 'context.* 64' stages.0.context=128 model.max_context=64
set_refused "micro rows not a divisor" 'micro_rows.* 3' stages.0.micro_rows=3 stages.0.rows=4
set_refused "tokens and steps" 'tokens or steps' stages.0.tokens=100
set_refused "no stages" 'stages' 'stages=[]'
set_refused "NaN as a rate" 'peak_lr' schedule.peak_lr=nan
set_refused "weights of zero" 'weights' 'stages.0.weights=[0.0]'
set_refused "unknown device" "device.*'gpu'" device=gpu
set_refused "a GPU that is not there" 'cuda' device=cuda:77
set_refused "vocabulary smaller than the shards'" "$tmp/data.* 2048 .* 300" model.vocab_size=300
set_refused "--set without a value" 'needs the form' clip
set_refused "--set without a key" 'needs the form' =3
set_refused "--set past the last stage" "stages.7" stages.7.rows=1
set_refused "--set below a number" "'clip'.*table" clip.x=1
set_refused "--set with an empty part" 'stages' stages..rows=1
refused "--set of a model that is not there" 1 'nowhere.toml' "${train[@]}" --set model=nowhere.toml
printf 'stages = [\n' >"$tmp/broken.toml"
refused "config that is no TOML" 2 'broken.toml.*line' "$furlong" train "$tmp/broken.toml" --out "$tmp/new"
refused "config that is not there" 1 'nowhere.toml' "$furlong" train "$tmp/nowhere.toml" --out "$tmp/new"
refused "config that is a folder" 1 "$tmp/data" "$furlong" train "$tmp/data" --out "$tmp/new"
refused "inspect of a text file" 2 'tiktoken.model' "$furlong" inspect "$tmp/data/tiktoken.model"
sed 's/^hidden_size.*/hidden_size = 0/' configs/model/nano.toml >"$tmp/absurd.toml"
refused "plan of an absurd model" 2 'hidden_size' "$furlong" plan "$tmp/absurd.toml" --context 64 --batch 1

# --- A damaged checkpoint: each case damages a copy of the run, and a resumed run falls back to the older one.
damaged=$tmp/damaged
newest=$damaged/checkpoints/$last

reads_refuse() { # reads_refuse NAME CODE PATTERN: by every command that loads a model
  refused "$1, eval" "$2" "$3" "$furlong" eval loss --data "$tmp/data" --checkpoint "$damaged"
  refused "$1, generate" "$2" "$3" "$furlong" generate --prompt In --max-tokens 2 --checkpoint "$damaged"
}
inspect_refuses() { refused "$1, inspect" "$2" "$3" "$furlong" inspect "$damaged"; }

damage() { # damage NAME FILE COMMAND...: COMMAND damages the newest checkpoint's FILE
  local name=$1 file=$2 after code=2
  shift 2
  rm -rf "$damaged"
  cp -r "$tmp/run" "$damaged"
  "$@" "$newest/$file"
  [ -e "$newest/$file" ] || code=1
  after=$(digest "$damaged")
  case $file in
    model.safetensors | config.json)
      reads_refuse "$name" $code "$last.*($file|tensor)"
      # A config.json without weights is a thing to inspect.
      [ ! -e "$newest/$file" ] || inspect_refuses "$name" $code "$last/$file"
      ;;
    tiktoken.model)
      refused "$name, generate" $code "$last/$file" "$furlong" generate --prompt In --checkpoint "$damaged"
      ;;
  esac
  [ "$after" = "$(digest "$damaged")" ] || failure "$name" "a command that reads changed the checkpoint"
  accepted "$name, train --resume" "$last is damaged: .*($file|tensor)" "$furlong" train "$tmp/tiny.toml" --out "$damaged" --resume
  same "$name, goes on from step 4 to the same bits" "$tmp/run/checkpoints/$last/model.safetensors" "$newest/model.safetensors"
  [ -d "$newest.damaged" ] || failure "$name" "the damaged checkpoint is gone"
}

flip_length() { flip "$1" 1; }
flip_header() { flip "$1" 200; }
flip_middle() { flip "$1" $(($(stat -c %s "$1") / 2)); }
flip_end() { flip "$1" $(($(stat -c %s "$1") - 99)); }
empty() { : >"$1"; }
damage "truncated weights" model.safetensors shorten
damage "empty weights" model.safetensors empty
damage "missing weights" model.safetensors rm
damage "a flipped bit in the header's length" model.safetensors flip_length
damage "a flipped bit in the header" model.safetensors flip_header
damage "a flipped bit in the weights" model.safetensors flip_end
damage "truncated config.json" config.json shorten
damage "a flipped bit in the optimizer's header" optimizer.safetensors flip_header
damage "a flipped bit in the moments" optimizer.safetensors flip_end
damage "truncated moments" optimizer.safetensors shorten
damage "missing moments" optimizer.safetensors rm
damage "a flipped bit in train_state.json" train_state.json flip_middle
damage "truncated train_state.json" train_state.json shorten
damage "missing train_state.json" train_state.json rm
damage "truncated tokenizer" tiktoken.model shorten
damage "missing tokenizer" tiktoken.model rm

resume=("$furlong" train "$tmp/tiny.toml" --out "$damaged" --resume)
fresh() { rm -rf "$damaged"; cp -r "$tmp/run" "$damaged"; }
fresh
for folder in "$damaged"/checkpoints/step-*; do shorten "$folder/model.safetensors"; done
refused "every checkpoint damaged" 2 "$damaged.*no checkpoint is whole" "${resume[@]}"
fresh
echo step-000099 >"$damaged/checkpoints/latest"
reads_refuse "latest pointing nowhere" 2 'latest.*step-000099'
inspect_refuses "latest pointing nowhere" 2 'latest.*step-000099'
accepted "latest pointing nowhere, train --resume" 'after step 6' "${resume[@]}"
echo ../../run >"$damaged/checkpoints/latest"
reads_refuse "latest pointing outside" 2 latest
inspect_refuses "latest pointing outside" 2 latest
empty "$damaged/checkpoints/latest"
reads_refuse "latest empty" 2 latest
inspect_refuses "latest empty" 2 latest
rm -r "$damaged/checkpoints"
reads_refuse "a run without checkpoints" 2 "$damaged"
fresh
empty "$damaged/metrics.jsonl"
refused "metrics.jsonl emptied" 2 'metrics.jsonl' "${resume[@]}"
refused "resume with another width" 2 'hidden_size' "$furlong" train "$tmp/tiny.toml" --out "$tmp/run" --resume \
  --set model.hidden_size=48
refused "a folder that holds a run" 2 "$tmp/run.*--resume" "$furlong" train "$tmp/tiny.toml" --out "$tmp/run"
refused "a checkpoint that is not there" 1 "$tmp/nowhere" "$furlong" inspect "$tmp/nowhere"
refused "report of no run" 1 "$tmp/data" "$furlong" report "$tmp/data"
fresh
sed -i 's/"vocab_size": *2048/"vocab_size": 1024/' "$newest/config.json"
reads_refuse "config.json of another vocabulary" 2 "$last"
inspect_refuses "config.json of another vocabulary" 2 "$last: tensor .*\[2048, 32\], config.json asks for \[1024, 32\]"
fresh
sed -i 's/"hidden_size": *32/"hidden_size": 1048576/' "$newest/config.json"
reads_refuse "config.json of an absurd width" 2 "$last"
inspect_refuses "config.json of an absurd width" 2 "$last: tensor "

# --- Shards and corpora.
shards() { rm -rf "$tmp/shards"; cp -r "$tmp/data" "$tmp/shards"; }
shards_refuse() { # shards_refuse NAME CODE PATTERN
  refused "$1, train" "$2" "$3" "${train[@]}" "--set=data.sources.0.path=$tmp/shards"
  refused "$1, eval" "$2" "$3" "$furlong" eval loss --checkpoint "$tmp/run" --data "$tmp/shards"
  refused "$1, inspect" "$2" "$3" "$furlong" data inspect "$tmp/shards"
}
shard=shard-00000.safetensors
shards; rm "$tmp/shards/$shard"; shards_refuse "missing shard" 1 "$shard"
shards; shorten "$tmp/shards/$shard"; shards_refuse "truncated shard" 2 "$shard"
shards; flip_header "$tmp/shards/$shard"; shards_refuse "a flipped bit in a shard's header" 2 "$shard"
shards; rm "$tmp/shards/meta.json"; shards_refuse "missing meta.json" 2 meta.json
shards; shorten "$tmp/shards/meta.json"; shards_refuse "truncated meta.json" 2 meta.json
shards; empty "$tmp/shards/meta.json"; shards_refuse "empty meta.json" 2 meta.json
rm -rf "$tmp/shards"; shards_refuse "no shards" 1 "$tmp/shards"
mkdir "$tmp/text"
printf 'In the beginning God created the heaven and the earth.\n%.0s' {1..3000} >"$tmp/text/large.txt"
head -c 20000 "$tmp/text/large.txt" >"$tmp/text/small.txt"
: >"$tmp/text/empty.txt"
printf a >"$tmp/text/one.txt"
printf '\n' >"$tmp/text/blank.txt"
head -c 5000 "$furlong" >"$tmp/text/binary.txt"
printf '{"text": "one"}\n{"text": \n' >"$tmp/text/broken.jsonl"
printf '{"body": "one"}\n' >"$tmp/text/field.jsonl"
printf '{"text": 3}\n' >"$tmp/text/number.jsonl"
mkdir "$tmp/text/none"
prepare=("$furlong" data prepare --tokenizer "$tmp/data" --out "$tmp/prepared")
tokenizer=("$furlong" tokenizer train --vocab 300 --out "$tmp/vocabulary")
corpus_refused() { # corpus_refused NAME CODE PATTERN INPUT
  refused "$1, data prepare" "$2" "$3" "${prepare[@]}" "$tmp/text/$4"
  refused "$1, tokenizer train" "$2" "$3" "${tokenizer[@]}" "$tmp/text/$4"
  for made in prepared vocabulary; do
    if [ -e "$tmp/$made" ]; then failure "$1" "left $made behind"; rm -rf "${tmp:?}/$made"; fi
  done
}
corpus_refused "empty corpus" 2 empty.txt empty.txt
corpus_refused "blank corpus" 2 blank.txt blank.txt
corpus_refused "binary corpus" 2 binary.txt binary.txt
corpus_refused "folder without files" 2 "$tmp/text/none" none
corpus_refused "corpus that is not there" 1 nowhere.txt nowhere.txt
corpus_refused "JSONL cut short" 2 'broken.jsonl:2' broken.jsonl
corpus_refused "JSONL without the field" 2 "field.jsonl:1.*'text'" field.jsonl
corpus_refused "JSONL with a number for text" 2 'number.jsonl:1' number.jsonl
accepted "1-byte corpus, data prepare" '1 documents' "${prepare[@]}" "$tmp/text/one.txt"
accepted "1-byte corpus, tokenizer train" 'got a vocabulary of 272' "${tokenizer[@]}" "$tmp/text/one.txt"
accepted "binary corpus by wish" '1 documents' "${prepare[@]}" --binary "$tmp/text/binary.txt"
accepted "1-byte corpus again" '1 documents' "${prepare[@]}" "$tmp/text/one.txt"
accepted "training on a document of one byte" 'training' "${train[@]}" "--set=data.sources.0.path=$tmp/prepared"
rm -rf "$tmp/new"
accepted "a corpus in place of an older one" '1 documents' "${prepare[@]}" "$tmp/text/small.txt"
printf '\xff\xff' | dd of="$tmp/prepared/$shard" bs=1 conv=notrunc status=none \
  seek=$(($(stat -c %s "$tmp/prepared/$shard") - 100))
refused "a token outside the vocabulary, eval" 2 "$shard.*65535" "$furlong" eval loss --checkpoint "$tmp/run" --data "$tmp/prepared"
"$furlong" tokenizer train "$tmp/text/small.txt" --vocab 280 --out "$tmp/vocabulary" >/dev/null 2>&1
"$furlong" data prepare "$tmp/text/small.txt" --tokenizer "$tmp/vocabulary" --out "$tmp/other" >/dev/null 2>&1
refused "a vocabulary of 3" 2 '--vocab.* 3' "$furlong" tokenizer train "$tmp/text/small.txt" --vocab 3 --out "$tmp/vocabulary"
refused "shards of another tokenizer" 2 "$tmp/.*tokenizer" "$furlong" eval loss --checkpoint "$tmp/run" --data "$tmp/other"
refused "shards over other files" 2 "$tmp/text" "$furlong" data prepare "$tmp/text/small.txt" --tokenizer "$tmp/data" --out "$tmp/text"
refused "no tokenizer there" 1 'tiktoken.model' "$furlong" data prepare "$tmp/text/small.txt" --tokenizer "$tmp/text" --out "$tmp/prepared"
refused "ids that are no numbers" 2 ids "$furlong" tokenizer decode --tokenizer "$tmp/data" 12 x
refused "id outside the vocabulary" 2 '99999' "$furlong" tokenizer decode --tokenizer "$tmp/data" 99999

# --- Conversations and replies.
render=("$furlong" tokenizer render --tokenizer "$tmp/data" "$tmp/chat.json")
chat_refused() { # chat_refused NAME PATTERN JSON
  printf '%s' "$3" >"$tmp/chat.json"
  refused "$1" 2 "$2" "${render[@]}"
}
chat_refused "chat that is no JSON" 'chat.json: not valid JSON' '{"messages":'
chat_refused "chat of invalid UTF-8" 'chat.json: not valid JSON' $'{"messages":[{"role":"user","content":"\xff"}]}'
chat_refused "chat nested 100,000 deep" 'chat.json: nested deeper' "$(head -c 100000 /dev/zero | tr '\0' '[')"
chat_refused "chat without messages" "'messages'" '{}'
chat_refused "chat with a misspelt option" "thinking_efort.*'thinking_effort'" '{"messages":[],"thinking_efort":"max"}'
chat_refused "chat of an unknown role" 'messages\[0\].role.*boss' '{"messages":[{"role":"boss"}]}'
chat_refused "tool result of no tool" 'tool result' '{"messages":[{"role":"tool","content":"x"}]}'
chat_refused "media sequence of no image" 'image_prompts' '{"messages":[],"image_prompts":["x"]}'
refused "chat that is not there" 1 'nowhere.json' "$furlong" tokenizer render --tokenizer "$tmp/data" "$tmp/nowhere.json"
refused "reply of ids outside the vocabulary" 2 '99999' "$furlong" tokenizer parse --tokenizer "$tmp/data" 99999
head -c 3000 "$furlong" >"$tmp/reply.txt"
accepted "reply of any bytes" '"ended": false' "$furlong" tokenizer parse --tokenizer "$tmp/data" --file "$tmp/reply.txt"

# --- Folders that cannot be written, disks that are full.
: >"$tmp/file"
refused "train below a file" 1 "$tmp/file" "$furlong" train "$tmp/tiny.toml" --out "$tmp/file/run"
refused "train onto a file" 1 "$tmp/file" "$furlong" train "$tmp/tiny.toml" --out "$tmp/file"
refused "data prepare below a file" 1 "$tmp/file" "$furlong" data prepare "$tmp/text/small.txt" --tokenizer "$tmp/data" --out "$tmp/file/x"
refused "tokenizer train below a file" 1 "$tmp/file" "$furlong" tokenizer train "$tmp/text/small.txt" --vocab 300 --out "$tmp/file/x"
refused "eval written below a file" 1 "$tmp/file" "$furlong" eval loss --checkpoint "$tmp/run" --data "$tmp/data" --out "$tmp/file/x"
refused "report written below a file" 1 "$tmp/file" "$furlong" report "$tmp/run" --out "$tmp/file/x"

step_kb=$(du -sk "$tmp/run/checkpoints/$last" | cut -f 1)
mkdir "$disk"
if why=$(mount -t tmpfs -o size=$((step_kb * 5 / 2))k tmpfs "$disk" 2>&1); then
  # Room for two checkpoints and a half: the third save fails.
  on_disk=("$furlong" train "$tmp/tiny.toml" --out "$disk/run")
  refused "full disk during a save" 1 "$disk/run/checkpoints/.*space" "${on_disk[@]}"
  accepted "full disk, the older checkpoint is whole" step-000004 "$furlong" inspect "$disk/run"
  refused "still full, train --resume" 1 "$disk/run/checkpoints/.*space" "${on_disk[@]}" --resume
  accepted "still full, the older checkpoint is whole" step-000004 "$furlong" inspect "$disk/run"
  mount -o remount,size=$((step_kb * 8))k "$disk"
  accepted "room again, train --resume" 'after step 4' "${on_disk[@]}" --resume
  same "room again, the same bits" "$tmp/run/checkpoints/$last/model.safetensors" "$disk/run/checkpoints/$last/model.safetensors"
  rm -rf "${disk:?}/run"
  umount "$disk"
  mount -t tmpfs -o size=300k tmpfs "$disk"
  cp -r "$tmp/prepared" "$disk/data"
  head -c 220000 /dev/zero >"$disk/ballast"
  held=$(digest "$disk/data")
  refused "full disk during data prepare" 1 "$disk/.*space" "$furlong" data prepare "$tmp/text/large.txt" --tokenizer "$tmp/data" --out "$disk/data"
  [ "$held" = "$(digest "$disk/data")" ] || failure "full disk during data prepare" "the older shards changed"
  [ "$(ls -A "$disk")" = $'ballast\ndata' ] || failure "full disk during data prepare" "left $(ls -A "$disk" | xargs)"
  head -c 300000 /dev/zero >"$disk/ballast" 2>/dev/null
  refused "full disk during tokenizer train" 1 "$disk/.*space" "$furlong" tokenizer train "$tmp/text/small.txt" --vocab 300 --out "$disk/v"
  refused "full disk, report" 1 "$disk/.*space" "$furlong" report "$tmp/run" --out "$disk/report.html"
  mount -o remount,ro "$disk"
  refused "read-only disk, train" 1 "$disk.*[Rr]ead-only" "${on_disk[@]}"
  refused "read-only disk, data prepare" 1 "$disk.*[Rr]ead-only" "$furlong" data prepare "$tmp/text/small.txt" --tokenizer "$tmp/data" --out "$disk/data"
  refused "read-only disk, report" 1 "$disk.*[Rr]ead-only" "$furlong" report "$tmp/run" --out "$disk/report.html"
else
  skip "full and read-only disks" "cannot mount a tmpfs: $why"
fi

note=
[ $skipped -eq 0 ] || note=", $skipped groups skipped"
if [ $failed -gt 0 ]; then echo "$cases cases, $failed failures$note"; exit 1; fi
echo "$cases cases, all refused cleanly$note"
