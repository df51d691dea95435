#include "kernels.h"

namespace lamina::elementwise {

Kernels avx512_kernels(ElementType type) {
    return kernels<16>(type);
}

} // namespace lamina::elementwise
