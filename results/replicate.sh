#!/bin/sh
# Run a part of the replication that replication-plan.yaml describes, for a limited time:
#
#     results/replicate.sh PART [OPTION...]     OPTION is one of `oelm matrix`; by default the seeds that the plan gives
#
# wiki      the study's recipe on a stand-in for WikiText-103: groups A, B and C at both of its rates
# stories   its four arms on a part of TinyStories
# books     groups A, B and C on a stand-in for OpenWebText
# encoder   a pretrained encoder of BERT-base's size on SST-2, MNLI and XNLI
# decoder   a pretrained decoder continued on other text
# variants  freezing by share, unfreezing from the top, a higher rate for what is trained
# size      the main arms with 12 layers of 768
# muon      the main arms with Muon
#
# After LIMIT seconds (500) no run starts and running ones save; the next call goes on exactly where they were, and skips what
# is done. Then the records of finished runs are copied to ARCHIVE. Exit codes: 0 all of the part is done, 75 it goes on
# with the next call, anything else an error.
# OELM is the command to run, DATA the folder with the data, RUNS where runs are kept, JOBS how many run at once (2),
# RECORD the settings that record steps of labelled batches: empty where there is no GPU.
set -eu
oelm=${OELM:-.venv/bin/oelm}
limit=${LIMIT:-500}
data=${DATA:-data}
runs=${RUNS:-runs/replication}
archive=${ARCHIVE:-}
jobs=${JOBS:-2}
record=${RECORD-train.compile=true train.graphs=true}

part=${1:-}
[ $# -gt 0 ] && shift
settings=
case $part in
  wiki) folder=wiki-gpt2 seeds=3 names=replicate-wiki ;;
  stories) folder=stories-gpt2 seeds=3 names=replicate-stories ;;
  books) folder=books-gpt2 seeds=2 names=replicate-books ;;
  encoder)
    folder=tasks seeds=1 settings=$record
    names="mpnet-sst2 mpnet-sst2-instead mpnet-mnli mpnet-mnli-instead mpnet-xnli mpnet-xnli-instead"
    ;;
  decoder) folder=wiki-stories15m seeds=3 names=decoder-wiki ;;
  variants) folder=wiki-gpt2 seeds=1 names="replicate-share replicate-unfreeze replicate-part-rates" ;;
  size)
    folder=books-parts seeds=1
    names="size-medium-study size-medium-frozen size-medium-modern size-medium-identity size-medium-latent"
    ;;
  muon) folder=books-parts seeds=1 names="robust-muon-modern robust-muon-identity robust-muon-latent" ;;
  *)
    echo "unknown part ${part:-(none)}: wiki, stories, books, encoder, decoder, variants, size and muon are" >&2
    exit 2
    ;;
esac
[ $# -gt 0 ] || set -- --seeds "$seeds"

code=0
# In the foreground, so that the matrix alone gets the signal, and only once: it asks its runs to save.
# shellcheck disable=SC2086 # words
timeout --foreground --signal=TERM "$limit" $oelm matrix $names --data "$data/$folder" --out "$runs/$part" \
  --jobs "$jobs" --yes "$@" $settings || code=$?
[ "$code" -ne 124 ] || code=75 # what timeout says of a command that it ended
if [ -n "$archive" ] && [ -n "$(find "$runs/$part" -name result.json 2> /dev/null | head -n 1)" ]; then
  $oelm archive "$runs/$part" --out "$archive/$part"
fi
exit "$code"
