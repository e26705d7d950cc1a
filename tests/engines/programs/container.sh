#!/bin/sh
# Run a command as in a container, as a user who is not root. It has a root directory of its own: the host's programs, and
# /dev, /sys, /proc and /tmp that are not the host's. rdmanet and the engines are in /opt, and the user's secret is
# /run/secret; an empty SECRET is none. Its network namespace is the caller's. As root, in a mount and a process
# namespace of its own:
#
# usage: unshare --mount --pid --ipc --uts --fork container.sh USER PYTHON ENGINES PACKAGES SECRET COMMAND ...
set -eu
user=$1 python=$2 engines=$3 packages=$4 secret=$5
shift 5
tree=$(cd "$(dirname "$0")/../../.." && pwd)
root=/mnt

show() { # a directory of the host, at another place
    mkdir -p "$root/$2"
    mount -o bind,ro "$1" "$root/$2"
}

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
for each in usr bin sbin lib lib64 etc; do
    if [ -L "/$each" ]; then
        ln -s "$(readlink "/$each")" "$root/$each"
    elif [ -d "/$each" ]; then
        show "/$each" "$each"
    fi
done
show "$python" "$python" # it finds its own parts there
show "$tree" opt/rdmanet
show "$engines" opt/engines
show "$packages" opt/packages # what rdmanet needs
mkdir -p "$root/dev/shm" "$root/sys" "$root/proc" "$root/tmp" "$root/run" "$root/home"
for each in null zero full random urandom; do
    touch "$root/dev/$each"
    mount --bind "/dev/$each" "$root/dev/$each"
done
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t sysfs sysfs "$root/sys"
mount -t proc proc "$root/proc"
chmod 1777 "$root/tmp"
chown "$user:$user" "$root/home"
if [ -n "$secret" ]; then
    install -m 600 -o "$user" -g "$user" "$secret" "$root/run/secret"
    set -- RDMANET_SOFT_SECRET_FILE=/run/secret "$@"
fi
cd "$root"
exec chroot --userspec="$user:$user" --groups="$user" "$root" /usr/bin/env -i PATH=/usr/bin:/bin \
    HOME=/home PYTHONPATH=/opt/rdmanet:/opt/engines:/opt/packages PYTHONDONTWRITEBYTECODE=1 UCX_TLS=ib "$@"
