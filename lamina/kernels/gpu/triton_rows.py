"""Writes rows where messages have them, in Triton: also into memory of the host."""

import triton
import triton.language as tl


@triton.jit
def write_rows(
    source, table, bodies, count, unit: tl.constexpr, lead: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Writes rows of ``unit`` elements as ``compute.device.kit.Kit.write`` says, with ``lead`` in elements.

    ``aligned``: everything in a message begins at a multiple of 16 bytes. Grid (``count``, blocks of a row).
    """
    column = tl.program_id(0)
    message = tl.load(table + count + column)
    if message < 0:
        return
    row, place = tl.load(table + column).to(tl.int64), tl.load(table + 2 * count + column).to(tl.int64)
    before = tl.load(table + 3 * count + column).to(tl.int64)
    # The host has written it since the last launch.
    body = tl.load(bodies + message, volatile=True).to(tl.pointer_type(source.dtype.element_ty))
    if aligned:
        body = tl.multiple_of(body, 16)
    elements = tl.program_id(1) * block + tl.arange(0, block)
    there = elements < unit
    values = tl.load(source + row * unit + elements, mask=there)
    tl.store(body + before * lead + place * unit + elements, values, mask=there)
