#!/bin/sh
# A Slurm of two pretend nodes on this machine, for tests. It listens on the loopback interface only.
#
#   cluster.sh check            say what is missing on this machine, if anything
#   cluster.sh start FOLDER     start munged, slurmctld and two slurmd; everything that they write is in FOLDER
#   cluster.sh stop FOLDER      stop them
#   cluster.sh lose FOLDER      kill the controller, as a crash would
#   cluster.sh restore FOLDER   start the controller again, from the state that it had saved
#
# Use it with SLURM_CONF=FOLDER/slurm.conf in the environment. It needs no root, and leaves alone a Slurm that this machine
# may have.
set -eu

say() { echo "cluster.sh: $*" >&2; }
PATH="$PATH:/usr/sbin:/sbin"

for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || {
        say "$program is not installed. As root: apt-get install --no-install-recommends slurm-wlm munge"
        exit 2
    }
done
host=$(hostname -s)
# srun listens on the address of the machine's name.
getent ahostsv4 "$host" | grep -q '^127\.' || {
    say "$host is not an address of the loopback interface; put '127.0.1.1 $host' into /etc/hosts"
    exit 2
}
[ "${1:-}" != check ] || exit 0
[ $# -eq 2 ] || { say "usage: cluster.sh check, or cluster.sh start|stop|lose|restore FOLDER"; exit 2; }

here=$(dirname "$(readlink -f "$0")")
mkdir -p "$2"
folder=$(readlink -f "$2")
export SLURM_CONF="$folder/slurm.conf"

configure() {
    mkdir -p "$folder/state" "$folder/node1" "$folder/node2" "$folder/munge"
    chmod 755 "$folder/munge"
    (umask 077; head -c 128 /dev/urandom > "$folder/munge.key")
    sed -e "s|@HOST@|$host|g" -e "s|@USER@|$(id -un)|g" -e "s|@FOLDER@|$folder|g" \
        "$here/slurm.conf" > "$SLURM_CONF"
}

start_munged() {
    munged --key-file "$folder/munge.key" --socket "$folder/munge/socket" --pid-file "$folder/munged.pid" \
        --seed-file "$folder/munge.seed" --log-file "$folder/munged.log"
}

# end DAEMON SIGNAL: signal the daemon whose process id is in a file, and wait until it is gone.
end() {
    [ -s "$folder/$1.pid" ] || return 0
    process=$(cat "$folder/$1.pid")
    kill "-$2" "$process" 2>/dev/null || true
    tries=100
    while kill -0 "$process" 2>/dev/null && [ $tries -gt 0 ]; do
        sleep 0.1
        tries=$((tries - 1))
    done
    kill -KILL "$process" 2>/dev/null || true
    rm -f "$folder/$1.pid"
}

wait_for_nodes() {
    tries=100
    until [ "$(sinfo --noheader --Node --format '%T' 2>/dev/null | grep -c idle)" -ge 2 ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || { say "the nodes did not come up; see the logs in $folder"; exit 1; }
        sleep 0.2
    done
}

case $1 in
start)
    configure
    trap '"$0" stop "$folder"' EXIT  # whatever fails below, nothing stays behind
    start_munged
    slurmctld -c
    slurmd -N node1
    slurmd -N node2
    wait_for_nodes
    trap - EXIT
    ;;
stop)
    scancel --user "$(id -un)" --quiet 2>/dev/null || true
    for daemon in slurmd-node1 slurmd-node2 slurmctld munged; do
        end "$daemon" TERM
    done
    ;;
lose) end slurmctld KILL ;;
restore) slurmctld ;;
*) say "$1: not a command"; exit 2 ;;
esac
