// The Python module lamina._native: one register_* function per concept, each in its own file.
#include <nanobind/nanobind.h>

NB_MODULE(_native, module) {
    module.doc() = "Native attention and transport of Lamina.";
}
