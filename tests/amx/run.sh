#!/bin/bash
# Checks matrix products by tiles (AMX) on this processor, or if it has none, on an emulated one, Bochs: Linux runs
# tests/amx/check.cpp there from an initial RAM disk. Packages are unpacked and not installed; only build/amx is written.
# Exits with the check's status, or with 77 if there is no emulator.
#     tests/amx/run.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$root/build/amx
tree=$work/tree
python=${PYTHON:-$root/.venv/bin/python}
minutes=30
packages="bochs bochs-term bochsbios vgabios busybox-static isolinux syslinux-common genisoimage"

say() { echo "$(date +%T) $1" >&2; }

skip() {
    echo "SKIPPED: the AMX tests did not run: $1" >&2
    exit 77
}

# Unpacks the packages of Debian 13, the first with Bochs 3.0, whatever the system's release is; and a Linux from its
# backports, because setcpuid= needs 6.15.
fetch_packages() {
    local archive kernel apt=$work/apt
    archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | grep -v security | head -1)
    [ -n "$archive" ] || { echo "apt-get knows no archive of Debian; run apt-get update"; return 1; }
    rm -rf "$apt" "$tree.new" && mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$tree.new"/usr/{bin,sbin,lib,lib64}
    printf "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive %s main\n" trixie trixie-backports >"$apt/sources.list"
    local options=(-qq -o "Dir::State=$apt" -o "Dir::Cache=$apt" -o "Dir::Etc::SourceList=$apt/sources.list"
        -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Status=/dev/null -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update || return
    apt-get "${options[@]}" install --download-only --yes --no-install-recommends $packages || return
    kernel=$(apt-cache "${options[@]}" search --names-only '^linux-binary-[0-9].*-cloud-amd64$' | cut -d " " -f 1 | sort -V | tail -n 1)
    (cd "$apt/archives" && apt-get "${options[@]}" download "$kernel") || return
    for name in bin sbin lib lib64; do ln -s "usr/$name" "$tree.new/$name"; done
    for package in "$apt"/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -C "$tree.new" -x --keep-directory-symlink || return
    done
    mv "$tree.new" "$tree" && rm -rf "$apt"
}

mkdir -p "$work"
say "building the check"
rm -rf "$work/ram" "$work/cd" && mkdir -p "$work"/ram/{dev,bin} "$work/cd/isolinux"
cmake=$(dirname "$python")/cmake
{ "$cmake" -S "$root" -B "$work/native" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" &&
    "$cmake" --build "$work/native" --target lamina_core -j "$(nproc)" &&
    c++ -std=c++20 -O2 -Wall -Wextra -Werror -static -I "$root/native/include" "$root/tests/amx/check.cpp" \
        "$work/native/liblamina_core.a" -o "$work/ram/bin/check"; } >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }

if grep -q amx_int8 /proc/cpuinfo; then
    say "checking on this processor, which has tiles"
    "$work/ram/bin/check" granted >&2 && "$work/ram/bin/check" refused >&2
    exit
fi

command -v apt-get >/dev/null || skip "this script gets Bochs with apt-get, which does not exist on this system"
if [ ! -d "$tree" ]; then
    say "downloading and unpacking the emulator and a kernel"
    fetch_packages >"$work/apt.log" 2>&1 || skip "packages cannot be fetched; $work/apt.log says why"
fi
# Programs of the unpacked packages run with their own libraries.
libraries=$tree/usr/lib/x86_64-linux-gnu
loader=("$tree/lib64/ld-linux-x86-64.so.2" --library-path "$libraries")

cp "$tree/usr/bin/busybox" "$work/ram/bin"
cat >"$work/ram/init" <<'EOF'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
exec >/dev/ttyS0 2>&1
/bin/check emulated && /bin/check refused
echo "STATUS $?"
/bin/busybox poweroff -f
EOF
chmod +x "$work/ram/init"
(cd "$work/ram" && find . | bin/busybox cpio -o -H newc | gzip -1) >"$work/cd/initrd" 2>/dev/null
cp "$tree"/usr/lib/modules/*/vmlinuz "$work/cd"
cp "$tree/usr/lib/ISOLINUX/isolinux.bin" "$tree/usr/lib/syslinux/modules/bios/ldlinux.c32" "$work/cd/isolinux"
# Linux enables tiles only on processors with XFD, feature 324, which Bochs lacks: they then belong to a thread from its
# first use of them on. Bochs ignores the register of XFD, so tiles belong to all threads. It cannot save five levels of
# page tables, either.
cat >"$work/cd/isolinux/isolinux.cfg" <<'EOF'
DEFAULT linux
LABEL linux
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND console=ttyS0 mitigations=off no5lvl setcpuid=324
EOF
"${loader[@]}" "$tree/usr/bin/genisoimage" -quiet -o "$work/cd.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$work/cd"

log=$work/output.log
: >"$log"
cat >"$work/bochsrc" <<EOF
cpu: model=sapphire_rapids, ips=50000000, ignore_bad_msrs=1, reset_on_triple_fault=0
memory: guest=512, host=512
romimage: file=$tree/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=$tree/usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path=$work/cd.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$log
display_library: term
clock: sync=none
log: $work/bochs.log
panic: action=fatal
EOF
say "starting the emulated machine; its output is written to $log"
export LTDL_LIBRARY_PATH=$libraries/bochs/plugins BXSHARE=$tree/usr/share/bochs TERM=xterm
setsid --wait timeout --kill-after 10 "${minutes}m" script -qec "$(printf "%q " "${loader[@]}" "$tree/usr/bin/bochs-bin" -q -f "$work/bochsrc")" \
    /dev/null >"$work/screen.log" 2>&1 </dev/null || true
tr -d '\r\0' <"$log" | grep -a "^tiles:\|^FAILED\|failures$\|panic" >&2 || true
status=$(tr -d '\r\0' <"$log" | sed -n 's/^STATUS //p')
[ -n "$status" ] || say "the emulated machine stopped, or took more than $minutes minutes; see $log and $work/bochs.log"
exit "${status:-1}"
