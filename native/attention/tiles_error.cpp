// Asks the kernel for matrix tiles.
#include "lamina/attention.h"

#include <cerrno>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lamina::attention {
namespace {

std::optional<int> ask_for_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    constexpr long kRequestPermission = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAll) == kAll)
        return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#endif
    return std::nullopt;
}

} // namespace

std::optional<int> tiles_error() {
    static const std::optional<int> error = ask_for_tiles();
    return error;
}

} // namespace lamina::attention
