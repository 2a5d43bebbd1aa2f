#!/bin/sh
# Measure what docs/performance.md shows, on one GPU with nothing else running on it:
#
#     results/speed.sh [FOLDER [PART...]]      by default results/speed-h200 and all parts but decode
#
# peers   beside transformers' Trainer and, where NANOGPT names a clone of it, nanoGPT
# kernels where the time of a step goes, by the profiler
# grow    what a step takes as batch, length, width and layers grow
# forms   a training step with each form of attention: recorded, but not compiled, so that no time goes into compiling
# decode  a generated token with each form of attention, compiled: by far the longest part
#
# A record that is there already is kept, so an interrupted call goes on where it was. `make results` writes the page.
# OELM is the command to run, GRAPHS the setting that records steps: empty where there is no GPU.
set -eu
out=${1:-results/speed-h200}
[ $# -gt 0 ] && shift
oelm=${OELM:-.venv/bin/oelm}
graphs=${GRAPHS-train.graphs=true}
mkdir -p "$out"

# measure NAME ARGUMENT...: keep what `oelm bench ARGUMENT... --json` prints as the record NAME.
measure() {
  name=$1
  shift
  if [ -s "$out/$name.json" ]; then
    echo "$out/$name.json is there"
    return
  fi
  echo "measuring $out/$name.json"
  $oelm bench "$@" --json > "$out/.$name.part"
  mv "$out/.$name.part" "$out/$name.json"
}

nanogpt() { [ -n "${NANOGPT:-}" ] && echo "--peer nanogpt=$NANOGPT" || true; }

peers() {
  for setting in 64-50257 64-8192 16-50257 16-8192; do
    batch=${setting%-*} vocabulary=${setting#*-}
    # shellcheck disable=SC2046,SC2086 # words
    measure "speed-gpt-${batch}x512-$vocabulary" baseline oelm-freeze identity-key --model gpt:medium-512 \
      --batch-size "$batch" --sequence-length 512 --vocab-size "$vocabulary" --rounds 8 --steps 20 \
      --peer hf-trainer $(nanogpt) train.compile=true $graphs
  done
  # shellcheck disable=SC2086
  measure speed-bert-16x128 baseline freeze-pretrained --model random:bert --task classification \
    --batch-size 16 --sequence-length 128 --vocab-size 30522 --rounds 8 --steps 20 --peer hf-trainer \
    model.fields.hidden_size=768 model.fields.num_hidden_layers=12 model.fields.num_attention_heads=12 \
    model.fields.intermediate_size=3072 model.fields.max_position_embeddings=512 train.compile=true $graphs
}

kernels() {
  for setting in 64-50257 64-8192 16-8192; do
    batch=${setting%-*} vocabulary=${setting#*-}
    # shellcheck disable=SC2046,SC2086
    measure "profile-gpt-${batch}x512-$vocabulary" baseline oelm-freeze identity-key --model gpt:medium-512 \
      --batch-size "$batch" --sequence-length 512 --vocab-size "$vocabulary" --rounds 10 --steps 20 --profile \
      $(nanogpt) train.compile=true $graphs
  done
}

# grown NAME LENGTH WIDTH LAYERS ARM...: steps of gpt:medium-512 with these sizes instead of its own.
grown() {
  name=$1 length=$2 width=$3 layers=$4
  shift 4
  # shellcheck disable=SC2086
  measure "grow-$name" "$@" --model gpt:medium-512 --batch-size 64 --sequence-length "$length" --vocab-size 8192 \
    --rounds 4 --steps 10 model.fields.hidden_size="$width" model.fields.num_attention_heads=$((width / 64)) \
    model.fields.num_hidden_layers="$layers" train.compile=true $graphs
}

grow() {
  grown batch 512 512 6 baseline baseline@8 baseline@16 baseline@32
  grown length-256 256 512 6 baseline
  grown length-1024 1024 512 6 baseline
  grown length-2048 2048 512 6 baseline
  grown width-256 512 256 6 baseline
  grown width-1024 512 1024 6 baseline
  grown layers-3 512 512 3 baseline
  grown layers-12 512 512 12 baseline
}

forms() {
  # shellcheck disable=SC2086
  measure forms-steps multi-head grouped-2 grouped-4 multi-query shared-kv thin-keys states identity-key \
    identity-channel latent latent-frozen latent-frozen-quarter orthogonal-key offset convolution frozen-offset \
    frozen-convolution frozen-channel --model gpt:modern-medium-512 --batch-size 16 --sequence-length 512 \
    --vocab-size 8192 --rounds 6 --steps 10 --no-compile $graphs
}

decode() {
  for setting in 8-16384 256-4096; do
    measure "forms-decode-${setting%-*}x${setting#*-}" multi-head grouped-2 grouped-4 multi-query shared-kv thin-keys \
      states identity-channel latent latent-frozen latent-frozen-quarter orthogonal-key offset convolution \
      frozen-offset frozen-convolution frozen-channel multi-head-fp8 --decode --compile \
      --model gpt:modern-medium-512 --batch-size "${setting%-*}" --sequence-length "${setting#*-}" \
      --vocab-size 8192 --rounds 4 --steps 10 train.precision=bfloat16
  done
}

[ $# -gt 0 ] || set -- peers kernels grow forms
for part; do
  case $part in
    peers | kernels | grow | forms | decode) "$part" ;;
    *)
      echo "unknown part $part: peers, kernels, grow, forms and decode are" >&2
      exit 2
      ;;
  esac
done
