#include "fma_tile.h"

namespace lamina::attention {

TaskKernel portable_kernel(ElementType kv_type) {
    return fma_kernel<4, 4, 2>(kv_type);
}

} // namespace lamina::attention
