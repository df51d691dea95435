#include "fma_tile.h"

namespace lamina::attention {

TaskKernel avx2_kernel(ElementType kv_type) {
    return fma_kernel<8, 6, 2>(kv_type);
}

} // namespace lamina::attention
