#!/bin/bash
# Runs a command with RDMA devices: in a small virtual machine with Soft-RoCE. By default the command is the transport's
# conformance suite over RDMA, and the runtime over RDMA and over impaired networks; with --short, a part of these; with
# -k, those of them that match pytest's expression.
# The virtual machine shares the host's files; only build/rdma is written. Exits with the command's status, or with 77 if
# no virtual machine can be started.
#     tests/rdma/run.sh [--short | -k EXPRESSION | COMMAND...]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$root/build/rdma
cd "$root"
PATH=$PATH:/usr/sbin:/sbin # some environments lack these, where depmod, mke2fs and ip are
python=${PYTHON:-$root/.venv/bin/python}
packages="qemu-system-x86 busybox-static kmod iproute2 ibverbs-providers python3-pyverbs"

whole="test_rdma_between or test_rdma_with or a_message_wakes or card_refuses or bodies_into"
few="was_written or lies_in_its_place or (full_flow and 0.01) or no_message_is_torn or (dead_peer_ends and before)"

say() { echo "$(date +%T) $1" >&2; }

skip() {
    echo "SKIPPED: the RDMA tests did not run: $1" >&2
    exit 77
}

command -v apt-get >/dev/null || skip "this script installs QEMU with apt-get, which does not exist on this system"
mkdir -p "$work/empty"
if ! dpkg -s $packages >/dev/null 2>&1; then
    say "installing $packages"
    apt-get install -y -qq --no-install-recommends $packages >"$work/apt.log" 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >"$work/apt.log" 2>&1 ||
        skip "these packages cannot be installed ($work/apt.log says why): $packages"
fi
[ -x "$work/venv/bin/vng" ] || { say "installing virtme-ng" && python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q virtme-ng >"$work/pip.log" 2>&1; } ||
    skip "virtme-ng cannot be installed ($work/pip.log says why)"
if ! compgen -G "$work/kernel/boot/vmlinuz-*" >/dev/null; then
    # Unpacked but not installed. Not the cloud kernel, which lacks Soft-RoCE.
    image=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/ {print $2; exit}')
    [ -n "$image" ] || skip "the package linux-image-amd64 does not exist"
    say "downloading and unpacking the kernel package $image"
    (cd "$work" && apt-get download -qq "$image" >"$work/kernel.log" 2>&1) || skip "$image cannot be downloaded ($work/kernel.log says why)"
    rm -rf "$work/kernel.new" && dpkg -x "$work/$image"_*.deb "$work/kernel.new"
    depmod -b "$work/kernel.new" "$(ls "$work/kernel.new/lib/modules")"
    mv "$work/kernel.new" "$work/kernel"
    rm -f "$work/$image"_*.deb
fi
# Debian's pyverbs, without the rest of its Python packages.
mkdir -p "$work/python"
ln -sfn /usr/lib/python3/dist-packages/pyverbs "$work/python/pyverbs"
PYTHONPATH="$work/python" "$python" -c "import pyverbs.device" 2>/dev/null ||
    skip "$("$python" -V) cannot import Debian's pyverbs, which is built for $(/usr/bin/python3 -V)"

# Frequently read files go to a disk of the virtual machine: importing torch over the shared file system takes minutes.
paths() { "$python" -c "import sysconfig; print(sysconfig.get_path('$1'))"; }
stdlib=$(paths stdlib) site=$(paths platlib) disk=$work/disk.img
unneeded="PIL clang_format cmake fontTools hf_xet kubernetes_validate matplotlib mypy mypyc *__mypyc*.so openai openvino* pillow.libs pip promql_parser pyarrow ray scipy scipy.libs textual torch/include torch/test transformers triton"
stage() { cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2" && cp -a "$1" "$2"; }; } # links, where both are on one file system
if [ ! -e "$disk" ] || [ -n "$(find "$site" -newer "$disk" -name '*.so' -print -quit)" ]; then
    say "copying Python's packages to a disk for the virtual machine: takes about half a minute"
    rm -rf "$work/disk" && mkdir "$work/disk"
    stage "$stdlib" "$work/disk/stdlib" && rm -rf "$work/disk/stdlib/site-packages" "$work/disk/stdlib/test"
    stage "$site" "$work/disk/site" && (cd "$work/disk/site" && rm -rf $unneeded)
    mke2fs -q -t ext4 -d "$work/disk" "$disk.new" "$(($(du -sm "$work/disk" | cut -f1) * 5 / 4 + 100))M"
    rm -rf "$work/disk" && mv "$disk.new" "$disk"
fi
say "creating the model of the tests"
rm -rf "$work/model"
# For the processor that QEMU emulates, which has AVX2 alone: what is cached depends on it.
ATEN_CPU_CAPABILITY=avx2 LAMINA_CACHE_DIR="$work/model/cache" "$python" -m tests.support.network_model "$work/model"

tests=("$python" -m pytest -vv -x -rs -p no:cacheprovider --timeout 1200 tests/transport/test_rdma_on_device.py tests/transport/test_conformance.py tests/runtime/test_network.py)
case ${1-} in
"") set -- "${tests[@]}" -k "rdma or network" ;;
-k) set -- "${tests[@]}" -k "(rdma or network) and ($2)" ;;
--short) set -- "${tests[@]}" -k "(rdma and processes and ($few)) or $whole" ;;
esac
job=$(printf "%q " bash "$root/tests/rdma/job.sh" "$work/kernel" "$stdlib" "$site" "$@")
# Emulated, because nested virtualisation may be missing. More processors than the suite has spinning threads.
export PATH=$work/venv/bin:$PATH
say "starting the virtual machine; its output is also written to $work/output.log"
log=$work/output.log
: >"$log"
# Also prints the tests passed so far when interrupted or out of time.
trap 'status=$?; say "ended with status $status after $SECONDS s: $(grep -c " PASSED" "$log") tests passed, $(grep -c " FAILED" "$log") failed"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# The kernel's modules are hidden until the job begins: the system would load drivers of all emulated devices, which
# takes half of the time until then.
# Through a pipe: QEMU would reopen, and overwrite, a file as standard output or error.
vng --run "$work"/kernel/boot/vmlinuz-* --disable-kvm --force-9p --user root --cpus 3 --memory 4G \
    --append virtme_link_mods=/nowhere --rodir "/usr/lib/systemd=$work/empty" --qemu-opts="-drive if=virtio,format=raw,readonly=on,file=$disk" -- \
    "cd $root && env PYTHONUNBUFFERED=1 PYTHONPATH=$work/python LAMINA_TEST_RDMA=1 LAMINA_TEST_MODEL=$work/model $job" 2>&1 | tee "$log"
