#include "kernels.h"

namespace lamina::elementwise {

Kernels avx2_kernels(ElementType type) {
    return kernels<8>(type);
}

} // namespace lamina::elementwise
