// The Python module lamina._native: one register_* function per concept, each in its own file.
#include <nanobind/nanobind.h>

void register_attention(nanobind::module_ &module);
void register_elementwise(nanobind::module_ &module);
void register_linear(nanobind::module_ &module);
void register_program(nanobind::module_ &module);
void register_simulation(nanobind::module_ &module);
void register_transport(nanobind::module_ &module);
void register_tcp(nanobind::module_ &module);

NB_MODULE(_native, module) {
    module.doc() = "Native attention, dense kernels, transport and simulation of Lamina.";
    register_attention(module);
    register_elementwise(module);
    register_linear(module);
    register_program(module);
    register_simulation(module);
    register_transport(module);
    register_tcp(module);
}
