#include "kernels.h"

namespace lamina::elementwise {

Kernels portable_kernels(ElementType type) {
    return kernels<4>(type);
}

} // namespace lamina::elementwise
