# SPDX-License-Identifier: Apache-2.0
# Minimal systems of Debian and Ubuntu in build/distributions, to try there what a newcomer does. For bash scripts that
# run at the root of the tree, as root.
#
#     make_system RELEASE ROOT       bookworm, trixie, forky, noble (Ubuntu 24.04), resolute (26.04)
#     inside ROOT COMMAND ...        what is mounted for it goes with the process, whatever ends it
#     install ROOT PACKAGE ...

make_system() {
    local release=$1 root=$2
    [ -d "$root" ] && return
    command -v debootstrap >/dev/null || { echo "this takes Debian's package debootstrap" >&2; return 1; }
    mkdir -p "$(dirname "$root")"
    case $release in
        noble | resolute)
            # Debian signs the keys of Ubuntu: trixie is the first release with that package.
            local keys=build/distributions/trixie
            make_system trixie "$keys"
            install "$keys" ubuntu-keyring
            bootstrap "$root" --keyring="$keys/usr/share/keyrings/ubuntu-archive-keyring.gpg" \
                --components=main,universe "$release" "$root.new" http://archive.ubuntu.com/ubuntu jammy
            ;;
        # Newer releases than this machine's have no script of their own here.
        *) bootstrap "$root" "$release" "$root.new" http://deb.debian.org/debian sid ;;
    esac
    # As this machine reaches its registries.
    cp /etc/resolv.conf /etc/hosts "$root.new/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$root.new/etc/ssl/certs/"
    # A mirror may be a snapshot, whose signature is older than it says it holds.
    echo 'Acquire::Check-Valid-Until "false";' >"$root.new/etc/apt/apt.conf.d/snapshot"
    mv "$root.new" "$root" # only a whole system has the final name
}

bootstrap() { # ROOT DEBOOTSTRAP'S ARGUMENTS ...
    local root=$1
    shift
    rm -rf --one-file-system "$root.new"
    scripts/progress "making $root" debootstrap --variant=minbase --include=ca-certificates "$@" >"$root.log" 2>&1 ||
        { tail -20 "$root.log" >&2; return 1; }
}

# By pivot_root: the kernel lets nobody whose root is not that of its mount namespace make a namespace of users.
inside() {
    unshare --mount --propagation private bash -euc '
        root=$1; shift
        mount --rbind "$root" "$root" # pivot_root takes a mount
        mount --types proc proc "$root/proc"
        mount --types sysfs --options ro sys "$root/sys"
        mount --rbind /dev "$root/dev"
        cd "$root"
        pivot_root . mnt
        umount --lazy /mnt
        exec "$@"' - "$@"
}

install() {
    local root=$1
    shift
    inside "$root" sh -c 'export DEBIAN_FRONTEND=noninteractive
        apt-get update -q && apt-get install -q -y --no-install-recommends "$@"' - "$@" >"$root.log" 2>&1 ||
        { tail -20 "$root.log" >&2; return 1; }
}
