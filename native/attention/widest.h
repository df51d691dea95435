// LAMINA_WIDEST compiles a function for several instruction sets; calls take the widest that the processor
// has.
#pragma once

#if defined(__x86_64__)
#define LAMINA_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LAMINA_WIDEST
#endif
