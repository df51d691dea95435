#!/bin/bash
# Runs inside the virtual machine: creates software RDMA devices, then runs the given command.
# rxe0 is on a dummy link, which packets never leave; rxe1 and rxe2 are on the two ends of a virtual cable.
#     job.sh KERNEL_ROOT STDLIB SITE_PACKAGES COMMAND...
set -euo pipefail
kernel=$1 stdlib=$2 site=$3
shift 3
ln -sfn "$kernel/lib/modules/$(uname -r)" /lib/modules/ # for modules that the kernel loads itself; see run.sh
for module in virtio_blk ext4; do
    modprobe -d "$kernel" $module
done
mkdir -p /run/disk
mount -o ro /dev/vda /run/disk
mount --bind /run/disk/stdlib "$stdlib"
mount --bind /run/disk/site "$site"
modprobe -d "$kernel" rdma_rxe
modprobe -d "$kernel" dummy numdummies=0
modprobe -d "$kernel" veth
ip link add lamina0 type dummy
ip link set lamina0 mtu 4200 up # room for packets of 4096 bytes
ip address add 10.77.0.1/24 dev lamina0
ip link set lo up
rdma link add rxe0 type rxe netdev lamina0

ip link add lamina1 type veth peer name lamina2
for end in 1 2; do
    other=$((3 - end))
    for setting in accept_local=1 rp_filter=0; do
        echo "${setting#*=}" >"/proc/sys/net/ipv4/conf/lamina$end/${setting%=*}"
    done
    ip address add 10.79.0.$end/32 dev lamina$end
    ip link set lamina$end up
    ip route add 10.79.0.$other dev lamina$end src 10.79.0.$end table 10$end
    ip rule add pref 1$end iif lamina$end lookup local
    ip rule add pref 2$end iif lo to 10.79.0.$other lookup 10$end # although that address is local
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip rule add pref 100 lookup local
ip rule del pref 0
modprobe -d "$kernel" sch_netem
modprobe -d "$kernel" vgem # a device that exports its memory as dma-bufs
rdma link add rxe1 type rxe netdev lamina1
rdma link add rxe2 type rxe netdev lamina2
ulimit -l unlimited
exec "$@"
