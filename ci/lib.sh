# Sourced by the scripts of this folder.

# install_packages PACKAGE...: Debian packages, without questions; says nothing unless it fails.
install_packages() {
    local as_root=() log
    if ! command -v apt-get >/dev/null; then
        echo "please install $* (there is no apt-get here to do it)" >&2
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "please install $* (only root may, and there is no sudo)" >&2
            return 1
        fi
        as_root=(sudo)
    fi
    log=$(mktemp)
    # A machine's first install needs the lists; later ones do not wait for them.
    if ! { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ||
        { "${as_root[@]}" apt-get update &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }; } \
        >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        rm -f "$log"
        echo "could not install $*" >&2
        return 1
    fi
    rm -f "$log"
}

# unpack_package PACKAGE FOLDER FILE...: some files of a Debian package, without installing it.
unpack_package() {
    local package=$1 folder=$2 work as_root=()
    shift 2
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    work=$(mktemp -d)
    # Root's apt downloads as a user of its own.
    chmod 777 "$work"
    if ! (
        cd "$work"
        apt-get download -qq "$package" 2>log ||
            { "${as_root[@]}" apt-get update >>log 2>&1 && apt-get download -qq "$package" 2>>log; }
    ); then
        cat "$work/log" >&2
        rm -rf "$work"
        echo "could not download $package" >&2
        return 1
    fi
    mkdir -p "$folder"
    dpkg-deb --fsys-tarfile "$work/$package"_*.deb | tar -x -C "$folder" "$@"
    rm -rf "$work"
}

# stage NAME COMMAND...: runs the command and prints the seconds it took, also when it fails.
stage() {
    local name=$1 start=$SECONDS status=0
    shift
    echo "== $name"
    # Not `if "$@"`: that would turn `set -e` off inside a function.
    set +e
    (
        set -e
        "$@"
    )
    status=$?
    set -e
    echo "== $name: $((SECONDS - start)) s$([ "$status" -eq 0 ] || echo ", FAILED ($status)")"
    return "$status"
}
